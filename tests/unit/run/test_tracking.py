"""What the trackers are handed: numbers under names that all of them take, and tables."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from nemo_edo.run.tracking import log_numbers, log_table

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
