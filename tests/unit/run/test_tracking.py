"""What the trackers are handed: numbers under names that all of them take, and tables."""

import html
import re
from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from nemo_edo.run.tracking import log_numbers, log_table, markdown_table

NAME, COLUMNS = "grpo/evaluation/solutions", ("problem", "sample", "text")
ROWS = [("1 + 2", 0, "1 + 2 = 3\n#### 3"), ("1 + 2", 1, "a | b <b>*c*</b> `d` \\n [e](f) _g_ #h")]


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


def test_mlflow_gets_a_table_by_columns_as_an_artifact_of_the_step(monkeypatch):
    calls = []
    client = SimpleNamespace(log_table=lambda run, data, artifact_file: calls.append((run, data, artifact_file)))
    monkeypatch.setattr(MLFlowLogger, "experiment", client)
    monkeypatch.setattr(MLFlowLogger, "run_id", "run")
    log_table(trainer(MLFlowLogger.__new__(MLFlowLogger)), NAME, COLUMNS, ROWS, step=3)  # MLflow is not installed
    by_column = {"problem": ["1 + 2", "1 + 2"], "sample": [0, 1], "text": [ROWS[0][2], ROWS[1][2]]}
    assert calls == [("run", by_column, f"{NAME}/step_00000003.json")]


def test_nothing_is_logged_without_trackers_and_no_table_where_a_logger_has_none(tmp_path: Path):
    log_numbers(None)({"loss": 1.0}, 0)
    for tracker in (None, trainer(CSVLogger(str(tmp_path)))):
        log_table(tracker, NAME, COLUMNS, ROWS, step=0)
    assert markdown_table(("a", "b"), []) == "| a | b |\n| --- | --- |"
