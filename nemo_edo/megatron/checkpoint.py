"""Megatron distributed checkpoints: written by all ranks, loadable at any tensor- or pipeline-parallel size."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model

from nemo_edo.config.model_shape import SHAPE_FIELDS
from nemo_edo.errors import DamagedCheckpoint, UserError
from nemo_edo.megatron.background import Writing
from nemo_edo.megatron.optimizer_state import begin_adam, count_adam_steps, distributed
from nemo_edo.megatron.pickles import check_metadata, check_scales, plain_objects_only, switched_on
from nemo_edo.megatron.policy import MegatronPolicy, Weights
from nemo_edo.parallel.main_rank import gathered, on_main
from nemo_edo.utils.files import checksum, read_object, write_text

ABOUT = "about.json"


def save(policy: MegatronPolicy, folder: Path, **settings: Any) -> None:
    """Writes a checkpoint folder, which appears under its name only when it is whole, and replaces an earlier one.
    Every rank calls it. ``settings`` as in ``begin_save``."""
    begin_save(policy, folder, **settings).is_finished(wait=True)


def begin_save(
    policy: MegatronPolicy,
    folder: Path,
    *,
    with_optimizer: bool = False,
    reference: Weights | None = None,
    extra: dict[str, Any] | None = None,
    reshardable: bool = True,
) -> Writing:
    """``save`` in the background: training may continue while the files are written.

    reference: a frozen copy of the policy's weights (``snapshot``) to be saved as well. extra: what ``load_extra``
    returns, plain values for JSON. reshardable: whether a distributed optimizer's state loads at any number of ranks.
    """
    staging = folder.with_name(folder.name + ".part")

    def begin() -> None:
        shutil.rmtree(staging, ignore_errors=True)  # left by a killed run
        staging.mkdir(parents=True)

    on_main(begin)
    # A distributed optimizer's state as one that is not distributed, which each rank writes its own share of
    # (optimizer_state.py), or each rank's part as it is, which asks for the same layout at loading.
    sharding = {"distrib_optim_sharding_type": "fully_reshardable" if reshardable else "dp_reshardable"}
    state = _sharded_state(policy, with_optimizer, sharding, is_loading=False)
    if reference is not None:
        state |= _sharded_copy(policy, reference)
    about = {
        "architecture": _architecture(policy),
        "optimizer": _optimizer_needs(policy, reshardable) if with_optimizer else None,
        "layout": _layout(),
        "extra": extra or {},
    }
    text = json.dumps(about, indent=1) + "\n"

    def put_in_place() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        staging.replace(folder)

    def finish(checksums: dict[str, str]) -> None:
        on_main(lambda: write_text(staging / ABOUT, text))
        write_checksums(staging, checksums)
        on_main(put_in_place)

    return Writing(state, staging, content_metadata=sharding, finish=finish)


def load_extra(folder: Path) -> dict[str, Any]:
    """What ``save`` was given as ``extra``. Raises DamagedCheckpoint where it cannot be read."""
    return _about(folder)["extra"]


@torch.no_grad()  # the distributed optimizer copies into parameters
def load(policy: MegatronPolicy, folder: Path, *, with_optimizer: bool = False, is_checked: bool = False) -> None:
    """Puts a checkpoint's weights (and optimizer state) in place, once all of it is verified.

    The layout may differ from the saved one, unless a distributed optimizer's state was saved without ``reshardable``.
    is_checked: whether the caller has compared the files' checksums.
    Raises UserError where the checkpoint is of another architecture or has no optimizer (or another kind of one), and
    its subclass DamagedCheckpoint where files are missing or not what was written. No weight has changed by then.
    """
    if not is_checked:
        check_checksums(folder)
    _check_fits(policy, folder, with_optimizer)
    if with_optimizer:
        begin_adam(policy.optimizer)
    with plain_objects_only(folder):
        check_metadata(folder)
        sharding = dist_checkpointing.load_content_metadata(str(folder))
        wanted = _sharded_state(policy, with_optimizer, sharding, is_loading=True)
        # Transformer Engine's layers keep an ``_extra_state`` each, FP8's scales or nothing, and torch's layers write
        # none. Any other name that the checkpoint lacks is left for Megatron to refuse.
        written = {part.key for part in load_sharded_metadata(str(folder)).values()}

        def is_unwritten(part: object) -> bool:
            return isinstance(part, ShardedObject) and part.key.endswith("._extra_state") and part.key not in written

        own, wanted = extract_matching_values(wanted, is_unwritten)
        state = dist_checkpointing.load(wanted, str(folder))
        models = [state[f"model{index}"] for index in range(len(policy.chunks))]
        for model in models:
            check_scales(folder, model)
    for index, (chunk, model) in enumerate(zip(unwrap_model(policy.chunks), models, strict=True)):
        extra = {name: part.data for name, part in own.get(f"model{index}", {}).items()}
        with switched_on("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"):  # scales, which check_scales has passed
            chunk.load_state_dict(model | extra)
    if with_optimizer:
        policy.optimizer.load_state_dict(state["optimizer"])
        count_adam_steps(policy.optimizer)
        policy.scheduler.num_steps = 0  # it adds the loaded steps to its own
        policy.scheduler.load_state_dict(state["scheduler"])
    elif policy.optimizer is not None:
        policy.optimizer.reload_model_params()


def _about(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / ABOUT, required=("architecture", "optimizer", "layout", "extra"))
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from error


def _check_fits(policy: MegatronPolicy, folder: Path, with_optimizer: bool) -> None:
    about = _about(folder)
    if different := _differences(about["architecture"], _architecture(policy)):
        raise UserError(f"{folder} is a checkpoint of another model: {different}")
    if not with_optimizer:
        return
    there = about["optimizer"]
    if there is None:
        raise UserError(f"{folder} has weights only, no optimizer state to resume from")
    here = {**_layout(), **_optimizer_needs(policy, reshardable=True)}
    if different := _differences(there, {key: here[key] for key in there}):
        raise UserError(f"{folder} holds another optimizer's state: {different}")


def _architecture(policy: MegatronPolicy) -> dict[str, Any]:
    """What determines the shapes of a model's weights: its config's sizes, and its adapters."""
    config, lora = policy.built.bridge.hf_pretrained.config, policy.built.lora
    shapes = {name: getattr(config, name) for name in SHAPE_FIELDS if hasattr(config, name)}
    adapters = lora and {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(set(lora.targets))}
    return {**shapes, "lora": adapters}


def _optimizer_needs(policy: MegatronPolicy, reshardable: bool) -> dict[str, Any]:
    """What has to be the same for an optimizer's state to be loaded."""
    is_distributed = bool(distributed(policy.optimizer))
    layout = _layout() if is_distributed and not reshardable else {}
    # Megatron then has a separate optimizer for experts, and other names in the state.
    experts = parallel_state.get_expert_model_parallel_world_size() > 1
    return {"distributed optimizer": is_distributed, "expert parallelism": experts, **layout}


def changed_layout(folder: Path) -> str | None:
    """How the checkpoint's layout differs from this one, in words; None: not at all."""
    return _differences(_about(folder)["layout"], _layout()) or None


def _layout() -> dict[str, int]:
    return {
        "tensor-parallel size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline-parallel size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context-parallel size": parallel_state.get_context_parallel_world_size(),
        "expert-parallel size": parallel_state.get_expert_model_parallel_world_size(),
        "data-parallel size": parallel_state.get_data_parallel_world_size(),
    }


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The differences in words; empty: there are none."""
    keys = [key for key in there | here if there.get(key) != here.get(key)]
    return ", ".join(f"{key} is {there.get(key)} there and {here.get(key)} here" for key in keys)


def _sharded_state(policy: MegatronPolicy, with_optimizer: bool, sharding: dict, *, is_loading: bool) -> dict:
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(unwrap_model(policy.chunks))}
    if with_optimizer:
        # Several chunks may have the same name: each counts its layers from 0.
        model_state = {f"{chunk}.{key}": value for chunk, part in state.items() for key, value in part.items()}
        state["optimizer"] = policy.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=sharding)
        state["scheduler"] = policy.scheduler.state_dict()
    return state


# --- a frozen copy of the weights in the same checkpoint -----------------------------------------------------------


def load_reference(policy: MegatronPolicy, folder: Path) -> Weights:
    """The weights that ``save`` was given as ``reference``; ``load`` has checked the folder's files."""
    empty = [torch.empty_like(weight, dtype=torch.float32) for weight in policy.snapshot()]
    with plain_objects_only(folder):
        loaded = dist_checkpointing.load(_sharded_copy(policy, empty), str(folder))
    return [loaded[f"reference {place}"] for place in range(len(empty))]


def _sharded_copy(policy: MegatronPolicy, weights: Weights) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Copies of the trained weights, by their places among them, split as the weights themselves are."""
    trained = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad]
    # By identity: the addresses of FP8 weights, which are objects around their data, may all be 0.
    copy_of = {id(p): (place, w) for place, (p, w) in enumerate(zip(trained, weights, strict=True))}
    found = {}
    for chunk in unwrap_model(policy.chunks):
        state = chunk.sharded_state_dict()
        add_prefix_for_sharding(state, "reference.")
        for sharded in state.values():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and id(sharded.data) in copy_of:
                place, sharded.data = copy_of[id(sharded.data)]
                if isinstance(sharded, ShardedTensor):
                    sharded.dtype = sharded.data.dtype
                found[f"reference {place}"] = sharded
    if len(found) < len(trained):
        raise RuntimeError("Megatron's sharded state lacks trained weights: their copies would be lost")
    return found


# --- checksums of the files: damage is found before training resumes ------------------------------------------------

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path, known: dict[str, str]) -> None:
    """Adds ``checksums.json`` to a folder that all ranks have written into. Every rank calls it with what it knows of
    the checksums, by file name; the first one reads what is left."""
    found = gathered(known)

    def write() -> None:
        checksums = {name: value for part in found for name, value in part.items()}
        checksums |= {name: checksum(folder / name) for name in _files(folder) if name not in checksums}
        write_text(folder / CHECKSUMS, json.dumps(checksums, indent=1, sort_keys=True) + "\n")

    on_main(write)


def check_checksums(folder: Path) -> None:
    """Raises DamagedCheckpoint, on every rank, if a file is missing, new or changed. Every rank reads its share."""
    if fault := next(filter(None, gathered(_fault(folder))), None):
        raise DamagedCheckpoint(f"{folder} is damaged: {fault}")


def _fault(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    try:
        expected = read_object(folder / CHECKSUMS, required=())
    except UserError:
        return f"{CHECKSUMS}, which tells what was written, is missing or damaged"
    present = _files(folder)
    if different := set(present) ^ expected.keys():
        name = min(different)
        return f"{name} is {'missing' if name in expected else 'not one of its files'}"
    for name in present[torch.distributed.get_rank() :: torch.distributed.get_world_size()]:
        if checksum(folder / name) != expected[name]:
            return f"{name} has other content than was written"
    return None


def _files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path != Path(CHECKSUMS))
