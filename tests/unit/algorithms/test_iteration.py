"""Algorithm 1: its order, what it samples, and what it trains on."""

import json
import math
import weakref
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from nemo_edo.algorithms.samples import require_given
from nemo_edo.algorithms.services import Position
from nemo_edo.config import BoundsConfig, GuardsConfig, ScheduleConfig
from nemo_edo.data.batching import epoch_order
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import RolloutStore


def rows_of(batches) -> Counter:
    """How often each sequence (its tokens without padding) is in the batches."""
    return Counter(tuple(t for t in row if t) for batch in batches for row in batch.tokens.tolist())


def test_order_is_push_evaluate_collect_write_train_for_each_iteration(run_fake):
    journal = run_fake(iterations=2, epochs=2, minibatch_size=6, reference="ema", ema_decay=0.75)
    steps = [("release",), *[("train_step",)] * 4]
    assert journal.events == [
        ("push", 0), ("evaluate", 0),
        ("generate", 0, 12), ("write", 0), *steps, ("push", 1), ("evaluate", 1),
        ("reference", "ema", 0.75),
        ("generate", 1, 12), ("write", 1), *steps, ("push", 2), ("evaluate", 2),
    ]


def test_an_iterations_rollouts_on_disk_are_what_is_trained_on_with_the_sampling_policys_logprobs(run_fake):
    journal = run_fake(iterations=2, epochs=2, minibatch_size=5)
    assert [batch.size for batch in journal.policy.batches] == [5, 5, 2] * 4
    on_disk = [(*one.rollout.prompt_ids, *one.rollout.response_ids) for t in range(2) for one in journal.store.read(t)]
    assert rows_of(journal.policy.batches) == Counter(2 * on_disk)
    for index, batch in enumerate(journal.policy.batches):
        steps_before_the_iteration = 6 * (index // 6)
        expected = -0.01 * batch.tokens[:, 1:].float() - 0.1 * steps_before_the_iteration
        torch.testing.assert_close(batch.old_logprobs, expected)


def test_an_iterations_samples_are_freed_before_the_next_ones_are_generated(fake_iteration, monkeypatch):
    run, kept = fake_iteration(iterations=3, epochs=2), []
    build, generate = run.services.objective.build, run.services.engine.generate

    def building(_, scored, *more):
        collected = build(scored, *more)
        kept.extend(map(weakref.ref, (scored[0], collected.batch)))
        return collected

    def generating(_, *asked):
        assert not any(one() for one in kept)
        return generate(*asked)

    monkeypatch.setattr(type(run.services.objective), "build", building)
    monkeypatch.setattr(type(run.services.engine), "generate", generating)
    run.run()
    assert len(kept) == 6


def test_the_run_seed_alone_fixes_all_sample_seeds_and_no_two_samples_share_one(run_fake):
    training = {"minibatch_size": 4, "epochs": 2, "alpha": 300.0}
    stores = (run_fake(seed=seed, folder=folder, iterations=3, **settings).store
              for seed, folder, settings in ((1, "a", {"minibatch_size": 6}), (1, "b", training), (2, "c", training)))
    same, again, other = ([one.rollout.seed for t in range(3) for one in store.read(t)] for store in stores)
    assert same == again and len(set(same)) == 36
    assert set(same).isdisjoint(other)


def test_epochs_and_iterations_visit_the_responses_in_other_orders_which_the_run_seed_fixes(run_fake):
    journal = run_fake(problems=4, iterations=2, epochs=2, minibatch_size=16, alpha=0.0, seed=42)
    # By the problems that the rows belong to: the responses themselves are other ones in each iteration.
    orders = [tuple(batch.tokens[:, 0].tolist()) for batch in journal.policy.batches]
    assert len(orders) == len(set(orders)) == 4
    for epoch, order in enumerate(orders):
        samples = journal.store.stored(epoch // 2)
        assert order == tuple(samples[place].rollout.prompt_ids[0] for place in epoch_order(16, 42, epoch))


# --- collections of a part of the problems ------------------------------------------------------------------------


def ids(iteration, t: int) -> list[str]:
    return [problem.id for problem in iteration.plan.collection_problems(t)]


@pytest.mark.parametrize("problems_per_iteration", [None, 99])
def test_a_collection_is_of_all_problems_in_order_unless_fewer_are_asked_for(fake_iteration, problems_per_iteration):
    iteration = fake_iteration(problems=5, problems_per_iteration=problems_per_iteration)
    assert ids(iteration, 0) == ids(iteration, 7) == [f"p-{i}" for i in range(5)]


@pytest.mark.parametrize(("number", "size"), [(6, 2), (7, 3), (5, 4)])
def test_a_pass_of_small_collections_visits_no_problem_twice_and_leaves_out_only_the_rest(fake_iteration, number, size):
    iteration = fake_iteration(problems=number, problems_per_iteration=size)
    collections, passes = number // size, []
    for start in range(0, 20 * collections, collections):
        passes.append(tuple(name for t in range(start, start + collections) for name in ids(iteration, t)))
        assert len(set(passes[-1])) == len(passes[-1]) == collections * size
    assert len(set(passes)) > 3 and len({name for names in passes for name in names}) == number


# --- the exploration weight ---------------------------------------------------------------------------------------

COEFFICIENT = {"beta": 0.0, "exploration_coefficient": 0.2}


@pytest.mark.parametrize(("settings", "weight", "alpha"), [
    ({"alpha": 0.5, "beta": 0.25}, 0.125, 0.5),
    ({"alpha": 0.0}, 0.0, 0.0),
    ({"beta": 0.0, "exploration_coefficient": 0.1}, 0.1, None)])
def test_every_step_has_the_configured_weight_and_logs_its_alpha_where_there_is_beta(run_fake, settings, weight, alpha):
    journal = run_fake(iterations=2, minibatch_size=6, **settings)
    assert journal.policy.weights == [weight] * 4
    assert [line["exploration_weight"] for line in journal.lines_of("train_step")] == [weight] * 4
    assert [line.get("effective_alpha") for line in journal.lines_of("train_step")] == [alpha] * 4


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
def test_a_schedule_gives_each_step_its_weight_across_iterations(run_fake, algorithm: str):
    size = {"grpo": 6, "idpo": 2}[algorithm]  # responses, prompts: two steps a collection
    journal = run_fake(algorithm=algorithm, iterations=3, minibatch_size=size, exploration_coefficient=0.2,
                       schedule=ScheduleConfig(kind="linear", steps=5, final_factor=0.5))
    assert journal.policy.weights == pytest.approx([0.2, 0.18, 0.16, 0.14, 0.12, 0.1])


def test_the_entropy_controller_gets_the_entropy_of_each_step(run_fake):
    schedule = ScheduleConfig(kind="entropy", entropy_target=0.5, rate=0.1)
    journal = run_fake(iterations=1, minibatch_size=4, entropy=0.25, schedule=schedule, **COEFFICIENT)
    assert journal.policy.weights == pytest.approx([0.2, 0.2 * math.exp(0.05), 0.2 * math.exp(0.1)])


def test_gradients_are_measured_before_a_step_and_only_where_the_schedule_needs_them(run_fake):
    schedule = ScheduleConfig(kind="gradient-share", gradient_share=0.1, every=2)
    journal = run_fake(iterations=1, minibatch_size=2, schedule=schedule, gradient_ratio=2.0, **COEFFICIENT)
    assert journal.of_kind("gradients") == [("gradients", 0), ("gradients", 2), ("gradients", 4)]  # steps before each
    assert journal.policy.weights == pytest.approx([0.2] + [0.05] * 5)  # share / ratio from the second step on
    logged = [line.get("exploration_gradient_ratio") for line in journal.lines_of("train_step")]
    assert logged == [2.0, None, 2.0, None, 2.0, None]


# --- dynamic sampling ---------------------------------------------------------------------------------------------


DAPO = {"dynamic_sampling": True, "iterations": 1, "minibatch_size": 4, "alpha": 0.0}


@pytest.mark.parametrize(("problems", "size", "rounds", "hopeless", "requests", "trained"), [
    (12, 4, 3, "c0 c1 c2 s1", [16, 12, 4], "c3 s0 s2 s3"),  # the second round replaces a group of the first
    (12, 2, 0, "c0 *", [8], "c1"),
    (12, 2, 3, "c0 *", [8, 4, 4, 4], "c1"),
    (3, None, 3, "c1", [12], "c0 c2"),  # no substitutes
    (5, 4, 3, "c0 c1 c2", [16, 4], "c3 s0"),  # fewer substitutes than dropped groups
])
def test_dropped_groups_are_replaced_by_problems_outside_the_collection(
    run_fake, fake_iteration, problems, size, rounds, hopeless, requests, trained
):
    """c0 is the collection's first problem, s0 the first substitute, * all substitutes."""
    settings = {**DAPO, "problems": problems, "problems_per_iteration": size, "max_extra_rounds": rounds}
    plan = fake_iteration(**settings).plan
    collection, others = ([p.id for p in part] for part in (plan.collection_problems(0), plan.substitutes(0)))
    names = {f"{kind}{i}": name for kind, part in (("c", collection), ("s", others)) for i, name in enumerate(part)}
    failing = [name for key in hopeless.split() for name in (others if key == "*" else [names[key]])]
    journal = run_fake(**settings, hopeless=failing)
    assert journal.of_kind("generate") == [("generate", 0, responses) for responses in requests]
    learned = {f"p-{row[0] - 10}" for batch in journal.policy.batches for row in batch.tokens.tolist()}
    assert learned == {names[key] for key in trained.split()}
    sampled = {one.rollout.problem_id for one in journal.store.read(0)}
    assert sampled == {*collection, *others[: sum(requests[1:]) // 4]}


def test_all_samples_are_on_disk_before_the_informative_ones_are_trained_on(run_fake, fake_iteration):
    settings = {**DAPO, "problems": 6, "problems_per_iteration": 3}
    journal = run_fake(**settings, hopeless=ids(fake_iteration(**settings), 0)[:2])
    kinds = [event[0] for event in journal.events]
    assert kinds.index("write") < kinds.index("train_step")
    on_disk = {(*one.rollout.prompt_ids, *one.rollout.response_ids) for one in journal.store.read(0)}
    trained = rows_of(journal.policy.batches)
    assert (len(on_disk), len(trained)) == (20, 12) and trained.keys() < on_disk and set(trained.values()) == {1}
    [line] = journal.lines_of("collection")
    # Of all five groups: what is left out would make the policy look better than it is.
    assert (line["groups"], line["dropped_groups"]) == (5, 2)
    assert line["zero_advantage_groups"] == pytest.approx(2 / 5)
    assert line["reward"] == line["accuracy"] == pytest.approx(3 / 20)


@pytest.mark.parametrize(("problems", "size", "sampled"), [(3, None, 3), (8, 2, 8), (20, 2, 8)])
def test_nothing_left_to_train_on_is_an_error_and_the_samples_stay_on_disk(run_fake, tmp_path, problems, size, sampled):
    hopeless = [f"p-{i}" for i in range(problems)]
    with pytest.raises(UserError, match=f"iteration 0: .* {sampled} groups .*dynamic_sampling=false"):
        run_fake(**DAPO, problems=problems, problems_per_iteration=size, hopeless=hopeless)
    assert len(RolloutStore(tmp_path / "rollouts").read(0)) == 4 * sampled


@pytest.mark.filterwarnings("ignore:one optimizer step")
@pytest.mark.parametrize(("settings", "size", "epochs", "steps"), [
    ({"alpha": 0.0}, 12, 1, 1), ({"alpha": 0.0}, 11, 1, 2), ({"alpha": 0.0}, 5, 2, 6),
    *(({"algorithm": "idpo", "hopeless": ["p-2"], "exploration_coefficient": 0.1}, *rest)
      for rest in ((2, 1, 2), (1, 2, 6), (64, 2, 2)))])
def test_steps_are_as_many_as_announced_to_the_schedule_and_those_of_ed_idpo_are_of_prompts(
    fake_iteration, settings, size, epochs, steps
):
    iteration = fake_iteration(**settings, minibatch_size=size, epochs=epochs, iterations=2)
    assert (iteration.plan.steps_per_collection, iteration.plan.total_steps) == (steps, 2 * steps)
    batches = iteration.run().policy.batches
    assert len(batches) == 2 * steps
    if "algorithm" in settings:
        prompts = [len(set(batch.tokens[batch.mask.any(dim=1), 0].tolist())) for batch in batches]
        assert max(prompts) == min(size, 3) and sum(prompts) == 2 * epochs * 3


# --- stopped and resumed -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:iteration")
@pytest.mark.parametrize("settings", [
    {"problems": 3, "iterations": 3, "epochs": 2, "minibatch_size": 8, **COEFFICIENT,
     "schedule": ScheduleConfig(kind="linear", steps=9, final_factor=0.5)},
    {"algorithm": "idpo", "problems": 4, "iterations": 2, "minibatch_size": 3, "exploration_coefficient": 0.2},
    {"problems": 12, "problems_per_iteration": 4, "iterations": 2, "minibatch_size": 8, "dynamic_sampling": True,
     "alpha": 0.0, "hopeless": ["p-1", "p-2", "p-5", "p-7"]},
    *({"problems": 3, "iterations": 3, "minibatch_size": 4, "exploration_samples": samples, **COEFFICIENT}
      for samples in ("previous", "reference")),
    {"problems": 3, "iterations": 2, "epochs": 2, "minibatch_size": 4, "alpha": 0.0,
     "broken_steps": [2, 3, 6, 9, 10], "guards": GuardsConfig(reward=BoundsConfig(ceiling=0.2, in_a_row=2))},
], ids=["grpo", "idpo", "dynamic sampling", "previous", "reference", "skipped steps"])
def test_a_run_stopped_at_any_place_and_resumed_does_what_an_uninterrupted_one_does(go, settings: dict, new_memory):
    memory = new_memory()
    whole, finished = go(settings, memory, folder="whole")
    assert finished and len(memory.positions) > 8
    for stop_at in range(1, len(memory.positions) + 1):
        folder = f"stopped {stop_at}"
        stopping = new_memory(stop_at=stop_at)
        first, finished = go(settings, stopping, folder=folder)
        assert not finished
        position = Position(**json.loads(json.dumps(asdict(stopping.positions[-1]))))
        resumed = new_memory(start=position, collected=stopping.collected)
        second, finished = go(settings, resumed, folder=folder, before=first)
        assert finished
        # What was logged after the place that is resumed from, inside a collection, is logged again.
        collected = position.iteration + (position.step > 0)
        kept = [line for line in first.lines
                if (line["step"] < position.steps_taken if "step" in line else line["iteration"] < collected)]
        assert kept + second.lines == whole.lines
        # Weights from within an iteration are no version's: the engine would sample from them as if they were pi_t.
        assert second.of_kind("push") == [("push", t) for t in range(collected, settings["iterations"] + 1)]
        generated = [sum(event[2] for event in journal.of_kind("generate")) for journal in (first, second, whole)]
        assert generated[0] + generated[1] == generated[2], "what is on disk is not generated again"
        evaluated = [event for event in first.of_kind("evaluate") if event[1] < position.iteration or position.step]
        assert evaluated + second.of_kind("evaluate") == whole.of_kind("evaluate")
        assert second.policy.weights == whole.policy.weights
        pairs = zip(second.policy.batches, whole.policy.batches, strict=True)
        assert all(torch.equal(mine.tensors()[name], theirs.tensors()[name])
                   for mine, theirs in pairs for name in theirs.tensors())
        for t in range(settings["iterations"]):
            assert second.store.stored(t) == whole.store.stored(t)


# --- given rollouts -----------------------------------------------------------------------------------------------

GIVEN = {"problems": 6, "problems_per_iteration": 3, "iterations": 2, "minibatch_size": 4, "alpha": 0.0,
         "dynamic_sampling": True, "hopeless": ["p-1", "p-4"]}


@pytest.fixture
def train_on(fake_iteration, tmp_path):
    """train_on(store, iteration, keeps_stale, **fields): trains on a copy whose first response of the iteration has
    other fields."""

    def run(store: RolloutStore, iteration: int, keeps_stale: bool, **fields):
        copy = RolloutStore(tmp_path / "copy")
        for t in range(2):
            first, *others = store.stored(t)
            changed = replace(first, rollout=replace(first.rollout, **(fields if t == iteration else {})))
            copy.write(t, [changed, *others])
        return fake_iteration(folder="own", **GIVEN).changed(given=copy, keeps_stale=keeps_stale).run()

    return run


def test_training_on_a_runs_rollouts_takes_its_steps_without_generating_anything(run_fake, train_on):
    """Of an earlier policy, too, where that is meant, and that is counted."""
    whole = run_fake(**GIVEN)
    again = train_on(whole.store, 1, True, policy_version=0)
    assert again.of_kind("generate") == []
    assert again.lines_of("train_step") == whole.lines_of("train_step")
    assert [line["staleness"] for line in again.lines_of("collection")] == [0, pytest.approx(1 / 12)]
    assert again.store.stored(0) == whole.store.stored(0)


@pytest.mark.parametrize(("changes", "told"), [
    ({"problems_per_iteration": 2}, "problems_per_iteration=2 of this run: set it to 3"),
    ({"samples_per_prompt": 2}, "sampling.samples_per_prompt=2 of this run: set it to")])
def test_given_rollouts_that_are_more_than_the_schedules_count_on_are_refused(run_fake, fake_iteration, changes, told):
    whole = run_fake(**GIVEN | {"dynamic_sampling": False})
    plan = fake_iteration(folder="own", **GIVEN | {"dynamic_sampling": False} | changes).plan
    with pytest.raises(UserError, match=told):
        require_given(whole.store, plan.config, len(plan.problems), plan.sampling.samples_per_prompt)


@pytest.mark.parametrize(("iteration", "keeps_stale", "fields", "told"), [
    (0, True, {"policy_version": 1}, "iteration 0 has policy version 1, .* version 0"),
    (1, False, {"policy_version": 0}, "iteration 1 has policy version 0, .* version 1"),
    (0, False, {"problem_id": "p-99"}, "problem p-99"),
    (1, False, {"prompt_ids": (3, 3)}, r"the prompt \(3, 3\), .* \(1[0-9], 7\)")])
def test_given_rollouts_that_do_not_fit_are_refused_with_both_sides(
    run_fake, train_on, iteration, keeps_stale, fields, told
):
    store = run_fake(**GIVEN).store
    with pytest.raises(UserError, match=told):
        train_on(store, iteration, keeps_stale, **fields)
