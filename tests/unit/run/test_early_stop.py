"""Where an arm's training ends early, and which of its policies are kept."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.controller import remote

from nemo_edo.config import CheckpointConfig, EarlyStopConfig
from nemo_edo.megatron import checkpoint
from nemo_edo.run.policy_evaluation import end_of, keep_best
from nemo_edo.run_folder import RunFolder


@pytest.mark.parametrize(("settings", "values", "end"), [
    ({}, [0.1, 0.2, 0.2, 0.2, 0.2], (4, 1)),  # three evaluations without improvement
    ({"patience": 1}, [0.1, 0.2, 0.3, 0.25, 0.9], (3, 2)),  # what comes later plays no part
    ({"patience": 2, "min_delta": 0.05}, [0.1, 0.14, 0.18], None),  # against the best, not the one before
    ({"patience": 1, "mode": "min"}, [0.3, 0.2, 0.25], (2, 1)),
    ({"patience": 2}, [0.1, math.nan, math.nan], (2, 0)), ({"patience": 1}, [math.nan, 0.1], (0, 0)),
])
def test_training_ends_after_patience_evaluations_without_improvement(settings, values, end):
    found = end_of(enumerate(values), EarlyStopConfig(metric="accuracy", **settings))
    assert (found and (found.iteration, found.best_iteration)) == end


def test_the_best_policies_are_kept_under_names_that_last(tmp_path, monkeypatch):
    def save(policy, folder, *, extra):
        folder.mkdir(parents=True)
        (folder / "about").write_text(repr(extra))

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint, "load_extra", lambda folder: eval((folder / "about").read_text()))
    folder = RunFolder(tmp_path)

    def kept(value: float, iteration: int, **settings) -> list[str]:
        """The names of the policies that are kept after such an evaluation."""
        config = CheckpointConfig(**{"best": "accuracy", "best_count": 2, **settings})
        keep_best(remote(SimpleNamespace(built=None)), folder, config, "a", value, iteration)
        return [f"{path.name} {checkpoint.load_extra(path)['iteration']}" for path in folder.best_checkpoints("a")]

    assert kept(0.5, 0) == ["a.best 0"]
    assert kept(0.4, 1) == ["a.best 0", "a.best_iter_00001 1"]
    assert kept(0.6, 2) == ["a.best 2", "a.best_iter_00000 0"]
    assert kept(0.6, 3) == ["a.best 2", "a.best_iter_00003 3"]  # of equal ones the earlier is the better
    assert kept(0.1, 4) == kept(math.nan, 5) == ["a.best 2", "a.best_iter_00003 3"]
    assert kept(0.6, 3) == ["a.best 2", "a.best_iter_00003 3"]  # again, as after a kill
    assert kept(0.7, 6, best_count=1) == ["a.best 6"]
    # A kill between renaming the best and saving the better one loses neither.
    (tmp_path / "checkpoints" / "a.best").rename(tmp_path / "checkpoints" / "a.best_iter_00006")
    assert kept(0.4, 7) == ["a.best 6", "a.best_iter_00007 7"]

    def half_removed(path: Path, **_) -> None:
        if path.exists():
            (path / "about").unlink()
            raise InterruptedError

    with monkeypatch.context() as killed, pytest.raises(InterruptedError):
        killed.setattr(shutil, "rmtree", half_removed)
        kept(0.9, 8, best_count=1)
    assert kept(0.9, 8, best_count=1) == ["a.best 8"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["a.best"]
