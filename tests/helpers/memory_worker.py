"""What real Megatron models hold, tensor by tensor, beside ``nemo_edo.doctor.memory``'s estimates.

    torchrun --nproc-per-node 2 memory_worker.py MODELS OUT.json '[["qwen2", {"tensor_model_parallel_size": 2}], ...]'

MODELS is a folder of model folders. OUT.json has both, of every rank, for each model and its layout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_models
import torch

from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.doctor import memory
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron import platform
from nemo_edo.model_shape import ModelShape

PARTS = ("weights", "gradients", "optimizer")


def measured(policy) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and optimizer state, after a step."""
    from nemo_edo.megatron.forward_backward import MicroBatching

    batch = tiny_models.random_batch(rows=4)
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
    policy.train_step(
        batch,
        lambda log_probs, entropies, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
        loss_counts={"sft": float(reduction_count(batch.mask, "token-mean"))},
        micro_batching=MicroBatching(4),
        temperature=1.0,
    )
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
        shape=ModelShape.from_hf(fields, str(folder)),
        parallelism=parallelism,
        precision=PrecisionConfig(dtype),
        lora=lora or LoRAConfig(),
        data_parallel=data_parallel,
        tokens=64,
    )
    parts = dict(memory.stage_memory(load, stage).items())
    return {name: parts[name] for name in PARTS}


def main(models: str, out: str, cases: str) -> None:
    platform.init_process_group(torch.device("cpu"))
    from megatron.core import parallel_state

    mine = []
    for model, settings in json.loads(cases):
        folder, parallelism = Path(models) / model, ParallelismConfig(**settings)
        policy = tiny_models.build_policy(folder, parallelism, "bf16")
        stage = parallel_state.get_pipeline_model_parallel_rank()
        ranks = parallel_state.get_data_parallel_world_size()
        both = {
            "measured": measured(policy),
            "estimated": estimated(folder, parallelism, "bf16", None, ranks, stage),
        }
        mine.append({"case": f"{model} {settings}", **both})
    of_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, mine)
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(sum(of_ranks, [])))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
