"""The lines of a run: what they say, how wide they are, and how many there are."""

import pytest

from nemo_edo.run.metrics_log import RunConsole

NAME = "ed_grpo_with_a_floor_and_a_very_long_name"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console(clock: Clock) -> RunConsole:
    return RunConsole({"warmup": 600, "grpo": 15, NAME: 15}, clock)


def collection(iteration: int) -> dict:
    return {"iteration": iteration, "reward": 0.644, "kl": 0.0804, "entropy": 0.26, "response_length": 21.2, "lag": 0}


def evaluation(iteration: int, *, final: bool = True) -> dict:
    metrics = {name: {"mean": mean} for name, mean in (("greedy_accuracy", 0.71), ("vote@4", 0.7), ("vote@10", 0.8),
                                                       ("pass@10", 1.0), ("distinct_4", 0.44), ("entropy", 0.31))}
    return {"iteration": iteration, "final": final, "metrics": metrics, "evaluation_s": 6.0}


def test_an_iterations_line_has_the_samples_numbers_and_the_time_left_of_arm_and_run(console, clock, capsys):
    console.begin("grpo")
    for iteration in range(9):
        clock.now = 2.0 * iteration
        console("collection", collection(iteration))
        console("train_step", {"loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[2/3] grpo 1/15 reward .64 KL .08 H .26 len 21"
    # 8 iterations took 2 s each: 7 are left of this arm, and 15 of the other.
    assert lines[-1] == "[2/3] grpo 9/15 reward .64 KL .08 H .26 len 21 2.0 s/it left 0:14 run ~0:44"
    console("evaluation", evaluation(15))
    assert capsys.readouterr().out == "[2/3] grpo after 15: greedy .71 vote@10 .80 pass@10 1.0 dist-4 .44 H .31\n"
    console.begin(NAME)  # each arm ends with an evaluation
    for iteration in (3, 4):  # a resumed arm
        clock.now += 2.0
        console("collection", collection(iteration))
    assert capsys.readouterr().out.splitlines()[-1].endswith("2.0 s/it left 0:28 run ~0:28")
