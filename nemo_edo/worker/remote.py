"""The workers' model and engine, as Algorithm 1 sees them. Batches are global; each rank gets its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from nemo_edo.data.shares import Share, joined, require_tokens
from nemo_edo.interfaces import GenerationEngine, WeightSync
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams, TrainingBatch
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Place, Responses, Worker

T = TypeVar("T")


class RemotePolicy:
    """``interfaces.Policy`` by calls to the workers, which have built its model."""

    def __init__(self, workers: Workers, places: Sequence[Place]) -> None:
        """places: of each rank."""
        self.workers = workers
        self.places = list(places)
        self.engine: GenerationEngine | None = None
        self.weight_sync: WeightSync | None = None

    @property
    def shares(self) -> int:
        """Data-parallel ranks."""
        return 1 + max(place.share for place in self.places)

    def start_training(self, total_steps: int) -> None:
        """A fresh optimizer, and a schedule over ``total_steps``."""
        self.workers.call(Worker.start_training, total_steps)

    def train_step(
        self, batch: TrainingBatch, *, exploration_weight: float | None = None, grad_norm_limit: float = math.inf
    ) -> dict[str, float]:
        require_tokens(batch)
        model = self._model
        shares, of_tokens = model.shares(batch), model.of_tokens(batch)
        given = (model.loss_counts(batch), exploration_weight, grad_norm_limit, of_tokens is not None)
        answers = self._call(Worker.train_step, shares, *given)
        metrics, step, _ = answers[0]
        if of_tokens is not None and math.isfinite(metrics["loss"]):
            metrics |= of_tokens(*self._joined(batch, shares, [tokens for _, _, tokens in answers]))
        return {**metrics, "padding_share": shares[0].padding_share, **step}

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        model = self._model
        counts = (model.loss_counts(batch), model.exploration_count(batch))
        return self._call(Worker.exploration_gradient_ratio, model.shares(batch), *counts)[0]

    def logprobs(self, batch: TrainingBatch, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        shares = self._model.shares(batch)
        both = self._joined(batch, shares, self._call(Worker.logprobs, shares, temperature))
        return both[0], both[1]

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        shares = self._model.shares(batch)
        return self._joined(batch, shares, self._call(Worker.reference_logprobs, shares))[0]

    def freeze_reference(self) -> None:
        """The current policy becomes the reference."""
        self.workers.call(Worker.freeze_reference)

    def move_reference(self, kind: str, decay: float) -> None:
        self.workers.call(Worker.move_reference, kind, decay)

    def measure(self, work: Callable[..., T], batch: TrainingBatch, *given: Any) -> list[T]:
        """What ``work(worker, share, loss_counts, *given)`` returns on each rank for its share of the batch."""
        model = self._model
        return self._call(work, model.shares(batch), model.loss_counts(batch), *given)

    @property
    def _model(self) -> Any:
        """Rank 0's part of the model: its settings say how a batch is cut and counted."""
        return self.workers.local.model

    def _call(self, work: Callable[..., T], shares: Sequence[Any], *given: Any) -> list[T]:
        return self.workers.call(work, *given, each=[shares[place.share] for place in self.places])

    def of_shares(self, answers: Sequence[T]) -> list[T]:
        """Each share's results, from those of all ranks."""
        found = {place.share: answer for place, answer in zip(self.places, answers, strict=True) if place.answers}
        return [found[share] for share in range(self.shares)]

    def _joined(self, batch: TrainingBatch, shares: Sequence[Share], answers: Sequence[Tensor]) -> Tensor:
        return joined(shares, self.of_shares(answers), batch.mask.shape)


class RemoteEngine:
    """``interfaces.GenerationEngine`` over the policy's own weights: each data-parallel rank generates its share."""

    def __init__(self, policy: RemotePolicy) -> None:
        self.policy_version = 0
        self._policy = policy

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        if not requests:
            return []
        shares = [list(requests[share :: self._policy.shares]) for share in range(self._policy.shares)]
        prompt = max(len(request.prompt_ids) for request in requests)
        response = max(request.limit(sampling) for request in requests)
        answers = self._policy._call(Worker.generate, shares, sampling, prompt, response)
        parts = self._policy.of_shares(answers)
        rollouts = [iter(self._rollouts(*one)) for one in zip(shares, parts, strict=True)]
        return [next(rollouts[place % len(rollouts)]) for place in range(len(requests))]

    def _rollouts(self, requests: Sequence[GenerationRequest], responses: Responses) -> list[Rollout]:
        ids, logprobs, end, rollouts = responses.ids.tolist(), responses.logprobs.tolist(), 0, []
        parts = (responses.lengths, responses.texts, responses.finished, responses.stops)
        for request, length, text, finished, stop in zip(requests, *parts, strict=True):
            begin, end = end, end + length
            rollouts.append(
                Rollout(
                    problem_id=request.problem_id,
                    sample_index=request.sample_index,
                    prompt_ids=request.prompt_ids,
                    response_ids=tuple(ids[begin:end]),
                    response_logprobs=tuple(logprobs[begin:end]),
                    text=text,
                    finished=finished,
                    policy_version=self.policy_version,
                    seed=request.seed,
                    stop=stop,
                )
            )
        return rollouts
