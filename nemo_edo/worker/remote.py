"""The workers' model and engine, as Algorithm 1 sees them. Batches are global; each rank gets its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from nemo_edo.data.shares import joined
from nemo_edo.interfaces import Arrivals, GenerationEngine, WeightSync
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams, TrainingBatch
from nemo_edo.worker.dispatch import News, Workers
from nemo_edo.worker.worker import Place, Worker

if TYPE_CHECKING:
    from nemo_edo.models.megatron_gpt_model import MegatronGPTModel

T = TypeVar("T")
TOKENS_OF_A_CALL = 2**22
"""Tokens of a log-probability pass that one call sends, padding included, so that no rank holds a whole collection."""


@dataclass(eq=False, repr=False)
class RemotePolicy:
    """``interfaces.Policy`` by calls to the workers, which have built its model."""

    workers: Workers
    places: Sequence[Place]  # of each rank
    engine: GenerationEngine | None = None
    weight_sync: WeightSync | None = None

    @property
    def model(self) -> Any:
        """Rank 0's part of the model: its settings say how a batch is cut and counted."""
        return self.workers.local.model

    @property
    def shares(self) -> int:
        return 1 + max(place.share for place in self.places)

    def start_training(self, total_steps: int) -> None:
        self.workers.call(Worker.start_training, total_steps)

    def train_step(
        self, batch: TrainingBatch, *, exploration_weight: float, grad_norm_limit: float = math.inf
    ) -> dict[str, float]:
        shares = self.model.loss_shares(batch)
        each = self.for_each_rank(shares)
        answers = self.workers.call(Worker.train_step, exploration_weight, grad_norm_limit, each=each)
        metrics = {**answers[0][0], "padding_share": shares[0].padding_share}
        if self.model.measures_tokens and math.isfinite(metrics["loss"]):
            tokens = joined(shares, self.of_shares([tokens for _, tokens in answers]), batch.mask.shape)
            metrics |= self.model.token_metrics(batch, *tokens)
        return metrics

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        each = self.for_each_rank(self.model.loss_shares(batch))
        count = self.model.exploration_count(batch)
        return self.workers.call(Worker.exploration_gradient_ratio, count, each=each)[0]

    def logprobs(self, batch: TrainingBatch, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        both = self._passes(batch, batch.routed_experts, Worker.logprobs, temperature)
        return both[0], both[1]

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        return self._passes(batch, None, Worker.reference_logprobs)[0]  # its routers choose for themselves

    def _passes(
        self, batch: TrainingBatch, experts: Tensor | None, work: Callable[..., Tensor | None], *given: Any
    ) -> Tensor:
        """[2, B, T] of forward passes over the batch, part by part; a pass needs tokens, mask and replayed experts."""
        rows = max(1, TOKENS_OF_A_CALL // batch.tokens.shape[1])
        plain = TrainingBatch(batch.tokens, batch.mask, routed_experts=experts)
        parts = []
        for start in range(0, batch.size, rows):
            part = plain.rows(slice(start, start + rows))
            shares = self.model.shares(part)
            answers = self.workers.call(work, *given, each=self.for_each_rank(shares))
            parts.append(joined(shares, self.of_shares(answers), part.mask.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def freeze_reference(self) -> None:
        self.workers.call(Worker.freeze_reference)

    def move_reference(self, kind: str, decay: float) -> None:
        self.workers.call(Worker.move_reference, kind, decay)

    def for_each_rank(self, of_shares: Sequence[T]) -> list[T]:
        """What each rank gets, from what is for each data-parallel share."""
        return [of_shares[place.share] for place in self.places]

    def of_shares(self, answers: Sequence[T]) -> list[T]:
        """Each share's results, from those of all ranks."""
        found = {place.share: answer for place, answer in zip(self.places, answers, strict=True) if place.answers}
        return [found[share] for share in range(self.shares)]


class RemoteEngine:
    """``interfaces.GenerationEngine`` over the policy's own weights: each data-parallel rank generates its share."""

    takes_all = False

    def __init__(self, policy: RemotePolicy) -> None:
        self.policy_version = 0
        self._policy = policy

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, arrivals: Arrivals | None = None
    ) -> list[Rollout]:
        if not requests:
            return []
        policy, rollouts = self._policy, [None] * len(requests)
        shares = [list(requests[share :: policy.shares]) for share in range(policy.shares)]
        longest = max(len(request.prompt_ids) for request in requests), max(r.limit(sampling) for r in requests)

        def take(rank: int, ended: tuple[Sequence[int], Sequence[Rollout]]) -> None:
            places = [policy.places[rank].share + place * policy.shares for place in ended[0]]
            for place, rollout in zip(places, ended[1], strict=True):
                prompt = requests[place].prompt_ids
                rollouts[place] = replace(rollout, prompt_ids=prompt, policy_version=self.policy_version)
            if arrivals is not None:
                arrivals.add([rollouts[place] for place in places])

        each = policy.for_each_rank(shares)
        policy.workers.call(Worker.generate, sampling, longest, each=each, news=take)
        return rollouts


class SameCalls(Workers):
    """A program without a controller: every rank makes the same calls, executes its part, and learns all results."""

    @property
    def size(self) -> int:
        return torch.distributed.get_world_size()

    def call(
        self, work: Callable[..., T], *given: Any, each: Sequence[Any] | None = None, own: Any = None,
        news: News | None = None,
    ) -> list[T]:  # fmt: skip
        if news is not None:
            raise NotImplementedError("without a controller nobody hears of a call before it ends")
        first = () if each is None else (each[torch.distributed.get_rank()],)
        answers: list[Any] = [None] * self.size
        last = () if own is None else (own,)
        torch.distributed.all_gather_object(answers, work(self.local, *first, *given, *last))
        return answers


def policy_over(model: MegatronGPTModel) -> RemotePolicy:
    """``interfaces.Policy`` over a model that every rank has built itself."""
    calls = SameCalls()
    return RemotePolicy(calls, calls.call(Worker.adopt, model))
