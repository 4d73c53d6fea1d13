"""The guards: when they find an alarm, and what a run does about it."""

import json
import math
import random
import re
import statistics
import warnings
from types import SimpleNamespace

import pytest

from nemo_edo.algorithms.guards import Guards, respond
from nemo_edo.algorithms.iteration import train_supervised
from nemo_edo.algorithms.services import Position
from nemo_edo.config import BoundsConfig, GuardsConfig, ScheduleConfig, SFTConfig
from nemo_edo.errors import StoppedByGuard, UserError
from nemo_edo.losses import NotFinite
from nemo_edo.types import TrainingBatch

QUIET = dict.fromkeys(("kl", "entropy", "truncated", "reward", "sampler_gap", "stale_gap"), BoundsConfig())


def step(grad_norm: float = 1.0, loss: float = 0.5, skipped: bool = False, **metrics) -> dict[str, float]:
    return {"loss": loss, "grad_norm": grad_norm, "skipped": float(skipped), **metrics}


def found(alarms) -> list[tuple[str, str]]:
    return [(alarm.guard, alarm.action) for alarm in alarms]


@pytest.mark.parametrize("broken", [step(loss=math.nan, skipped=True), step(math.inf, skipped=True)])
def test_the_last_of_so_many_skipped_steps_in_a_row_stops_the_run(broken):
    guards = Guards(GuardsConfig(max_skipped_steps=3))
    alarms = [guards.step(broken) for _ in range(3)]
    assert [found(each) for each in alarms] == [
        [("guards.max_skipped_steps", action)] for action in ("skip", "skip", "stop")]
    assert "guards.max_skipped_steps is 3" in alarms[2][0].message
    assert all(alarm.batch_matters for [alarm] in alarms) and guards.skipped_steps == 3


def with_norms(norms, **config) -> Guards:
    guards = Guards(GuardsConfig(**QUIET, **config))
    for norm in norms:
        assert guards.step(step(norm)) == []
    return guards


def test_a_spike_is_above_the_factor_times_the_median_of_the_last_50_norms():
    rng = random.Random(0)
    norms = [rng.uniform(1, 2) for _ in range(70)]
    bound = 5 * statistics.median(norms[-50:])
    assert with_norms(norms, grad_norm_spike=5).step(step(bound * (1 - 1e-9))) == []
    [alarm] = with_norms(norms, grad_norm_spike=5).step(step(bound * (1 + 1e-9)))
    assert (alarm.guard, alarm.action, alarm.bound) == ("guards.grad_norm_spike", "warn", bound)
    assert with_norms(norms, grad_norm_spike=None).step(step(1e6)) == []


def test_there_is_no_median_before_20_norms_and_those_of_0_do_not_count():
    assert with_norms([1.0] * 19 + [0.0] * 30).step(step(1e6)) == []
    assert found(with_norms([1.0] * 20).step(step(1e6))) == [("guards.grad_norm_spike", "warn")]


@pytest.mark.parametrize(("action", "limit", "actions"), [
    ("warn", math.inf, ["skip", "stop"]), ("skip", 40.0, ["skip", "stop"]), ("stop", 40.0, ["stop", "stop"])])
def test_a_spike_that_is_not_to_be_taken_limits_steps_leaves_the_median_and_counts_as_skipped(action, limit, actions):
    assert with_norms([2.0] * 19, on_grad_norm_spike=action).grad_norm_limit == math.inf
    guards = with_norms([2.0] * 20, on_grad_norm_spike=action, max_skipped_steps=2)
    alarms = [guards.step(step(50.0, skipped=True)) for _ in range(2)]
    guard = "guards.max_skipped_steps" if action == "warn" else "guards.grad_norm_spike"
    assert [found(each) for each in alarms] == [[(guard, action)] for action in actions]
    assert (guards.grad_norm_limit, guards.skipped_steps) == (limit, 2)


MEASURED = [("kl", "collection"), ("kl", "step"), ("entropy", "collection"), ("entropy", "step"),
            ("truncated", "collection"), ("reward", "collection"), ("sampler_gap", "collection")]


def measure(guards: Guards, where: str, **values: float):
    return guards.collection(values) if where == "collection" else guards.step(step(**values))


@pytest.mark.parametrize("action", ["warn", "stop"])
@pytest.mark.parametrize(("name", "where"), MEASURED)
def test_a_bound_fires_at_its_value_and_beyond_and_not_before(name: str, where: str, action: str):
    config = GuardsConfig(**{**QUIET, name: BoundsConfig(floor=0.25, ceiling=0.75, action=action)})
    for value, side in ((0.2, "floor"), (0.25, "floor"), (0.26, None), (0.74, None), (0.75, "ceiling"), (3, "ceiling"),
                        (math.nan, None)):
        alarms = measure(Guards(config), where, **{name: value})
        assert found(alarms) == ([(f"guards.{name}.{side}", action)] if side else [])
        told = f"is {value:.4g}, at or {'below' if side == 'floor' else 'above'} guards.{name}.{side} = "
        assert all(told in alarm.message for alarm in alarms)
    if (name, "step") not in MEASURED:
        assert measure(Guards(config), "step", **{name: 0.0}) == []


def test_measurements_at_a_bound_count_in_a_row_separately_for_each_side_and_for_steps_and_collections():
    guards = Guards(GuardsConfig(**{**QUIET, "reward": BoundsConfig(floor=0.0, ceiling=1.0, in_a_row=3)}))
    rewards = [0, 0, 0.5, 0, 0, 1, 0, 1, 1, 1, 1, 0]
    assert [place for place, reward in enumerate(rewards) if guards.collection({"reward": reward})] == [9, 10]
    guards = Guards(GuardsConfig(**{**QUIET, "entropy": BoundsConfig(floor=0.1, in_a_row=2)}))
    assert [len(measure(guards, where, entropy=0.0)) for where in ("step", "collection", "step")] == [0, 0, 1]


def test_guards_resumed_from_a_saved_state_find_what_uninterrupted_ones_find():
    config = GuardsConfig(on_grad_norm_spike="skip", reward=BoundsConfig(floor=0.0, in_a_row=3))
    rng, whole = random.Random(2), Guards(config)
    for place in range(100):
        saved = whole.state_dict()
        text = json.dumps(saved)
        resumed = Guards(config, saved)
        assert resumed.grad_norm_limit == whole.grad_norm_limit
        skipped = rng.random() < 0.3
        broken, norm = rng.choice([0.5, math.nan]) if skipped else 0.5, rng.choice([0.0, 1.0, 1.5, 100.0])
        assert resumed.step(step(norm, broken, skipped)) == whole.step(step(norm, broken, skipped))
        rewards = {"reward": float(place % 5 == 0)}
        assert resumed.collection(rewards) == whole.collection(rewards)
        assert resumed.state_dict() == whole.state_dict()
        assert json.loads(text) == saved, "a saved state is a copy"
    assert whole.skipped_steps > 20


def test_every_alarm_is_logged_and_the_1st_2nd_4th_and_8th_of_a_guard_are_warned_of(new_memory):
    guards, lines, warned = Guards(GuardsConfig(**{**QUIET, "kl": BoundsConfig(ceiling=1.0)})), [], {}
    for time in range(1, 11):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            respond(guards.collection({"kl": 1.0 + time}), Position(2, 3, 17), {"iteration": 2, "step": 16},
                    progress=new_memory(), log=lambda kind, **values: lines.append({"kind": kind, **values}))
        if caught:
            [warning] = caught
            warned[time] = str(warning.message)
    assert list(warned) == [1, 2, 4, 8]
    assert re.match("iteration 2, step 16: .* is 2, .*guards.kl.ceiling = 1", warned[1]) and "8 times" in warned[8]
    assert [(line["times"], line["value"]) for line in lines] == [(time, 1.0 + time) for time in range(1, 11)]
    assert lines[0] == {"kind": "guard", "iteration": 2, "step": 16, "guard": "guards.kl.ceiling", "value": 2.0,
                        "bound": 1.0, "times": 1, "action": "warn"}


@pytest.mark.filterwarnings("ignore:iteration")
def test_a_run_continues_after_a_step_with_a_broken_loss_which_moves_no_schedule(run_fake):
    journal = run_fake(iterations=2, minibatch_size=3, broken_steps=[2, 5], beta=0.0, exploration_coefficient=0.2,
                       schedule=ScheduleConfig(kind="linear", steps=8))
    assert len(journal.policy.batches) == 8
    weights = [0.2 * (1 - taken / 8) for taken in (0, 1, 1, 2, 3, 3, 4, 5)]
    assert journal.policy.weights == pytest.approx(weights)
    assert [line["loss"] for line in journal.lines_of("train_step")] == [1.0, None, 3.0, 4.0, None, 6.0, 7.0, 8.0]
    assert [line["skipped_steps"] for line in journal.lines_of("train_step")] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert [(line["step"], line["action"]) for line in journal.lines if line["kind"] == "guard"] == [
        (1, "skip"), (4, "skip")]


def test_broken_steps_in_a_row_stop_the_run_where_it_can_resume_after_them(fake_iteration, new_memory):
    memory = new_memory()
    run = fake_iteration(iterations=1, minibatch_size=2, alpha=0.0, broken_steps=[2, 3, 4]).changed(progress=memory)
    with pytest.warns(UserWarning, match="step not taken"), pytest.raises(
            StoppedByGuard, match="iteration 0, step 3: the loss is nan .*kept for nemo-edo replay: failures/it"):
        run.run()
    (kind, _, batch, about), (then, position) = memory.asked
    assert (kind, then) == ("failure", "save")
    assert batch is run.journal.policy.batches[-1]
    assert about["exploration_weight"] == 0.0
    assert (position.iteration, position.step, position.steps_taken) == (0, 4, 4)
    assert position.guards["skipped_in_a_row"] == 3


def full_disk():
    raise UserError("no space left")


def test_a_collection_at_a_bound_stops_before_it_is_trained_on(fake_iteration, new_memory, monkeypatch):
    memory = new_memory()
    guards = GuardsConfig(reward=BoundsConfig(floor=0.25, action="stop"))
    run = fake_iteration(iterations=1, minibatch_size=2, alpha=0.0, guards=guards).changed(progress=memory)
    with pytest.raises(StoppedByGuard, match="iteration 0: .* is 0.25, at or below guards.reward.floor = 0.25"):
        run.run()
    assert run.journal.policy.batches == []
    [(asked, position)] = memory.asked
    assert (asked, position.iteration, position.step) == ("save", 0, 0)
    assert [line["action"] for line in run.journal.lines_of("guard")] == ["stop"]
    monkeypatch.setattr(memory, "save", lambda position: full_disk())
    with pytest.raises(StoppedByGuard, match=r"guards.reward.floor = 0.25.*; no space left"):
        run.run()


@pytest.mark.parametrize(("gap", "staleness", "guard"), [
    (0.099, 0.0, None), (0.1, 0.0, "sampler_gap"), (0.9, 0.5, None), (1.0, 1.0, "stale_gap")])
def test_a_gap_at_its_ceiling_stops_or_of_one_nat_where_samples_are_stale(gap, staleness, guard):
    config = GuardsConfig(sampler_gap=BoundsConfig(ceiling=0.1, action="stop"))
    alarms = Guards(config).collection({"sampler_gap": gap, "staleness": staleness})
    assert found(alarms) == ([(f"guards.{guard}.ceiling", "stop")] if guard else [])


def test_samples_whose_probabilities_are_not_numbers_stop_the_run_with_the_reason(fake_iteration):
    run = fake_iteration(iterations=1, minibatch_size=2, alpha=0.0)

    def broken(batch: TrainingBatch):
        raise NotFinite("logprobs has NaN")

    run.services.policy.logprobs = broken
    with pytest.raises(StoppedByGuard, match="iteration 0: logprobs has NaN: .*probabilities of its own samples"):
        run.run()


@pytest.mark.filterwarnings("ignore:step")
def test_the_warm_up_skips_broken_steps_too_and_stops_after_so_many(new_memory):
    def learn(most: int):
        results = iter([step(loss=math.nan, skipped=True) if number in (2, 4, 5) else step() for number in range(1, 7)])
        policy, progress = SimpleNamespace(train_step=lambda batch, **_: next(results)), new_memory()
        train_supervised(policy, [((100 + place, 7), (8, 9)) for place in range(4)], SFTConfig(steps=6, batch_size=2),
                         pad_id=0, seed=0, progress=progress, guards=GuardsConfig(max_skipped_steps=most),
                         log=lambda kind, **values: skipped.append(values.get("skipped_steps")))
        return progress

    skipped = []
    progress = learn(most=3)
    assert progress.asked == []
    assert [position.guards["skipped_in_a_row"] for position in progress.positions] == [0, 1, 0, 1, 2, 0]
    assert [number for number in skipped if number is not None] == [0, 1, 1, 2, 3, 3]
    with pytest.raises(StoppedByGuard, match="step 4: the loss is nan"):
        learn(most=2)
