"""Run folders read back, which runs a report is about, and which arms of theirs are the same."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import xxhash
import yaml
from helpers.experiment_run import write_evaluation
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.report.comparison import compare
from nemo_edo.report.page import facts
from nemo_edo.report.run_folders import find_runs
from nemo_edo.report.run_set import SEARCH_EVALUATION, Trained, one_run, read_run, read_runs
from nemo_edo.run_folder import RunFolder


@pytest.fixture
def sweep(tmp_path: Path):
    """sweep(alphas): the folder of a sweep of small runs with two seeds each."""

    def write(alphas=(0.0, 0.1)) -> Path:
        for alpha, seed in product(alphas, (1, 2)):
            write_run_folder(tmp_path / "sweep" / f"alpha={alpha:g},seed={seed}", seed=seed, arms=(),
                             alphas={"policy": alpha}, iterations=4, problems=20)
        return tmp_path / "sweep"

    return write


def change_config(run: Path, **values) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_folder_a_pattern_and_the_members_by_name_are_the_same_runs_each_once(sweep):
    folder = sweep()
    by_name = [str(run) for run in sorted(folder.iterdir())]
    arguments = ([str(folder)], [f"{folder}/alpha=*"], by_name, [str(folder), by_name[0]])
    found = [find_runs(one) for one in arguments]
    assert all(one.folders == found[0].folders and one.common == folder for one in found)
    runs = read_runs(found[0])
    arms = {label: sorted(by_seed) for label, by_seed in runs.arms.items()}
    assert (arms, runs.seeds) == ({"GRPO": [1, 2], "ED-GRPO α=0.1": [1, 2]}, [1, 2])
    one = find_runs(by_name[:1])
    alone = read_runs(one)
    assert (one.common, alone.is_one, alone.labels) == (folder / "alpha=0,seed=1", True, {"policy": "GRPO"})


def test_a_sweeps_members_are_those_that_it_lists_and_incomplete_ones_are_left_out_by_name(sweep, tmp_path: Path):
    folder = sweep()
    unfinished, unstarted = folder / "alpha=0,seed=2", folder / "alpha=0,seed=9"
    (unfinished / "summary.json").unlink()
    found = find_runs([str(folder)])
    assert (len(found.folders), found.left_out) == (3, {unfinished: "it has not finished"})
    members = {"alpha=0,seed=1": [], unstarted.name: []}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"members": members}))
    listed = find_runs([str(folder)])
    assert (listed.folders, listed.left_out) == ((folder / "alpha=0,seed=1",), {unstarted: "it has not started"})
    (folder / "sweep.yaml").unlink()
    for run in found.folders:
        (run / "summary.json").unlink()
    (tmp_path / "empty").mkdir()
    for argument, told in ((folder, "none of the 4 runs has finished"), (tmp_path / "nowhere", "no such folder"),
                           (tmp_path / "empty", "no run is in it"), (unfinished, "it has not finished .* resumes it")):
        with pytest.raises(UserError, match=told):
            find_runs([str(argument)])


@pytest.mark.parametrize(("changes", "labels"), [
    *((change, ["GRPO"]) for change in (
        {"grpo__micro_batch_size": 3, "threads": 4, "evaluation__bootstrap": 10, "model__loss_head": "fused",
         "grpo__reference_placement": "resident", "guards__max_skipped_steps": 9, "train__seed": 7, "search__steps": 9,
         "model__verify": False, "allow_changed": ["data.test"], "data__allow_overlap": True,
         "rewards__function_time_limit_s": 3.0},
        {"grpo__beta": 0}, {"grpo__alpha": 0.0})),  # the default, null, stands for the summary's
    ({"grpo__clip_high": 0.28}, ["GRPO, clip_high 0.2", "GRPO, clip_high 0.28"]),
    ({"arms": {"policy": {"optimizer": {"lr": 1.0}}}}, ["GRPO, optimizer.lr 1e-06", "GRPO, optimizer.lr 1.0"]),
    ({"sampling__temperature": 0.5}, ["GRPO, sampling.temperature 1.0", "GRPO, sampling.temperature 0.5"])])
def test_arms_are_told_apart_by_their_settings_unless_these_have_no_effect(sweep, changes: dict, labels: list[str]):
    folder = sweep(alphas=(0.0,))
    for run in folder.iterdir():
        change_config(run, grpo__beta=0.0)
    change_config(folder / "alpha=0,seed=2", **changes)
    assert list(read_runs(find_runs([str(folder)])).arms) == labels


@pytest.mark.parametrize(("changes", "named"), [
    ({"evaluation__samples": 4, "model__seq_length": 7}, "evaluation.samples is "),
    ({"something_new": 1}, "something_new is missing in the one and 1 in the other"),
    ({"data__prompt": "Q", "evaluation__rollouts": 4}, "'Q' in the other (also different: evaluation.rollouts); runs")])
def test_runs_that_differ_in_more_than_arms_and_seeds_are_refused_with_both_values(sweep, changes: dict, named: str):
    folder = sweep()
    change_config(folder / "alpha=0.1,seed=1", **changes)
    with pytest.raises(UserError) as refused:
        read_runs(find_runs([str(folder)]))
    told = (named, "alpha=0,seed=1 and ", "alpha=0.1,seed=1 cannot be compared")
    assert all(part in str(refused.value) for part in told)


@pytest.mark.parametrize(("other", "told"), [
    ({"seed": 3, "arms": ("grpo",), "problems": 21}, r"evaluated on different problems \(20 and 21\)"),
    ({"seed": 2, "arms": (), "alphas": {"policy": 0.0}, "problems": 20}, "other.* both trained GRPO with seed 2")])
def test_runs_on_other_problems_and_one_arm_trained_twice_with_one_seed_are_refused(sweep, other: dict, told: str):
    folder = sweep()
    write_run_folder(folder / "other", iterations=4, **other)
    with pytest.raises(UserError, match=told):
        read_runs(find_runs([str(folder)]))


def test_runs_of_other_data_are_refused_and_a_reward_that_was_edited_between_is_told(sweep):
    folder = sweep(alphas=(0.0,))

    def with_other(name: str):
        for seed, content in ((1, "a"), (2, "b")):
            RunFolder(folder / f"alpha=0,seed={seed}").note("files", inputs={name: {"file": [content]}})
        return read_runs(find_runs([str(folder)]))

    with pytest.warns(UserWarning, match="seed=1 and .*seed=2: rewards.function: the files had other content"):
        assert with_other("rewards.function").seeds == [1, 2]
    with pytest.raises(UserError, match="cannot be compared: the files of data.train had other content"):
        with_other("data.train")


@pytest.fixture
def folder(tmp_path):
    return write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), iterations=3, problems=20)


def test_a_run_folder_reads_back_and_nulls_nans_and_lines_of_other_kinds_are_tolerated(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "collection", "arm": "grpo", "iteration": 3, "reward": NaN, "entropy": null}\n'
                   '{"kind": "note"}\n')
    record = read_run(folder)
    assert list(record.evaluations) == ["warmup", *record.arms] == ["warmup", "grpo", "edo_floor"]
    assert Trained(record, "edo_floor").lines("collection")["iteration"].tolist() == [0, 1, 2]
    assert compare(one_run(folder)).matched.accuracies


def test_arms_of_one_run_with_one_label_have_their_names_too(tmp_path):
    folder = write_run_folder(tmp_path / "run", alphas={"dr_grpo": 0.0}, iterations=3, problems=20)
    labels = one_run(folder).labels
    assert [labels["grpo"], labels["dr_grpo"]] == ["GRPO (grpo)", "GRPO (dr_grpo)"]
    assert "(" not in labels["edo_floor"]
    summary = json.loads((folder / "summary.json").read_text())
    summary["arms"]["dr_grpo"]["stopped_early"] = "stopped"
    (folder / "summary.json").write_text(json.dumps(summary))
    assert facts(compare(one_run(folder)))["Stopped early"] == "GRPO (dr_grpo) stopped"


@pytest.mark.parametrize(("name", "spoil", "told"), [
    ("summary.json", lambda text: text.replace('"exploration_weight": 0.0, ', "", 1), ": arms.grpo.exploration_w"),
    ("summary.json", lambda text: text.replace('"alpha": 0.0', '"alpha": "x"', 1), ": arms.grpo.alpha is .* not"),
    ("evaluations/edo_floor.json", lambda text: text.replace('"vote@', '"vote\\n@', 1), "expected sums and counts"),
    ("evaluations/edo_floor.json", lambda text: re.sub(r'"sum": \[[\d.]+', '"sum": [99', text, count=1), "between 0"),
    ("config.yaml", lambda text: "seed: 1\n", "config.yaml: data is missing"),
    *(("metrics.jsonl", lambda text, bad=bad: text.replace("\n", f"\n{bad}\n", 1), "metrics.jsonl:2: ")
      for bad in ('{"kind": "collection", "arm"', "[1]", "[" * 9999, '{"kind": []}')),
    ("metrics.jsonl", lambda text: text.replace('"entropy": 0', '"entropy": "high", "reward": 0', 1), "'high'")])
def test_what_a_file_lacks_is_named_with_the_file(folder, name: str, spoil, told: str):
    text = (folder / name).read_text()
    (folder / name).write_text(spoil(text))
    with pytest.raises(UserError, match=told) as raised:
        compare(one_run(folder))
    assert name in str(raised.value) and "\n" not in str(raised.value)


def test_lines_that_are_not_those_that_the_run_logged_are_refused_and_later_ones_are_not(folder):
    path, content = folder / "metrics.jsonl", (folder / "metrics.jsonl").read_bytes()
    mark = {"metrics_bytes": len(content), "metrics_checksum": xxhash.xxh3_128_hexdigest(content)}
    RunFolder(folder).note("warmup", metrics_bytes=0)
    RunFolder(folder).note("grpo", **mark)
    path.write_bytes(content + content.splitlines(keepends=True)[-1])  # of a later nemo-edo evaluate
    assert len(read_run(folder).lines) == len(content.splitlines()) + 1
    for changed in b"", content[: content.rindex(b"\n", 0, -1) + 1], content.replace(b"0.1", b"0.2", 1):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: its first {len(content)} bytes"):
            read_run(folder)


def test_an_arm_has_its_curves_and_its_only_search_unless_that_is_of_other_problems(folder):
    def measured() -> set[str]:
        return {*read_run(folder).test_time["grpo"].metrics}

    one, two = (folder / "search" / "grpo" / name / SEARCH_EVALUATION for name in ("one", "two"))
    write_evaluation(one, "grpo", {"search_accuracy": [1.0] * 20})
    assert measured() == {"search_accuracy"}
    write_evaluation(folder / "test_time" / "grpo.json", "grpo", {"pass@1": [0.0, 1.0] * 10})
    assert measured() == {"pass@1", "search_accuracy"}
    write_evaluation(two, "grpo", {"search_accuracy": [1.0] * 20})
    assert measured() == {"pass@1"}, "of several searches none is taken"
    two.unlink()
    write_evaluation(one, "grpo", {"search_accuracy": [1.0] * 3})
    with pytest.warns(UserWarning, match=f"{SEARCH_EVALUATION}: has other problems than .*grpo.json"):
        assert measured() == {"pass@1"}
