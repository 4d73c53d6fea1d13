"""Each second of a run in exactly one phase."""

from types import SimpleNamespace

from nemo_edo.utils.phases import PHASES, PhaseClock


def seconds(clock: PhaseClock) -> dict[str, float]:
    return {name: value for name, value in clock.take().items() if value}


def test_a_phase_within_another_interrupts_it_and_what_is_in_none_is_in_the_wall_time_alone():
    now = SimpleNamespace(at=100.0)
    clock = PhaseClock(lambda: now.at)
    with clock.phase("data"):
        now.at += 1
        with clock.phase("log_pi_old"):
            now.at += 2
        now.at += 4
    now.at += 8
    assert seconds(clock) == {"wall_s": 15, "data_s": 5, "log_pi_old_s": 2}
    assert clock.take() == {"wall_s": 0, **{f"{name}_s": 0 for name in PHASES}}


def test_a_resumed_process_adds_what_the_killed_one_had_not_written_once():
    resumed, kept = PhaseClock(lambda: 100.0, begun=99.0), {"wall_s": 5.0, "train_s": 5.0}
    resumed.carry_on(kept)
    resumed.carry_on(kept)
    assert seconds(resumed) == {"wall_s": 6, "start_s": 1, "train_s": 5}
