import math

import numpy as np
import pytest

from nemo_edo.evaluation.comparison import (
    ArmSettings,
    CurvePoint,
    Evaluation,
    compare,
    largest,
    main_metrics,
    match_accuracy,
    metric_order,
    newly_solved_and_lost,
)

PROBLEMS = tuple(f"test-{index}" for index in range(50))


def arm(label="arm", weight=0.0, bonus=0.0):
    return ArmSettings(label, None, 0.04, weight, None, bonus, 3)


def evaluation(name, problems=PROBLEMS, **metrics):
    """Each metric is its sums [P], with counts of one."""
    ones = np.ones(len(problems))
    return Evaluation(name, problems, {key.replace("_at_", "@"): (np.asarray(sums, dtype=float), ones)
                                       for key, sums in metrics.items()})


def points(*pairs):
    return [CurvePoint(accuracy, {"entropy": entropy, "distinct_4": 2 * entropy}) for accuracy, entropy in pairs]


def compared(evaluations, names=("a", "b"), baseline="a", curves=None):
    return compare({e.arm: e for e in evaluations}, curves or {}, arms={name: arm(name) for name in names},
                   baseline=baseline, seed=0, resamples=200)


def test_a_metric_is_the_sum_of_sums_over_the_sum_of_counts():
    uneven = Evaluation("a", ("x", "y"), {"entropy": (np.array([1.0, 9.0]), np.array([1.0, 3.0]))})
    table = compare({"a": uneven}, {}, arms={"a": arm()}, baseline=None, seed=0, resamples=50).table
    assert table["a"]["entropy"].mean == 10 / 4


def test_means_leave_out_a_metric_that_no_problem_counts_in():
    pair, nothing = (np.array([1.0, 9.0]), np.array([1.0, 3.0])), (np.zeros(2), np.zeros(2))
    found = Evaluation("a", ("x", "y"), {"entropy": pair, "accuracy": nothing}).means(resamples=50, seed=0)
    assert found == {"entropy": {"mean": 10 / 4, "low": 1.0, "high": 3.0}}


def test_a_constant_gain_on_every_problem_exceeds_its_interval():
    base = np.linspace(0, 1, 50)
    result = compared([evaluation("a", accuracy=base), evaluation("b", accuracy=base + 0.1)])
    difference = result.difference("b", "accuracy")
    assert difference.exceeds_interval
    assert difference.interval.low == pytest.approx(0.1)


def test_equal_arms_show_no_difference():
    base = np.linspace(0, 1, 50)
    result = compared([evaluation("a", accuracy=base), evaluation("b", accuracy=base)])
    assert not result.difference("b", "accuracy").exceeds_interval


def test_only_the_main_metrics_that_both_arms_have_are_compared():
    rows = {"accuracy": np.ones(50), "vote_at_4": np.ones(50), "vote_at_16": np.ones(50), "well_formed": np.ones(50)}
    result = compared([evaluation("a", **rows, entropy=np.ones(50)), evaluation("b", **rows)])
    assert [(d.arm, d.metric) for d in result.differences] == [("b", "accuracy"), ("b", "vote@16")]


def test_a_metric_without_counts_is_not_measured_rather_than_zero():
    empty = Evaluation("a", ("x",), {"entropy": (np.zeros(1), np.zeros(1))})
    result = compare({"a": empty}, {}, arms={"a": arm()}, baseline=None, seed=0, resamples=5)
    assert result.table["a"]["entropy"] is None


def test_a_single_arm_is_compared_with_its_start():
    result = compared([evaluation("warmup", accuracy=np.zeros(50)), evaluation("a", accuracy=np.ones(50))],
                      names=("a",), baseline=None)
    assert (result.baseline, result.difference("a", "accuracy").interval.mean) == ("warmup", 1.0)


def test_arms_evaluated_on_other_problems_are_refused():
    with pytest.raises(ValueError, match="arms a and b were evaluated on different problems"):
        compared([evaluation("a", accuracy=np.ones(50)), evaluation("b", PROBLEMS[::-1], accuracy=np.ones(50))])


def test_an_unknown_baseline_is_refused_with_the_arms_that_exist():
    with pytest.raises(ValueError, match=r"baseline 'c' is not an arm; the arms are a, b"):
        compared([evaluation("a"), evaluation("b")], baseline="c")


def test_an_arm_without_evaluation_is_named():
    with pytest.raises(ValueError, match="no evaluation of arm b"):
        compared([evaluation("a")])


def test_matching_interpolates_at_the_lowest_of_the_arms_best_accuracies():
    matched = match_accuracy({"fast": points((0.2, 1.0), (0.4, 0.8), (0.8, 0.4)),
                              "slow": points((0.2, 1.0), (0.6, 0.9))})
    assert matched.accuracy == 0.6
    assert matched.values["entropy"] == {"fast": pytest.approx(0.6), "slow": pytest.approx(0.9)}
    assert matched.values["distinct_4"]["fast"] == pytest.approx(1.2)


def test_arms_on_the_same_curve_at_different_speeds_match_although_their_ends_differ():
    fast = points(*[(0.2 + 0.06 * t, 1 - 0.08 * t) for t in range(10)])
    slow = points(*[(0.2 + 0.02 * t, 1 - 0.08 * t / 3) for t in range(10)])
    matched = match_accuracy({"fast": fast, "slow": slow})
    assert matched.values["entropy"]["fast"] == pytest.approx(matched.values["entropy"]["slow"])
    assert matched.last["entropy"]["slow"] - matched.last["entropy"]["fast"] > 0.4


def test_collections_below_the_best_so_far_do_not_enter_the_matching():
    dip = points((0.2, 1.0), (0.4, 0.8), (0.3, 99.0), (0.6, 0.6))
    matched = match_accuracy({"dip": dip, "other": points((0.2, 1.0), (0.5, 0.7))})
    assert matched.values["entropy"]["dip"] == pytest.approx(0.7)


def test_an_arm_that_never_left_the_start_has_a_reason_and_does_not_pull_the_level_down():
    matched = match_accuracy({"a": points((0.3, 1.0), (0.7, 0.5)), "b": points((0.3, 1.0), (0.6, 0.6)),
                              "collapsed": points((0.3, 1.0), (0.31, 0.9), (0.0, 0.0))})
    assert matched.accuracy == 0.6
    assert "never left the start" in matched.reasons["collapsed"]
    assert "collapsed" not in matched.values["entropy"]


def test_where_no_arm_learned_nothing_is_matched():
    flat = points((0.3, 1.0), (0.31, 1.0))
    matched = match_accuracy({"a": flat, "b": flat})
    assert matched.accuracy is None
    assert set(matched.reasons) == {"a", "b"}


def test_collections_without_a_measure_give_nan_not_zero():
    bare = [CurvePoint(0.2, {}), CurvePoint(math.nan, {}), CurvePoint(0.6, {})]
    matched = match_accuracy({"a": bare, "b": points((0.2, 1.0), (0.5, 0.5))})
    assert math.isnan(matched.values["entropy"]["a"])


def test_an_arm_without_collections_is_named_among_the_reasons():
    matched = match_accuracy({"a": points((0.2, 1.0), (0.6, 0.5)), "b": []})
    assert matched.accuracy is None
    assert matched.reasons["b"] == "it has no collection with an accuracy"


def test_metrics_are_ordered_by_number_not_by_letter():
    names = ["entropy", "pass@10", "pass@2", "vote@4", "zzz", "accuracy", "greedy_accuracy", "pass@1"]
    assert sorted(names, key=metric_order) == ["greedy_accuracy", "accuracy", "vote@4", "pass@1", "pass@2", "pass@10",
                                               "entropy", "zzz"]


def test_the_largest_vote_and_pass_are_chosen_whatever_the_config_asked_for():
    names = ["vote@2", "vote@128", "pass@9", "pass@64", "distinct_4"]
    assert main_metrics(names) == ["vote@128", "pass@64", "distinct_4"]
    assert largest(["entropy"], "vote@") is None


def greedy(name: str, rewards: list[float], problems: tuple[str, ...] = ("a", "b", "c", "d")) -> Evaluation:
    return Evaluation(name, problems, {"greedy_accuracy": (np.array(rewards), np.ones(len(rewards)))})


def test_newly_solved_and_lost_count_full_rewards_that_came_and_went():
    before, after = greedy("start", [1.0, 1.0, 0.0, 0.5]), greedy("grpo", [1.0, 0.9, 1.0, 1.0])
    assert newly_solved_and_lost(before, after) == {"newly_solved": 2.0, "lost": 1.0}
    assert newly_solved_and_lost(after, before) == {"newly_solved": 1.0, "lost": 2.0}


def test_newly_solved_and_lost_pair_by_problem_and_refuse_others():
    before, after = greedy("start", [1.0, 0.0, 0.0, 0.0]), greedy("grpo", [0.0, 0.0, 0.0, 1.0], ("d", "c", "b", "a"))
    assert newly_solved_and_lost(before, after) == {"newly_solved": 0.0, "lost": 0.0}
    with pytest.raises(ValueError, match="1 problems that after has not: 'd'"):
        newly_solved_and_lost(before, greedy("other", [1.0] * 4, ("a", "b", "c", "e")))
