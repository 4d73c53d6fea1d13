"""Each section of a config refuses settings out of range or that do not fit each other, and names the key."""

import pytest

from nemo_edo import config
from nemo_edo.config.data import ArithmeticConfig, JudgeConfig

URL = "http://node7:8000/v1"
LAST_LAYER_IN_BF16 = {"fp8": "hybrid", "dtype": "bf16", "fp8_recipe": "delayed", "bf16_layers_at_end": 1}
CONTROLLER = config.ScheduleConfig(kind="gradient-share", min_weight=1e-6, max_weight=1.0)
WRONG = [
    (config.LoRAConfig, "lora", {
        "rank": -1, "alpha": 0.0, "targets": [[], ["linear_qkv", "q_proj"]], "dropout": 0.1}),
    (config.IDPOConfig, "idpo", {
        "micro_batch_size": 3, "exploration_samples": ["some", "0"], "pairs_per_prompt": 0, "alpha": -1.0,
        "label_smoothing": 0.5}),
    (config.SearchLLMConfig, "search", {
        "steps": [0, 2.5, "4"], "branches": [0, True], "width": -1, "part_size": 0, "batch_tokens": 0, "seed": -1,
        "trees": -1,
        "exploration": [-0.1, float("inf")], "prior_precision": 0.0, "noise_variance": float("nan"),
        "width_kind": "std", "mean": "gp", "dtype": "fp8", "name": ["a/b", ".a", ""], "step_separator": ""}),
    (JudgeConfig, "rewards.judge", {
        "url": "node7", "prompt": ["{question} {answer}", "{reference}"], "max_abstained": 1.5, "attempts": 0,
        "temperature": -1.0, "structured_output": "json"}),
    (config.ParallelismConfig, "parallelism", {
        "sequence_parallel": True, "virtual_pipeline_model_parallel_size": 2, "overlap_param_gather": True,
        "optimizer_offload_fraction": 0.5, "context_parallel_size": 0, "recompute_granularity": "some"}),
    (config.ModelConfig, "model", {
        "seq_length": 0, "attention": "flash", "loss_head": "none", "architecture": {"x": 1}}),
    (config.GRPOConfig, "grpo", {
        "packing": True, "share_prompts": True, "old_logprobs": "engine", "beta": -1.0, "clip_low": 1.0,
        "aggregation": ["mean", "seq-mean-token-sum-norm"], "dual_clip": 0.5, "log_ratio_floor": 0.1,
        "exploration_samples": ["all", "initial"]}),
    (config.GenerationConfig, "generation", {"max_batch_size": [0, -1, "many"], "part_size": 0, "backend": "hf"}),
    (config.PrecisionConfig, "precision", {"dtype": "fp16", "fp8_param_gather": True}),
]


@pytest.mark.parametrize(("section", "key", "value"), [
    pytest.param(kind, f"{prefix}.{name}", value, id=f"{prefix}.{name}={value}")
    for kind, prefix, wrong in WRONG
    for name, values in wrong.items()
    for value in (values if isinstance(values, list) else [values])
])
def test_a_value_out_of_range_is_an_error_that_names_the_key(section, key: str, value):
    name = key.rpartition(".")[2]
    named = "norm_length" if value == "seq-mean-token-sum-norm" else name  # what this aggregation requires
    with pytest.raises(ValueError, match=f"^{named} is "):
        section(**{name: value})


@pytest.mark.parametrize(("section", "fields", "key"), [
    (config.ParallelismConfig, {"overlap_param_gather": True, "use_distributed_optimizer": True},
     "overlap_grad_reduce"),
    (config.PrecisionConfig, {"fp8": "e4m3", "dtype": "bf16", "fp8_margin": 1}, "fp8_margin"),
    (config.PrecisionConfig, LAST_LAYER_IN_BF16, "bf16_layers_at_end"),
    (ArithmeticConfig, {"num_operands": 19}, "num_operands is 19, expected fewer"),
    (config.GRPOConfig, {"pass_k": 4, "overlong_buffer": 8}, "overlong_buffer is 8, expected null with pass_k"),
    (config.GRPOConfig, {"exploration_samples": "reference", "reference": "ema"}, "exploration_samples is 'reference'"),
    *((config.GRPOConfig, {"exploration_samples": "previous", name: value}, f"{name} .*exploration_samples=previous")
      for name, value in (("redundancy_weighted", True), ("explore_uninformative_groups", False),
                          ("explore_solved_groups_only", True))),
    *((config.GRPOConfig, {"alpha": alpha, "schedule": CONTROLLER}, "schedule.kind is 'gradient-share', .* weight")
      for alpha in (0.0, 1e3)),  # outside of its bounds
    *((config.ScheduleConfig, {"kind": kind, "steps": 9, name: value}, f"{name} is {value}, .* with kind {kind}")
      for kind, name, value in (("linear", "warmup_steps", 5), ("cosine", "hold_steps", 5),
                                ("constant", "final_factor", 0.1), ("constant", "entropy_target", 1.0))),
    (JudgeConfig, {"prompt_price": 1.0}, "prompt_price"),
    (config.RewardsConfig, {"verifier": "judge"}, "judge.url"),
    (config.RewardsConfig, {"verifier": "judge", "judge": JudgeConfig(url=URL)}, "judge.model"),
])
def test_settings_that_do_not_fit_each_other_are_an_error_that_names_the_key(section, fields: dict, key: str):
    with pytest.raises(ValueError, match=key):
        section(**fields)


def test_processes_of_one_copy_are_the_product_of_the_splits():
    split = config.ParallelismConfig(2, 3, context_parallel_size=5)
    assert (split.model_ranks, split.expert_ranks) == (30, 6)
    experts = config.ParallelismConfig(2, 3, expert_model_parallel_size=7, expert_tensor_parallel_size=1)
    assert (experts.model_ranks, experts.expert_ranks) == (6, 21)
