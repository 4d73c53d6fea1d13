"""What the parts know of each other: Protocols, so that an algorithm sees neither Megatron nor a server."""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nemo_edo.types import GenerationRequest, Problem, Rollout, SamplingParams, ScoredRollout, TrainingBatch


class GenerationEngine(Protocol):
    """Generates responses with the current weights of a policy.

    An engine that hands over responses as they end also has ``takes_all``: whether it wants all requests at a time,
    since a part's end leaves servers idle; otherwise it gets them in parts. ``generate`` then takes ``Arrivals``, which
    may have already what it returns.
    """

    policy_version: int

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, in the order of the requests."""


class Watch(Protocol):
    """What a generation tells the run, from any thread."""

    def alive(self) -> None:
        """A sign of life."""

    def stop_if_asked(self) -> None:
        """Raises RunStopped if the run is asked to stop."""


class Arrivals(Watch, Protocol):
    """Takes responses while others are generated."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Some responses that have ended, a sign of life. From any thread; returns at once."""


class PartWatch(Watch, Protocol):
    """What a generation in parts tells the run."""

    def begin_part(self) -> None:
        """Called before an engine gets a part's requests: where the run may be saved. May raise RunStopped."""


class Scorer(Protocol):
    """Scores responses.

    A scorer that compares a problem's responses also has ``by_group``, which is true: ``score`` then gets all of a
    problem's that an iteration generates together.
    """

    def begin(self, scored: Sequence[ScoredRollout], expected: int) -> None:
        """Called before a collection or an evaluation, whose responses ``score`` gets in parts. scored: those that an
        earlier process has scored: limits that hold for all of them count these, too. expected: how many all are."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order. ``problems`` holds every problem that they name."""


class WeightSync(Protocol):
    """Brings a trained policy's weights to the generation engine (refit)."""

    def push(self, version: int) -> None:
        """After it returns, the engine samples from the trainer's weights and stamps ``version`` on rollouts.

        A version names one state of the weights: if the engine has it already, nothing is done."""

    def release(self) -> None:
        """Called when no responses are needed until the next ``push``: an engine on the trainer's devices frees their
        memory."""


class Policy(Protocol):
    """A trainable policy. It takes global batches, and gives each data-parallel rank its share."""

    def train_step(
        self, batch: TrainingBatch, *, exploration_weight: float, grad_norm_limit: float = math.inf
    ) -> dict[str, float]:
        """One optimizer step on the global batch; returns global means of the loss and its metrics, "grad_norm" and
        "skipped": 1 where no rank took the step, because the loss or the norm is not finite or the norm is above
        ``grad_norm_limit``. Weights and optimizer then are as before.

        exploration_weight: the exploration term's in this step; 0 where nothing explores.
        """

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        """Norm of the exploration term's gradient at weight 1 over that of the rest of the loss. Takes no step."""

    def logprobs(self, batch: TrainingBatch, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the response tokens and exact entropies (nats) of the current weights, each [B, T]; zero
        where the mask is. temperature: of the softmax; None: the one that the policy trains at."""

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities under the reference policy."""

    def move_reference(self, kind: str, decay: float) -> None:
        """Before a later iteration: "initial" leaves the reference where it is, "previous" puts it at the current
        policy, "ema" moves it there by the share 1 - decay."""
