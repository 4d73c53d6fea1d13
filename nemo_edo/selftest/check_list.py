"""The checks, in their order: a failure explains those below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_edo.selftest import devices, loss_kernels, nccl_versions, numbers, speed
from nemo_edo.selftest.numbers import BF16, FP8, PACKED, SameNumbers, across
from nemo_edo.selftest.outcome import Outcome
from nemo_edo.selftest.server_check import Server
from nemo_edo.selftest.this_machine import Machine
from nemo_edo.selftest.tiny_model import Setting

HOPPER, BLACKWELL = (9, 0), (10, 0)


@dataclass(frozen=True)
class Check:
    """run: takes the machine and the check's number, which is the same on all ranks."""

    group: str
    name: str
    run: Callable[[Machine, int], Outcome]


def _needs_te(machine: Machine, capability: tuple[int, int] = (8, 0)) -> str | None:
    if not machine.gpus:
        return "it needs a GPU and Transformer Engine"
    if not machine.has_te:
        return "Transformer Engine is not installed"
    if machine.capability < capability:
        needed, here = ("{}.{}".format(*found) for found in (capability, machine.capability))
        return f"it needs a GPU of capability {needed}; this is {here}"
    return None


def _several(machine: Machine) -> str | None:
    return None if machine.world > 1 else "it needs several processes (torchrun --nproc-per-node N)"


def _context(machine: Machine) -> str | None:
    return _several(machine) or _needs_te(machine)


def _fp8(recipe: str, capability: tuple[int, int]) -> Check:
    return Check(
        "precision",
        f"fp8, {recipe}",
        SameNumbers(
            lambda machine: Setting(precision={**FP8, "fp8_recipe": recipe}),
            "another recipe (precision.fp8_recipe), or bf16; docs/scaling.md has what each needs",
            lambda machine: _needs_te(machine, capability),
        ),
    )


def _packing(**more: bool) -> SameNumbers:
    """In bf16 where Transformer Engine does it, which packs in no other precision."""
    return SameNumbers(
        lambda machine: Setting(
            training={**PACKED, **more},
            precision=BF16 if machine.gpus else {},
            attention="sdpa" if more else "auto",
        ),
        "train with packing=false, and report the versions of Transformer Engine and its attention kernels",
    )


def _split(name: str, setting: Callable[[Machine], Setting], **more: object) -> Check:
    remedy = "another split of the ranks; the all-reduce above tells whether they can reach each other"
    return Check("split", name, SameNumbers(setting, remedy, **{"why_not": _several, **more}, world=True))


ATTENTION = "set model.attention to one that passes"
EAGER = "generation.servers.arguments=[--enforce-eager]"
"""The first server has captured graphs: that takes most of its start."""
SPLITS_ABOVE = "see the splits above"
CHECKS = [
    Check("machine", "packages", devices.packages),
    Check("machine", "same on all ranks", devices.alike),
    Check("machine", "GPUs", devices.devices),
    Check("machine", "Transformer Engine", devices.transformer_engine),
    Check("machine", "NCCL versions", nccl_versions.same_version),
    Check("machine", "shared folder", devices.shared_folder),
    Check("machine", "all-reduce", devices.all_reduce),
    Check("precision", "fp32, as transformers", numbers.against_transformers),
    Check("precision", "bf16", SameNumbers(lambda machine: Setting(precision=BF16), "train in fp32")),
    _fp8("tensorwise", HOPPER),
    _fp8("delayed", HOPPER),
    _fp8("blockwise", HOPPER),
    _fp8("mxfp8", BLACKWELL),
    Check("attention", "torch's", SameNumbers(lambda machine: Setting(attention="sdpa"), ATTENTION)),
    Check("attention", "Megatron's", SameNumbers(lambda machine: Setting(attention="local"), ATTENTION)),
    Check(
        "attention",
        "Transformer Engine's",
        SameNumbers(lambda machine: Setting(attention="te", precision=BF16), ATTENTION, _needs_te),
    ),
    Check("attention", "packing", _packing()),
    Check("attention", "shared prompts", _packing(share_prompts=True)),
    Check(
        "attention",
        "fused loss head",
        SameNumbers(lambda machine: Setting(loss_head="fused"), "set model.loss_head=logits"),
    ),
    Check("attention", "fused loss kernels", loss_kernels.against_fp64),
    Check("attention", "token by token", numbers.token_by_token),
    _split("data", lambda machine: Setting(parallelism={"use_distributed_optimizer": True})),
    _split("tensor", lambda machine: across(machine, "tensor")),
    _split("tensor, with the sequence", lambda machine: across(machine, "tensor", sequence_parallel=True)),
    _split("pipeline", lambda machine: across(machine, "pipeline", limit=4)),
    _split("context", lambda machine: across(machine, "context", precision=BF16), why_not=_context),
    _split("experts", lambda machine: across(machine, "expert"), mixture=True),
    Check("training", "ED-GRPO step", SameNumbers(lambda machine: Setting(), SPLITS_ABOVE, world=True)),
    Check(
        "training",
        "ED-iDPO step",
        SameNumbers(lambda machine: Setting(algorithm="idpo"), SPLITS_ABOVE, world=True),
    ),
    Check("training", "checkpoint at another layout", numbers.checkpoint_at_another_layout),
    Check("training", "speed", speed.training),
    Check("server", "vLLM, refit by disk", Server(())),
    Check(
        "server",
        "vLLM, refit by NCCL",
        Server(
            ("generation.refit.transport=nccl", "generation.placement=apart", EAGER),
            lambda machine: None if len(machine.gpus) > machine.world else "it needs one GPU more than the trainer has",
        ),
    ),
    Check(
        "server",
        "vLLM, asleep during training",
        Server(
            ("generation.placement=shared", "generation.servers.memory_share=0.4", EAGER),
            lambda machine: None if machine.gpus else "it needs a GPU",
        ),
    ),
]
