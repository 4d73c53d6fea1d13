"""Checks that compute one step in many ways: each must give the numbers of fp32 in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nemo_edo.selftest import tiny_model
from nemo_edo.selftest.isolated import CheckError
from nemo_edo.selftest.outcome import Outcome, failed, impossible, passed
from nemo_edo.selftest.this_machine import OTHER_FOLDER, Machine
from nemo_edo.selftest.tiny_model import Measured, Setting

LIMIT_S = 90.0
BF16, FP8 = {"dtype": "bf16"}, {"dtype": "bf16", "fp8": "hybrid"}
PACKED = {"packing": True, "micro_batch_tokens": 1024}


@dataclass(frozen=True)
class Bounds:
    """Largest deviations: of log-probabilities and entropies in nats, before and after the step; of the loss and the
    gradient's norm, relative to their size (the loss's is at least 1)."""

    values: float
    loss: float
    grad_norm: float
    after: float


OF = {
    "fp32": Bounds(1e-4, 1e-4, 1e-3, 2e-3),
    "bf16": Bounds(0.15, 0.05, 0.1, 0.3),
    "fp8": Bounds(0.6, 0.2, 0.3, 1.0),
}
"""Those of bf16 and fp8 are estimates for this model until they have been measured on GPUs; a wrong layout, scale or
mask is off by more."""


@dataclass(frozen=True)
class SameNumbers:
    """A step in a setting against the same step of the same model in fp32, in one process.

    why_not: says why this machine cannot do it, None where it can. world: whether all ranks take part.
    """

    setting: Callable[[Machine], Setting]
    remedy: str
    why_not: Callable[[Machine], str | None] = lambda machine: None
    world: bool = False
    mixture: bool = False

    def __call__(self, machine: Machine, number: int) -> Outcome:
        if why := self.why_not(machine):
            return impossible(why)
        if not self.world and machine.rank > 0:
            return passed("on rank 0")
        folder, setting = machine.mixture if self.mixture else machine.llama, self.setting(machine)
        try:
            found = run(machine, number, folder, setting, world=self.world)
            # Last: if rank 0 failed before it met the others, they would wait for it.
            expected = reference(machine, folder, setting.algorithm, number) if machine.rank == 0 else None
        except CheckError as error:
            return failed(str(error), self.remedy)
        return passed("") if expected is None else compared(found, expected, _bounds(setting), self.remedy)


def _bounds(setting: Setting) -> Bounds:
    """Those of the numbers that it computes with."""
    return OF["fp8" if "fp8" in setting.precision else setting.precision.get("dtype", "fp32")]


def run(machine: Machine, number: int, folder: Path, setting: Setting, *paths: Path | None, world: bool) -> Measured:
    """Raises CheckError."""
    return machine.isolation.run(number, tiny_model.measure, folder, setting, *paths, world=world, limit_s=LIMIT_S)


_references: dict[tuple[Path, str], Measured] = {}


def reference(machine: Machine, folder: Path, algorithm: str, number: int) -> Measured:
    """Measured once. Raises CheckError."""
    key = (folder, algorithm)
    if key not in _references:
        _references[key] = run(machine, number, folder, Setting(algorithm=algorithm), world=False)
    return _references[key]


def compared(found: Measured, expected: Measured, bounds: Bounds, remedy: str) -> Outcome:
    far = {
        "values": float(np.abs(found.values - expected.values).max()),
        "loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1.0),
        "grad_norm": abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
        "after": float(np.abs(found.after - expected.after).max()),
    }
    said = ", ".join(f"{name.replace('_', ' ')} {deviation:.1e}" for name, deviation in far.items())
    too_far = [name for name, deviation in far.items() if not deviation <= getattr(bounds, name)]  # NaN is too far
    if not too_far:
        return passed(f"deviations: {said}", **far)
    allowed = ", ".join(f"{name.replace('_', ' ')} at most {getattr(bounds, name):.0e}" for name in too_far)
    return failed(f"deviations: {said}; expected {allowed}", remedy, **far)


def against_transformers(machine: Machine, number: int) -> Outcome:
    """The reference of the other checks."""
    if machine.rank > 0:
        return passed("on rank 0")
    remedy = "compare the versions with those of requirements/base.txt: nothing below can be trusted"
    try:
        found = reference(machine, machine.llama, "grpo", number)
        expected = machine.isolation.run(
            number, tiny_model.of_transformers, machine.llama, world=False, limit_s=LIMIT_S
        )
    except CheckError as error:
        return failed(str(error), remedy)
    return compared(found, replace(found, values=expected), OF["fp32"], remedy)


def token_by_token(machine: Machine, number: int) -> Outcome:
    """What is sampled with stored keys and values must have the log-probabilities of a pass over the sequence."""
    if machine.rank > 0:
        return passed("on rank 0")
    remedy = "set model.attention to one that passes above, or generate with servers (generation=vllm)"
    precision = BF16 if machine.gpus else {}
    try:
        sampled, whole = machine.isolation.run(
            number, tiny_model.generated, machine.llama, precision, world=False, limit_s=LIMIT_S
        )
    except CheckError as error:
        return failed(str(error), remedy)
    far, bound = float(np.abs(sampled - whole).max()), OF[precision.get("dtype", "fp32")].values
    said = f"log-probabilities of {len(sampled)} tokens differ by {far:.1e}"
    if far <= bound:  # NaN is too far
        return passed(said, values=far)
    return failed(f"{said}; expected at most {bound:.0e}", remedy, values=far)


def checkpoint_at_another_layout(machine: Machine, number: int) -> Outcome:
    """The weights after a step, written by all ranks as one layout, read by one process (and its log-probabilities
    compared with those that were measured before writing)."""
    remedy = f"see that every node can write to and read {machine.folder} (--folder), and that it is not full"
    if why := machine.no_folder(number):
        return failed(why, OTHER_FOLDER)
    folder = machine.folder / "checkpoint"
    try:
        before = run(machine, number, machine.llama, across(machine, "tensor"), folder, None, world=True)
        if machine.rank > 0:
            return passed("")
        after = run(machine, number, machine.llama, Setting(), None, folder, world=False)
    except CheckError as error:
        return failed(str(error), remedy)
    far = float(np.abs(after.values[0] - before.after).max())
    said = f"log-probabilities differ by {far:.1e}"
    return passed(said, values=far) if far <= OF["fp32"].values else failed(said, remedy, values=far)


def across(machine: Machine, split: str, limit: int = 8, **more: object) -> Setting:
    """The largest power of two of the ranks, up to ``limit``, for a split: "tensor", "pipeline", "context" or
    "expert"; the others are data-parallel."""
    size = 1
    while size * 2 <= limit and machine.world % (size * 2) == 0:
        size *= 2
    precision = more.pop("precision", {})
    return Setting(parallelism={f"{split}_model_parallel_size" if split != "context" else "context_parallel_size": size,
                                **more}, precision=precision)  # fmt: skip
