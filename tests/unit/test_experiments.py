"""The experiments: each composes, fits four H100s, has the paper's settings, and every row of its tables has a run."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import pytest

from nemo_edo.configuration import ConfigError, arm_configs, compose_incomplete, compose_run, shipped_config_dir
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.doctor.memory import OVERHEAD
from nemo_edo.doctor.report import Devices, of_config
from nemo_edo.evaluation.comparison import START
from nemo_edo.evaluation.paper_settings import departures
from nemo_edo.evaluation.paper_tables import (
    EXPERIMENTS,
    OUT_OF_DISTRIBUTION,
    OVERALL,
    TABLES,
    evaluated_on,
    paper_values,
    rows_of,
    runs_for,
)

HELPER = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "experiment_run.py"))
FOLDER = shipped_config_dir() / "experiment"
NAMES = sorted(
    str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.yaml") if path.parent.name != "base"
)
OF_THE_PAPER = [name for name in NAMES if not name.startswith("builtin/")]
TRAINED = [name for name in OF_THE_PAPER if not name.startswith("ood/")]
H100 = Devices(False, 4, 80 * 10**9, OVERHEAD)
ROWS = [(table, row) for table in TABLES for row in rows_of(table)]


@functools.cache
def composed_with_missing(name: str):
    """Composing takes half a second."""
    return compose_incomplete(f"experiment/{name}", [])


def composed(name: str):
    return composed_with_missing(name)[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_under_its_own_name(name: str):
    cfg = composed(name)
    assert cfg.experiment == name
    assert cfg.name.startswith(name.replace("/", "_"))


def test_no_two_experiments_share_a_folder():
    names = [composed(name).name for name in NAMES]
    assert len(set(names)) == len(names)


def test_every_experiment_of_the_tables_has_a_config_and_the_other_way_round():
    assert set(EXPERIMENTS) == set(OF_THE_PAPER)


@pytest.mark.parametrize("name", TRAINED)
def test_an_experiment_fits_on_four_h100s_of_80_gb(name: str):
    assert of_config(*composed_with_missing(name), H100).problems == []


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_nothing_keeps_an_experiment_from_standing_beside_the_papers_numbers(tmp_path: Path, name: str):
    record = HELPER["experiment_record"](tmp_path / "run", composed(name))
    assert {arm: departures(record, arm) for arm in EXPERIMENTS[name].methods} == {
        arm: [] for arm in EXPERIMENTS[name].methods}


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: "-".join(map(str, vars(value).values()))[:90]
                         if hasattr(value, "method") else value)
def test_every_row_of_the_papers_tables_has_one_run_that_measures_it(table: str, row):
    [(name, arm)] = runs_for(table, row)
    cfg = composed(name)
    assert arm in {START, *arm_configs(cfg)}
    if name.startswith("ood/"):
        assert (cfg.algorithm, row.evaluated_on in (OVERALL, *OUT_OF_DISTRIBUTION)) == ("none", True)
    else:
        assert evaluated_on(cfg.data.tested_on, row.trained_on) == row.evaluated_on
        assert BENCHMARKS[cfg.data.benchmark].title.lower().startswith(row.trained_on.lower())


@pytest.mark.parametrize("data", ["aime24", "aime25", "math500", "minerva", "olympiadbench"])
def test_a_benchmark_is_chosen_by_data_and_has_a_folder_of_its_own(data: str):
    cfg, missing = compose_incomplete("experiment/ood/s1k_llama_eto", [f"data={data}"])
    assert evaluated_on(cfg.data.tested_on, "s1K") in OUT_OF_DISTRIBUTION
    assert (cfg.name, missing) == (f"ood_s1k_llama_eto_{data}", ["model.path", "data.test"])


def test_every_number_of_the_paper_stands_in_a_row():
    in_rows = [value for table in TABLES for row in rows_of(table) for found in row.values.values() for value in found]
    assert sorted(map(repr, in_rows)) == sorted(map(repr, paper_values()))
    assert len(in_rows) == 300


def test_overall_is_the_plain_mean_of_the_five_benchmarks_in_the_paper_too():
    of = {}
    for value in paper_values():
        if value.table == "ood":
            of.setdefault((value.backbone, value.method, value.column), {})[value.evaluated_on] = value.value
    assert len(of) == 24
    off = [abs(found[OVERALL] - sum(found[name] for name in OUT_OF_DISTRIBUTION) / 5) for found in of.values()]
    assert sorted(off)[-2] < 0.06 and max(off) < 0.5  # rounding, and one cell that does not add up


@pytest.mark.parametrize(("name", "arm", "batch", "lr", "rank"), [
    ("main/gsm8k_llama3_grpo", "ed_grpo", 512, None, 0), ("main/math_qwen_grpo", "ed_grpo", 512, None, 0),
    ("main/s1k_qwen_grpo", "ed_grpo", 32, None, 0), ("main/s1k_llama_grpo", "ed_grpo", 32, None, 0),
    ("main/gsm8k_llama3_idpo", "ed_idpo", 256, 5e-7, 8), ("main/math_qwen_idpo", "ed_idpo", 128, 5e-7, 8),
    ("main/s1k_qwen_idpo", "ed_idpo", 4, 5e-7, 8), ("main/s1k_llama_idpo", "ed_idpo", 4, 5e-7, 8),
])
def test_the_papers_hyper_parameters(name: str, arm: str, batch: int, lr: float | None, rank: int):
    cfg = composed(name)
    settings = arm_configs(cfg)[arm]
    assert (settings.minibatch_size, settings.iterations, settings.effective_alpha) == (batch, 3, 1e-3)
    assert lr is None or settings.optimizer.lr == lr
    assert (cfg.lora.rank, cfg.sampling.samples_per_prompt, cfg.sampling.temperature) == (rank, 10, 1.0)
    assert (cfg.evaluation.samples, cfg.evaluation.rollouts, settings.log_ratio_floor) == (10, 3, None)


def test_only_s1k_has_a_warm_up_of_one_epoch():
    steps = {name: composed(name).sft for name in TRAINED}
    assert {name for name, sft in steps.items() if sft.steps} == {"main/s1k_qwen_grpo", "main/s1k_llama_grpo"}
    sft = steps["main/s1k_qwen_grpo"]
    assert (sft.optimizer.lr, sft.steps * sft.batch_size // 1000) == (1e-5, 1)


def test_alphas_are_the_papers():
    for name in ("alpha/math_qwen_grpo", "alpha/math_qwen_idpo"):
        assert [arm.alpha for arm in arm_configs(composed(name)).values()] == [0, 1e-4, 1e-3, 1e-2, 1e-1]


def test_daposs_buffer_is_a_fifth_of_the_longest_response():
    for name in ("main/gsm8k_llama3_grpo", "main/math_qwen_grpo", "main/s1k_qwen_grpo", "main/s1k_llama_grpo"):
        cfg = composed(name)
        assert arm_configs(cfg)["dapo"].overlong_buffer == cfg.sampling.max_new_tokens // 5


def test_the_experiment_of_a_run_is_a_setting_like_others():
    assert compose_run("quickstart", []).experiment is None
    for line, expected in (("experiment=mine", "mine"), ("+experiment=mine/two", "mine/two"), ("~experiment", None)):
        assert compose_run("experiment/builtin/quickstart", [line]).experiment == expected


@pytest.mark.parametrize(("name", "told"), [
    ("experiment/main/gsm8k_llama3_grp", "did you mean experiment/main/gsm8k_llama3_grpo?"),
    ("experiment/mian/gsm8k_llama3_grpo", "has no folder experiment/mian"),
])
def test_an_unknown_experiment_is_told_with_the_nearest(name: str, told: str):
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        compose_run(name, [])
