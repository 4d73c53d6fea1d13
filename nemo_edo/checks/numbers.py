"""Checks that compute one step in many ways: each must give the numbers of fp32 in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_edo.checks import tiny_model
from nemo_edo.checks.findings import Finding, failed, passed
from nemo_edo.checks.machine import Machine
from nemo_edo.checks.tiny_model import FASTEST, LLAMA, Measured, Setting

PACKED = {"packing": True, "micro_batch_tokens": 1024}


class Bounds(NamedTuple):
    """Largest deviations: of log-probabilities and entropies in nats, before and after the step; of the loss and the
    gradient's norm, relative to their size (the loss's is at least 1)."""

    values: float
    loss: float
    grad_norm: float
    after: float


BOUNDS = {
    "fp32": Bounds(1e-4, 1e-4, 1e-3, 2e-3),
    "bf16": Bounds(0.15, 0.05, 0.1, 0.3),
    "fp8": Bounds(0.6, 0.2, 0.3, 1.0),
}
"""Those of bf16 and fp8 are estimates for this model until they have been measured on GPUs; a wrong layout, scale or
mask is off by more."""


@dataclass(frozen=True)
class SameNumbers:
    """A check: a step in a setting against the same step of the same model in fp32, in one process."""

    setting: Setting
    world: bool = False
    """Whether the step is that of all ranks."""
    model: str = LLAMA

    def __call__(self, machine: Machine) -> Finding:
        folder, setting = machine.scratch / self.model, self.setting.on(machine)
        found = step(machine, folder, setting, world=self.world)
        if machine.rank > 0:
            return passed("")
        # Last: if rank 0 failed before it met the others, they would wait for it.
        expected = reference(machine, folder, setting.algorithm)
        return compared(found, expected, BOUNDS[setting.precision.partition(" ")[0]])


def step(
    machine: Machine, folder: Path, setting: Setting, *, world: bool, save: Path | None = None, load: Path | None = None
) -> Measured:
    return machine.run(tiny_model.measure, folder, setting, save, load, world=world)


_references: dict[tuple[Path, str], Measured] = {}


def reference(machine: Machine, folder: Path, algorithm: str) -> Measured:
    """Measured once."""
    key = (folder, algorithm)
    if key not in _references:
        _references[key] = step(machine, folder, Setting(algorithm=algorithm), world=False)
    return _references[key]


def compared(found: Measured, expected: Measured, bounds: Bounds) -> Finding:
    far = {
        "values": float(np.abs(found.values - expected.values).max()),
        "loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1.0),
        "grad_norm": abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
        "after": float(np.abs(found.after - expected.after).max()),
    }
    said = "deviations: " + ", ".join(f"{name.replace('_', ' ')} {deviation:.1e}" for name, deviation in far.items())
    too_far = [name for name, deviation in far.items() if not deviation <= getattr(bounds, name)]  # NaN is too far
    if not too_far:
        return passed(said, **far)
    allowed = ", ".join(f"{name.replace('_', ' ')} at most {getattr(bounds, name):.0e}" for name in too_far)
    return failed(f"{said}; expected {allowed}", **far)


def _close(said: str, far: float, bound: float) -> Finding:
    if far <= bound:  # NaN is too far
        return passed(said, values=far)
    return failed(f"{said}; expected at most {bound:.0e}", values=far)


def against_transformers(machine: Machine) -> Finding:
    """The reference of the other checks."""
    found = reference(machine, machine.scratch / LLAMA, "grpo")
    expected = machine.run(tiny_model.of_transformers, machine.scratch / LLAMA)
    return compared(found, replace(found, values=expected), BOUNDS["fp32"])


def token_by_token(machine: Machine) -> Finding:
    """What is sampled with stored keys and values must have the log-probabilities of a pass over the sequence."""
    setting = Setting(FASTEST).on(machine)
    sampled, whole = machine.run(tiny_model.generated, machine.scratch / LLAMA, setting)
    far = float(np.abs(sampled - whole).max())
    return _close(
        f"log-probabilities of {len(sampled)} tokens differ by {far:.1e}", far, BOUNDS[setting.precision].values
    )


def checkpoint_at_another_layout(machine: Machine) -> Finding:
    """The weights after a step, written by all ranks as one layout, read by one process (and its log-probabilities
    compared with those that were measured before writing)."""
    folder = machine.folder / "checkpoint"
    before = step(machine, machine.scratch / LLAMA, Setting(split="tensor").on(machine), world=True, save=folder)
    if machine.rank > 0:
        return passed("")
    after = step(machine, machine.scratch / LLAMA, Setting(), world=False, load=folder)
    far = float(np.abs(after.values[0] - before.after).max())
    return _close(f"log-probabilities differ by {far:.1e}", far, BOUNDS["fp32"].values)


# --- why a machine cannot do it ---------------------------------------------------------------------------------------


def a_gpu(machine: Machine) -> str | None:
    return None if machine.gpus else "it needs a GPU"


def a_spare_gpu(machine: Machine) -> str | None:
    return None if len(machine.gpus) > machine.world else "it needs one GPU more than the trainer has"


def te_on(capability: float = 8.0) -> Callable[[Machine], str | None]:
    """Transformer Engine, on GPUs of a capability."""

    def why_not(machine: Machine) -> str | None:
        if not machine.gpus:
            return "it needs a GPU and Transformer Engine"
        if not machine.has_te:
            return "Transformer Engine is not installed"
        here = float(machine.gpus[0].capability)
        return None if here >= capability else f"it needs a GPU of capability {capability}; this is {here}"

    return why_not
