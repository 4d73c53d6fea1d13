"""docs/models.md: its tables are current, and every layout in it fits."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "docs" / "models_table.py"))


@pytest.fixture(scope="module")
def rows(tool) -> list:
    return list(tool["rows"]())


def test_the_table_is_current(tool, rows):
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert tool["table"](rows) in page, "run: python tools/docs/models_table.py"


def test_every_model_has_a_layout_that_fits_eight_sixteen_and_sixty_four_gpus(tool, rows):
    assert [row.gpus for row in rows] == 18 * [8, 16, 64]
    assert all(row.memory.total <= tool["GPU_BYTES"] for row in rows)
    assert all("path: ???" in path.read_text() for path in (ROOT / "conf" / "model").glob("*_*b.yaml"))


def test_a_layout_of_the_table_is_what_the_command_line_makes_of_it(tool, rows):
    """The tool reads the files of conf/ itself, without Hydra."""
    from nemo_edo.configuration import compose_incomplete
    from nemo_edo.doctor.advice import fullest
    from nemo_edo.doctor.workload import model_shape

    row = next(row for row in rows if row.model == "qwen2_5_72b")
    overrides = [f"model={row.model}", *tool["BASE"][1:], *row.overrides]
    cfg, _ = compose_incomplete("grpo_gsm8k", overrides)
    assert fullest(cfg, model_shape(cfg), row.gpus) == row.memory


@pytest.mark.parametrize("page", ["", "BEGIN", "END BEGIN", "BEGIN END END"])
def test_a_page_without_one_pair_of_markers_is_refused(tool, page: str):
    text = page.replace("BEGIN", tool["BEGIN"]).replace("END", tool["END"])
    with pytest.raises(ValueError, match="the page needs one line"):
        tool["updated"](text, "a table")
