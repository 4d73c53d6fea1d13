"""The experiments: each composes, fits four H100s, has the paper's settings, and every row of its tables has a run."""

import functools
from pathlib import Path

import pytest
from helpers.experiment_run import experiment_record

from nemo_edo.checks.doctor import Devices, of_config
from nemo_edo.checks.machine import FAIL
from nemo_edo.config.compose import arm_configs, compose_incomplete
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.evaluation.results import START
from tools.paper_tables import published
from tools.paper_tables.settings import departures

pytestmark = pytest.mark.slow
FOLDER = shipped_config_dir() / "experiment"
NAMES = sorted(
    str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.yaml") if path.parent.name != "base"
)
OF_THE_PAPER = [name for name in NAMES if not name.startswith("builtin/")]
TRAINED = [name for name in OF_THE_PAPER if not name.startswith("ood/")]
EXPERIMENTS = published.read_texts("experiments.csv")
MEASURED = EXPERIMENTS.assign(tables=EXPERIMENTS["tables"].str.split()).explode("tables")
"""A line for each arm and table."""
H100 = Devices(False, 4, 80 * 10**9)


@functools.cache
def composed(name: str):
    """The config and the keys that it lacks. Composing takes half a second."""
    return compose_incomplete(f"experiment/{name}", [])


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_under_its_name_with_the_papers_settings(tmp_path: Path, name: str):
    cfg, _ = composed(name)
    benchmark = f"_{cfg.data.test_benchmark}" if name.startswith("ood/") else ""
    assert (cfg.experiment, cfg.name) == (name, name.replace("/", "_") + benchmark)
    if name in OF_THE_PAPER:
        record = experiment_record(tmp_path / "run", cfg)
        found = {arm: departures(record, arm) for arm in published.measured_by(name)["arm"]}
        assert found == {arm: [] for arm in found}
        assert (cfg.evaluation.samples, cfg.evaluation.rollouts) == (10, 3)
    # DAPO's buffer is a fifth of the longest response, as its authors' 4,096 of 20,480.
    dapo = arm_configs(cfg).get("dapo")
    assert dapo is None or dapo.overlong_buffer == cfg.sampling.max_new_tokens // 5


@pytest.mark.parametrize("name", TRAINED)
def test_an_experiment_fits_on_four_h100s_of_80_gb(name: str):
    assert not [found for _, found in of_config(*composed(name), H100) if found.status == FAIL]


@pytest.mark.parametrize("table", published.TABLES)
def test_every_row_of_the_papers_tables_has_one_run_that_measures_it(table: str):
    arms = MEASURED[MEASURED["tables"] == table]
    for row in published.published(table)[published.ROW].drop_duplicates().itertuples():
        elsewhere = row.evaluated_on in (published.OVERALL, *published.OUT_OF_DISTRIBUTION)
        method = "cot" if row.method == "searchllm" else row.method
        same = (arms[["backbone", "trained_on", "method"]] == [row.backbone, row.trained_on, method]).all(axis=1)
        [measures] = arms[same & ((arms["evaluated_on"] == published.OVERALL) == elsewhere)].itertuples()
        cfg, _ = composed(measures.experiment)
        assert measures.arm in {START, *arm_configs(cfg)}
        assert (cfg.algorithm == "none") == elsewhere
        assert elsewhere or published.evaluated_on(cfg.data.tested_on, row.trained_on) == row.evaluated_on
        assert elsewhere or BENCHMARKS[cfg.data.benchmark].title.lower().startswith(row.trained_on.lower())


def test_every_experiment_of_the_tables_has_a_config_and_no_two_arms_measure_one_row():
    assert set(MEASURED["experiment"]) == set(OF_THE_PAPER)
    assert not MEASURED[[*published.ROW, "tables"]].duplicated().any()
    for name in ("alpha/math_qwen_grpo", "alpha/math_qwen_idpo"):
        assert [arm.alpha for arm in arm_configs(composed(name)[0]).values()] == [0, 1e-4, 1e-3, 1e-2, 1e-1]


@pytest.mark.parametrize("data", ["aime24", "aime25", "math500", "minerva", "olympiadbench"])
def test_a_benchmark_is_chosen_by_data_and_has_its_own_folder(data: str):
    cfg, missing = compose_incomplete("experiment/ood/s1k_llama_eto", [f"data={data}"])
    assert published.evaluated_on(cfg.data.tested_on, "s1K") in published.OUT_OF_DISTRIBUTION
    assert (cfg.name, missing) == (f"ood_s1k_llama_eto_{data}", ["model.path", "data.test"])
