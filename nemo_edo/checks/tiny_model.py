"""Tiny models with random weights, and what they compute in a given layout and precision. Torch is imported by the
functions: the doctor reads the list of checks without it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_edo.checks.machine import Machine
from nemo_edo.types import TrainingBatch

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "initializer_range": 0.04,
    "tie_word_embeddings": False,
}
"""Divides over eight ranks in every direction but the layers; heads of 64, which flash attention has kernels for."""
LLAMA, MIXTURE = "llama", "mixture"
"""Models, and the names of their folders."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROWS, LENGTH, PROMPT = 16, 128, 40
"""Of a batch; lengths suit every split and FP8's multiples."""
GROUP = 4
"""Responses to a prompt."""
TEMPERATURE = 0.7
EXPLORATION_WEIGHT = 0.1
OPTIMIZER = {"lr": 1e-3, "adam_eps": 1e-3}
"""With Adam's usual eps a first step is the gradient's sign, which rounding flips where it is near zero."""


FP8 = {"dtype": "bf16", "fp8": "hybrid"}
PRECISIONS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    **{f"fp8 {recipe}": {**FP8, "fp8_recipe": recipe} for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8")},
}
FASTEST = "bf16 on GPUs, fp32 on CPUs"


@dataclass(frozen=True)
class Setting:
    """What a model computes with."""

    precision: str = "fp32"
    """One of PRECISIONS, or FASTEST."""
    split: str = ""
    """What the ranks share, if they do: tensor, pipeline, context or expert; the largest power of two of them, and the
    others are data-parallel."""
    at_most: int = 8
    """Ranks that share it."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    loss_head: str = "logits"
    tile: int | None = None
    """Columns that the fused loss kernels take at a time; None: theirs, which are more than this model has."""
    algorithm: str = "grpo"
    """grpo or idpo."""

    def on(self, machine: Machine) -> Setting:
        """With what the machine decides."""
        precision = self.precision
        if precision == FASTEST:
            precision = "bf16" if machine.gpus else "fp32"
        size = 1
        while size * 2 <= self.at_most and machine.world % (size * 2) == 0:
            size *= 2
        name = "context_parallel_size" if self.split == "context" else f"{self.split}_model_parallel_size"
        split = {name: size} if self.split else {}
        return replace(self, precision=precision, parallelism={**split, **self.parallelism})


@dataclass(frozen=True)
class Measured:
    """A batch's log-probabilities and entropies [2, B, T], the loss and the gradient's norm of a step on it, and the
    log-probabilities [B, T] after the step."""

    values: np.ndarray
    loss: float
    grad_norm: float
    after: np.ndarray


def write_model(folder: Path) -> None:
    """A Hugging Face folder with random weights, the same wherever it is written: Llama, or a Qwen3 mixture by that
    name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"model_type": "qwen3_moe", **EXPERTS} if folder.name == MIXTURE else {"model_type": "llama"}
    config = AutoConfig.for_model(**more, **SHAPE, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def batch() -> TrainingBatch:
    """Responses of many lengths, groups of which share a prompt; made-up log-probabilities of two other policies."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)
    groups = torch.arange(ROWS) // GROUP
    tokens[:, :PROMPT] = tokens[groups * GROUP, :PROMPT]
    ends = torch.randint(PROMPT + 8, LENGTH + 1, (ROWS, 1), generator=generator)
    ends[0] = LENGTH
    places = torch.arange(1, LENGTH)
    mask = ((places >= PROMPT) & (places < ends)).float()
    old, ref = (torch.randn(ROWS, LENGTH - 1, generator=generator) - 6 for _ in range(2))
    return TrainingBatch(
        tokens=torch.where(torch.arange(LENGTH) < ends, tokens, 0),
        mask=mask,
        groups=groups,
        advantages=torch.randn(ROWS, generator=generator),
        old_logprobs=old * mask,
        ref_logprobs=ref * mask,
        pair_role=torch.tensor([1, -1]).repeat(ROWS // 2),
        exploration_factors=torch.ones(ROWS),
    )


def measure(folder: Path, setting: Setting, save: Path | None = None, load: Path | None = None) -> Measured:
    """A step of ED-GRPO or ED-iDPO from the folder's weights. save: a checkpoint folder for the weights after the
    step; load: one that they are read from before it."""
    import torch

    from nemo_edo.megatron import checkpoint
    from nemo_edo.worker.same_calls import policy_over

    model = build(folder, setting)
    if load is not None:
        checkpoint.load(model.policy, load)
    examples = batch()
    if setting.algorithm == "grpo":
        examples = examples.with_fields(pair_role=None, exploration_factors=None)
    policy = policy_over(model)
    values = torch.stack(policy.logprobs(examples))
    model.start_training(total_steps=1)
    metrics = policy.train_step(examples, exploration_weight=EXPLORATION_WEIGHT)
    if save is not None:
        checkpoint.save(model.policy, save)
    return Measured(values.numpy(), metrics["loss"], metrics["grad_norm"], policy.logprobs(examples)[0].numpy())


def build(folder: Path, setting: Setting):
    from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    if setting.tile is not None:
        from nemo_edo.parallel import kernels  # imports Triton

        kernels.TILE = setting.tile
    settings = {"beta": 0.04, "exploration_coefficient": EXPLORATION_WEIGHT, "optimizer": OptimizerConfig(**OPTIMIZER)}
    kind, config = (MegatronGPTGRPOModel, GRPOConfig) if setting.algorithm == "grpo" else (
        MegatronGPTDPOModel, IDPOConfig
    )  # fmt: skip
    return kind(
        model_config(
            folder,
            parallelism=ParallelismConfig(**setting.parallelism),
            precision=PrecisionConfig(**PRECISIONS[setting.precision]),
            seed=0,
            training=config(**{**settings, "micro_batch_size": 4, **setting.training}),
            temperature=TEMPERATURE,
            attention=setting.attention,
            loss_head=setting.loss_head,
        )
    )


def generated(folder: Path, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of generated tokens, all responses in a row: as they were sampled, token by token, and by a
    pass over the whole sequences."""
    import torch

    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.types import GenerationRequest, SamplingParams

    model = build(folder, setting)
    built = model.policy.built
    engine = MegatronEngine(built, stop_ids=[1], decode=str, max_batch_size=ROWS, device=model.platform_device)
    prompts = [tuple(range(20, 20 + length)) for length in (3, 1, 17)]
    requests = [GenerationRequest(str(place), 0, prompt, seed=place) for place, prompt in enumerate(prompts)]
    rollouts = engine.generate(requests, SamplingParams(TEMPERATURE, 1.0, 24))
    tokens, mask = torch.zeros(len(prompts), LENGTH, dtype=torch.int64), torch.zeros(len(prompts), LENGTH - 1)
    for row, rollout in enumerate(rollouts):
        ids = rollout.prompt_ids + rollout.response_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, len(rollout.prompt_ids) - 1 : len(ids) - 1] = 1
    whole = model.get_inference_log_probs(TrainingBatch(tokens, mask))[mask.bool()]
    return np.concatenate([rollout.response_logprobs for rollout in rollouts]), whole.numpy()


def of_transformers(folder: Path) -> np.ndarray:
    """[2, B, T] as in ``Measured.values``, in fp32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    examples = batch()
    with torch.no_grad():
        log_p = (model(examples.tokens).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs = log_p.gather(-1, examples.tokens[:, 1:, None]).squeeze(-1)
    return (torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)]) * examples.mask).numpy()
