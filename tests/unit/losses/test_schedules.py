import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.config import ScheduleConfig
from nemo_edo.losses import build_schedule, exploration_term

few = settings(max_examples=20, deadline=None, derandomize=True)
COURSES = {
    "constant": ScheduleConfig(),
    "linear": ScheduleConfig("linear", steps=8, final_factor=0.1),
    "cosine": ScheduleConfig("cosine", steps=8, final_factor=0.1),
    "warmup-hold-decay": ScheduleConfig("warmup-hold-decay", steps=8, warmup_steps=2, hold_steps=2, final_factor=0.1),
}
CONTROLLERS = {
    "entropy": ScheduleConfig("entropy", entropy_target=1.0, entropy_ceiling=2.0, rate=0.3),
    "gradient-share": ScheduleConfig("gradient-share", gradient_share=0.2, every=3, rate=0.3),
}
every_kind = pytest.mark.parametrize("config", [*COURSES.values(), *CONTROLLERS.values()], ids=lambda c: c.kind)
every_course = pytest.mark.parametrize("config", COURSES.values(), ids=lambda c: c.kind)
every_controller = pytest.mark.parametrize("config", CONTROLLERS.values(), ids=lambda c: c.kind)


def weights(schedule, steps: int) -> list[float]:
    """The weights of the first optimizer steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.weight)
        schedule.step()
    return found


def wide(kind: str, **changes) -> ScheduleConfig:
    """A controller whose bounds are out of the way."""
    return ScheduleConfig(kind, **{"min_weight": 1e-30, "max_weight": 1e30, **changes})


def test_constant_never_changes():
    assert weights(build_schedule(COURSES["constant"], 4e-5), 20) == [4e-5] * 20


def test_linear_falls_by_equal_amounts_and_then_stays():
    found = weights(build_schedule(COURSES["linear"], 2.0), 12)
    assert found == pytest.approx([2.0 * (1 - 0.9 * min(t, 8) / 8) for t in range(12)], rel=1e-12)


def test_cosine_is_half_a_wave_and_then_stays():
    found = weights(build_schedule(COURSES["cosine"], 2.0), 12)
    expected = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(t, 8) / 8)) / 2) for t in range(12)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_warmup_hold_decay_has_its_three_parts():
    found = weights(build_schedule(COURSES["warmup-hold-decay"], 2.0), 11)
    shape = [0, 0.5, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]
    assert found == pytest.approx([2.0 * factor for factor in shape], rel=1e-12)


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ({"steps": 4, "warmup_steps": 4, "final_factor": 1.0}, [0, 0.25, 0.5, 0.75, 1, 1]),
        ({"steps": 2, "hold_steps": 2}, [1, 1, 0, 0]),
        ({"steps": 2}, [1, 0.5, 0, 0]),
        ({"steps": 3, "warmup_steps": 1, "hold_steps": 1}, [0, 1, 1, 0, 0]),
    ],
)
def test_parts_of_warmup_hold_decay_may_be_missing(parts, shape):
    schedule = build_schedule(ScheduleConfig("warmup-hold-decay", **parts), 1.0)
    assert weights(schedule, len(shape)) == shape


@every_course
@few
@given(weight=st.floats(1e-8, 10))
def test_courses_start_and_end_exactly_where_they_should(config, weight):
    schedule = build_schedule(config, weight)
    found = weights(schedule, 30)
    if config.kind != "warmup-hold-decay":
        assert found[0] == weight
    assert max(found) == weight
    assert found[8:] == [weight if config.kind == "constant" else weight * 0.1] * 22
    assert not schedule.needs_gradients


@every_course
def test_a_weight_of_zero_stays_zero_on_a_fixed_course(config):
    assert weights(build_schedule(config, 0.0), 12) == [0.0] * 12


@every_controller
@pytest.mark.parametrize("weight", [0.0, -0.1, 1e-9, 1.5])
def test_a_controller_refuses_a_start_outside_its_bounds(config, weight):
    with pytest.raises(ValueError, match=rf"exploration weight is {weight}.*schedule.min_weight = 1e-08"):
        build_schedule(config, weight)


@every_kind
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_an_error(config, weight):
    with pytest.raises(ValueError, match=f"exploration weight is {weight}"):
        build_schedule(config, weight)


@pytest.mark.parametrize(
    ("entropy", "exponent"),
    [(0.0, 0.3), (0.5, 0.15), (-0.1, 0.3), (1.0, 0), (1.5, 0), (2.0, 0), (3.0, -0.15), (4.0, -0.3), (9.0, -0.3)],
)
def test_entropy_controller_moves_in_proportion_to_the_distance_from_its_band(entropy, exponent):
    schedule = build_schedule(CONTROLLERS["entropy"], 1e-3)
    schedule.step(entropy=entropy)
    assert schedule.weight == pytest.approx(1e-3 * math.exp(exponent), rel=1e-12)
    if exponent == 0:
        assert schedule.weight == 1e-3


def test_without_a_ceiling_the_entropy_target_is_the_ceiling():
    schedule = build_schedule(ScheduleConfig("entropy", entropy_target=1.0, rate=0.3), 1e-3)
    schedule.step(entropy=1.0)
    assert schedule.weight == 1e-3
    schedule.step(entropy=1.5)
    assert schedule.weight == pytest.approx(1e-3 * math.exp(-0.15))


@every_controller
def test_controllers_stop_at_their_bounds(config):
    for low, expected in ((True, config.max_weight), (False, config.min_weight)):
        schedule = build_schedule(config, 1e-3)
        for _ in range(200):
            schedule.step(entropy=0.0 if low else 9.0, gradient_ratio=1e-12 if low else 1e12)
        assert schedule.weight == expected


@few
@given(gain=st.floats(0.5, 30), start=st.floats(1e-4, 0.5))
def test_entropy_controller_settles_where_entropy_meets_its_target(gain, start):
    schedule = build_schedule(ScheduleConfig("entropy", entropy_target=1.0, rate=0.1, max_weight=10.0), start)
    for _ in range(400):
        schedule.step(entropy=gain * schedule.weight)  # a policy whose entropy follows the weight
    assert gain * schedule.weight == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-mean", "token-mean"])
@few
@given(log_scale=st.floats(-6, 6), share=st.floats(0.01, 2.0), seed=st.integers(0, 99))
def test_the_exploration_gradients_share_is_the_target_whatever_scales_the_term(reduction, log_scale, share, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(7, (4, 5), generator=generator)
    logprobs = logits.log_softmax(0)[tokens]
    term = exploration_term(logprobs, torch.zeros_like(logprobs), torch.ones(4, 5), reduction=reduction)
    task = 0.5 * (logits - torch.randn(7, generator=generator, dtype=torch.float64)).square().sum()
    (of_term,) = torch.autograd.grad(10**log_scale * term.mean(), logits)
    (of_task,) = torch.autograd.grad(task, logits)
    schedule = build_schedule(wide("gradient-share", gradient_share=share), 1e-3)
    schedule.step(gradient_ratio=(of_term.norm() / of_task.norm()).item())
    assert (schedule.weight * of_term).norm().item() == pytest.approx(share * of_task.norm().item(), rel=1e-9)


def test_gradients_are_wanted_at_the_first_step_and_then_every_few():
    schedule = build_schedule(CONTROLLERS["gradient-share"], 1e-3)
    wanted = []
    for _ in range(7):
        wanted.append(schedule.needs_gradients)
        schedule.step(gradient_ratio=1.0 if schedule.needs_gradients else None)
    assert wanted == [True, False, False, True, False, False, True]


def test_a_ratio_between_measurements_is_ignored():
    schedule = build_schedule(CONTROLLERS["gradient-share"], 1e-3)
    schedule.step(gradient_ratio=1.0)
    schedule.step(gradient_ratio=100.0)
    assert schedule.weight == 0.2


@few
@given(ratio=st.floats(1e-3, 1e3), rate=st.floats(0.01, 1.0))
def test_later_measurements_move_the_weight_by_the_rate_at_most_until_the_share_is_met(ratio, rate):
    schedule = build_schedule(wide("gradient-share", gradient_share=0.2, every=1, rate=rate), 1e-3)
    schedule.step(gradient_ratio=1.0)
    assert schedule.weight == 0.2
    for _ in range(math.ceil(abs(math.log(ratio)) / rate + 1e-9)):
        before = schedule.weight
        schedule.step(gradient_ratio=ratio)
        assert abs(math.log(schedule.weight / before)) <= rate * (1 + 1e-9)
    assert schedule.weight * ratio == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("ratio", [0.0, math.nan, math.inf])
def test_a_ratio_that_says_nothing_keeps_the_weight_and_is_asked_for_again(ratio):
    schedule = build_schedule(CONTROLLERS["gradient-share"], 1e-3)
    schedule.step(gradient_ratio=ratio)
    assert schedule.weight == 1e-3 and schedule.needs_gradients
    schedule.step(gradient_ratio=4.0)
    assert schedule.weight == 0.05  # still the first measurement: set, not approached
    assert not schedule.needs_gradients


@pytest.mark.parametrize(
    ("kind", "measured", "message"),
    [
        ("entropy", {}, "entropy is missing"),
        ("entropy", {"gradient_ratio": 1.0}, "entropy is missing"),
        ("entropy", {"entropy": math.nan}, "entropy is nan"),
        ("entropy", {"entropy": math.inf}, "entropy is inf"),
        ("gradient-share", {}, "gradient_ratio is missing"),
        ("gradient-share", {"entropy": 1.0}, "gradient_ratio is missing"),
        ("gradient-share", {"gradient_ratio": -1.0}, "gradient_ratio is -1.0"),
    ],
)
def test_measurements_that_are_missing_or_wrong_are_errors_and_change_nothing(kind, measured, message):
    schedule = build_schedule(CONTROLLERS[kind], 1e-3)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=message):
        schedule.step(**measured)
    assert schedule.state_dict() == before


@every_kind
@few
@given(entropies=st.lists(st.floats(0, 4), min_size=2, max_size=12), cut=st.integers(0, 12))
def test_a_resumed_schedule_goes_on_exactly(config, entropies, cut):
    def go_on(schedule, values):
        found = []
        for value in values:
            schedule.step(entropy=value, gradient_ratio=value)
            found.append((schedule.weight, schedule.needs_gradients))
        return found

    whole, first, second = (build_schedule(config, 1e-3) for _ in range(3))
    expected = go_on(whole, entropies)
    found = go_on(first, entropies[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + go_on(second, entropies[cut:]) == expected


@every_kind
def test_a_state_is_a_copy(config):
    schedule = build_schedule(config, 1e-3)
    taken, given = schedule.state_dict(), schedule.state_dict()
    before = dict(taken)
    schedule.step(entropy=0.5, gradient_ratio=2.0)
    assert taken == before != schedule.state_dict()
    schedule.load_state_dict(given)
    schedule.step(entropy=0.5, gradient_ratio=2.0)
    assert given == before != schedule.state_dict()


@every_controller
def test_measurements_as_scalar_tensors_leave_a_plain_state(config):
    schedule = build_schedule(config, 1e-3)
    schedule.step(entropy=torch.tensor(0.5), gradient_ratio=torch.tensor(2.0))
    assert schedule.weight != 1e-3
    assert json.loads(json.dumps(schedule.state_dict())) == schedule.state_dict()


@pytest.mark.parametrize(
    ("kind", "state", "message"),
    [
        ("cosine", {"kind": "linear", "steps": 3}, "kind 'linear'.*kind 'cosine'"),
        ("entropy", {"kind": "constant", "steps": 3}, r"kind 'constant' with keys.*kind 'entropy' with keys"),
        ("linear", {}, r"kind None with keys \[\].*kind 'linear' with keys \['kind', 'steps'\]"),
        ("linear", {"kind": "linear", "steps": 3, "lr": 1.0}, r"\['kind', 'steps', 'lr'\].*\['kind', 'steps'\]"),
        ("linear", {"kind": "linear", "steps": -1}, "steps in the schedule's state is -1"),
        ("linear", {"kind": "linear", "steps": "3"}, "steps in the schedule's state is '3'"),
        ("entropy", {"kind": "entropy", "weight": math.nan}, "weight in the schedule's state is nan"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing(kind, state, message):
    schedule = build_schedule({**COURSES, **CONTROLLERS}[kind], 1e-3)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == before
