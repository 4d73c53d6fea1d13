"""From rewards to advantages: relative to the group (the responses to one prompt), which groups are informative, DAPO's
penalty on the reward of overlong responses, and credit for rare correct solutions.

Advantages are [B], in the rewards' floating type (torch's default for integer rewards), and have no gradient. They are
relative to a group or to nothing, never to the batch: a loss divides by its own count and by nothing else.
Dimensions: B responses, G groups.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nemo_edo.losses.checks import check_coefficient

GroupIds = Tensor | np.ndarray | Sequence[Hashable]
"""[B], equal for the responses of one group."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Which of B responses belong together."""

    ids: list[Hashable]
    """G of them, in the order of their first responses."""
    of_B: Tensor
    """[B] int64, the index of each response's group in ``ids``."""
    size_G: Tensor

    def sum_G(self, values_B: Tensor) -> Tensor:
        return values_B.new_zeros(len(self.ids)).index_add(0, self.of_B, values_B)

    def lowest_G(self, values_B: Tensor) -> Tensor:
        empty_G = values_B.new_empty(len(self.ids))
        return empty_G.scatter_reduce(0, self.of_B, values_B, "amin", include_self=False)

    def all_equal_G(self, values_B: Tensor) -> Tensor:
        """[G] bool, by comparison: a variance would have to be compared with a rounding error."""
        return self.lowest_G(values_B) == -self.lowest_G(-values_B)

    def smaller_than(self, size: int) -> list[Hashable]:
        """Ids of the groups with fewer responses."""
        return [group for group, small in zip(self.ids, (self.size_G < size).tolist(), strict=True) if small]

    def require_pairs(self) -> None:
        """Raises ValueError, with their ids, for groups of one response."""
        if alone := self.smaller_than(2):
            raise ValueError(f"groups {alone} have one response each: nothing to be compared with")


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: GroupIds,
    *,
    scale: str = "std",
    baseline: str = "mean",
    deviation: str = "population",
    singletons: str = "error",
    epsilon: float = 1e-6,
) -> Tensor:
    """(r - baseline) / (std + epsilon) within each group; [B] (GRPO, Shao et al. 2024).

    rewards: [B]. group_ids: [B] integers, strings or other hashable ids in any order, equal for one group's responses.
    scale: "std", the standard deviation of the group, or "none" (Dr.GRPO), which divides by nothing.
    baseline: "mean" of the group, or "leave-one-out", the mean of the group's other rewards (RLOO).
    deviation: "population", its squares divided by the group's size n, or "sample", by n - 1 (TRL, verl).
    singletons: what a group of one gives: "error", ValueError, or "zero", advantage 0.
    A group whose rewards are all equal gets exact zeros. Raises ValueError as ``read_groups`` does.
    """
    for name, value, allowed in (
        ("scale", scale, ("std", "none")),
        ("baseline", baseline, ("mean", "leave-one-out")),
        ("deviation", deviation, ("population", "sample")),
        ("singletons", singletons, ("error", "zero")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(allowed)}")
    groups, (rewards,) = read_groups(group_ids, rewards=rewards)
    if singletons == "error":
        groups.require_pairs()
    values_B, size_G = rewards.double(), groups.size_G.double()  # double: the order of the rows hardly shows
    others_G = (size_G - 1).clamp(min=1)  # a group of one is all equal: it gets its zeros below
    deviation_B = values_B - (groups.sum_G(values_B) / size_G)[groups.of_B]
    advantages_B = deviation_B
    if baseline == "leave-one-out":  # r - (n * mean - r) / (n - 1)
        advantages_B = deviation_B * (size_G / others_G)[groups.of_B]
    if scale == "std":
        variance_G = groups.sum_G(deviation_B.square()) / (size_G if deviation == "population" else others_G)
        advantages_B = advantages_B / (variance_G.sqrt()[groups.of_B] + epsilon)
    # The mean of equal rewards may be off by a rounding, which a small std would blow up.
    advantages_B = torch.where(groups.all_equal_G(values_B)[groups.of_B], 0.0, advantages_B)
    return advantages_B.to(floating_type(rewards))


def informative_groups(
    rewards: Tensor | Sequence[float], group_ids: GroupIds, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """[B] bool: True where the response's group has rewards that differ (dynamic sampling, DAPO, Yu et al. 2025).

    A group of equal rewards has no advantages and so no policy gradient, but it carries much of the exploration term:
    as 0/1 weights of that term, the result is the control that leaves such groups out.
    low, high: where given, only groups with a mean reward in [low, high] are kept (a filter by difficulty).
    Raises ValueError as ``read_groups`` does, for a group of one, and for low above high.
    """
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}, expected numbers with low <= high")
    groups, (rewards,) = read_groups(group_ids, rewards=rewards)
    groups.require_pairs()
    values_B = rewards.double()
    mean_G = groups.sum_G(values_B) / groups.size_G
    return (~groups.all_equal_G(values_B) & (low <= mean_G) & (mean_G <= high))[groups.of_B]


def solved_groups(successes: Tensor | Sequence[bool], group_ids: GroupIds) -> Tensor:
    """[B] bool: True where all responses of the response's group succeed (successes: [B], bool or 0 and 1). As 0/1
    weights of the exploration term these leave it the groups that have no policy gradient and nothing to learn."""
    groups, (successes,) = read_groups(group_ids, successes=successes)
    require_among("successes", successes, (0, 1))
    return (groups.sum_G(successes.double()) == groups.size_G)[groups.of_B]


def pass_at_k_advantages(rewards: Tensor | Sequence[float], group_ids: GroupIds, k: int) -> Tensor:
    """Advantages of the best of k responses; [B] (Pass@k Training, Chen et al. 2025, their analytical form).

    All k-subsets of a group are rewarded with their highest reward and normalised over the subsets; a response gets the
    mean over the subsets that include it. With n wrong ones of G responses, P = 1 - C(n, k) / C(G, k) and
    s = sqrt(P (1 - P)):

        correct   (1 - P) / s
        wrong     (1 - P - C(n - 1, k - 1) / C(G - 1, k - 1)) / s

    and zeros where s = 0: no correct response, or fewer than k wrong ones. Groups may differ in size. k = 1 gives
    ``group_advantages`` with epsilon 0. rewards: [B], 0 and 1.
    Raises ValueError as ``read_groups`` does, for other rewards, a group of one or of fewer than k, and k below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    groups, (rewards,) = read_groups(group_ids, rewards=rewards)
    groups.require_pairs()
    require_among("rewards", rewards, (0, 1))
    if small := groups.smaller_than(k):
        raise ValueError(f"k is {k}, but groups {small} have fewer responses")
    wrong_G = groups.sum_G((rewards == 0).long())
    by_group = [_pass_at_k(*counts, k) for counts in zip(wrong_G.tolist(), groups.size_G.tolist(), strict=True)]
    correct_G, wrong_G = torch.tensor(by_group, dtype=torch.float64, device=rewards.device).reshape(-1, 2).unbind(1)
    advantages_B = torch.where(rewards == 1, correct_G[groups.of_B], wrong_G[groups.of_B])
    return advantages_B.to(floating_type(rewards))


def positive_downweighted_advantages(
    rewards: Tensor | Sequence[float], *, positive: float = 0.1, negative: float = 1.0
) -> Tensor:
    """REINFORCE that learns mostly from mistakes (W-REINFORCE, Zhu et al. 2025, "The Surprising Effectiveness of
    Negative Reinforcement in LLM Reasoning"): +positive for correct responses, -negative for wrong ones; [B].

    rewards: [B], 1 where correct; 0 (as verifiers have it) or -1 (as that paper has it) where wrong. No baseline and no
    scale, hence no groups. positive = negative = 1 is plain REINFORCE with rewards +1 and -1; positive = 0 learns from
    wrong responses alone. Raises ValueError for other rewards and for weights that are negative or not finite.
    """
    for name, weight in (("positive", positive), ("negative", negative)):
        check_coefficient(name, weight)
    rewards = torch.as_tensor(rewards).detach()
    if rewards.ndim != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, expected [B]")
    require_among("rewards", rewards, (-1, 0, 1))
    signed = torch.full(rewards.shape, -negative, dtype=floating_type(rewards), device=rewards.device)
    return signed.masked_fill(rewards == 1, positive)


def soft_overlong_penalty(lengths: Tensor, *, max_length: float, cache_length: float) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the reward (Yu et al. 2025, eq. 13); in [-1, 0].

    With L_max = max_length and L_cache = cache_length, a response of length L gets 0 up to L_max - L_cache, then
    (L_max - L_cache - L) / L_cache, which is -1 at L_max, and -1 beyond. lengths: in tokens, of any shape.
    Raises ValueError for lengths that are negative or not finite, and unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length < float("inf"):
        raise ValueError(
            f"cache_length is {cache_length} and max_length {max_length}, expected 0 < cache_length <= max_length"
        )
    wrong = ~(torch.isfinite(lengths) & (lengths >= 0))
    if wrong.any():
        raise ValueError(f"lengths has {lengths[wrong].tolist()}, expected finite numbers of at least 0")
    return ((max_length - cache_length - lengths) / cache_length).clamp(-1, 0)


def read_groups(group_ids: GroupIds, **values_B: Tensor | Sequence[float]) -> tuple[Groups, list[Tensor]]:
    """The groups, and the named values as detached tensors on the first one's device. Raises ValueError, naming the
    argument, for shapes other than one [B], values that are not finite, and tensors or arrays of ids that are not whole
    numbers."""
    device = torch.as_tensor(next(iter(values_B.values()))).device
    values = [torch.as_tensor(value, device=device).detach() for value in values_B.values()]
    shape = tuple(group_ids.shape) if isinstance(group_ids, (Tensor, np.ndarray)) else (len(group_ids),)
    for name, value in zip(values_B, values, strict=True):
        if value.ndim != 1 or shape != tuple(value.shape):
            raise ValueError(f"{name} {tuple(value.shape)} and group_ids {shape} must both be [B]")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} are not finite at rows {(~torch.isfinite(value)).nonzero().flatten().tolist()}")
    if isinstance(group_ids, (Tensor, np.ndarray)):
        floating = group_ids.is_floating_point() if isinstance(group_ids, Tensor) else group_ids.dtype.kind == "f"
        if floating and len(group_ids) > 0:  # an empty list becomes a tensor of floats
            raise ValueError(f"group_ids are of type {group_ids.dtype}, expected whole numbers, strings or other ids")
        ids = group_ids.tolist()
    else:
        ids = [group.item() if isinstance(group, (Tensor, np.generic)) else group for group in group_ids]
    for row, group in enumerate(ids):
        if not isinstance(group, Hashable):
            raise ValueError(f"group_ids has a {type(group).__name__} at row {row}, expected ids that can be hashed")
    numbers: dict[Hashable, int] = {}
    positions = [numbers.setdefault(group, len(numbers)) for group in ids]
    of_B = torch.tensor(positions, dtype=torch.int64, device=device)
    return Groups(list(numbers), of_B, torch.bincount(of_B, minlength=len(numbers))), values


def require_among(name: str, values_B: Tensor, allowed: tuple[int, ...]) -> None:
    """Raises ValueError, with the rows, for a value other than the allowed ones."""
    other = ~torch.isin(values_B.double(), torch.tensor(allowed, dtype=torch.float64, device=values_B.device))
    if other.any():
        rows, found = other.nonzero().flatten().tolist(), values_B[other].tolist()
        raise ValueError(f"{name} has values {found} at rows {rows}, expected {' or '.join(map(str, allowed))}")


def floating_type(values: Tensor) -> torch.dtype:
    """The tensor's own type if it is a floating one, otherwise torch's default."""
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()


def _pass_at_k(wrong: int, size: int, k: int) -> tuple[float, float]:
    """Advantages of a correct and of a wrong response; exact up to the last divisions, for groups of any size."""
    pass_rate = 1 - Fraction(math.comb(wrong, k), math.comb(size, k))
    std = math.sqrt(pass_rate * (1 - pass_rate))
    if std == 0:
        return 0.0, 0.0
    pass_rate_with_wrong = 1 - Fraction(math.comb(wrong - 1, k - 1), math.comb(size - 1, k - 1))
    return float(1 - pass_rate) / std, float(pass_rate_with_wrong - pass_rate) / std


# --- credit for rare correct solutions --------------------------------------------------------------------------------
#
# Ours, not the paper's: how much of a group took the same solution path. The task defines what "the same path" means
# (``PathFunction``): a parser where steps can be parsed, otherwise clusters of similar texts. Two uses of the resulting
# shares: ``novelty_advantages`` moves advantage from repeated to rare correct solutions; as ``weights`` of
# ``exploration_term`` they push down repeated paths alone.


class PathFunction(Protocol):
    """Which of a group's responses took the same solution path."""

    def __call__(self, question: str, texts: Sequence[str]) -> Sequence[Hashable | None]:
        """One label for each text, in order: equal for the same path, None where no path can be read."""


def each_path(parse: Callable[..., Hashable | None]) -> PathFunction:
    """A path function from a parser of one response, ``parse(question=..., text=...)``."""

    def paths(question: str, texts: Sequence[str]) -> list[Hashable | None]:
        return [parse(question=question, text=text) for text in texts]

    return paths


@dataclass(frozen=True)
class NgramPaths:
    """A path function for texts that no parser reads: similar wording counts as the same path.

    Two texts are linked if the Jaccard overlap |A & B| / |A | B| of their sets of word n-grams is at least the
    threshold; a path is a connected component of the links (single linkage), so the order of the texts does not
    matter. Words are separated by blanks. A text of fewer than n words is one gram; a blank one has no path.
    A path's label is its first text in alphabetical order.
    """

    n: int = 4
    """Words in a gram, at least 1."""
    threshold: float = 0.5
    """A similarity in (0, 1]; 1 links only texts with the same grams."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, expected at least 1")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}, expected a number in (0, 1]")

    def __call__(self, question: str, texts: Sequence[str]) -> list[str | None]:
        distinct = sorted({text for text in texts if text.split()})
        words = [text.split() for text in distinct]
        grams = [{tuple(one[i : i + self.n]) for i in range(max(len(one) - self.n, 0) + 1)} for one in words]
        label = list(distinct)
        for i, j in combinations(range(len(distinct)), 2):
            if label[i] != label[j] and len(grams[i] & grams[j]) / len(grams[i] | grams[j]) >= self.threshold:
                first, second = sorted((label[i], label[j]))
                label = [first if name == second else name for name in label]
        path_of = dict(zip(distinct, label, strict=True))
        return [path_of.get(text) for text in texts]


def redundancy_shares(
    paths: Sequence[Hashable | None], correct: Tensor | Sequence[bool], group_ids: GroupIds
) -> Tensor:
    """w_i: of the *other* correct responses in the group, the share that took the same path as this correct one; [B], 0
    for wrong responses and for a lone correct one.

    paths: [B] labels, compared within a group. Those of None count as one and the same path: a response whose path is
        unknown is not a discovery: with a separate path for each, garbled solutions would earn the most.
    correct: [B], bool or 0 and 1. group_ids: [B], as for ``group_advantages``.

    As ``exploration_term(..., weights=shares)`` these give the softer form of the novelty advantage: the term then
    lowers correct answers on repeated paths alone, more the more they are repeated.
    Raises ValueError for lengths that differ and for ``correct`` other than 0 and 1.
    """
    groups, (correct,) = read_groups(group_ids, correct=correct)
    require_among("correct", correct, (0, 1))
    labels = paths.tolist() if isinstance(paths, Tensor) else list(paths)
    if len(labels) != len(correct):
        raise ValueError(f"paths has {len(labels)} labels, but correct has {len(correct)} values")
    is_correct = (correct == 1).tolist()
    keys = list(zip(groups.of_B.tolist(), labels, strict=True))
    on_path = Counter(key for key, right in zip(keys, is_correct, strict=True) if right)
    in_group = groups.sum_G((correct == 1).long()).tolist()
    shares = [
        (on_path[key] - 1) / (in_group[key[0]] - 1) if right and in_group[key[0]] > 1 else 0.0
        for key, right in zip(keys, is_correct, strict=True)
    ]
    return torch.tensor(shares, dtype=floating_type(correct), device=correct.device)


def novelty_advantages(
    advantages: Tensor, shares: Tensor, correct: Tensor | Sequence[bool], group_ids: GroupIds, *, strength: float
) -> Tensor:
    """A_i - strength * (w_i - mean of w over the group's correct responses) for correct responses; others keep A_i.

    Advantage moves from repeated to rare correct solutions, and the group's total stays what it was. Groups with no or
    one correct response, or where all correct ones are equally redundant, keep theirs bit for bit.
    advantages: [B], of any kind; the result has their type. shares: [B], w (``redundancy_shares``). correct, group_ids:
    as there. strength: units of advantage for each unit of w, at least 0.
    Raises ValueError as ``read_groups`` does, for ``correct`` other than 0 and 1, and for a strength below 0. No
    gradient.
    """
    check_coefficient("strength", strength)
    groups, (advantages, shares, correct) = read_groups(
        group_ids, advantages=advantages, shares=shares, correct=correct
    )
    require_among("correct", correct, (0, 1))
    right_B, w_B = correct == 1, shares.double()
    # Measured from the lowest share, so that the deviations of equal shares are zero and not a rounding.
    lowest_G = groups.lowest_G(torch.where(right_B, w_B, math.inf))
    above_B = torch.where(right_B, w_B - lowest_G[groups.of_B], 0.0)
    mean_G = groups.sum_G(above_B) / groups.sum_G(right_B.double()).clamp(min=1)
    deviation_B = torch.where(right_B, above_B - mean_G[groups.of_B], 0.0)
    return (advantages.double() - strength * deviation_B).to(floating_type(advantages))
