"""Which steps a trace has, and that what is logged passes through."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.algorithms.services import Position, Services
from nemo_edo.config import ProfileConfig
from nemo_edo.run.services import profiled
from nemo_edo.run_folder import RunFolder


@pytest.mark.parametrize(("steps", "next_step", "traced"), [
    ((2, 4), 0, [2, 3]), ((0, 1), 0, [0]), ((4, 9), 0, [4, 5]), ((3, 5), 3, [3, 4]), ((1, 2), 3, None)])
def test_a_trace_has_the_steps_asked_for_and_a_short_or_resumed_run_those_that_it_takes(
        tmp_path: Path, steps: tuple, next_step: int, traced: list | None):
    logged, path = [], tmp_path / "profile" / "grpo.json.gz"
    progress = SimpleNamespace(start=Position(steps_taken=next_step))
    services = Services(*5 * [None], store=None, log=lambda kind, **values: logged.append((kind, values)),
                        progress=progress)
    run = SimpleNamespace(cfg=SimpleNamespace(profile=ProfileConfig([*steps])), folder=RunFolder(tmp_path))
    with profiled(run, "grpo", services) as traced_services:
        for step in range(next_step, 6):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(4).sum()
            traced_services.log("train_step", step=step)
            traced_services.log("evaluation", iteration=0)
    assert len(logged) == 2 * (6 - next_step)
    assert path.is_file() is (traced is not None)
    if traced is not None:
        names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {name for name in names if name.startswith("step ")} == {f"step {step}" for step in traced}
        assert "aten::sum" in names
