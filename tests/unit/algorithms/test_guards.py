"""The guards: when they find an alarm and when they do not, what is done about it, and what a run then is."""

from __future__ import annotations

import json
import math
import random
import statistics
import warnings
from dataclasses import asdict, replace

import pytest

from nemo_edo.algorithms.guards import Guards, exploration_hazards, loggable, respond
from nemo_edo.algorithms.iteration import run_iterations
from nemo_edo.algorithms.progress import Position
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import BoundsConfig, GRPOConfig, GuardsConfig, IDPOConfig, SFTConfig
from nemo_edo.errors import StoppedByGuard
from nemo_edo.losses import NotFinite
from nemo_edo.types import TrainingBatch

OFF = BoundsConfig()
QUIET = {"kl": OFF, "entropy": OFF, "truncated": OFF, "reward": OFF, "sampler_gap": OFF, "stale_gap": OFF}


def step(grad_norm: float = 1.0, loss: float = 0.5, skipped: bool = False, **metrics) -> dict[str, float]:
    return {"loss": loss, "grad_norm": grad_norm, "skipped": float(skipped), **metrics}


def found(alarms) -> list[tuple[str, str]]:
    return [(alarm.guard, alarm.action) for alarm in alarms]


# --- steps that are not taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [step(loss=math.nan, skipped=True), step(math.inf, skipped=True)])
def test_the_last_of_so_many_skipped_steps_in_a_row_stops_the_run(broken):
    guards = Guards(GuardsConfig(max_skipped_steps=3))
    alarms = [guards.step(broken) for _ in range(3)]
    assert [found(each) for each in alarms] == [
        [("guards.max_skipped_steps", action)] for action in ("skip", "skip", "stop")]
    assert "3 in a row, and guards.max_skipped_steps is 3" in alarms[2][0].message
    assert all(alarm.batch_matters for [alarm] in alarms)
    assert guards.skipped_steps == 3


def test_a_step_that_is_taken_ends_the_row_but_not_the_total():
    guards = Guards(GuardsConfig(max_skipped_steps=2))
    for _ in range(4):
        assert found(guards.step(step(loss=math.inf, skipped=True))) == [("guards.max_skipped_steps", "skip")]
        assert guards.step(step()) == []
    assert guards.skipped_steps == 4


# --- spikes -------------------------------------------------------------------------------------------------------


def with_norms(norms, **config) -> Guards:
    guards = Guards(GuardsConfig(**QUIET, **config))
    for norm in norms:
        assert guards.step(step(norm)) == []
    return guards


def test_a_spike_is_above_the_factor_times_the_median_of_the_last_50_norms():
    draw = random.Random(0)
    norms = [draw.uniform(1, 2) for _ in range(70)]
    bound = 5 * statistics.median(norms[-50:])
    assert with_norms(norms, grad_norm_spike=5).step(step(bound * (1 - 1e-9))) == []
    [alarm] = with_norms(norms, grad_norm_spike=5).step(step(bound * (1 + 1e-9)))
    assert (alarm.guard, alarm.action, alarm.bound) == ("guards.grad_norm_spike", "warn", bound)


def test_there_is_no_median_before_20_norms_and_those_of_0_do_not_count():
    assert with_norms([1.0] * 19).step(step(1e6)) == []
    assert with_norms([1.0] * 19 + [0.0] * 30).step(step(1e6)) == []
    assert found(with_norms([1.0] * 20).step(step(1e6))) == [("guards.grad_norm_spike", "warn")]
    assert with_norms([1.0] * 20, grad_norm_spike=None).step(step(1e6)) == []


@pytest.mark.parametrize(("action", "limit"), [("warn", math.inf), ("skip", 40.0), ("stop", 40.0)])
def test_the_next_step_is_limited_where_a_spike_is_not_to_be_taken(action: str, limit: float):
    assert with_norms([2.0] * 20, on_grad_norm_spike=action).grad_norm_limit == limit
    assert with_norms([2.0] * 19, on_grad_norm_spike=action).grad_norm_limit == math.inf


@pytest.mark.parametrize(("action", "actions"), [("skip", ["skip", "stop"]), ("stop", ["stop", "stop"])])
def test_a_spike_that_was_not_taken_leaves_the_median_and_counts_as_skipped(action: str, actions: list[str]):
    guards = with_norms([2.0] * 20, on_grad_norm_spike=action, max_skipped_steps=2)
    alarms = [guards.step(step(50.0, skipped=True)) for _ in range(2)]
    assert [found(each) for each in alarms] == [[("guards.grad_norm_spike", action)] for action in actions]
    assert (guards.grad_norm_limit, guards.skipped_steps) == (40.0, 2)


# --- bounds -------------------------------------------------------------------------------------------------------

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
        if side:
            bound = getattr(config.__dict__[name], side)
            assert f"is {value:.4g}, at or " in alarms[0].message and f"guards.{name}.{side} = {bound:g}: " in (
                alarms[0].message)


@pytest.mark.parametrize("name", ["truncated", "reward", "sampler_gap"])
def test_what_only_a_collection_says_is_not_asked_of_a_step(name: str):
    guards = Guards(GuardsConfig(**{**QUIET, name: BoundsConfig(floor=0.5)}))
    assert guards.step(step(**{name: 0.0})) == []


def test_measurements_at_a_bound_count_in_a_row_on_each_side_by_itself():
    guards = Guards(GuardsConfig(**{**QUIET, "reward": BoundsConfig(floor=0.0, ceiling=1.0, in_a_row=3)}))
    rewards = [0, 0, 0.5, 0, 0, 1, 0, 1, 1, 1, 1, 0]
    fired = [place for place, reward in enumerate(rewards) if guards.collection({"reward": float(reward)})]
    assert fired == [9, 10]


def test_steps_and_collections_count_apart():
    guards = Guards(GuardsConfig(**{**QUIET, "entropy": BoundsConfig(floor=0.1, in_a_row=2)}))
    assert [found(measure(guards, where, entropy=0.0)) for where in ("step", "collection", "step")] == [
        [], [], [("guards.entropy.floor", "warn")]]


def test_a_policy_that_answers_some_problems_and_is_near_its_reference_sets_off_no_guard():
    """The extremes that healthy runs of the quickstarts have shown, and a few times that."""
    draw, guards = random.Random(1), Guards(GuardsConfig())
    for _ in range(30):
        assert guards.collection({"kl": draw.uniform(0, 0.5), "entropy": draw.uniform(0.05, 2), "reward": 0.01,
                                  "truncated": draw.uniform(0, 0.3)}) == []
        for _ in range(4):
            norm = draw.uniform(0.1, 1) * (5 if draw.random() < 0.1 else 1)
            assert guards.step(step(norm, kl=draw.uniform(-0.1, 0.5), entropy=draw.uniform(0.05, 2))) == []


# --- the state ----------------------------------------------------------------------------------------------------


def random_measurements(count: int):
    draw = random.Random(2)
    for place in range(count):
        if place % 5 == 0:
            yield "collection", {"reward": draw.choice([0.0, 1.0, 0.5]), "entropy": draw.uniform(0, 0.1), "kl": 20.0}
        else:
            skipped = draw.random() < 0.3
            norm = draw.choice([0.0, 1.0, 1.5, 100.0, math.inf if skipped else 2.0])
            yield "step", step(norm, draw.choice([0.5, math.nan]) if skipped else 0.5, skipped, entropy=draw.random())


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_guards_that_go_on_from_a_saved_state_find_what_unbroken_ones_find(action: str):
    config = GuardsConfig(on_grad_norm_spike=action, reward=BoundsConfig(floor=0.0, ceiling=1.0, in_a_row=2))
    whole, broken = Guards(config), Guards(config)
    for kind, values in random_measurements(200):
        broken = Guards(config, json.loads(json.dumps(broken.state_dict())))
        assert broken.grad_norm_limit == whole.grad_norm_limit
        expected = getattr(whole, kind)(values)
        assert getattr(broken, kind)(values) == expected
    assert whole.skipped_steps > 20 and whole.state_dict() == broken.state_dict()


def test_a_saved_state_is_a_copy():
    guards = Guards(GuardsConfig())
    guards.step(step())
    state = guards.state_dict()
    later = Guards(GuardsConfig(), state)
    later.step(step(7.0))
    guards.step(step(9.0))
    assert state["grad_norms"] == [1.0]


# --- what is done about an alarm ----------------------------------------------------------------------------------


@pytest.fixture
def lines() -> list[dict]:
    return []


@pytest.fixture
def answer(lines, new_memory):
    """answer(alarms, progress, **more): ``respond`` with a log that ends up in ``lines``."""

    def call(alarms, progress=None, **more) -> None:
        respond(alarms, Position(2, 3, 17), {"iteration": 2, "step": 16}, progress=progress or new_memory(),
                log=lambda kind, **values: lines.append({"kind": kind, **values}), **more)

    return call


def test_every_alarm_is_logged_and_the_1st_2nd_4th_and_8th_of_a_guard_are_warned_of(answer, lines):
    guards, warned = Guards(GuardsConfig(**{**QUIET, "kl": BoundsConfig(ceiling=1.0)})), []
    for time in range(1, 11):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer(guards.collection({"kl": 1.0 + time}))
        warned += [(time, str(warning.message)) for warning in caught]
    assert [time for time, _ in warned] == [1, 2, 4, 8]
    assert warned[0][1].startswith("iteration 2, step 16: the KL to the reference (nats a token) is 2, at or above "
                                   "guards.kl.ceiling = 1: the policy is far from where it began: raise beta")
    assert warned[3][1].endswith("(8 times so far)")
    assert [(line["times"], line["value"]) for line in lines] == [(time, 1.0 + time) for time in range(1, 11)]
    assert lines[0] == {"kind": "guard", "iteration": 2, "step": 16, "guard": "guards.kl.ceiling", "value": 2.0,
                        "bound": 1.0, "times": 1, "action": "warn"}


def test_a_stop_saves_and_then_says_what_where_the_threshold_and_what_to_do(answer, lines, new_memory):
    progress = new_memory()
    alarms = Guards(GuardsConfig(entropy=BoundsConfig(floor=0.01, action="stop"))).collection({"entropy": 0.002})
    with pytest.raises(StoppedByGuard, match=r"iteration 2, step 16: the policy's entropy \(nats a token\) is 0.002, "
                                             r"at or below guards.entropy.floor = 0.01: the policy has collapsed: "):
        answer(alarms, progress, batch=object())
    assert progress.asked == [("save", Position(2, 3, 17))]
    assert [line["action"] for line in lines] == ["stop"]


def test_a_stop_by_broken_numbers_keeps_the_batch_and_names_the_file(answer, new_memory):
    progress, batch = new_memory(), object()
    alarms = Guards(GuardsConfig(max_skipped_steps=1)).step(step(loss=math.nan, skipped=True))
    with pytest.raises(StoppedByGuard, match="the loss is nan.*kept for nemo-edo replay: failures/it"):
        answer(alarms, progress, batch=batch, about={"exploration_weight": 0.5})
    assert [asked[0] for asked in progress.asked] == ["failure", "save"]
    assert progress.asked[0][2:] == (batch, {"exploration_weight": 0.5})


def test_without_alarms_nothing_is_said_or_saved(answer, lines, new_memory):
    progress = new_memory()
    answer([], progress)
    assert (progress.asked, lines) == ([], [])


def test_numbers_that_are_not_finite_are_logged_as_none():
    values = {"loss": math.nan, "kl": math.inf, "lr": 0.5, "skipped": 1.0, "time": {"step_s": 1.0}, "step": 3}
    assert loggable(values) == {"loss": None, "kl": None, "lr": 0.5, "time": {"step_s": 1.0}, "step": 3}


# --- runs ---------------------------------------------------------------------------------------------------------

def steps_of(journal) -> list[dict]:
    return [line for line in journal.lines if line["kind"] == "train_step"]


@pytest.mark.filterwarnings("ignore:iteration")
def test_a_run_goes_on_behind_a_step_with_a_broken_loss_which_moves_no_schedule(run_fake):
    from nemo_edo.config import ScheduleConfig

    journal = run_fake(iterations=2, minibatch_size=3, broken_steps=[2, 5], beta=0.0, exploration_coefficient=0.2,
                       schedule=ScheduleConfig(kind="linear", steps=8))
    assert len(journal.policy.batches) == 8
    weights = [0.2 * (1 - taken / 8) for taken in (0, 1, 1, 2, 3, 3, 4, 5)]
    assert journal.policy.weights == pytest.approx(weights)
    assert [line["loss"] for line in steps_of(journal)] == [1.0, None, 3.0, 4.0, None, 6.0, 7.0, 8.0]
    assert [line["skipped_steps"] for line in steps_of(journal)] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert [(line["step"], line["action"]) for line in journal.lines if line["kind"] == "guard"] == [
        (1, "skip"), (4, "skip")]


GUARDED = {
    "problems": 3, "iterations": 2, "epochs": 2, "minibatch_size": 4, "alpha": 0.0,
    "broken_steps": [2, 3, 6, 9, 10], "guards": GuardsConfig(reward=BoundsConfig(ceiling=0.2, in_a_row=2)),
}


def without_clocks(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


@pytest.mark.filterwarnings("ignore:iteration")
def test_a_run_killed_around_skipped_steps_and_gone_on_with_logs_what_an_unbroken_one_does(go, new_memory):
    memory = new_memory()
    whole, _ = go(GUARDED, memory, folder="whole")
    assert steps_of(whole)[-1]["skipped_steps"] == 5
    assert [line["guard"] for line in whole.lines if line["kind"] == "guard"].count("guards.reward.ceiling") == 1
    for stop_at, position in enumerate(memory.positions, start=1):
        if not position.step:
            continue
        stopping = new_memory(stop_at=stop_at)
        first, _ = go(GUARDED, stopping, folder=f"stopped {stop_at}")
        saved = Position(**json.loads(json.dumps(asdict(stopping.positions[-1]))))
        second, _ = go(GUARDED, new_memory(saved, stopping.collected), folder=f"stopped {stop_at}", before=first)
        assert without_clocks(first.lines + second.lines) == without_clocks(whole.lines)


def test_broken_steps_in_a_row_stop_the_run_where_it_can_go_on_behind_them(fake_iteration, new_journal, new_memory):
    journal, memory = new_journal(), new_memory()
    run = replace(fake_iteration(journal=journal, iterations=1, minibatch_size=2, alpha=0.0, broken_steps=[2, 3, 4]),
                  progress=memory)
    with pytest.warns(UserWarning, match="step not taken"), pytest.raises(
            StoppedByGuard, match="iteration 0, step 3: the loss is nan .*kept for nemo-edo replay"):
        run_iterations(run, lambda t: None)
    (_, _, batch, about), (_, position) = memory.asked
    assert batch is journal.policy.batches[-1]
    assert about["exploration_weight"] == 0.0
    assert (position.iteration, position.step, position.steps_taken) == (0, 4, 4)
    assert position.guards["skipped_in_a_row"] == 3


def test_a_collection_at_a_bound_stops_before_it_is_trained_on(fake_iteration, new_journal, new_memory):
    journal, memory = new_journal(), new_memory()
    guards = GuardsConfig(reward=BoundsConfig(floor=0.25, action="stop"))
    run = replace(fake_iteration(journal=journal, iterations=1, minibatch_size=2, alpha=0.0, guards=guards),
                  progress=memory)
    with pytest.raises(StoppedByGuard, match="iteration 0: the mean reward of a collection is 0.25, at or below"):
        run_iterations(run, lambda t: None)
    assert journal.policy.batches == []
    assert [asked[0] for asked in memory.asked] == ["save"]


def test_an_engine_that_computes_something_else_stops_the_run_with_what_to_look_at(fake_iteration, new_journal):
    gap = BoundsConfig(ceiling=0.05, action="stop")
    iteration = fake_iteration(journal=new_journal(), iterations=1, minibatch_size=6, sampler_gap=gap)
    told = "mean gap .* guards.sampler_gap.ceiling = 0.05: .*weights.*stale.*precision.*temperature and top-p.*template"
    with pytest.raises(StoppedByGuard, match=told):
        run_iterations(iteration, lambda t: None)


def test_by_default_a_gap_of_a_tenth_of_a_nat_stops_and_a_smaller_one_does_not():
    [alarm] = Guards(GuardsConfig()).collection({"sampler_gap": 0.1})
    assert (alarm.guard, alarm.action) == ("guards.sampler_gap.ceiling", "stop")
    assert Guards(GuardsConfig()).collection({"sampler_gap": 0.099}) == []


def test_a_gap_of_stale_samples_holds_the_policys_move_and_has_a_bound_of_its_own():
    assert Guards(GuardsConfig()).collection({"sampler_gap": 0.9, "staleness": 0.5}) == []
    [alarm] = Guards(GuardsConfig()).collection({"sampler_gap": 1.0, "staleness": 1.0})
    assert (alarm.guard, alarm.action) == ("guards.stale_gap.ceiling", "stop")


def test_samples_whose_probabilities_are_no_numbers_stop_the_run_with_the_reason(fake_iteration, new_journal):
    journal = new_journal()
    run = fake_iteration(journal=journal, iterations=1, minibatch_size=2, alpha=0.0)

    def broken(batch: TrainingBatch):
        raise NotFinite("logprobs has NaN")

    run.policy.log_probs = broken
    with pytest.raises(StoppedByGuard, match="iteration 0: logprobs has NaN: .*no probability that is a number"):
        run_iterations(run, lambda t: None)


@pytest.mark.filterwarnings("ignore:step")
def test_the_warm_up_skips_broken_steps_too_and_stops_after_so_many(lines, new_memory):
    class Policy:
        steps = 0

        def train_step(self, batch, *, grad_norm_limit):
            self.steps += 1
            return step(loss=math.nan, skipped=True) if self.steps in (2, 4, 5) else step()

    def learn(most: int):
        solutions = [((100 + place, 7), (8, 9)) for place in range(4)]
        progress = new_memory()
        train_supervised(Policy(), solutions, SFTConfig(steps=6, batch_size=2), pad_id=0, seed=0, progress=progress,
                         log=lambda kind, **values: lines.append({"kind": kind, **values}),
                         guards=GuardsConfig(max_skipped_steps=most))
        return progress

    progress = learn(most=3)
    assert progress.asked == []
    assert [position.guards["skipped_in_a_row"] for position in progress.positions] == [0, 1, 0, 1, 2, 0]
    assert [line["skipped_steps"] for line in lines if line["kind"] == "sft_step"] == [0, 1, 1, 2, 3, 3]
    with pytest.raises(StoppedByGuard, match="step 4: the loss is nan"):
        learn(most=2)


# --- exploration that cannot act ----------------------------------------------------------------------------------

ONE_STEP, DROPPED = "one optimizer step for each collection", "dynamic_sampling drops groups"
OFF_BY_BETA, K1, PAIRED = "beta is 0, and with it", "kl_estimator k1 in the loss", "exploration_samples is paired"


@pytest.mark.parametrize(("config", "steps", "expected"), [
    (GRPOConfig(), 4, []),
    (GRPOConfig(), 1, [ONE_STEP]),
    (GRPOConfig(alpha=0.0), 1, []),
    (GRPOConfig(dynamic_sampling=True), 4, [DROPPED]),
    (GRPOConfig(dynamic_sampling=True, alpha=0.0), 4, []),
    (GRPOConfig(beta=0.0), 4, [OFF_BY_BETA]),
    (GRPOConfig(beta=0.0, alpha=300.0), 1, [OFF_BY_BETA]),
    (GRPOConfig(beta=0.0, alpha=0.0), 1, []),
    (GRPOConfig(beta=0.0, exploration_coefficient=0.1), 4, []),
    (GRPOConfig(beta=0.0, exploration_coefficient=0.1, dynamic_sampling=True), 1, [ONE_STEP, DROPPED]),
    (GRPOConfig(kl_estimator="k1"), 4, [K1]),
    (GRPOConfig(kl_estimator="k1", alpha=0.0), 4, [K1]),
    (GRPOConfig(kl_estimator="k1", beta=0.0, alpha=0.0), 4, []),
    (GRPOConfig(kl_estimator="k1", exploration_control="noise"), 4, []),
    (GRPOConfig(kl_estimator="k1+"), 4, []),
    (GRPOConfig(kl_estimator="k3+"), 4, []),
    (IDPOConfig(), 4, []),
    (IDPOConfig(), 1, [ONE_STEP]),
    (IDPOConfig(alpha=0.0), 1, []),
    (IDPOConfig(exploration_samples="paired"), 4, [PAIRED]),
    (IDPOConfig(exploration_samples="paired", alpha=0.0), 4, []),
    (IDPOConfig(exploration_samples="3"), 4, []),
])
def test_exploration_that_cannot_act_as_configured_is_told_of_and_no_other(config, steps: int, expected: list[str]):
    told = exploration_hazards(config, steps)
    assert len(told) == len(expected)
    assert all(said.startswith(start) for said, start in zip(told, expected, strict=True))


def test_k1_with_exploration_names_the_beta_that_would_do_the_same():
    [told] = exploration_hazards(GRPOConfig(kl_estimator="k1", beta=0.04, alpha=0.5), 4)
    assert "that of GRPO with beta = 0.06 and alpha = 0" in told


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
def test_a_healthy_run_warns_of_nothing_and_logs_no_guard(run_fake, algorithm: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        journal = run_fake(algorithm=algorithm, iterations=2, epochs=2, minibatch_size=2)
    assert {line["kind"] for line in journal.lines} == {"collection", "train_step"}
    assert {line["skipped_steps"] for line in steps_of(journal)} == {0}


@pytest.mark.parametrize(("settings", "message"), [
    ({"max_skipped_steps": 0}, "guards.max_skipped_steps is 0, expected a number above 0"),
    ({"grad_norm_spike": 1.0}, "guards.grad_norm_spike is 1.0, expected null or a number above 1"),
    ({"on_grad_norm_spike": "no"}, "guards.on_grad_norm_spike is 'no', expected one of warn, skip, stop"),
    ({"kl": BoundsConfig(action="skip")}, "guards.kl.action is 'skip', expected one of warn, stop"),
    ({"reward": BoundsConfig(in_a_row=0)}, "guards.reward.in_a_row is 0, expected a number above 0"),
    ({"entropy": BoundsConfig(floor=2.0, ceiling=1.0)}, "guards.entropy.floor is 2.0, expected null or a number below"),
])
def test_settings_that_do_not_fit_are_refused_by_their_keys(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GuardsConfig(**settings)
