"""A study's file, its cells, and its table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_edo.config.compose import ConfigError, arm_configs
from nemo_edo.config.run import training_seed
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.experiments.grid import Cell
from nemo_edo.experiments.study import changed_cells, cpu_hours_left, read_study, status_lines
from nemo_edo.experiments.study_table import COLUMNS, append_rows, cell_of, config_digest, last_rows, read_rows
from nemo_edo.run_folder import RunFolder

SUMS = {"sums": {"config": "study/sums"}}
SETTINGS = {
    "name": "two",
    "seeds": [1, 2],
    "tasks": {**SUMS, "gcd": {"config": "study/gcd", "settings": ["grpo.iterations=2"]}},
    "arms": {
        "grpo": {},
        "clip_higher": {"arm": "grpo", "dose": "clip_high", "doses": [0.28, 0.4]},
        "target": {"arm": "ed_grpo_floor", "settings": {"alpha": None, "exploration_coefficient": 0.1},
                   "dose": "log_ratio_floor", "doses": [-0.2]},
    },
}


@pytest.fixture
def written(tmp_path: Path):
    def write(**changes):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({**SETTINGS, "output_dir": str(tmp_path), **changes}, sort_keys=False))
        return read_study(path)

    return write


def row(cell, **values) -> dict:
    named = dict(zip(("task", "arm", "dose", "seed"), map(str, cell.key), strict=True))
    return {**dict.fromkeys(COLUMNS, ""), **named, "cpu_seconds": "36", **values}


def test_cells_are_every_combination_seeds_outermost_and_each_composes_to_its_dose(written):
    study = written()
    assert [cell.key for cell in study.cells][:5] == [
        ("sums", "grpo", "", 1), ("sums", "clip_higher", "0.28", 1), ("sums", "clip_higher", "0.4", 1),
        ("sums", "target", "-0.2", 1), ("gcd", "grpo", "", 1)]
    assert len({cell.name for cell in study.cells}) == len(study.cells) == 2 * 2 * 4
    by_key = {cell.key: cell.cfg for cell in study.cells if cell.seed == 2 and cell.task == "gcd"}
    [clipped] = arm_configs(by_key["gcd", "clip_higher", "0.4", 2]).values()
    assert (clipped.clip_high, clipped.iterations, clipped.exploration_weight) == (0.4, 2, 0)
    assert by_key["gcd", "grpo", "", 2].seed == 2
    fewer = written(arms={"grpo": {}, "replicate": {"first_seeds": 1}})
    assert {(cell.arm, cell.seed) for cell in fewer.cells} == {("grpo", 1), ("grpo", 2), ("replicate", 1)}
    settings = {"alpha": None, "exploration_coefficient": 0.1, "schedule.kind": "entropy"}
    target = {"arm": "ed_grpo_floor", "settings": settings, "dose": "schedule.entropy_target", "doses": [0.2]}
    [arm] = arm_configs(written(arms={"target": target}).cells[0].cfg).values()
    assert (arm.exploration_weight, arm.schedule.kind, arm.schedule.entropy_target) == (0.1, "entropy", 0.2)


def test_seeds_take_the_warm_ups_in_turn_and_train_with_their_own_samples(written):
    study = written(seeds=[1, 2, 3], warm_up_seeds=[101, 102], arms={"grpo": {}}, tasks=SUMS)
    assert [(cell.seed, cell.cfg.seed, training_seed(cell.cfg)) for cell in study.cells] == [
        (1, 101, 1), (2, 102, 2), (3, 101, 3)]
    assert [cell.seed for cell in study.left() if cell.arm == "warmup"] == [101, 102]
    [donor] = study.donors(study.cells[2])
    assert donor.warm_up == study.cells[2].warm_up
    assert Cell.warm_up.func(donor) == Cell.warm_up.func(study.cells[2])  # the settings that reach the warm-up


@pytest.mark.parametrize(("changes", "message"), [
    ({"warm_up_seeds": [5, 5]}, "warm_up_seeds is .5, 5."),
    ({"task": {}}, "unknown key task; did you mean tasks"),
    ({"tasks": {"a/b": {"config": "x"}}}, "'a/b' names no task or arm"),
    ({"arms": {"grpo": {"dose": "clip_high"}}}, "arms.grpo: dose and doses"),
    ({"arms": {"grpo": {"dose": "clip_high", "doses": [0.1, 0.1]}}}, "expected different numbers"),
    ({"baselines": ["grop"]}, "baselines has 'grop', which is no arm; did you mean grpo"),
    ({"arms": {"grpo": {"first_seeds": 3}}}, "arms.grpo.first_seeds is 3, expected at most the 2 of seeds"),
    ({"seeds": [1, 1]}, "seeds is .1, 1."), ({"seeds": [-1]}, "of at least 0"), ({"seeds": [True]}, "seeds"),
    ({"held_out": True, "arms": {"grpo": {}}, "baselines": ["grpo"]}, "and an arm that is none"),
    ({"held_out": True, "baselines": ["grpo"], "arms": {"grpo": {}, "x": {"dose": "alpha", "doses": [0.1, 0.2]}}},
     "arms.x.doses is .0.1, 0.2."),
    ({"held_out": True, "baselines": ["grpo"], "seeds": [1]}, "seeds is .1., expected at least two where held_out"),
    ({"held_out": True, "baselines": ["grpo"], "arms": {"grpo": {}, "replicate": {"first_seeds": 1}}},
     "arms.replicate.first_seeds is 1, expected all seeds"),
])
def test_a_wrong_file_is_an_error_that_names_the_key(written, changes, message: str):
    with pytest.raises(UserError, match=message):
        written(**changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"tasks": {"sums": {"config": "study/sum"}}}, "sums,.*: no config named study/sum"),
    ({"arms": {"grpoo": {}}}, "sums,grpoo,seed=1: .*no config grpoo in group arm"),
    ({"arms": {"several": {"arm": "controls"}}}, "a cell has one arm and a warm-up"),
    ({"settings": ["sft.steps=0"]}, "a cell has one arm and a warm-up"),
    ({"held_out": True, "baselines": ["grpo"], "arms": {"grpo": {}, "replicate": {}}, "seeds": [1, 2],
      "settings": ["evaluation.tuning_problems=0"]}, "sums,.*: held_out .* set evaluation.tuning_problems"),
])
def test_what_cannot_be_trained_is_refused_before_any_cell(written, changes, message: str):
    with pytest.raises(ConfigError, match=message):
        written(**{"seeds": [1], **changes}).check()


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[] if path.stem == "collapse" else pytest.mark.slow)
    for path in sorted((shipped_config_dir() / "studies").glob("*.yaml"))])
def test_shipped_studies_give_baselines_as_many_tries_as_any_arm_and_compose(path: Path):
    study = read_study(path)
    each_once = {name: replace(arm, doses=arm.doses[:1]) for name, arm in study.arms.items()}
    replace(study, seeds=study.seeds[:1], arms=each_once).check()
    tries = {name: len(arm.doses) for name, arm in study.arms.items() if arm.doses}
    assert study.table.parent == Path("docs/studies")
    if study.name != "collapse":  # its one question is about the mean over all doses: none is chosen
        assert len(set(tries.values())) <= 1


def test_a_finished_cell_is_one_that_the_table_has_whatever_folders_there_are(written):
    study = written()
    assert len(study.unfinished()) == len(study.cells) and cpu_hours_left(study) is None
    done = study.cells[:4]
    append_rows(study.table, [row(cell) for cell in done])
    append_rows(study.table, [row(study.start("sums", 1), cpu_seconds="72")])
    assert study.unfinished() == study.cells[4:]
    # 12 cells of 36 s, and the three warm-ups that are missing, of 72 s
    assert cpu_hours_left(study) == pytest.approx((12 * 36 + 3 * 72) / 3600)


def test_cells_whose_settings_have_changed_since_are_named(written):
    study = written(seeds=[1], tasks=SUMS, arms={"grpo": {}})
    rows = [row(cell, config=config_digest(cell.cfg)) for cell in study.cells]
    append_rows(study.table, rows)
    assert changed_cells(study) == []
    other = replace(study, settings=["grpo.beta=0.02"])
    assert changed_cells(other) == other.cells
    assert "settings have changed since these were run: sums,grpo,seed=1" in status_lines(other)[-1]


def test_a_finished_cell_gets_a_row_for_each_evaluation_and_temperature_and_only_what_is_kept_stays(written):
    study = written(keep="results")
    cell = study.cells[1]
    folder, two = study.run_folder(cell), (np.array([1.0, 0.0]), np.ones(2))
    metrics = {"accuracy": two, "vote@2": two, "vote@10": (np.ones(2), np.ones(2)), "vote@10/t0.6": two,
               "accuracy/best": (np.ones(2), np.ones(2)), "best_temperature": (np.full(2, 0.6), np.ones(2))}
    folder.write_evaluation(Evaluation("grpo", ("a", "b"), {"accuracy": two}), 3)
    folder.write_evaluation(Evaluation("grpo", ("a", "b"), metrics))
    folder.write_json("summary.json", {"commit": "abc+"})
    folder.checkpoint("grpo").mkdir(parents=True)
    folder.evaluated("grpo", "sampled").mkdir(parents=True)
    assert study.record(cell, 0, 12.34)
    rows = read_rows(study.table)
    shown = [(one["iteration"], one["temperature"], one["accuracy"], one["vote"]) for one in rows]
    assert shown == [("3", "1", "0.50000", ""), ("15", "1", "0.50000", "1.00000"), ("15", "0.6", "", "0.50000"),
                     ("15", "best", "1.00000", "")]
    assert {(cell_of(one), one["cpu_seconds"], one["commit"], one["problems"]) for one in rows} == {
        (cell.key, "12.3", "abc+", "2")}
    assert rows[1]["best_temperature"] == "0.60000" and rows[1]["config"] == config_digest(cell.cfg)
    assert last_rows(rows, "1") == {cell.key: rows[1]}
    assert not (folder.path / "checkpoints").exists() and not folder.evaluated("grpo", "sampled").exists()
    assert folder.evaluation("grpo").is_file() and cell not in study.left()


def test_a_training_that_a_guard_stopped_has_a_row_that_says_why_and_any_other_failure_has_none(written):
    study = written()
    cell, other = study.cells[:2]
    RunFolder(study.folder / study.start("sums", 1).name).write_json("summary.json", {"commit": "abc"})
    study.log(cell).parent.mkdir()
    study.log(cell).write_text("...\nnemo-edo: stopped by a guard: grpo, not finite\nnemo-edo: its state is saved\n")
    assert study.record(cell, 3, 1.0) and not study.record(other, 1, 1.0)
    [row] = read_rows(study.table)
    assert (cell_of(row), row["note"], row["commit"]) == (cell.key, "grpo, not finite", "abc")
    assert last_rows([row], "best") == {cell.key: row}
    (study.folder / study.start("sums", 1).name / "summary.json").unlink()  # the guard has stopped its start, too
    study.log(other).write_text("nemo-edo: stopped by a guard: warmup, not finite\n")
    assert study.record(other, 3, 1.0) and read_rows(study.table)[1]["commit"] == ""


def test_starts_are_run_before_the_first_of_their_cells_and_again_only_for_cells_that_are_left(written):
    study = written(seeds=[1], arms={"grpo": {}})
    names = [cell.name for cell in study.left()]
    assert names == ["sums,warmup,seed=1", "sums,grpo,seed=1", "gcd,warmup,seed=1", "gcd,grpo,seed=1"]
    append_rows(study.table, [row(study.start("sums", 1)), row(study.start("gcd", 1)), row(study.cells[0])])
    assert [cell.name for cell in study.left()] == names[2:]
    for task in ("sums", "gcd"):
        study.run_folder(study.start(task, 1)).write_json("summary.json", {})
    assert [cell.name for cell in study.left()] == names[3:]
    assert study.donors(study.cells[1]) == [study.start("gcd", 1)]
    assert study.cells[1].warm_up == study.start("gcd", 1).warm_up != study.cells[0].warm_up
