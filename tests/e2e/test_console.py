"""What a person sees of a run: on a terminal of 80 columns, after Ctrl-C, and through a pipe."""

import re
import shlex
from pathlib import Path

import pytest
from helpers.terminal import COLUMNS, Terminal

ARGUMENTS = [
    "train", "--config-name=quickstart", "name=seen", "sft.steps=8", "sft.batch_size=16", "sft.micro_batch_size=8",
    "sampling.samples_per_prompt=4", "sampling.max_new_tokens=6", "grpo.iterations=3", "grpo.minibatch_size=16",
    "grpo.micro_batch_size=16", "grpo.problems_per_iteration=4", "evaluation.samples=2", "evaluation.rollouts=1",
    "evaluation.bootstrap=50", "data.arithmetic.warmup_problems=32", "data.arithmetic.train_problems=8",
    "data.arithmetic.test_problems=4", "guards.truncated.ceiling=null", "~arms", "replicate_baseline=false",
    "+arms={grpo: {alpha: 0}, other: {}}",
]  # fmt: skip
TIME_LEFT = r"( \S+ s/it left \d:\d\d( run ~\d:\d\d)?)?"
ITERATION = re.compile(rf"\[[23]/3\] (grpo|other) (\d)/3 reward \S+ KL \S+ H \S+ len \S+{TIME_LEFT}")


@pytest.fixture(scope="module")
def stopped(nemo_edo, tmp_path_factory) -> tuple[Path, int, list[str]]:
    """A run that got Ctrl-C on a terminal in its first arm: where it is, its status, and what was drawn."""
    folder = tmp_path_factory.mktemp("seen")
    with Terminal({"grpo 2/3": b"\x03"}) as terminal:
        done = nemo_edo(*ARGUMENTS, f"output_dir={folder}", before=[terminal.attached])
    return folder, done.returncode, terminal.drawn


@pytest.fixture(scope="module")
def resumed(stopped, nemo_edo) -> str:
    """What the same command then wrote into a pipe."""
    done = nemo_edo(*ARGUMENTS, f"output_dir={stopped[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_terminal_of_80_columns_shows_each_iteration_and_ctrl_c_is_one_line_that_says_what_is_saved(stopped):
    _, status, drawn = stopped
    of_iterations = [line for line in drawn if ITERATION.fullmatch(line)]
    assert status == 75 and of_iterations and all(len(line) <= COLUMNS for line in of_iterations)
    assert any(line.startswith("[1/3] warmup after 0: greedy ") and len(line) <= COLUMNS for line in drawn)
    told = " ".join(drawn[next(place for place, line in enumerate(drawn) if line.startswith("nemo-edo:")):])
    assert re.fullmatch(r"nemo-edo: stopped, with .* saved; the same command resumes the run", told)
    assert not any("Traceback" in line for line in drawn)


def test_a_pipe_gets_plain_lines_and_the_same_command_resumes(resumed: str):
    assert "\x1b" not in resumed and "resuming the unfinished run" in resumed
    lines = [match for line in resumed.splitlines() if (match := ITERATION.fullmatch(line))]
    assert [(match[1], match[2]) for match in lines][-3:] == [("other", str(number)) for number in (1, 2, 3)]
    assert "warmup" not in " ".join(line for line in resumed.splitlines() if line.startswith("[1/3]"))
    assert re.search(r"^\[3/3\] other after 3: greedy .* H ", resumed, re.MULTILINE)
    command = re.search(r"^command: nemo-edo (.*) \(resumes the run where it was stopped\)$", resumed, re.MULTILINE)
    assert shlex.split(command[1])[: len(ARGUMENTS)] == ARGUMENTS
