"""Log-probabilities, gradients and steps of a model in a layout. Run by a WorkerPool."""

from pathlib import Path
from unittest import mock

from helpers import tiny_models

from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import LossTerm
from nemo_edo.types import GenerationRequest, SamplingParams


def loss(logprobs, entropies, micro, _=0.0):
    """Of log-probabilities and entropies, so that both contribute to the gradients."""
    total = -((logprobs + 0.1 * entropies) * micro.advantages[:, None] * micro.mask).sum()
    return {"loss": LossTerm(total, micro.mask.sum())}, {}


def a_part_of_a_gradient(folder: Path, sizes: dict) -> str:
    """What is said where ranks do not add up their parts of the gradient of a norm's weight."""
    from nemo_edo.config import MicroBatchConfig

    policy = tiny_models.build_policy(folder, ParallelismConfig(**sizes))
    norm = policy.chunks[0].module.decoder.layers[0].pre_mlp_layernorm.weight
    norm.sequence_parallel = False
    batch = tiny_models.random_batch(rows=5)
    policy.reset_optimizer(OptimizerConfig(lr=1e-2), total_steps=2)
    policy.zero_grad()
    try:
        tiny_models.forward_backward(policy, batch, loss, loss_counts={"loss": float(batch.mask.sum())},
                                     micro_batching=MicroBatchConfig(2), temperature=0.7)
    except UserError as error:
        return str(error)
    return ""


def measure(
    folder: Path, sizes: dict, lora: list[str] | None = None, packing: bool = False, share_prompts: bool = False,
    head: str = "logits", tokens: tuple[int | None, int | None] = (None, None),
) -> dict:
    """The weights as exported, log-probabilities, entropies and gradients [5 rows, of different lengths], two steps'
    results, and what is generated. lora: the layers whose adapters are trained; head: "logits" or "fused"; tokens: of
    a micro-batch in each step."""
    from nemo_edo.config import MicroBatchConfig
    from nemo_edo.megatron.policy import MegatronPolicy

    parallelism = ParallelismConfig(**sizes)
    lora = None if lora is None else LoRAConfig(rank=4, alpha=12.0, targets=lora)
    built = tiny_models.build_policy(folder, parallelism, lora=lora)
    policy = MegatronPolicy(built.built, parallelism, PrecisionConfig(), built.device, head)
    batch = tiny_models.with_shared_prompts(tiny_models.random_batch(rows=5), {2: 0, 3: 0, 4: 1})
    # Three micro-batches: one stage has to wait.
    cut = {"micro_batching": MicroBatchConfig(2, tokens[0], packing, share_prompts), "temperature": 0.7}
    counts = {"loss_counts": {"loss": float(batch.mask.sum())}}
    # Two blocks of each rank's columns.
    with mock.patch.multiple("nemo_edo.parallel.logprobs", BLOCK_ELEMENTS={"cpu": 1}, MIN_COLUMNS=50):
        logprobs, entropies = tiny_models.logprobs(policy, batch, **cut)
        results = {"exported": tiny_models.exported(policy), "logprobs": logprobs * batch.mask,
                   "entropies": entropies * batch.mask}
        policy.reset_optimizer(OptimizerConfig(lr=1e-2, adam_eps=1e-3), total_steps=2)
        policy.zero_grad()
        results["loss"] = tiny_models.forward_backward(policy, batch, loss, **counts, **cut)["loss"]
        results["gradients"] = tiny_models.exported_gradients(policy)
        # The second step has more micro-batches: a reduction that overlaps must not begin before the last.
        cuts = [cut, {**cut, "micro_batching": MicroBatchConfig(1, tokens[1], packing, share_prompts)}]
        steps = [tiny_models.train_step(policy, batch, loss, **counts, **other) for other in cuts]
        results["norms"] = [report["grad_norm"] for report in steps]
    results["trained"] = tiny_models.exported(policy)
    if parallelism.context_parallel_size == parallelism.expert_model_parallel_size == 1:  # as the config asks
        requests = [GenerationRequest(f"p{i}", 0, (20 + i, 30), i) for i in range(3)]
        rollouts = tiny_models.build_engine(policy).generate(requests, SamplingParams(0.0, 1.0, 6))
        results["responses"] = [tuple(rollout.response_ids) for rollout in rollouts]
    return results
