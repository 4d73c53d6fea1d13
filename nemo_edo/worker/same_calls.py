"""Calls of a program without a controller: every rank makes the same ones, with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

T = TypeVar("T")


class SameCalls:
    """``dispatch.Workers`` of such a program: a rank executes its part of a call, and learns the others' results."""

    def __init__(self, model: MegatronGPTModel) -> None:
        self.local = Worker()
        self.local.adopt(model)
        self.size = torch.distributed.get_world_size()

    def call(self, work: Callable[..., T], *given: Any, each: Sequence[Any] | None = None) -> list[T]:
        first = () if each is None else (each[torch.distributed.get_rank()],)
        answers: list[T] = [None] * self.size
        torch.distributed.all_gather_object(answers, work(self.local, *first, *given))
        return answers


def policy_over(model: MegatronGPTModel) -> RemotePolicy:
    """``interfaces.Policy`` over a model that every rank has built itself."""
    calls = SameCalls(model)
    return RemotePolicy(calls, calls.call(Worker.place))
