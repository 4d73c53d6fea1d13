"""What the trackers are handed: numbers under names that all of them take, and tables."""

import errno
import html
import logging
import os
import re
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from nemo_edo.errors import UserError
from nemo_edo.run.tracking import check_names, log_numbers, log_table, markdown_table, quiet_libraries

NAME, COLUMNS = "grpo/evaluation/solutions", ("problem", "sample", "text")
ROWS = [("1 + 2", 0, "1 + 2 = 3\n#### 3"), ("1 + 2", 1, "a | b <b>*c*</b> `d` \\n [e](f) _g_ #h")]


def trainer(*loggers) -> SimpleNamespace:
    return SimpleNamespace(loggers=loggers)


def put_back_afterwards(monkeypatch):
    """What quiet_libraries changes."""
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    for name in ("TRANSFORMERS_VERBOSITY", "MEGATRON_SUPPRESS_FUSION_WARNINGS"):
        monkeypatch.setenv(name, "")


def test_the_experiment_managers_settings_are_known_from_its_source_alone():
    from nemo.utils.exp_manager import ExpManagerConfig

    check_names({field.name: None for field in fields(ExpManagerConfig)})
    with pytest.raises(UserError, match="exp_manager.create_wandb_loger: .*; did you mean create_wandb_logger"):
        check_names({"create_wandb_loger": True})


def test_numbers_reach_every_logger_at_their_step_without_an_at_sign():
    class Logger:
        def log_metrics(self, metrics, step):
            self.seen = (metrics, step)

    loggers = [Logger(), Logger()]
    log_numbers(trainer(*loggers))({"grpo/collection/pass@4": 0.5, "grpo/collection/kl": 1.0}, 7)
    assert [logger.seen for logger in loggers] == [
        ({"grpo/collection/pass_at_4": 0.5, "grpo/collection/kl": 1.0}, 7)] * 2


@pytest.mark.parametrize("method", ["add_scalar", "add_text"])
def test_a_full_disk_under_tensorboard_is_the_systems_error_with_its_folder_and_not_a_wrong_number(
    tmp_path: Path, monkeypatch, method
):
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # its writing thread's: of no file
    monkeypatch.setattr(logger.experiment, method, mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left") as raised:
        log_numbers(trainer(logger))({"grpo/collection/kl": 1.0}, 7)
        log_table(trainer(logger), NAME, COLUMNS, ROWS, step=3)
    assert (raised.value.errno, Path(raised.value.filename)) == (errno.ENOSPC, tmp_path)


def test_a_logger_thread_that_cannot_write_says_so_in_one_line_and_every_other_error_of_a_thread_keeps_its_traceback(
    tmp_path: Path, monkeypatch, capfd
):
    put_back_afterwards(monkeypatch)
    quiet_libraries()
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    writer = logger.experiment.file_writer.event_writer._async_writer
    monkeypatch.setattr(writer._writer, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    log_numbers(trainer(logger))({"grpo/collection/kl": 1.0}, 7)
    writer._worker.join()
    assert capfd.readouterr().err == (
        "nemo-edo: error: a logger's thread could not write ([Errno 28] No space left); make room or give access\n"
    )
    with pytest.raises(OSError, match="No space left"):
        log_numbers(trainer(logger))({"grpo/collection/kl": 1.0}, 8)
    mistaken = threading.Thread(target=lambda: 1 / 0)
    mistaken.start()
    mistaken.join()
    assert "Traceback" in capfd.readouterr().err


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
