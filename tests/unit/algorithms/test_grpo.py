"""From samples to a training batch: advantages, exploration weights, and what a minibatch selects."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_edo.algorithms.grpo import keep_informative
from nemo_edo.config import GRPOConfig

QUESTION = "1 + 2 + 3"
FIRST, SECOND, THIRD = (  # the three paths: which two operands are merged first
    "1 + 2 = 3\n3 + 3 = 6\n#### 6", "1 + 3 = 4\n4 + 2 = 6\n#### 6", "2 + 3 = 5\n1 + 5 = 6\n#### 6")
GARBLED = "#### 6"


@pytest.fixture
def batch_of(build, table_policy):
    """batch_of(samples, **GRPO settings)"""
    return lambda samples, **settings: build(samples, table_policy(), GRPOConfig(**settings))[0].batch


@pytest.fixture
def group(scored):
    """group([rewards], name, texts, lengths): the responses to one problem."""

    def make(rewards, name: str = "a", texts=None, lengths=None):
        texts, lengths = texts or ["text"] * len(rewards), lengths or [2] * len(rewards)
        return [scored(name, i, (3,) * length, float(reward), text=text)
                for i, (reward, text, length) in enumerate(zip(rewards, texts, lengths, strict=True))]

    return make


# --- advantages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_advantages_equal_a_numpy_computation_group_by_group(batch_of, scored, scale: str, baseline: str):
    rng = np.random.default_rng(0)
    owners = rng.permutation(np.repeat(["a", "b", "c"], 4))
    rewards = rng.normal(size=12)
    samples = [scored(name, i, (3, 4), float(r)) for i, (name, r) in enumerate(zip(owners, rewards, strict=True))]
    advantages = batch_of(samples, advantage_scale=scale, advantage_baseline=baseline).advantages

    expected = np.empty(12)
    for name in "abc":
        own = owners == name
        others = (rewards[own].sum() - rewards[own]) / 3
        base = rewards[own].mean() if baseline == "mean" else others
        expected[own] = (rewards[own] - base) / (rewards[own].std() + 1e-6 if scale == "std" else 1.0)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5)


def test_pass_k_gives_the_advantages_of_the_best_of_k(batch_of, group):
    """Two wrong of four, k = 2: P = 1 - C(2,2)/C(4,2) = 5/6, and a wrong one's best partner is right 2 times of 3."""
    advantages = batch_of([*group([1, 0, 1, 0]), *group([1, 1, 1, 0], "b")], pass_k=2).advantages
    s = math.sqrt(5 / 36)
    right, wrong = (1 - 5 / 6) / s, (1 - 5 / 6 - 1 / 3) / s
    assert advantages.tolist() == pytest.approx([right, wrong, right, wrong, 0, 0, 0, 0])


def test_the_overlong_buffer_lowers_the_reward_before_advantages_are_formed(build, table_policy, group):
    """Of at most 10 tokens with a buffer of 4: 6 tokens cost nothing, 8 half a point, 10 a whole one."""
    config = GRPOConfig(overlong_buffer=4, advantage_scale="none")
    collected, _ = build(group([1, 1, 1, 0], lengths=[6, 8, 10, 3]), table_policy(), config, max_new_tokens=10)
    assert collected.batch.advantages.tolist() == pytest.approx([1 - 0.375, 0.5 - 0.375, -0.375, -0.375])
    assert collected.statistics["reward"] == pytest.approx(3 / 4)  # what the verifier gave


def test_a_problem_with_a_single_sample_is_an_error(batch_of, four, scored):
    with pytest.raises(ValueError, match="one response each"):
        batch_of([*four, scored("c", 0, (1,), 1.0)])


def test_a_reward_that_is_not_a_number_is_an_error(batch_of, four):
    with pytest.raises(ValueError, match="rewards are not finite"):
        batch_of([replace(four[0], reward=math.nan), *four[1:]])


# --- novelty ------------------------------------------------------------------------------------------------------


def test_novelty_moves_advantage_from_the_common_path_to_the_rare_one(batch_of, group):
    """Of three right ones two took one path: each has half of the others with it, the third none."""
    samples = [*group([1, 1, 1, 0], texts=[FIRST, FIRST, SECOND, FIRST]), *group([1, 0, 0, 0], "b", [FIRST] * 4)]
    plain, novel = (batch_of(samples, novelty_strength=strength).advantages for strength in (0.0, 0.6))
    assert (novel - plain).tolist() == pytest.approx([-0.1, -0.1, 0.2, 0, 0, 0, 0, 0], abs=1e-6)
    assert float(novel[:4].sum()) == pytest.approx(float(plain[:4].sum()), abs=1e-6)


def test_novelty_goes_with_the_advantages_of_pass_k(batch_of, group):
    samples = group([1, 1, 1, 0, 0], texts=[FIRST, SECOND, FIRST, FIRST, SECOND])
    plain, novel = (batch_of(samples, pass_k=2, novelty_strength=strength).advantages for strength in (0.0, 0.6))
    assert (novel - plain).tolist() == pytest.approx([-0.1, 0.2, -0.1, 0, 0], abs=1e-6)


def test_paths_are_read_against_each_problems_own_question(build, table_policy, group):
    """The same texts are three paths to one question; to another one they are none, hence one and the same."""
    texts = [FIRST, SECOND, THIRD, GARBLED]
    samples = [*group([1, 1, 1, 0], "a", texts), *group([1, 1, 1, 0], "b", texts)]
    config = GRPOConfig(redundancy_weighted=True)
    collected, _ = build(samples, table_policy(), config, questions={"a": QUESTION, "b": "7 + 8 + 9"})
    assert collected.batch.exploration_weights.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert collected.statistics["redundancy"] == pytest.approx(1 / 2)


def test_paths_follow_their_responses_however_groups_are_interleaved(batch_of, group):
    a, b = (group([1, 1, 1, 0], name, [FIRST, FIRST, SECOND, GARBLED]) for name in "ab")
    in_order = batch_of([*a, *b], redundancy_weighted=True).exploration_weights
    mixed = batch_of([a[2], b[0], b[1], a[3], a[0], b[3], a[1], b[2]], redundancy_weighted=True).exploration_weights
    assert in_order.tolist() == [0.5, 0.5, 0, 0] * 2
    assert mixed.tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0]


def test_ngram_paths_join_texts_of_like_wording(batch_of, group):
    alike, other = "first we add one and then two", "take three away from nine at once"
    samples = group([1, 1, 1, 0], texts=[alike, f"{alike} more", other, other])
    assert batch_of(samples, redundancy_weighted=True, solution_paths="ngrams").exploration_weights.tolist() == [
        0.5, 0.5, 0, 0]
    unread = batch_of(samples, redundancy_weighted=True, solution_paths="arithmetic").exploration_weights
    assert unread.tolist() == [1, 1, 1, 0]  # a text that no parser reads is no discovery


# --- exploration weights ------------------------------------------------------------------------------------------


def test_every_response_explores_alike_by_default(batch_of, four):
    assert batch_of(four).exploration_weights.tolist() == [1, 1, 1, 1]
    assert batch_of(four, novelty_strength=0.5).exploration_weights.tolist() == [1, 1, 1, 1]


def test_without_uninformative_groups_exactly_those_of_equal_rewards_do_not_explore(batch_of, group):
    samples = [*group([1, 1], "a"), *group([1, 0], "b"), *group([0, 0], "c"), *group([0, 1], "d")]
    mixed = [samples[i] for i in (2, 0, 6, 4, 1, 3, 5, 7)]
    weights = batch_of(mixed, explore_uninformative_groups=False).exploration_weights
    assert weights.tolist() == [1, 0, 1, 0, 0, 1, 0, 1]
    assert batch_of(mixed, explore_uninformative_groups=True).exploration_weights.tolist() == [1] * 8


def test_redundancy_and_leaving_out_uninformative_groups_go_together(batch_of, group):
    samples = [*group([1, 1], "a", [FIRST] * 2), *group([1, 1, 0], "b", [FIRST] * 3)]
    weights = batch_of(samples, redundancy_weighted=True, explore_uninformative_groups=False).exploration_weights
    assert weights.tolist() == [0, 0, 1, 1, 0]


# --- references and statistics ------------------------------------------------------------------------------------


def test_the_reference_is_asked_for_only_where_beta_is_above_zero(build, four, table_policy):
    for config, asked in ((GRPOConfig(beta=0.04), ["log_probs", "reference"]),
                          (GRPOConfig(beta=0.0, exploration_coefficient=0.1), ["log_probs"])):
        policy = table_policy()
        batch = build(four, policy, config)[0].batch
        assert policy.asked == asked
        assert (batch.ref_logprobs is None) == (config.beta == 0)


def test_the_spread_of_advantages_is_their_standard_deviation(build, four, table_policy):
    statistics = build(four, table_policy(), GRPOConfig(advantage_scale="none"))[0].statistics
    assert statistics["advantage_spread"] == pytest.approx(np.std([0.5, 0, -0.5, 0]))


# --- minibatches --------------------------------------------------------------------------------------------------


def test_an_item_is_a_response_and_a_minibatch_its_rows_in_the_order_asked_for(build, four, table_policy):
    collected, objective = build(four, table_policy(), GRPOConfig())
    assert collected.items == [[0], [1], [2], [3]]
    batch = objective.minibatch(collected, [2, 0], "seed")
    for name, value in collected.batch.tensors().items():
        assert torch.equal(batch.tensors()[name], value[[2, 0]]), name
    assert batch.selected is None


@pytest.fixture
def covarying(build, table_policy, group):
    """covarying(control, **settings): the collection of 2 x 4 responses whose log-probabilities range widely."""
    generator = torch.Generator().manual_seed(0)
    table = -4 * torch.rand(8, 11, generator=generator)

    def collect(control: str, **settings):
        samples = [*group([1, 0, 0, 1], "a", lengths=[10] * 4), *group([1, 1, 0, 1], "b", lengths=[10] * 4)]
        config = GRPOConfig(covariance_control=control, covariance_share=0.1, **settings)
        return build(samples, table_policy(table.tolist()), config)

    return collect


def numpy_covariances(batch) -> np.ndarray:
    """Of the batch's valid tokens: [8 rows x 10 tokens], with means over them all."""
    log_probs = batch.old_logprobs.double().numpy()[:, 1:]
    advantages = np.broadcast_to(batch.advantages.double().numpy()[:, None], log_probs.shape)
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def test_kl_cov_selects_the_tokens_of_highest_covariance_in_the_whole_minibatch(covarying):
    collected, objective = covarying("kl-cov")
    batch = objective.minibatch(collected, range(8), "any seed")
    covariances = numpy_covariances(batch)
    expected = covariances >= np.sort(covariances.flatten())[-8]  # a tenth of 80 tokens
    assert batch.selected[:, 1:].bool().numpy().tolist() == expected.tolist()
    assert not batch.selected[:, 0].any()  # the prompt
    part = objective.minibatch(collected, [0, 3, 5], "any seed")
    assert float(part.selected.sum()) == 3  # a tenth of that minibatch's own 30


def test_clip_cov_draws_a_share_of_the_tokens_within_the_bounds_and_the_seed_fixes_which(covarying):
    collected, objective = covarying("clip-cov", clip_cov_low=0.2, clip_cov_high=1.5)
    drawn = [objective.minibatch(collected, range(8), seed).selected for seed in ("0 0 0", "0 0 0", "0 0 1", "0 1 0")]
    covariances = numpy_covariances(collected.batch)
    eligible = (covariances >= 0.2) & (covariances <= 1.5)
    assert eligible.sum() > 16, "nothing to choose from"
    for selected in drawn:
        assert float(selected.sum()) == 8
        assert eligible[selected[:, 1:].bool().numpy()].all()
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[3])


# --- dynamic sampling ---------------------------------------------------------------------------------------------


def test_informative_groups_are_kept_whole_and_in_their_order(four, group):
    mixed = [*four, *group([1, 1], "c"), *group([0, 1], "d")]
    kept = keep_informative(mixed)
    assert [(item.rollout.problem_id, item.rollout.sample_index) for item in kept] == [
        ("a", 0), ("a", 1), ("d", 0), ("d", 1)]
    assert keep_informative(four[1::2]) == keep_informative([]) == []
