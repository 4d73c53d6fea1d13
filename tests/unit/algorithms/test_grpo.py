"""From samples to a training batch: advantages, whose log-probabilities, and the statistics of a collection."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_edo.algorithms.grpo import build_groups
from nemo_edo.config import GRPOConfig
from nemo_edo.types import Rollout, ScoredRollout


class TablePolicy:
    """Gives back the tables that it is made of, and counts the questions."""

    def __init__(self, log_probs=None, entropies=None, reference=None) -> None:
        self.tables = {"log_probs": log_probs, "entropies": entropies, "reference": reference}
        self.asked: list[str] = []

    def _table(self, name: str, batch) -> torch.Tensor:
        table = self.tables[name]
        return torch.full_like(batch.mask, -0.5) if table is None else torch.tensor(table)

    def log_probs(self, batch):
        self.asked.append("log_probs")
        return self._table("log_probs", batch), self._table("entropies", batch)

    def reference_log_probs(self, batch):
        self.asked.append("reference")
        return self._table("reference", batch)


def scored(problem: str, index: int, response: tuple[int, ...], reward: float, *, well_formed: bool = True,
           log_prob: float = -0.7) -> ScoredRollout:
    rollout = Rollout(problem, index, (5, 6), response, (log_prob,) * len(response), "text", True, 0, index)
    return ScoredRollout(rollout, reward, None, well_formed, "")


FOUR = [  # two groups, interleaved; responses of 1 to 5 tokens after prompts of 2
    scored("a", 0, (1, 2, 3, 4, 5), 1.0),
    scored("b", 0, (7, 8), 0.0, well_formed=False),
    scored("a", 1, (1, 2, 3, 4), 0.0, well_formed=False),
    scored("b", 1, (9,), 0.0),
]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_advantages_equal_a_numpy_computation_group_by_group(scale: str, baseline: str):
    rng = np.random.default_rng(0)
    owners = rng.permutation(np.repeat(["a", "b", "c"], 4))
    rewards = rng.normal(size=12)
    samples = [scored(name, i, (3, 4), float(r)) for i, (name, r) in enumerate(zip(owners, rewards, strict=True))]
    config = GRPOConfig(advantage_scale=scale, advantage_baseline=baseline)
    advantages = build_groups(samples, TablePolicy(), config, pad_id=0).batch.advantages

    expected = np.empty(12)
    for name in "abc":
        own = owners == name
        others = (rewards[own].sum() - rewards[own]) / 3
        base = rewards[own].mean() if baseline == "mean" else others
        expected[own] = (rewards[own] - base) / (rewards[own].std() + 1e-6 if scale == "std" else 1.0)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5)


def test_old_log_probs_are_the_policys_and_not_the_engines():
    table = -0.1 * torch.arange(24, dtype=torch.float32).reshape(4, 6)
    batch = build_groups(FOUR, TablePolicy(table.tolist()), GRPOConfig(), pad_id=0).batch
    torch.testing.assert_close(batch.old_logprobs, table)


def test_reference_is_asked_for_where_beta_is_above_zero():
    table = -0.2 * torch.arange(24, dtype=torch.float32).reshape(4, 6)
    policy = TablePolicy(reference=table.tolist())
    collected = build_groups(FOUR, policy, GRPOConfig(beta=0.04), pad_id=0)
    torch.testing.assert_close(collected.batch.ref_logprobs, table)
    assert "kl" in collected.statistics


def test_without_beta_no_reference_is_computed():
    policy = TablePolicy()
    collected = build_groups(FOUR, policy, GRPOConfig(beta=0.0, exploration_coefficient=0.1), pad_id=0)
    assert policy.asked == ["log_probs"]
    assert collected.batch.ref_logprobs is None
    assert "kl" not in collected.statistics


def test_rows_of_the_batch_are_the_samples_in_their_order():
    batch = build_groups(FOUR, TablePolicy(), GRPOConfig(), pad_id=99).batch
    assert batch.tokens.tolist() == [
        [5, 6, 1, 2, 3, 4, 5], [5, 6, 7, 8, 99, 99, 99], [5, 6, 1, 2, 3, 4, 99], [5, 6, 9, 99, 99, 99, 99]]
    assert batch.mask.tolist() == [
        [0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]


def test_statistics_of_responses_and_groups_equal_hand_computed_values():
    statistics = build_groups(FOUR, TablePolicy(), GRPOConfig(), pad_id=0).statistics
    assert statistics["reward"] == pytest.approx(1 / 4)
    assert statistics["well_formed"] == pytest.approx(2 / 4)
    assert statistics["response_length"] == pytest.approx((5 + 2 + 4 + 1) / 4)
    # a has the 4-grams 1234, 2345 and 1234: two of three are distinct. b has none, which counts as 0.
    assert statistics["distinct_4"] == pytest.approx((2 / 3 + 0) / 2)
    assert statistics["zero_advantage_groups"] == pytest.approx(1 / 2)  # b: all rewards equal


def test_statistics_of_tokens_are_means_over_response_tokens_only():
    samples = [scored("a", 0, (1, 2, 3), 1.0, log_prob=-1.0), scored("a", 1, (4,), 0.0, log_prob=-2.0)]
    outside = 1e6  # on prompts and padding: it must not show
    policy = TablePolicy(
        log_probs=[[outside, -1.5, -1.0, -0.5], [outside, -1.0, outside, outside]],
        entropies=[[outside, 0.1, 0.2, 0.3], [outside, 1.0, outside, outside]],
        reference=[[outside, -1.0, -1.0, -1.0], [outside, -3.0, outside, outside]],
    )
    statistics = build_groups(samples, policy, GRPOConfig(), pad_id=0).statistics
    assert statistics["entropy"] == pytest.approx((0.1 + 0.2 + 0.3 + 1.0) / 4)
    assert statistics["sampler_gap"] == pytest.approx((0.5 + 0.0 + 0.5 + 1.0) / 4)
    differences = [-0.5, 0.0, 0.5, 2.0]  # log pi_old - log pi_ref
    expected = sum(math.exp(-d) - 1 + d for d in differences) / 4  # Schulman's k3
    assert statistics["kl"] == pytest.approx(expected)


def test_a_problem_with_a_single_sample_is_an_error():
    with pytest.raises(ValueError, match="one response each"):
        build_groups([*FOUR, scored("c", 0, (1,), 1.0)], TablePolicy(), GRPOConfig(), pad_id=0)


def test_a_reward_that_is_not_a_number_is_an_error():
    broken = [replace(FOUR[0], reward=math.nan), *FOUR[1:]]
    with pytest.raises(ValueError, match="rewards are not finite"):
        build_groups(broken, TablePolicy(), GRPOConfig(), pad_id=0)
