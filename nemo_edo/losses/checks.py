"""Checks of the values that losses get and compute, which ask the device once for all of them.

Every answer to "is this finite?" makes the host wait for a GPU. A public loss therefore collects its checks while it
computes, and reads them together when it returns; only after a failure does it look for the place.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Test = Callable[[Tensor], Tensor]
"""Whether each of a tensor's numbers is allowed."""
Check = tuple[Test, Tensor, Callable[[], ValueError]]
"""A test, the numbers that it is asked about, and the error where one of them is not allowed."""

ABOVE_0 = 0.01
"""Nats by which rounding may put a log-probability above 0, with a margin."""

_collected: ContextVar[list[Check] | None] = ContextVar("collected", default=None)
_enabled: ContextVar[bool] = ContextVar("enabled", default=True)


class NotFinite(ValueError):
    """NaN or infinity where a loss needs numbers: a fault of this batch's values, not of how the loss is called."""


@contextmanager
def one_check() -> Iterator[None]:
    """The value checks of all losses in the block (a training step's, say) are read at its end, with one
    synchronisation.
    Raises the error of the first check that fails. Where the block itself raises, its checks are not read."""
    checks: list[Check] = []
    token = _collected.set(checks)
    try:
        yield
    finally:
        _collected.reset(token)
    by_test: dict[Test, list[Tensor]] = {}  # a test reads all tensors that it is asked about at once
    for test, values, _ in checks:
        by_test.setdefault(test, []).append(values.detach().flatten())
    if checks and not torch.cat([test(torch.cat(values)) for test, values in by_test.items()]).all():
        raise next(error() for test, values, error in checks if not test(values).all())


@contextmanager
def without_checks() -> Iterator[None]:
    """Inside, losses check shapes and settings but no values, and never wait for the device. ``torch.func.vmap`` needs
    it, because no value can be read there. ``torch.compile`` leaves the checks out by itself."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def checked(loss: Callable[P, R]) -> Callable[P, R]:
    """The loss with its value checks read when it returns, or with those of the ``one_check`` or loss around it."""

    @functools.wraps(loss)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _off() or _collected.get() is not None:
            return loss(*args, **kwargs)
        with one_check():
            return loss(*args, **kwargs)

    return call


def require_values(ok: Tensor | bool, error: Callable[[], ValueError]) -> None:
    """Raises ``error()`` unless ``ok``, or all of a tensor is true; for a tensor, where the checks are read."""
    if not isinstance(ok, bool):
        _require(torch.Tensor.bool, ok, error)
    elif not ok:
        raise error()


def _require(test: Test, values: Tensor, error: Callable[[], ValueError]) -> None:
    if _off():
        return
    checks = _collected.get()
    if checks is not None:
        checks.append((test, values, error))
    elif not test(values).all():
        raise error()


def require_finite(name: str, values: Tensor) -> None:
    """Raises NotFinite, with the name and the first place, if any value is NaN or infinite."""

    def error() -> NotFinite:
        place = (~torch.isfinite(values)).nonzero()[0].tolist()
        return NotFinite(f"{name} has NaN or infinite values where the mask is 1, first at {place}; all must be finite")

    _require(_finite, values, error)


def _finite(values: Tensor) -> Tensor:
    return values.abs() < math.inf  # torch.isfinite is four kernels


def check_coefficient(name: str, value: float) -> None:
    """Raises ValueError unless the value is a finite number of at least 0."""
    if isinstance(value, str | bool | None) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number of at least 0")


def constant(name: str, values: Tensor) -> Tensor:
    """The tensor without its gradient. Raises ValueError where none was given."""
    if not isinstance(values, Tensor):
        raise ValueError(
            f"{name} is {values!r}, expected a tensor: the log-probabilities under the policy that sampled"
        )
    return values.detach()


def require_logprobs(name: str, values: Tensor) -> None:
    """Raises ValueError for a value that is clearly above 0."""

    def error() -> ValueError:
        place = (values > ABOVE_0).nonzero()[0].tolist()
        return ValueError(f"{name} has {values[tuple(place)]:.3g} at {place}: a log-probability is at most 0")

    _require(_at_most_0, values, error)


def _at_most_0(values: Tensor) -> Tensor:
    return values <= ABOVE_0


def _off() -> bool:
    return torch.compiler.is_compiling() or not _enabled.get()
