"""What the trackers are handed: numbers under names that all of them take, and tables."""

from __future__ import annotations

import html
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from nemo_edo.tracking import log_numbers, log_table, markdown_table

NAME, COLUMNS = "grpo/evaluation/solutions", ("problem", "sample", "text")
ROWS = [("1 + 2", 0, "1 + 2 = 3\n#### 3"), ("1 + 2", 1, "a | b <b>*c*</b> `d` \\n [e](f) _g_ #h")]


class Client:
    """The part of mlflow.MlflowClient that is called."""

    def __init__(self) -> None:
        self.calls = []

    def log_table(self, run_id: str, data: dict, artifact_file: str) -> None:
        self.calls.append((run_id, data, artifact_file))


class FakeMLFlowLogger(MLFlowLogger):
    """Its constructor asks for MLflow, which the package does not install."""

    experiment, run_id = Client(), "run"

    def __init__(self) -> None:
        pass


def trainer(*loggers) -> SimpleNamespace:
    return SimpleNamespace(loggers=loggers)


def test_numbers_reach_every_logger_at_their_step_without_an_at_sign():
    class Logger:
        def log_metrics(self, metrics, step):
            self.seen = (metrics, step)

    loggers = [Logger(), Logger()]
    log_numbers(trainer(*loggers))({"grpo/collection/pass@4": 0.5, "grpo/collection/kl": 1.0}, 7)
    assert [logger.seen for logger in loggers] == [
        ({"grpo/collection/pass_at_4": 0.5, "grpo/collection/kl": 1.0}, 7)] * 2


def test_without_trackers_nothing_is_logged():
    log_numbers(None)({"loss": 1.0}, 0)
    log_table(None, NAME, COLUMNS, ROWS, step=0)


def test_tensorboard_shows_a_table_whose_cells_are_the_texts_as_they_are(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    log_table(trainer(logger), NAME, COLUMNS, ROWS, step=3)
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    [event] = events.Tensors(f"{NAME}/text_summary")
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0].decode())
    cells = [html.unescape(cell.replace("<br>", "\n")) for cell in re.findall(r"<td>(.*?)</td>", shown, re.DOTALL)]
    assert event.step == 3
    assert re.findall(r"<th>(.*?)</th>", shown) == list(COLUMNS)
    assert cells == [str(value) for row in ROWS for value in row]


def test_a_table_without_rows_is_its_head():
    assert markdown_table(("a", "b"), []) == "| a | b |\n| --- | --- |"


def test_mlflow_gets_a_table_by_columns_as_an_artifact_of_the_step():
    logger = FakeMLFlowLogger()
    log_table(trainer(logger), NAME, COLUMNS, ROWS, step=3)
    by_column = {"problem": ["1 + 2", "1 + 2"], "sample": [0, 1], "text": [ROWS[0][2], ROWS[1][2]]}
    assert logger.experiment.calls == [("run", by_column, f"{NAME}/step_00000003.json")]


def test_a_logger_without_tables_is_passed_over(tmp_path: Path):
    log_table(trainer(CSVLogger(str(tmp_path))), NAME, COLUMNS, ROWS, step=3)


def test_mlflow_itself_takes_numbers_and_tables(tmp_path: Path):
    mlflow = pytest.importorskip("mlflow")
    assert list(inspect.signature(mlflow.MlflowClient.log_table).parameters) == list(
        inspect.signature(Client.log_table).parameters)
    logger = MLFlowLogger("edo", tracking_uri=f"sqlite:///{tmp_path}/runs.db", artifact_location=f"file://{tmp_path}")
    log_numbers(trainer(logger))({"grpo/collection/pass@4": 0.5}, 7)
    log_table(trainer(logger), NAME, COLUMNS, ROWS, step=3)
    client = logger.experiment
    [number] = client.get_metric_history(logger.run_id, "grpo/collection/pass_at_4")
    uri = client.get_run(logger.run_id).info.artifact_uri
    table = json.loads(mlflow.artifacts.load_text(f"{uri}/{NAME}/step_00000003.json"))
    assert (number.step, number.value) == (7, 0.5)
    assert table == {"columns": list(COLUMNS), "data": [list(row) for row in ROWS]}
