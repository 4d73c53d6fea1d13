import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.config import ScheduleConfig
from nemo_edo.losses import build_schedule

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
every_controller = pytest.mark.parametrize("config", CONTROLLERS.values(), ids=lambda c: c.kind)


def weights(schedule, steps: int) -> list[float]:
    """The weights of the first optimizer steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.weight)
        schedule.step()
    return found


@pytest.mark.parametrize(("kind", "shape"), [
    ("constant", lambda p: 1.0),
    ("linear", lambda p: 1 - 0.9 * p),
    ("cosine", lambda p: 0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2),
    ("warmup-hold-decay", lambda p: [0, 0.5, 1, 1, 1, 0.775, 0.55, 0.325, 0.1][round(8 * p)]),
])
@few
@given(weight=st.floats(1e-8, 10))
def test_a_fixed_course_has_its_shape_ends_exactly_at_the_final_factor_and_keeps_a_weight_of_zero(kind, shape, weight):
    schedule = build_schedule(COURSES[kind], weight)
    found = weights(schedule, 30)
    assert found == pytest.approx([weight * shape(min(t, 8) / 8) for t in range(30)], rel=1e-12)
    assert max(found) == weight and found[8:] == [weight if kind == "constant" else weight * 0.1] * 22
    assert not schedule.needs_gradients
    assert weights(build_schedule(COURSES[kind], 0.0), 12) == [0.0] * 12


@every_controller
def test_a_controller_starts_and_stays_within_its_bounds(config):
    for weight in (0.0, -0.1, 1e-9, 1.5):
        with pytest.raises(ValueError, match=rf"exploration weight is {weight}.*schedule.min_weight = 1e-08"):
            build_schedule(config, weight)
    for low, bound in ((True, config.max_weight), (False, config.min_weight)):
        assert build_schedule(config, bound).weight == bound
        schedule = build_schedule(config, 1e-3)
        for _ in range(200):
            schedule.step(entropy=0.0 if low else 9.0, gradient_ratio=1e-12 if low else 1e12)
        assert schedule.weight == bound


@pytest.mark.parametrize(("ceiling", "entropy", "exponent"), [
    (2.0, 0.5, 0.15), (2.0, -0.1, 0.3), (2.0, 1.0, 0), (2.0, 2.0, 0), (2.0, 3.0, -0.15), (2.0, 9.0, -0.3),
    (None, 1.0, 0), (None, 1.5, -0.15),
])
def test_entropy_controller_moves_in_proportion_to_the_distance_from_its_band(ceiling, entropy, exponent):
    schedule = build_schedule(replace(CONTROLLERS["entropy"], entropy_ceiling=ceiling), 1e-3)
    schedule.step(entropy=entropy)
    assert schedule.weight == pytest.approx(1e-3 * math.exp(exponent), rel=1e-12)
    assert (schedule.weight == 1e-3) == (exponent == 0)


def test_gradients_are_wanted_at_the_first_step_and_then_every_few_and_ignored_between():
    schedule = build_schedule(CONTROLLERS["gradient-share"], 1e-3)
    wanted = []
    for _ in range(7):
        wanted.append(schedule.needs_gradients)
        schedule.step(gradient_ratio=1.0 if schedule.needs_gradients else [None, 100.0][len(wanted) % 2])
        assert schedule.weight == 0.2
    assert wanted == [True, False, False, True, False, False, True]


@few
@given(ratio=st.floats(1e-3, 1e3), rate=st.floats(0.01, 1.0))
def test_later_measurements_move_the_weight_by_the_rate_at_most_until_the_share_is_met(ratio, rate):
    config = ScheduleConfig("gradient-share", gradient_share=0.2, every=1, rate=rate, min_weight=1e-30, max_weight=1e30)
    schedule = build_schedule(config, 1e-3)
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


@every_kind
@few
@given(entropies=st.lists(st.floats(0, 4), min_size=2, max_size=12), cut=st.integers(0, 12))
def test_a_resumed_schedule_continues_exactly_even_from_measurements_that_are_tensors(config, entropies, cut):
    def advance(schedule, values):
        found = []
        for value in map(torch.tensor, values):
            schedule.step(entropy=value, gradient_ratio=value)
            found.append((schedule.weight, schedule.needs_gradients))
        return found

    whole, first, second = (build_schedule(config, 1e-3) for _ in range(3))
    expected = advance(whole, entropies)
    found = advance(first, entropies[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + advance(second, entropies[cut:]) == expected
