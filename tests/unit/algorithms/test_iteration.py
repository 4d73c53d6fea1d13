"""Algorithm 1: its order, what it samples, and what it trains on."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from nemo_edo.algorithms.iteration import run_iterations
from nemo_edo.algorithms.progress import Position
from nemo_edo.config import ScheduleConfig
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import UserError
from nemo_edo.losses import build_schedule


def rows_of(batches) -> Counter:
    """How often each sequence (its tokens without padding) stands in the batches."""
    return Counter(tuple(t for t in row if t) for batch in batches for row in batch.tokens.tolist())


def test_order_is_push_evaluate_collect_write_train_for_each_iteration(run_fake):
    journal = run_fake(iterations=2, epochs=2, minibatch_size=6)
    steps = [("release",), *[("train_step",)] * 4]
    assert journal.events == [
        ("push", 0), ("evaluate", 0),
        ("generate", 0, 12), ("write", 0), *steps, ("push", 1), ("evaluate", 1),
        ("reference", "initial", 0.9),
        ("generate", 1, 12), ("write", 1), *steps, ("push", 2), ("evaluate", 2),
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
    {"beta": 0.0, "alpha": 0.0, "minibatch_size": 12},
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


# --- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "decay"), [("initial", 0.9), ("previous", 0.9), ("ema", 0.75)])
def test_the_reference_is_moved_before_every_collection_but_the_first(run_fake, kind: str, decay: float):
    events = run_fake(iterations=3, minibatch_size=6, reference=kind, ema_decay=decay).events
    places = [place for place, event in enumerate(events) if event[0] == "reference"]
    assert [events[place] for place in places] == [("reference", kind, decay)] * 2
    assert [events[place + 1][:2] for place in places] == [("generate", 1), ("generate", 2)]


# --- the exploration weight ---------------------------------------------------------------------------------------

COEFFICIENT = {"beta": 0.0, "exploration_coefficient": 0.2}


def test_every_step_is_taken_with_the_configured_weight(run_fake):
    journal = run_fake(iterations=2, minibatch_size=6, alpha=0.5, beta=0.3)
    assert journal.policy.weights == [0.15] * 4
    assert [line["exploration_weight"] for line in journal.lines if line["kind"] == "train_step"] == [0.15] * 4
    assert run_fake(iterations=1, minibatch_size=6, alpha=0.0, folder="off").policy.weights == [0.0] * 2


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
def test_a_schedule_gives_each_step_its_weight_across_iterations(run_fake, algorithm: str):
    config = ScheduleConfig(kind="linear", steps=5, final_factor=0.5)
    size = {"grpo": 6, "idpo": 2}[algorithm]  # responses, prompts: two steps a collection
    journal = run_fake(algorithm=algorithm, iterations=3, minibatch_size=size, exploration_coefficient=0.2,
                       schedule=config)
    expected = build_schedule(config, 0.2)
    weights = []
    for _ in range(6):
        weights.append(expected.weight)
        expected.step(entropy=0.5)
    assert journal.policy.weights == weights == pytest.approx([0.2, 0.18, 0.16, 0.14, 0.12, 0.1])
    assert [line["exploration_weight"] for line in journal.lines if line["kind"] == "train_step"] == weights


@pytest.mark.parametrize(("entropy", "factor"), [(0.25, math.exp(0.1 * 0.5)), (0.5, 1.0), (1.0, math.exp(-0.1))])
def test_the_entropy_controller_is_told_the_entropy_of_each_step(run_fake, entropy: float, factor: float):
    schedule = ScheduleConfig(kind="entropy", entropy_target=0.5, rate=0.1)
    journal = run_fake(iterations=1, minibatch_size=4, entropy=entropy, schedule=schedule, **COEFFICIENT)
    assert journal.policy.weights == pytest.approx([0.2, 0.2 * factor, 0.2 * factor**2])


def test_gradients_are_measured_before_a_step_and_only_where_the_schedule_needs_them(run_fake):
    schedule = ScheduleConfig(kind="gradient-share", gradient_share=0.1, every=2)
    journal = run_fake(iterations=1, minibatch_size=2, schedule=schedule, gradient_ratio=2.0, **COEFFICIENT)
    assert journal.of_kind("gradients") == [("gradients", 0), ("gradients", 2), ("gradients", 4)]
    assert [event[0] for event in journal.events[5:8]] == ["gradients", "train_step", "train_step"]
    assert journal.policy.weights == pytest.approx([0.2] + [0.05] * 5)  # share / ratio from the second step on
    logged = [line.get("exploration_gradient_ratio") for line in journal.lines if line["kind"] == "train_step"]
    assert logged == [2.0, None, 2.0, None, 2.0, None]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "warmup-hold-decay", "entropy"])
def test_other_schedules_never_ask_for_gradients(run_fake, kind: str):
    schedule = ScheduleConfig(kind=kind, steps=4, entropy_target=0.5)
    journal = run_fake(iterations=1, minibatch_size=4, schedule=schedule, **COEFFICIENT)
    assert journal.of_kind("gradients") == []
    assert not any("exploration_gradient_ratio" in line for line in journal.lines)


def test_a_minibatch_without_a_task_gradient_leaves_the_weight_and_is_not_logged_as_a_number(run_fake):
    """Its ratio is infinite, which no line of JSON holds."""
    schedule = ScheduleConfig(kind="gradient-share")
    journal = run_fake(iterations=1, minibatch_size=6, schedule=schedule, gradient_ratio=math.inf, **COEFFICIENT)
    assert journal.policy.weights == [0.2, 0.2]
    assert len(journal.of_kind("gradients")) == 2  # asked again: the first said nothing
    assert not any("exploration_gradient_ratio" in line for line in journal.lines)


# --- dynamic sampling ---------------------------------------------------------------------------------------------


def requests_of(journal) -> list[tuple[int, int]]:
    """(policy version, responses) of each call of the engine."""
    return [event[1:] for event in journal.of_kind("generate")]


def trained_problems(journal) -> set[str]:
    """The problems of all rows that were trained on, by their prompts' first token."""
    return {f"p-{row[0] - 10}" for batch in journal.policy.batches for row in batch.tokens.tolist()}


DAPO = {"dynamic_sampling": True, "iterations": 1, "minibatch_size": 4, "alpha": 0.0}


def test_dropped_groups_are_replaced_by_problems_outside_the_collection(run_fake, fake_iteration):
    settings = {**DAPO, "problems": 12, "problems_per_iteration": 4}
    collection, others = ids(fake_iteration(**settings), 0), [p.id for p in fake_iteration(**settings).substitutes(0)]
    journal = run_fake(**settings, hopeless=[*collection[:3], others[1]])
    assert requests_of(journal) == [(0, 16), (0, 12), (0, 4)]  # the second round replaces a group of the first
    assert trained_problems(journal) == {collection[3], others[0], others[2], others[3]}
    assert sum(batch.size for batch in journal.policy.batches) == 16
    assert {one.rollout.problem_id for one in journal.collected(0)} == {*collection, *others[:4]}


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_no_more_than_max_extra_rounds_are_drawn(run_fake, fake_iteration, rounds: int):
    settings = {**DAPO, "problems": 12, "problems_per_iteration": 2, "max_extra_rounds": rounds}
    collection = ids(fake_iteration(**settings), 0)
    rest = [p.id for p in fake_iteration(**settings).substitutes(0)]
    journal = run_fake(**settings, hopeless=[collection[0], *rest])
    assert requests_of(journal) == [(0, 8)] + [(0, 4)] * rounds
    assert trained_problems(journal) == {collection[1]}


def test_all_samples_drawn_are_on_disk_before_the_informative_ones_are_trained_on(run_fake, fake_iteration):
    settings = {**DAPO, "problems": 6, "problems_per_iteration": 3}
    hopeless = ids(fake_iteration(**settings), 0)[:2]
    journal = run_fake(**settings, hopeless=hopeless)
    assert journal.on_disk == [20] * 3  # 12 and 8, of which 12 are trained on
    on_disk = {(*one.rollout.prompt_ids, *one.rollout.response_ids) for one in journal.collected(0)}
    trained = rows_of(journal.policy.batches)
    assert len(on_disk) == 20 and trained.keys() < on_disk and set(trained.values()) == {1}
    (line,) = [line for line in journal.lines if line["kind"] == "collection"]
    # Of all five groups: what is left out would make the policy look better than it is.
    assert (line["groups"], line["dropped_groups"]) == (5, 2)
    assert line["zero_advantage_groups"] == pytest.approx(2 / 5)
    assert line["reward"] == line["accuracy"] == pytest.approx(3 / 20)


def test_nothing_is_replaced_where_all_groups_say_something(run_fake):
    journal = run_fake(**DAPO, problems=6, problems_per_iteration=3)
    assert requests_of(journal) == [(0, 12)]


def test_where_the_collection_is_the_whole_set_uninformative_groups_are_dropped_alone(run_fake):
    journal = run_fake(**DAPO, problems=3, hopeless=["p-1"])
    assert requests_of(journal) == [(0, 12)]
    assert trained_problems(journal) == {"p-0", "p-2"}


def test_the_last_substitutes_do_for_as_many_as_they_are(run_fake, fake_iteration):
    settings = {**DAPO, "problems": 5, "problems_per_iteration": 4}
    collection = ids(fake_iteration(**settings), 0)
    journal = run_fake(**settings, hopeless=collection[:3])
    assert requests_of(journal) == [(0, 16), (0, 4)]
    assert len(trained_problems(journal)) == 2


@pytest.mark.parametrize(("problems", "part", "drawn"), [(3, None, 3), (8, 2, 8), (20, 2, 8)])
def test_nothing_left_to_train_on_is_an_error_and_the_samples_stay_on_disk(run_fake, tmp_path, problems, part, drawn):
    hopeless = [f"p-{i}" for i in range(problems)]
    message = f"iteration 0: the rewards of all {drawn} groups are all equal.*dynamic_sampling=false"
    with pytest.raises(UserError, match=message):
        run_fake(**DAPO, problems=problems, problems_per_iteration=part, hopeless=hopeless)
    assert len(RolloutStore(tmp_path / "rollouts").read(0)) == 4 * drawn


def test_substitutes_are_all_other_problems_in_an_order_of_each_iteration_that_the_seed_fixes(fake_iteration):
    iteration, again, other = (
        fake_iteration(problems=12, problems_per_iteration=4, seed=seed) for seed in (1, 1, 2))
    orders = [[problem.id for problem in iteration.substitutes(t)] for t in range(6)]
    assert orders == [[problem.id for problem in again.substitutes(t)] for t in range(6)]
    assert orders != [[problem.id for problem in other.substitutes(t)] for t in range(6)]
    for t, order in enumerate(orders):
        assert sorted([*order, *ids(iteration, t)]) == sorted(f"p-{i}" for i in range(12))
    in_both = [[[name for name in order if name in orders[0] and name in later] for order in (orders[0], later)]
               for later in orders[1:]]
    assert all(one != other for one, other in in_both)


def test_dynamic_sampling_with_exploration_warns_and_without_it_does_not(run_fake):
    settings = {**DAPO, "hopeless": ["p-0"]}
    with pytest.warns(UserWarning, match="dynamic_sampling drops groups.*exploration"):
        run_fake(**{**settings, "alpha": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_fake(**settings, folder="plain")


# --- ED-iDPO ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "epochs", "steps"), [(3, 1, 1), (2, 1, 2), (1, 2, 6), (64, 2, 2)])
def test_steps_of_ed_idpo_are_of_prompts_and_as_many_as_announced(run_fake, fake_iteration, size, epochs, steps):
    settings = {"algorithm": "idpo", "minibatch_size": size, "epochs": epochs, "iterations": 2,
                "hopeless": ["p-2"], "exploration_coefficient": 0.1}
    announced = fake_iteration(**settings)
    assert (announced.steps_per_collection, announced.total_steps) == (steps, 2 * steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        journal = run_fake(**settings)
    assert len(journal.policy.batches) == 2 * steps
    prompts = [len(set(batch.tokens[batch.mask.any(dim=1), 0].tolist())) for batch in journal.policy.batches]
    assert max(prompts) == min(size, 3) and sum(prompts) == 2 * epochs * 3


def test_each_epoch_of_ed_idpo_explores_every_response_once_and_has_every_pair_once(run_fake):
    journal = run_fake(algorithm="idpo", iterations=1, epochs=2, minibatch_size=2, pairs_per_prompt=3)
    for epoch in (journal.policy.batches[:2], journal.policy.batches[2:]):
        exploring = rows_of([batch.rows(batch.exploration_weights == 1) for batch in epoch])
        assert len(exploring) == 12 and set(exploring.values()) == {1}
        assert sum(int((batch.pair_role == 1).sum()) for batch in epoch) == 3 * 3  # one right of four: three pairs


def test_eto_with_one_step_a_collection_does_not_warn_and_ed_idpo_does(run_fake):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_fake(algorithm="idpo", iterations=1, alpha=0.0)
    with pytest.warns(UserWarning, match="one optimizer step for each collection"):
        run_fake(algorithm="idpo", iterations=1, folder="exploring")


# --- stopped and gone on with -------------------------------------------------------------------------------------


SCHEDULED = {"schedule": ScheduleConfig(kind="linear", steps=9, final_factor=0.5), **COEFFICIENT}
RESUMED = [
    {"problems": 3, "iterations": 3, "epochs": 2, "minibatch_size": 8, **SCHEDULED},
    {"algorithm": "idpo", "problems": 4, "iterations": 2, "minibatch_size": 3, "exploration_coefficient": 0.2},
    {"problems": 12, "problems_per_iteration": 4, "iterations": 2, "minibatch_size": 8, "dynamic_sampling": True,
     "alpha": 0.0, "hopeless": ["p-1", "p-2", "p-5", "p-7"]},
]


@pytest.mark.parametrize("settings", RESUMED, ids=["grpo", "idpo", "dynamic sampling"])
def test_a_run_stopped_at_any_place_and_gone_on_with_does_what_an_unbroken_one_does(go, settings: dict, new_memory):
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
        # What was logged behind the place that is gone on from, inside a collection, is logged again.
        kept = [line for line in first.lines if is_before(line, position)]
        assert kept + second.lines == whole.lines
        assert second.policy.weights == whole.policy.weights
        pairs = zip(second.policy.batches, whole.policy.batches, strict=True)
        assert all(torch.equal(mine.tensors()[name], theirs.tensors()[name])
                   for mine, theirs in pairs for name in theirs.tensors())
        for t in range(settings["iterations"]):
            assert second.store.drawn(t) == whole.store.drawn(t)


def is_before(line: dict, position: Position) -> bool:
    if line["kind"] == "train_step":
        return line["step"] < position.steps_taken
    return line["iteration"] < position.iteration or (line["iteration"] == position.iteration and position.step > 0)


def test_a_collection_that_was_broken_off_draws_only_what_is_not_on_disk(go, new_memory):
    settings = {"problems": 3, "iterations": 1, "minibatch_size": 6, "alpha": 0.0}
    stopping = new_memory(stop_at=4)  # the beginning, and before each of the three parts: the third is not drawn
    first, _ = go(settings, stopping, folder="parts")
    second, _ = go(settings, new_memory(), folder="parts", before=first)
    assert [event[2] for event in first.of_kind("generate")] == [5, 5]
    assert [event[2] for event in second.of_kind("generate")] == [2]
    third, _ = go(settings, new_memory(), folder="parts", before=first)
    assert third.of_kind("generate") == []


@pytest.mark.parametrize(("change", "told"), [
    ({"seed": 7}, "a response with seed [0-9]+ there where [0-9]+ is asked for here"),
    ({"samples_per_prompt": 3}, "a response with (sample_index|problem_id) .* there where"),
])
def test_parts_of_another_run_are_refused_with_both_sides(go, change: dict, told: str, new_memory):
    settings = {"problems": 3, "iterations": 1, "minibatch_size": 6, "alpha": 0.0}
    go(settings, new_memory(stop_at=4), folder="parts")
    with pytest.raises(UserError, match=rf"parts: iteration 0 has {told}"):
        go({**settings, **change}, new_memory(), folder="parts")


# --- given rollouts -----------------------------------------------------------------------------------------------


@pytest.fixture
def train_on(fake_iteration, new_journal):
    """train_on(store, **settings): the journal of a run that trains on stored rollouts."""

    def run(store: RolloutStore, *, keeps_stale: bool = False, **settings):
        journal = new_journal()
        iteration = fake_iteration(journal=journal, folder="own", **settings)
        iteration = replace(iteration, given=store, keeps_stale=keeps_stale)
        run_iterations(iteration, lambda t: None)
        return journal

    return run


GIVEN = {"problems": 6, "problems_per_iteration": 3, "iterations": 2, "minibatch_size": 4, "alpha": 0.0,
         "dynamic_sampling": True, "hopeless": ["p-1", "p-4"]}


def test_training_on_a_runs_rollouts_takes_its_steps_without_drawing_anything(run_fake, train_on):
    whole = run_fake(**GIVEN)
    again = train_on(whole.store, **GIVEN)
    assert again.of_kind("generate") == []
    assert again.lines == whole.lines
    assert [again.store.drawn(t) for t in range(2)] == [whole.store.drawn(t) for t in range(2)]


def changed(store: RolloutStore, iteration: int, folder, **fields) -> RolloutStore:
    """A copy whose first response of an iteration has other fields."""
    copy = RolloutStore(folder)
    for t in range(2):
        drawn = store.drawn(t)
        if t == iteration:
            drawn[0] = replace(drawn[0], rollout=replace(drawn[0].rollout, **fields))
        copy.write(t, drawn, rank=0, world_size=1)
    return copy


def test_samples_of_earlier_policies_are_trained_on_where_that_is_meant_and_counted(run_fake, train_on, tmp_path):
    whole = run_fake(**GIVEN)
    stale = changed(whole.store, 1, tmp_path / "copy", policy_version=0)
    journal = train_on(stale, keeps_stale=True, **GIVEN)
    assert [line["staleness"] for line in journal.lines if line["kind"] == "collection"] == [0, pytest.approx(1 / 12)]
    assert [line for line in journal.lines if line["kind"] == "train_step"] == [
        line for line in whole.lines if line["kind"] == "train_step"]


def test_samples_of_later_policies_are_refused_even_so(run_fake, train_on, tmp_path):
    later = changed(run_fake(**GIVEN).store, 0, tmp_path / "copy", policy_version=1)
    with pytest.raises(UserError, match="iteration 0 is of policy version 1 there; version 0 is asked for here"):
        train_on(later, keeps_stale=True, **GIVEN)


@pytest.mark.parametrize(("iteration", "fields", "told"), [
    (0, {"policy_version": 3}, "iteration 0 is of policy version 3 there; version 0 is asked for here"),
    (1, {"policy_version": 0}, "iteration 1 is of policy version 0 there; version 1 is asked for here"),
    (0, {"problem_id": "p-99"}, "answers problem p-99, which is none of this run's"),
    (1, {"prompt_ids": (3, 3)}, r"after the prompt \(3, 3\) there, which is \(1[0-9], 7\) here"),
])
def test_given_rollouts_that_do_not_fit_are_refused_with_both_sides(
    run_fake, train_on, tmp_path, iteration: int, fields: dict, told: str
):
    store = changed(run_fake(**GIVEN).store, iteration, tmp_path / "copy", **fields)
    with pytest.raises(UserError, match=told):
        train_on(store, **GIVEN)
