"""A held-out study's claim: gains in votes over the plain method and the best baseline of each task."""

import pytest

from nemo_edo.experiments.verdict import ALL_TASKS, gains, markdown, tasks_won, verdict

TASKS, SEEDS = ("a", "b"), (11, 12, 13)
BASELINES = ("grpo", "bonus")


def row(task: str, arm: str, seed: int, vote: float, **values: str) -> dict[str, str]:
    return {"task": task, "arm": arm, "dose": "", "seed": str(seed), "iteration": "15", "temperature": "best",
            "note": "", "vote": str(vote), "problems": "300", **values}  # fmt: skip


def table(**level: dict[str, float]) -> list[dict[str, str]]:
    """Rows of each arm: its level on each task, with the same noise of seeds for all and a little of the arm's own."""
    own = {arm: number for number, arm in enumerate(level)}
    return [
        row(task, arm, seed, of[task] + 0.01 * (seed - 12) + 0.001 * ((seed * (own[arm] + 1)) % 3))
        for arm, of in level.items() for task in TASKS for seed in SEEDS
    ]  # fmt: skip


def test_a_task_is_won_only_above_both_the_plain_method_and_the_tasks_best_baseline():
    rows = table(grpo={"a": 0.5, "b": 0.5}, bonus={"a": 0.56, "b": 0.4}, ours={"a": 0.6, "b": 0.6},
                 weak={"a": 0.58, "b": 0.52})  # fmt: skip
    found = gains(rows, BASELINES)
    rivals = {(one.task, one.rival) for one in found}
    assert rivals == {("a", "grpo"), ("a", "bonus"), ("b", "grpo"), (ALL_TASKS, "grpo"),
                      (ALL_TASKS, "best of each task")}  # fmt: skip
    assert tasks_won(found) == {"ours": ["a", "b"], "weak": []}
    pooled = [one for one in found if one.candidate == "ours" and one.task == ALL_TASKS]
    assert [round(one.interval.mean, 2) for one in pooled] == [0.1, 0.07]
    assert markdown(found).count("\n") == 1 + len(found)
    each = "ours wins 2 of 2 (a, b); weak wins 0 of 2."
    assert verdict(found) == f"The claim is won by ours (at least 2 of 2 tasks): {each}"
    assert verdict([one for one in found if one.candidate == "weak"]).startswith("No candidate wins the claim (")


def test_differences_that_tie_are_no_proof():
    rows = [row("a", arm, seed, vote) for arm, vote in (("grpo", 0.5), ("ours", 0.53)) for seed in SEEDS]
    few = [{**one, "problems": "30"} for one in rows]
    assert tasks_won(gains(rows, ("grpo",))) == {"ours": ["a"]} and tasks_won(gains(few, ("grpo",))) == {"ours": []}


def test_the_last_evaluation_at_the_best_temperature_counts_and_a_training_that_a_guard_stopped_as_votes_of_0():
    rows = table(grpo={"a": 0.5, "b": 0.5}, ours={"a": 0.6, "b": 0.6})
    others = [row("a", "ours", 11, 0.0, iteration="3"), row("a", "ours", 11, 0.0, temperature="1"),
              row("a", "warmup", 11, 0.9, iteration="0")]  # fmt: skip
    assert gains([*rows, *others], ("grpo",)) == gains(rows, ("grpo",))
    stopped = {**rows[-1], "note": "stopped by a guard", "temperature": "", "iteration": "", "vote": ""}
    [of_b] = [one for one in gains([*rows[:-1], stopped], ("grpo",)) if one.task == "b" and one.rival == "grpo"][:1]
    assert min(of_b.values) == of_b.values[-1] == pytest.approx(-0.51, abs=0.01)


def test_a_policy_that_states_no_answer_has_votes_of_0_and_a_task_without_answers_none():
    rows = table(grpo={"a": 0.5, "b": 0.5}, ours={"a": 0.6, "b": 0.6})
    silent = [{**one, "temperature": "1", "vote": ""} if one is rows[-1] else one for one in rows]
    assert min(one.values[-1] for one in gains(silent, ("grpo",)) if one.task == "b") == pytest.approx(-0.51, abs=0.01)
    stopped = [{**one, "vote": "", "note": "stopped" if one is rows[-1] else ""} if one["task"] == "b" else one
               for one in rows]  # fmt: skip
    assert {one.task for one in gains(stopped, ("grpo",))} == {"a", ALL_TASKS}


@pytest.mark.parametrize(("change", "message"), [
    (lambda rows: [{**one, "vote": ""} for one in rows], "no policy has votes"),
    (lambda rows: rows[:-1], r"ours on b lacks the seeds \[13\]"),
    (lambda rows: [row for row in rows if row["seed"] == "11"], "a has 1 seed, expected at least 2"),
    (lambda rows: [*rows, row("a", "ours", 11, 0.5, dose="0.3")], "ours has the doses  and 0.3, expected one"),
])
def test_an_incomplete_study_is_not_judged(change, message: str):
    rows = table(grpo={"a": 0.5, "b": 0.5}, ours={"a": 0.6, "b": 0.6})
    with pytest.raises(ValueError, match=message):
        gains(change(rows), ("grpo",))
