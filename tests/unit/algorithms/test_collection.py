"""Statistics of an iteration's samples and of its steps, and whose log-probabilities the samples carry."""

import math
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from helpers.responses import scored

from nemo_edo.algorithms.collection import Collected, step_statistics, view_of_sampler
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.phases import PhaseClock


def view(samples, policy, old_logprobs: str = "auto", *, with_reference: bool = True):
    return view_of_sampler(samples, policy, PhaseClock(), pad_id=0, with_reference=with_reference,
                           old_logprobs=old_logprobs)


def test_where_the_samplers_are_trusted_the_trainer_computes_only_those_of_every_tenth_prompt(table_policy):
    """The gap between both is measured on these; the loss gets nothing to correct."""
    samples = [scored(f"p{number}", index, (1, 2), 1.0, log_prob=-0.7) for number in range(11) for index in range(2)]
    policy = table_policy([[0.0, -0.5, -0.9], [0.0, -0.7, -0.7], [0.0, -0.7, -0.6], [0.0, -0.7, -0.7]])
    batch, statistics = view(samples, policy, "sampler", with_reference=False)
    torch.testing.assert_close(batch.old_logprobs, -0.7 * batch.mask)
    assert batch.sampler_logprobs is None and batch.size == 22
    assert statistics["sampler_gap"] == pytest.approx((0.2 + 0.2 + 0.1) / 8, rel=1e-4)
    assert statistics["sampler_gap_max"] == pytest.approx(0.2, rel=1e-4)
    assert statistics["reward"] == 1


@pytest.mark.parametrize(("gap", "trusted"), [(0.9e-5, True), (1.1e-5, False)])
def test_by_default_the_samplers_are_used_where_they_are_the_trainers_up_to_the_bound(gap, trusted):
    """Otherwise the trainer computes those of the other prompts, too, and each row gets its own."""
    samples = [scored(f"p{number}", 0, (1, 2), 1.0, log_prob=-0.7) for number in range(12)]
    own = torch.tensor([[0.0, -0.5, -number / 10] for number in range(12)])
    own[::10] = torch.tensor([0.0, -0.7 - gap, -0.7 + gap])
    policy = SimpleNamespace(logprobs=lambda batch: (own[batch.groups], 2 * own[batch.groups]))
    batch, statistics = view(samples, policy, with_reference=False)
    assert statistics["old_from_sampler"] == trusted
    seen = own[::10] if trusted else own
    assert statistics["entropy"] == pytest.approx(float(2 * seen[:, 1:].mean()))
    if trusted:
        torch.testing.assert_close(batch.old_logprobs, -0.7 * batch.mask)
    else:
        assert torch.equal(batch.old_logprobs, own) and batch.sampler_logprobs is not None


def test_the_kl_to_the_reference_is_that_of_all_samples_whichever_the_trainer_has_seen(table_policy):
    samples = [scored(f"p{number}", 0, (1, 2), 1.0, log_prob=-0.7) for number in range(11)]
    same = [0.0, -0.7, -0.7]
    policy = table_policy([same] * 2, reference=[same] * 10 + [[0.0, -0.7, -0.7 - math.log(2)]])
    assert view(samples, policy, "sampler")[1]["kl"] == pytest.approx((0.5 - 1 + math.log(2)) / 22, rel=1e-4)


@pytest.mark.parametrize("keep_groups", [False, True])
def test_an_epochs_order_has_every_item_once_and_kept_groups_together(keep_groups):
    groups = torch.tensor([3, 1, 3, 2, 1, 3, 2, 2])
    batch = TrainingBatch(tokens=torch.zeros(8, 3, dtype=torch.int64), mask=torch.ones(8, 2), groups=groups)
    collected = Collected(batch, [[row] for row in range(8)], {})
    orders = [collected.order(7, epoch, keep_groups=keep_groups) for epoch in (0, 0, 1, 2, 3, 4, 5)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1 and orders[0] == orders[1]
    runs = [len(list(groupby(groups[order].tolist()))) for order in orders]
    assert (max(runs) == 3) is keep_groups


def test_statistics_of_responses_and_groups_equal_hand_computed_values(table_policy):
    samples = [
        scored("a", 0, (1, 2, 3, 4, 5), 1.0, answer="1"),
        scored("b", 0, (7, 8), 0.0, answer=None, well_formed=False, finished=False),
        scored("a", 1, (1, 2, 3, 4), 0.0, well_formed=False, answer="2"),
        scored("b", 1, (9,), 0.0, answer="1")]
    _, statistics = view(samples, table_policy(), "trainer")
    expected = {
        "reward": 1 / 4, "well_formed": 2 / 4, "truncated": 1 / 4, "response_length": (5 + 2 + 4 + 1) / 4,
        # a has the 4-grams 1234, 2345 and 1234: two of three are distinct. b has none, which counts as 0.
        "distinct_4": (2 / 3 + 0) / 2, "distinct_4_pooled": 2 / 3,
        "distinct_answers": (2 + 1) / 2,  # no answer is not an answer
        "zero_advantage_groups": 1 / 2,  # b: all rewards equal
    }
    assert {name: statistics[name] for name in expected} == pytest.approx(expected)


def test_statistics_of_tokens_are_means_over_response_tokens_only(table_policy):
    samples = [scored("a", 0, (1, 2, 3), 1.0, log_prob=-1.0), scored("a", 1, (4,), 0.0, log_prob=-2.0)]
    outside = 1e6  # on prompts and padding: it must not show
    policy = table_policy(
        logprobs=[[outside, -1.5, -1.0, -0.5], [outside, -1.0, outside, outside]],
        entropies=[[outside, 0.1, 0.2, 0.3], [outside, 1.0, outside, outside]],
        reference=[[outside, -1.0, -1.0, -1.0], [outside, -3.0, outside, outside]],
    )
    _, statistics = view(samples, policy, "trainer")
    assert statistics["entropy"] == pytest.approx((0.1 + 0.2 + 0.3 + 1.0) / 4)
    assert statistics["sampler_gap"] == pytest.approx((0.5 + 0.0 + 0.5 + 1.0) / 4)
    assert statistics["sampler_gap_max"] == pytest.approx(1.0)
    differences = [-0.5, 0.0, 0.5, 2.0]  # log pi_old - log pi_ref
    expected = sum(math.exp(-d) - 1 + d for d in differences) / 4  # Schulman's k3
    assert statistics["kl"] == pytest.approx(expected)


def test_votes_and_pass_at_k_are_those_of_each_group(table_policy):
    rewards_and_answers = {  # by problem
        "tie": [(1.0, "1"), (0.0, "2"), (0.0, "3"), (0.0, None)],
        "vote": [(1.0, "3"), (1.0, "3"), (0.0, "4"), (0.0, None)],
        "never": [(0.0, "5"), (0.0, "5"), (0.0, "6"), (0.0, "7")],
        "two right answers": [(1.0, "8"), (1.0, "9"), (0.0, "7"), (0.0, "6")],
    }
    samples = [scored(problem, index, (index, 1), reward, answer=answer)
               for problem, found in rewards_and_answers.items() for index, (reward, answer) in enumerate(found)]
    _, statistics = view(samples, table_policy(), "trainer")
    assert statistics["accuracy"] == pytest.approx(5 / 16)
    assert statistics["voted_accuracy"] == pytest.approx((1 / 3 + 1 + 0 + 2 / 4) / 4)
    assert statistics["zero_advantage_groups"] == pytest.approx(1 / 4)  # never
    # 1 - C(n - c, k) / C(n, k) with c of n = 4 right
    assert statistics["pass@1"] == pytest.approx((1 / 4 + 1 / 2 + 0 + 1 / 2) / 4)
    assert statistics["pass@2"] == pytest.approx((3 / 6 + 5 / 6 + 0 + 5 / 6) / 4)
    assert statistics["pass@4"] == pytest.approx(3 / 4)
    assert "pass@5" not in statistics


def test_a_steps_statistics_equal_hand_computed_values():
    outside = 1e6  # of the last row, too: it is padding
    fields = {
        "mask": [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0] * 3],
        "groups": [3, 3, 5, 6, 9], "rewards": [1.0, 0.0, 1.0, 1.0, outside],
        "advantages": [-1.0, 0.0, 0.0, 0.0, outside],
        "old_logprobs": [[outside, -1, -1], [outside, -1, outside], [-2, -1, -1], [0.0, -1, -1], [outside] * 3],
        "sampler_logprobs": [[0.0, -1.5, -1.0], [0.0, -0.25, 0.0], [-2, -1, -1], [0.0, -1, -1], [0.0] * 3],
    }
    batch = TrainingBatch(torch.zeros(5, 4).long(), **{name: torch.tensor(value) for name, value in fields.items()})
    assert step_statistics(batch) == pytest.approx({
        "response_length": 8 / 4, "reward": 3 / 4, "advantage_spread": math.sqrt(3) / 4,
        "zero_advantage_groups": 2 / 3, "sampler_gap_max": 0.75, "sampler_ratio_max": math.exp(0.5)})
