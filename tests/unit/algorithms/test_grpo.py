"""From samples to a training batch: advantages, exploration weights, and what a minibatch selects."""

import math

import numpy as np
import pytest
import torch
from helpers.responses import scored

from nemo_edo.algorithms.grpo import GRPO
from nemo_edo.algorithms.plan import request_seed
from nemo_edo.config import GRPOConfig
from nemo_edo.losses import clip_cov_selection, group_advantages, kl_cov_selection, token_covariances
from nemo_edo.utils.phases import PhaseClock

FIRST, SECOND, THIRD = (  # the three paths: which two operands are merged first
    "1 + 2 = 3\n3 + 3 = 6\n#### 6", "1 + 3 = 4\n4 + 2 = 6\n#### 6", "2 + 3 = 5\n1 + 5 = 6\n#### 6")


@pytest.fixture
def build(table_policy):
    """build(samples, questions, log-probabilities, **GRPO settings): (what GRPO collects, the objective)."""

    def collect(samples, questions=None, logprobs=None, **settings):
        config = GRPOConfig(**settings, old_logprobs="trainer")  # a table has the rows of all samples
        objective = GRPO(config, questions or dict.fromkeys("abcde", "1 + 2 + 3"), 64, pad_id=0)
        return objective.build(samples, table_policy(logprobs), PhaseClock()), objective

    return collect


@pytest.fixture
def batch_of(build):
    return lambda samples, **settings: build(samples, **settings)[0].batch


def group(rewards, name: str = "a", texts=None, length: int = 2):
    """The responses to one problem."""
    texts = texts or ["text"] * len(rewards)
    return [scored(name, i, (3,) * length, float(reward), text=text)
            for i, (reward, text) in enumerate(zip(rewards, texts, strict=True))]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_advantages_are_those_of_each_problems_own_group(batch_of, scale: str, baseline: str):
    rng = np.random.default_rng(0)
    owners, rewards = rng.permutation(np.repeat([0, 1, 2], 4)).tolist(), rng.normal(size=12).tolist()
    samples = [scored("abc"[owner], i, (3, 4), r) for i, (owner, r) in enumerate(zip(owners, rewards, strict=True))]
    advantages = batch_of(samples, advantage_scale=scale, advantage_baseline=baseline).advantages
    expected = group_advantages(torch.tensor(rewards), owners, scale=scale, baseline=baseline)
    torch.testing.assert_close(advantages, expected)


def test_pass_k_gives_the_advantages_of_the_best_of_k(batch_of):
    """Two wrong of four, k = 2: P = 1 - C(2,2)/C(4,2) = 5/6, and a wrong one's best partner is right 2 times of 3."""
    advantages = batch_of([*group([1, 0, 1, 0]), *group([1, 1, 1, 0], "b")], pass_k=2).advantages
    s = math.sqrt(5 / 36)
    right, wrong = (1 - 5 / 6) / s, (1 - 5 / 6 - 1 / 3) / s
    assert advantages.tolist() == pytest.approx([right, wrong, right, wrong, 0, 0, 0, 0])


@pytest.mark.parametrize("settings", [{}, {"pass_k": 2}])
def test_novelty_moves_advantage_from_the_common_path_to_the_rare_one(batch_of, settings: dict):
    """Of three right ones two took one path: each has half of the others with it, the third none."""
    samples = [*group([1, 1, 1, 0, 0], texts=[FIRST, FIRST, SECOND, FIRST, SECOND]),
               *group([1, 0, 0, 0], "b", [FIRST] * 4)]
    plain, novel = (batch_of(samples, novelty_strength=strength, **settings).advantages for strength in (0.0, 0.6))
    assert (novel - plain).tolist() == pytest.approx([-0.1, -0.1, 0.2, *[0] * 6], abs=1e-6)


def test_paths_are_read_against_each_problems_own_question(build):
    """The same texts are three paths to one question; to another one they are none, hence one and the same."""
    texts = [FIRST, SECOND, THIRD, "#### 6"]
    samples = [*group([1, 1, 1, 0], "a", texts), *group([1, 1, 1, 0], "b", texts)]
    collected, _ = build(samples, questions={"a": "1 + 2 + 3", "b": "7 + 8 + 9"}, redundancy_weighted=True)
    assert collected.batch.exploration_factors.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert collected.statistics["redundancy"] == pytest.approx(1 / 2)


def test_every_response_explores_unless_uninformative_groups_or_redundancy_forbid_it(batch_of):
    samples = [*group([1, 1], "a", [FIRST] * 2), *group([1, 0], "b"), *group([0, 0], "c"), *group([0, 1], "d"),
               *group([1, 1, 0], "e", [FIRST] * 3)]
    mixed = [samples[i] for i in (2, 0, 6, 4, 1, 3, 5, 7, 8, 9, 10)]
    for settings, expected in (
        ({}, [1] * 11),
        ({"novelty_strength": 0.5}, [1] * 11),
        ({"explore_uninformative_groups": False}, [1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1]),
        ({"explore_solved_groups_only": True}, [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
        ({"explore_uninformative_groups": False, "redundancy_weighted": True}, [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]),
    ):
        assert batch_of(mixed, **settings).exploration_factors.tolist() == expected, settings


@pytest.mark.parametrize("rows", [range(8), [0, 3, 5]])
@pytest.mark.parametrize("control", ["kl-cov", "clip-cov"])
def test_covariance_control_selects_a_share_of_the_minibatchs_own_tokens_by_their_covariances(build, control, rows):
    table = -4 * torch.rand(8, 11, generator=torch.Generator().manual_seed(0))
    samples = [*group([1, 0, 0, 1], "a", length=10), *group([1, 1, 0, 1], "b", length=10)]
    collected, objective = build(samples, logprobs=table.tolist(), covariance_control=control, covariance_share=0.1,
                                 clip_cov_low=0.2, clip_cov_high=1.5)
    batch, again, other = (objective.minibatch(collected, rows, seed) for seed in ("0 0 0", "0 0 0", "0 0 1"))
    covariances = token_covariances(table[list(rows)], collected.batch.advantages[list(rows)], batch.mask)
    bounds = {"low": 0.2, "high": 1.5, "seed": request_seed("0 0 0")} if control == "clip-cov" else {}
    selection = clip_cov_selection if control == "clip-cov" else kl_cov_selection
    assert batch.selected.bool().equal(selection(covariances, batch.mask, share=0.1, **bounds).bool())
    assert float(batch.selected.sum()) == len(rows)  # a tenth of ten tokens each
    assert again.selected.equal(batch.selected)
    assert other.selected.equal(batch.selected) is (control == "kl-cov")
