"""Calls of a program without a controller: every rank makes the same ones, with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

T = TypeVar("T")


class SameCalls(Workers):
    """A rank executes its part of a call, and learns the others' results."""

    def __init__(self, model: MegatronGPTModel) -> None:
        super().__init__()
        self.local.adopt(model)

    @property
    def size(self) -> int:
        return torch.distributed.get_world_size()

    def call(self, work: Callable[..., T], *given: Any, each: Sequence[Any] | None = None, own: Any = None) -> list[T]:
        first = () if each is None else (each[torch.distributed.get_rank()],)
        answers: list[Any] = [None] * self.size
        last = () if own is None else (own,)
        torch.distributed.all_gather_object(answers, work(self.local, *first, *given, *last))
        return answers


def policy_over(model: MegatronGPTModel) -> RemotePolicy:
    """``interfaces.Policy`` over a model that every rank has built itself."""
    calls = SameCalls(model)
    return RemotePolicy(calls, calls.call(Worker.place))
