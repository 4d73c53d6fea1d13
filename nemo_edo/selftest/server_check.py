"""Checks of a vLLM server: a run of the built-in task in small, with the server that the settings ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.selftest.isolated import CheckError
from nemo_edo.selftest.outcome import Outcome, failed, impossible, passed
from nemo_edo.selftest.this_machine import Machine

LIMIT_S = 240.0
SMALL = [
    "generation=vllm", "arms={grpo: {algorithm: grpo, alpha: 0}}", "data.arithmetic.train_problems=64",
    "data.arithmetic.test_problems=8", "sft.steps=2", "sft.micro_batch_size=32", "grpo.iterations=2",
    "grpo.problems_per_iteration=8", "grpo.minibatch_size=32", "grpo.micro_batch_size=32",
    "sampling.samples_per_prompt=8", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
]  # fmt: skip
GAP = {"fp32": 1e-2, "bf16": 0.2}
"""Bounds on the mean distance of the server's log-probabilities from the trainer's, in nats."""


@dataclass(frozen=True)
class Server:
    """Responses of a vLLM server whose weights are replaced between two iterations."""

    settings: Sequence[str]
    why_not: Callable[[Machine], str | None] = lambda machine: None

    def __call__(self, machine: Machine, number: int) -> Outcome:
        if why := self.why_not(machine):
            return impossible(why)
        if missing := _missing():
            return impossible(missing)
        precision = "bf16" if machine.gpus else "fp32"
        folder = machine.folder / f"server_{number}"
        settings = [*SMALL, f"precision={precision}", f"output_dir={folder}", "name=run", *self.settings]
        if machine.rank == 0:  # an earlier selftest's; the other ranks begin after this
            shutil.rmtree(folder, ignore_errors=True)
        try:
            machine.isolation.run(number, _train, settings, world=True, limit_s=LIMIT_S)
        except CheckError as error:
            return failed(str(error), f"read {folder}/run/logs/server_0.log; docs/servers.md has what a server needs")
        if machine.rank > 0:
            return passed("")
        gaps = [line["sampler_gap"] for line in _lines(folder / "run" / "metrics.jsonl") if "sampler_gap" in line]
        said = f"log-probabilities are {max(gaps):.1e} nats from the trainer's, in 2 iterations"
        if not max(gaps) <= GAP[precision]:  # NaN is too far
            remedy = "the server computes with other weights, or in another precision: docs/refit.md"
            return failed(f"{said}; expected at most {GAP[precision]:.0e}", remedy, sampler_gap=max(gaps))
        return passed(said, sampler_gap=max(gaps))


def _train(settings: list[str]) -> None:
    from nemo_edo.config.compose import compose_run
    from nemo_edo.doctor.preflight import preflight
    from nemo_edo.run import jobs

    jobs.train(preflight(compose_run("quickstart", settings)))


def _missing() -> str | None:
    """Why no server can be started."""
    from nemo_edo.config import ServersConfig
    from nemo_edo.generation.servers import check_environment
    from nemo_edo.generation.vllm_server import VLLM

    try:
        check_environment(ServersConfig(), VLLM, gpus=0)
    except UserError as error:
        return str(error)
    return None


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
