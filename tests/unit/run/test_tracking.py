"""What the trackers are handed: numbers under names that all of them take, and tables."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.responses import scored
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

from nemo_edo.config import GRPOConfig
from nemo_edo.run.tracking import end_tracking, hyperparameters, log_numbers, log_solutions, start_tracking
from nemo_edo.types import Problem
from nemo_edo.utils.files import read_object


def test_numbers_reach_every_logger_at_their_step_without_an_at_sign():
    loggers = [mock.Mock(), mock.Mock()]
    log_numbers(SimpleNamespace(loggers=loggers))({"grpo/collection/pass@4": 0.5, "grpo/collection/kl": 1.0}, 7)
    for logger in loggers:
        expected = {"grpo/collection/pass_at_4": 0.5, "grpo/collection/kl": 1.0}
        logger.log_metrics.assert_called_once_with(expected, step=7)


@pytest.mark.parametrize("method", ["add_scalar", "add_text"])
def test_a_full_disk_under_tensorboard_is_the_systems_error_with_its_folder_and_not_a_wrong_number(
    tmp_path: Path, monkeypatch, method
):
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    trainer = SimpleNamespace(loggers=[logger])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # its writing thread's: of no file
    monkeypatch.setattr(logger.experiment, method, mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left") as raised:
        log_numbers(trainer)({"grpo/collection/kl": 1.0}, 7)
        log_solutions(trainer, [Problem("p", "q", "s", "2", "f:1")], [scored("p")], "grpo", 3)
    assert (raised.value.errno, Path(raised.value.filename)) == (errno.ENOSPC, tmp_path)


@pytest.mark.parametrize("chosen", [{}, {"id": "mine"}])
def test_a_resumed_run_has_the_id_in_wandb_that_it_began_with(tmp_path: Path, monkeypatch, chosen):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = {"create_tensorboard_logger": False, "create_wandb_logger": True,
                "wandb_logger_kwargs": {"name": "run", "project": "edo", **chosen}}
    ids = []
    for _ in range(2):
        [logger] = start_tracking(settings, tmp_path / "logs", tmp_path / "trackers.json", {"alpha": 0.1}).loggers
        ids.append(logger.experiment.id)
        logger.experiment.finish()
    assert ids[0] == ids[1] == read_object(tmp_path / "trackers.json", ())["wandb"] == chosen.get("id", ids[0])


@pytest.mark.parametrize(("finished", "status"), [(True, "FINISHED"), (False, "KILLED")])
def test_mlflow_is_told_how_a_run_ended_and_other_loggers_are_left_alone(
    monkeypatch, capsys, finished: bool, status: str
):
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=LookupError))
    client = mock.Mock()
    monkeypatch.setattr(MLFlowLogger, "experiment", client)
    monkeypatch.setattr(MLFlowLogger, "run_id", "r1")
    trainer = SimpleNamespace(loggers=[mock.Mock(), MLFlowLogger.__new__(MLFlowLogger)])
    end_tracking(trainer, finished=finished)
    assert client.mock_calls == [mock.call.set_terminated("r1", status)]
    client.set_terminated.side_effect = LookupError("no route to host")  # a finished run stays one
    end_tracking(trainer, finished=finished)
    assert "no route to host" in capsys.readouterr().err


def test_a_single_arm_has_its_alpha_under_its_plain_name_and_nothing_that_may_hold_a_key_is_logged():
    settings = {"seed": 1, "data": {"source": "https://me:secret@host/x", "columns": {}}, "cluster": {"a": "key"},
                "exp_manager": {"k": "key"}}
    arm = GRPOConfig(alpha=0.5, beta=0.1, log_ratio_floor=-1.0)
    logged = hyperparameters(settings, {"policy": arm})
    assert (logged["alpha"], logged["exploration_weight"], logged["log_ratio_floor"]) == (0.5, 0.05, -1.0)
    assert hyperparameters(settings, {"a": arm, "b": arm})["b.alpha"] == 0.5
    assert not any("secret" in str(value) or value == "key" for value in logged.values())
