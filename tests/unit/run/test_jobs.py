"""What a user reads when a command's input is wrong: one message, status 2, and nothing left behind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.problem_files import ROWS, problem_overrides

from nemo_edo.config import ParallelismConfig, SFTConfig
from nemo_edo.config.compose import compose_run, resolved_yaml
from nemo_edo.run.stored_run import open_run


class Inputs:
    """Writes input files into a test's folder, where its runs go as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def problems(self, train: list = ROWS[:3], test: list = ROWS[3:]) -> list[str]:
        return problem_overrides(self.folder, train=train, test=test)

    def train(self, *overrides: str) -> list[str]:
        return ["train", "replicate_baseline=false", "name=a", f"output_dir={self.folder / 'runs'}", "sft.steps=1",
                *overrides]

    def of_run(self, command: str, finished: str, **changes) -> list[str]:
        """A run of two arms, killed when these arms were finished."""
        run = self.folder / "runs" / "a"
        run.mkdir(parents=True)
        for arm in finished.split():
            (run / "checkpoints" / arm).mkdir(parents=True)
        arms = {"one": {"alpha": 0}, "two": {"alpha": 1}}
        quickstart = compose_run("quickstart", ["replicate_baseline=false", "sft.steps=1"])
        cfg = replace(quickstart, name="a", output_dir=str(run.parent), **{"arms": arms, **changes})
        (run / "config.yaml").write_text(resolved_yaml(cfg))
        return self.filled(command)

    def filled(self, words: str) -> list[str]:
        return words.replace("{}", str(self.folder)).split()


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


# In all tables {} is the test's folder, and the last column what the message has to name. test_build.py has the
# problem files', and tests/unit/data the model folders'.
TRAIN = {
    "tracking setting that NeMo lacks": ("exp_manager.bogus=1", "exp_manager.bogus: "),
    "output folder below a file": (
        "output_dir={}/train.jsonl", "{}/train.jsonl/a cannot be made in {}/train.jsonl (Not a directory)"),
    "output in the kernel's files": (
        "output_dir=/proc/x", "/proc/x/a cannot be made in /proc (its file system takes no files); choose another"),
    "no stored rollouts": ("train.rollouts={}/none grpo.allow_one_step=true", "{}/none/iter_00000: has no rollouts"),
    "stop by an unknown metric": ("evaluation.every=1 early_stop.metric=pass@99", "early_stop.metric is 'pass@99'"),
}
# The second column has the arms that are finished.
OF_A_RUN = {
    "name of another run": (
        "train name=a output_dir={}/runs sft.steps=1 replicate_baseline=false ~arms "
        "+arms={one:{alpha:0},two:{alpha:1}} seed=2", "",
        "{}/runs/a exists already with another config: seed is 42 there and 2 here"),
    "export of an unknown arm": (
        "export {}/runs/a {}/out --arm=three", "", "{}/runs/a has no arm 'three'; it has warmup, one, two"),
    "export of one of several arms": (
        "export {}/runs/a {}/out", "", "{}/runs/a has the arms one, two: choose one with --arm"),
    "export of an unfinished arm": (
        "export {}/runs/a {}/out --arm=one", "", "{}/runs/a/checkpoints/one is missing"),
    "export into a folder in use": (
        "export {}/runs/a {}/runs --arm=one", "one", "{}/runs exists already and is not an empty folder"),
    "collect of an unknown arm": (
        "collect output_dir={}/new --arm=grp", "", "the config has no arm 'grp'; did you mean grpo? (there are: "),
    "evaluate with foreign overrides": (
        "evaluate {}/runs/a evaluation.samples=2 seed=3 grpo.alpha=0", "",
        "evaluate takes overrides of evaluation.* and allow_changed only, not seed=3, grpo.alpha=0"),
    "evaluate of a run whose last arm is unfinished": (
        "evaluate {}/runs/a", "warmup one", "{}/runs/a/checkpoints/two is missing"),
}


def assert_refused(nemo_edo, inputs: Inputs, arguments: list[str], told: str) -> None:
    before = set(inputs.folder.rglob("*"))
    done = nemo_edo(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("nemo-edo: error: ") and "Traceback" not in done.stderr
    assert told.replace("{}", str(inputs.folder)) in done.stderr
    assert set(inputs.folder.rglob("*")) == before


@pytest.mark.parametrize(("overrides", "told"), TRAIN.values(), ids=TRAIN)
def test_a_training_that_cannot_begin_is_one_message_and_leaves_nothing(nemo_edo, inputs, overrides: str, told: str):
    assert_refused(nemo_edo, inputs, inputs.train(*inputs.problems(), *inputs.filled(overrides)), told)


@pytest.mark.parametrize(("command", "finished", "told"), OF_A_RUN.values(), ids=OF_A_RUN)
def test_what_a_run_does_not_have_is_one_message_and_leaves_it_as_it_was(nemo_edo, inputs, command, finished, told):
    assert_refused(nemo_edo, inputs, inputs.of_run(command, finished), told)


def test_an_arm_of_a_run_that_trained_nothing_is_refused_before_it_generates(nemo_edo, inputs):
    command = inputs.of_run("evaluate {}/runs/a --arm=one", "", algorithm="none", arms={}, sft=SFTConfig(steps=0))
    assert_refused(nemo_edo, inputs, command, "{}/runs/a has no arm 'one': nothing was trained")


SMALL = ["grpo.iterations=1", "grpo.minibatch_size=8", "grpo.allow_one_step=true", "sampling.samples_per_prompt=2",
         "sampling.max_new_tokens=4", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
         "~arms"]


def test_skipped_rows_and_overlap_are_counted_the_run_continues_and_its_warnings_reach_stderr_once(nemo_edo, inputs):
    problems = inputs.problems(train=[*ROWS[:4], "{", ROWS[0]], test=[*ROWS[4:], "[", ROWS[1]])
    command = [*inputs.train(*problems, *SMALL, "data.allow_overlap=true"), "--on-bad-rows=skip"]
    done = nemo_edo(*command, before=[("warnings:resetwarnings",)])  # those of the process that this one is forked from
    assert done.returncode == 0, done.stderr
    assert "3 bad rows of the problems files were left out" in done.stdout.splitlines()
    assert "1 of the 3 test problems are train problems, too (data.allow_overlap)" in done.stdout.splitlines()
    run = inputs.folder / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["skipped_rows"] == 3
    evaluation = json.loads((run / "evaluations" / "policy.json").read_text())
    assert evaluation["problems"] == ["test-1", "test-2", "test-4"]
    # NeMo swallows Python's warnings when it is imported: this one has to come through.
    assert done.stderr.count("one optimizer step for each collection") == 1


def test_supervised_training_alone_is_evaluated_reported_and_exported(nemo_edo, inputs):
    run, out = inputs.folder / "runs" / "a", inputs.folder / "out"
    said = nemo_edo.succeed(*inputs.train(*inputs.problems(), *SMALL, "algorithm=sft"))
    assert json.loads((run / "summary.json").read_text())["arms"] == {}
    kinds = {json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"sft_step", "evaluation", "phases"}
    assert any(line.split()[:1] == ["SFT"] for line in said.splitlines())
    assert "SFT" in (run / "report.html").read_text()
    nemo_edo.succeed("export", str(run), str(out))
    assert (out / "model.safetensors").is_file()


def test_one_process_exports_what_any_layout_trained(inputs, monkeypatch):
    from nemo_edo.run import jobs
    from nemo_edo.run.build import Builder

    def load(builder, arm):
        raise LookupError(builder._cfg.parallelism, builder._cfg.model.attention)

    layout = ParallelismConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    inputs.of_run("", "one", parallelism=layout)
    monkeypatch.setattr(Builder, "trained", load)
    with pytest.raises(LookupError) as asked:
        jobs.export(open_run(inputs.folder / "runs" / "a"), inputs.folder / "out", "one", 10**9)
    assert asked.value.args == (ParallelismConfig(), "auto")
