"""docs/models.md: its tables are current, and every layout in it fits."""

from pathlib import Path

import models_table
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rows() -> list:
    return list(models_table.rows())


def test_the_table_is_current(rows):
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert models_table.table(rows) in page, "run: python tools/docs/models_table.py"


def test_a_layout_of_the_table_is_what_the_command_line_makes_of_it(rows):
    """The tool reads the files of conf/ itself, without Hydra."""
    from nemo_edo.checks.workload import fullest, model_shape
    from nemo_edo.config.compose import compose_incomplete

    row = next(row for row in rows if row.model == "qwen2_5_72b")
    overrides = [f"model={row.model}", *models_table.BASE[1:], *row.overrides]
    cfg, _ = compose_incomplete("grpo_gsm8k", overrides)
    assert fullest(cfg, model_shape(cfg), row.gpus) == row.memory
