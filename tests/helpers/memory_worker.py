"""Megatron models' real tensors, and ``nemo_edo.checks.estimates``'s estimates of them. Run by a WorkerPool."""

import json
from pathlib import Path

from helpers import tiny_models

from nemo_edo.checks import estimates as memory
from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.model_shape import ModelShape

PARTS = ("weights", "gradients", "optimizer")


def measured(policy) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and optimizer state, after a step."""
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
    tiny_models.train_sft(policy, [0])
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return {
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.main_grad.nbytes for parameter in trained),
        "optimizer": _state_bytes(policy.optimizer, of_weights),
    }


def _state_bytes(optimizer, of_weights: set[int]) -> int:
    """Moments and main weights; fp32 main weights that are the weights themselves are not counted again."""
    found = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                moments = part.optimizer.state[main]
                for tensor in (main, moments["exp_avg"], moments["exp_avg_sq"]):
                    if tensor.untyped_storage().data_ptr() not in of_weights:
                        found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())


def estimated(
    folder: Path, parallelism: ParallelismConfig, dtype: str, lora: LoRAConfig | None, data_parallel: int, stage: int
) -> dict[str, int]:
    fields = json.loads((folder / "config.json").read_text())
    load = memory.Workload(
        shape=ModelShape.from_hf(fields, str(folder)), parallelism=parallelism, precision=PrecisionConfig(dtype),
        lora=lora or LoRAConfig(), data_parallel=data_parallel, tokens=64,
    )
    parts = dict(memory.stage_memory(load, stage).items())
    return {name: parts[name] for name in PARTS}


def measured_and_estimated(folder: Path, sizes: dict) -> dict[str, dict[str, int]]:
    from megatron.core import parallel_state

    parallelism = ParallelismConfig(**sizes)
    policy = tiny_models.build_policy(folder, parallelism, "bf16")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    return {"measured": measured(policy), "estimated": estimated(folder, parallelism, "bf16", None, ranks, stage)}
