"""The records that components exchange: one frozen dataclass per hand-over.

Dimensions: B sequences, S tokens of a padded sequence, T = S - 1 next-token positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

UNVERIFIED = "verification "
"""How a score's reason begins where the answer could not be compared within the limits of time and memory."""
ABSTAINED = f"{UNVERIFIED}abstained: "
"""How it begins where a judge gave no verdict: the reward says nothing, and evaluations leave the response out."""
RULES_AGREE, RULES_DISAGREE = "; the rules agree", "; the rules disagree"
"""How it ends where a judge gave a verdict, and rules compared the same answers."""


@dataclass(frozen=True)
class Problem:
    """One row of a problems file, with the place it came from so that errors can name it."""

    id: str
    """Stable name, unique within the file: ``<file stem>-<line>``."""
    question: str
    solution: str
    """The reference chain of thought, final-answer line included (the text that SFT learns)."""
    answer: str
    """The final answer: a canonical number (``data.answers.canonical_number``), or cleaned LaTeX or text; as it is in
    the data where its columns were named, or a function made it, and empty without one."""
    source: str
    """``path:line`` of the row."""
    answer_kind: str = "number"
    """number; math: LaTeX or words, which rules can compare; text: prose, which they cannot."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, of JSON's types, which a custom reward gets."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat that is asked as it is, where the data have one: each message's role and content."""


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. ``temperature=0`` is greedy decoding."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    """A response ends, too, with the token that makes its text contain one of these."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. The seed alone fixes its random numbers, whatever else is in its batch."""

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None
    """The response's own limit; None: that of ``SamplingParams``."""

    def limit(self, sampling: SamplingParams) -> int:
        """The most tokens that the response may have."""
        return sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True)
class Rollout:
    """One sampled response with the sampler's view of it."""

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    response_ids: Sequence[int]
    """Sampled tokens, the stop token included where the response ended by itself; kept as an ``array`` of int32."""
    response_logprobs: Sequence[float]
    """Natural log-probabilities of ``response_ids`` under pi_gen: at the sampling temperature, before any top-p cut;
    kept as an ``array`` of float32, as on disk."""
    text: str
    """The response decoded without special tokens."""
    finished: bool
    """True if a stop token ended it, False if it ran into ``max_new_tokens`` or met a stop string."""
    policy_version: int
    seed: int
    stop: str | None = None
    """The stop string that ended it: ``text`` contains it, and the rest of its last token."""
    routed_experts: bytes = b""
    """int16 [tokens - 1, layers with experts, k]: what the sampler's routers chose for every token but the last
    (``generation.routing_replay``); empty where it is not kept."""

    def __post_init__(self) -> None:
        # A tuple of Python numbers takes 32 bytes for each of them, and the controller holds a whole collection.
        object.__setattr__(self, "response_ids", array("i", self.response_ids))
        object.__setattr__(self, "response_logprobs", array("f", self.response_logprobs))


@dataclass(frozen=True)
class ScoredRollout:
    rollout: Rollout
    reward: float
    answer: str | None
    """The final answer found in the text, in canonical form; None if there is none, or the response did not finish."""
    well_formed: bool
    """Finished, with exactly one final-answer line, and that at the end."""
    reason: str
    """Why the reward is what it is, in words."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What a custom reward consists of, by name; verifiers give none."""
    success_at: float = 1.0
    """The lowest reward of a success (``rewards.success_at``)."""

    @property
    def success(self) -> bool:
        """Whether the response counts as right for accuracy, pass@k and pairs: one that did not finish never does."""
        return self.rollout.finished and self.reward >= self.success_at

    @property
    def has_verdict(self) -> bool:
        """Whether the reward is a verdict; otherwise a judge abstained, and it says nothing."""
        return not self.reason.startswith(ABSTAINED)


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt."""

    chosen: ScoredRollout
    rejected: ScoredRollout


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences ready for the policy: prompt and response, right-padded.

    Position t of a ``[B, T]`` tensor is about token ``tokens[:, t + 1]``, the one predicted at t.
    Padding carries mask 0 everywhere; a row that is all padding contributes nothing.
    """

    tokens: Tensor
    """[B, S] int64, prompt then response then padding."""
    mask: Tensor
    """[B, T] float32, 1 where the predicted token is a response token that counts."""
    groups: Tensor | None = None
    """[B] int64, equal for the rows that answer one prompt."""
    rewards: Tensor | None = None
    """[B] float32, the reward of each response."""
    advantages: Tensor | None = None
    """[B] float32, one for each response (policy-gradient training)."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, under the frozen policy that produced the samples (pi_old)."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, under the reference policy."""
    sampler_logprobs: Tensor | None = None
    """[B, T] float32, pi_old as the generation engine computed it (pi_gen)."""
    exploration_factors: Tensor | None = None
    """[B] float32, factors on the exploration term of each response; 0: the term leaves the response out."""
    older: Tensor | None = None
    """[B] float32, 1 for a response of an older policy, which the exploration term alone reads: ``old_logprobs`` are
    that policy's, and the term reads no other rows. None: it reads the batch's own responses."""
    selected: Tensor | None = None
    """[B, T] float32, 1 at the tokens that a covariance control has selected."""
    routed_experts: Tensor | None = None
    """[B, T, layers with experts * k] int16, the experts that the sampler chose for token t; 0 in padding. None: the
    model's routers choose."""
    pair_role: Tensor | None = None
    """[B] int64, 1 for a pair's chosen response, -1 for its rejected one, 0 for a response outside pairs. Rows 2k and
    2k + 1 are a pair, chosen first, or both outside pairs."""

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    @property
    def unit(self) -> int:
        """Rows that no split may separate: 2 where rows make pairs."""
        return 1 if self.pair_role is None else 2

    @property
    def own(self) -> TrainingBatch:
        """The batch, with mask 0 at the responses of an older policy."""
        return self if self.older is None else self.with_fields(mask=self.mask * (1 - self.older)[:, None])

    @property
    def explored(self) -> TrainingBatch:
        """The batch, with mask 1 at the responses that only the exploration term reads."""
        return self if self.older is None else self.with_fields(mask=self.mask * self.older[:, None])

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are set, by name."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in present.items() if value is not None}

    def with_fields(self, **tensors: Tensor) -> TrainingBatch:
        """The batch with these fields set."""
        return replace(self, **tensors)

    def rows(self, index: Tensor | slice) -> TrainingBatch:
        """The given rows of every field."""
        return replace(self, **{name: value[index] for name, value in self.tensors().items()})

    def cut(self, length: int) -> TrainingBatch:
        """The first ``length`` tokens of every row."""
        ends = {name: length if name == "tokens" else length - 1 for name in self.tensors()}
        return replace(self, **{n: v[:, : ends[n]] if v.ndim > 1 else v for n, v in self.tensors().items()})
