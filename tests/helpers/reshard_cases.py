"""Trains at a layout, saves, and resumes from what another layout saved. Run by a WorkerPool."""

from pathlib import Path

import torch
from helpers import tiny_models
from helpers.training_settings import OPTIMIZER

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError

TRAINED, AFTERWARDS = (0, 1, 2), (3, 4)
"""Batches before and after the checkpoint."""


def begin(model: Path, sizes: dict):
    policy = tiny_models.build_policy(model, ParallelismConfig(**sizes))
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    return policy


def train(policy, seeds) -> list[dict[str, float]]:
    """The numbers of a step on five rows of each seed."""
    batches = [tiny_models.random_batch(rows=5, seed=seed) for seed in seeds]
    metrics = [tiny_models.train_step(policy, batch, **tiny_models.sft_settings(batch)) for batch in batches]
    return [{name: step[name] for name in ("loss", "grad_norm", "lr")} for step in metrics]


def save_and_continue(model: Path, folder: Path, sizes: dict, **settings) -> list[dict[str, float]]:
    """The metrics of the steps after the checkpoint."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, TRAINED)
    checkpoint.save(policy, folder, with_optimizer=True, reference=policy.snapshot(), **settings)
    return train(policy, AFTERWARDS)


def resume(model: Path, folder: Path, sizes: dict) -> dict:
    """The same for a policy that loads the checkpoint, with its reference, and the difference that is reported."""
    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, [7])  # an optimizer state that loading replaces
    checkpoint.load(policy, folder, with_optimizer=True)
    changed, reference = checkpoint.changed_layout(folder), checkpoint.load_reference(policy, folder)
    kept = all(map(torch.equal, reference, policy.snapshot()))
    return {"metrics": train(policy, AFTERWARDS), "changed": changed, "reference is as the weights": kept}


def refusal(model: Path, folder: Path, sizes: dict) -> str | None:
    """The error of ``resume`` for a checkpoint that it refuses."""
    try:
        resume(model, folder, sizes)
    except UserError as error:
        return str(error)
    return None


def optimizer_bytes(model: Path, folder: Path, sizes: dict) -> tuple[int, int, int]:
    """Bytes of this rank's optimizer state in a checkpoint, as saved and as loaded, and of a whole parameter's."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from nemo_edo.megatron import checkpoint

    policy = begin(model, sizes)
    train(policy, TRAINED)
    found = []
    for is_loading in (False, True):
        sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
        state = checkpoint._sharded_state(policy, True, sharding, is_loading=is_loading)
        tensors = [one.data for one in nested_values(state["optimizer"]) if isinstance(one, ShardedTensor)]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    weights = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
    return (*found, 3 * 4 * weights)
