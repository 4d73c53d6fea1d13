"""Algorithm 1: its order, what it samples, and what it trains on."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch


def rows_of(batches) -> Counter:
    """How often each sequence (its tokens without padding) stands in the batches."""
    return Counter(tuple(t for t in row if t) for batch in batches for row in batch.tokens.tolist())


def test_order_is_evaluate_then_collect_write_train_push_evaluate_for_each_iteration(run_fake):
    journal = run_fake(iterations=2, epochs=2, minibatch_size=6)
    steps = [("train_step",)] * 4
    assert journal.events == [
        ("evaluate", 0),
        ("generate", 0), ("write", 0), *steps, ("push", 1), ("evaluate", 1),
        ("generate", 1), ("write", 1), *steps, ("push", 2), ("evaluate", 2),
    ]


def test_all_rollouts_of_an_iteration_are_on_disk_before_its_first_train_step(run_fake):
    journal = run_fake(iterations=2, minibatch_size=6)
    assert journal.on_disk == [12, 12, 24, 24]


def test_rollouts_on_disk_are_those_trained_on(run_fake):
    journal = run_fake(iterations=1, minibatch_size=5)
    on_disk = Counter((*one.rollout.prompt_ids, *one.rollout.response_ids) for one in journal.collected(0))
    assert rows_of(journal.policy.batches) == on_disk


def test_a_rank_that_does_not_write_leaves_no_file(run_fake, tmp_path):
    run_fake(iterations=1, minibatch_size=6, write_rollouts=False, folder="other")
    assert not (tmp_path / "other").exists()


def test_samples_of_iteration_t_carry_policy_version_t(run_fake):
    journal = run_fake(iterations=3, minibatch_size=6)
    assert [{one.rollout.policy_version for one in journal.collected(t)} for t in range(3)] == [{0}, {1}, {2}]


def test_every_prompt_gets_n_samples_in_every_iteration(run_fake):
    journal = run_fake(problems=3, samples_per_prompt=4, iterations=2, minibatch_size=6)
    for t in range(2):
        counts = Counter(one.rollout.problem_id for one in journal.collected(t))
        assert counts == {"p-0": 4, "p-1": 4, "p-2": 4}


def seeds_of(journal, iterations: int) -> list[int]:
    return [one.rollout.seed for t in range(iterations) for one in journal.collected(t)]


def test_no_two_samples_of_a_run_share_a_seed(run_fake):
    seeds = seeds_of(run_fake(problems=5, iterations=3, minibatch_size=10), 3)
    assert len(set(seeds)) == len(seeds) == 60


def test_the_run_seed_alone_fixes_all_sample_seeds(run_fake):
    same, again, other = (
        seeds_of(run_fake(seed=seed, folder=folder, iterations=2, minibatch_size=6), 2)
        for seed, folder in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert same == again
    assert set(same).isdisjoint(other)


def test_settings_of_training_do_not_change_what_the_first_iteration_samples(run_fake):
    plain = seeds_of(run_fake(folder="a", iterations=1, minibatch_size=6, alpha=0.0), 1)
    other = seeds_of(run_fake(folder="b", iterations=1, minibatch_size=4, epochs=2, alpha=300.0), 1)
    assert plain == other


@pytest.mark.parametrize("minibatch_size", [1, 5, 6, 12, 100])
def test_each_epoch_trains_on_every_response_exactly_once(run_fake, minibatch_size: int):
    journal = run_fake(iterations=1, epochs=3, minibatch_size=minibatch_size, alpha=0.0)
    batches = journal.policy.batches
    each = len(batches) // 3
    epochs = [rows_of(batches[start : start + each]) for start in range(0, len(batches), each)]
    assert len(epochs) == 3
    assert all(len(epoch) == 12 and set(epoch.values()) == {1} for epoch in epochs)


def test_epochs_and_iterations_visit_the_responses_in_other_orders(run_fake):
    journal = run_fake(problems=4, iterations=2, epochs=2, minibatch_size=16, alpha=0.0)
    # By the problems that the rows belong to: the responses themselves are other ones in each iteration.
    orders = [tuple(batch.tokens[:, 0].tolist()) for batch in journal.policy.batches]
    assert len(orders) == len(set(orders)) == 4


@pytest.mark.parametrize(("problems", "samples", "size", "epochs", "steps"), [
    (3, 4, 12, 1, 1), (3, 4, 11, 1, 2), (3, 4, 5, 2, 6), (1, 2, 512, 3, 3), (8, 10, 16, 1, 5),
])
def test_steps_announced_to_the_schedule_are_the_steps_taken(
    run_fake, fake_iteration, problems, samples, size, epochs, steps
):
    settings = {"problems": problems, "samples_per_prompt": samples, "minibatch_size": size, "epochs": epochs,
                "iterations": 2, "alpha": 0.0}
    announced = fake_iteration(**settings)
    assert (announced.steps_per_collection, announced.total_steps) == (steps, 2 * steps)
    assert len(run_fake(**settings).policy.batches) == 2 * steps


def test_old_log_probs_stay_the_sampling_policys_through_all_steps_of_an_iteration(run_fake):
    journal = run_fake(iterations=2, epochs=2, minibatch_size=6)
    for index, batch in enumerate(journal.policy.batches):
        steps_before_the_iteration = 4 * (index // 4)
        expected = -0.01 * batch.tokens[:, 1:].float() - 0.1 * steps_before_the_iteration
        torch.testing.assert_close(batch.old_logprobs, expected)


def test_log_has_a_line_for_each_collection_and_step_in_order(run_fake):
    lines = run_fake(iterations=2, minibatch_size=6).lines
    seen = [(line["kind"], line["iteration"], line.get("step")) for line in lines]
    assert seen == [("collection", 0, None), ("train_step", 0, 0), ("train_step", 0, 1),
                    ("collection", 1, None), ("train_step", 1, 2), ("train_step", 1, 3)]
    assert [line["loss"] for line in lines if line["kind"] == "train_step"] == [1.0, 2.0, 3.0, 4.0]
    assert [line["policy_version"] for line in lines if line["kind"] == "collection"] == [0, 1]


@pytest.mark.parametrize("settings", [{}, {"alpha": 300.0}, {"beta": 0.0, "exploration_coefficient": 0.1}])
def test_exploration_with_one_step_a_collection_warns(run_fake, settings):
    with pytest.warns(UserWarning, match="one optimizer step for each collection"):
        run_fake(iterations=1, minibatch_size=12, **settings)


@pytest.mark.parametrize("settings", [
    {"alpha": 0.0, "minibatch_size": 12},
    {"beta": 0.0, "minibatch_size": 12},
    {"minibatch_size": 6},
    {"minibatch_size": 12, "epochs": 2},
], ids=["alpha 0", "beta 0", "two minibatches", "two epochs"])
def test_no_warning_without_exploration_or_with_several_steps(run_fake, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_fake(iterations=1, **settings)


def test_minibatches_of_an_epoch_differ_in_size_by_the_last_one_only(run_fake):
    sizes = [batch.size for batch in run_fake(iterations=2, minibatch_size=5).policy.batches]
    assert sizes == [5, 5, 2, 5, 5, 2]


# --- collections of a part of the problems ------------------------------------------------------------------------


def ids(iteration, t: int) -> list[str]:
    return [problem.id for problem in iteration.collection_problems(t)]


@pytest.mark.parametrize("problems_per_iteration", [None, 5, 99])
def test_a_collection_is_of_all_problems_in_order_unless_fewer_are_asked_for(fake_iteration, problems_per_iteration):
    iteration = fake_iteration(problems=5, problems_per_iteration=problems_per_iteration)
    assert ids(iteration, 0) == ids(iteration, 7) == [f"p-{i}" for i in range(5)]


@pytest.mark.parametrize(("problems", "size"), [(6, 2), (7, 3), (5, 4), (5, 1)])
def test_a_pass_of_small_collections_visits_no_problem_twice_and_leaves_out_only_the_rest(
    fake_iteration, problems: int, size: int
):
    iteration = fake_iteration(problems=problems, problems_per_iteration=size)
    collections = problems // size
    for start in (0, collections, 5 * collections):
        visited = [name for t in range(start, start + collections) for name in ids(iteration, t)]
        assert len(visited) == len(set(visited)) == collections * size


def test_passes_of_small_collections_go_through_other_problems_in_other_orders(fake_iteration):
    iteration = fake_iteration(problems=7, problems_per_iteration=3)
    collected = [tuple(ids(iteration, t)) for t in range(20)]
    assert {name for names in collected for name in names} == {f"p-{i}" for i in range(7)}
    assert len(set(collected)) > 10  # of 210 ordered triples


def test_small_collections_are_sampled_and_trained_on_alone(run_fake, fake_iteration):
    settings = {"problems": 5, "problems_per_iteration": 2, "iterations": 3, "minibatch_size": 4}
    journal, iteration = run_fake(**settings, folder="small"), fake_iteration(**settings)
    for t in range(3):
        counts = Counter(one.rollout.problem_id for one in journal.collected(t))
        assert counts == dict.fromkeys(ids(iteration, t), 4)
    assert [batch.size for batch in journal.policy.batches] == [4] * 6
    assert (iteration.steps_per_collection, iteration.total_steps) == (2, 6)
