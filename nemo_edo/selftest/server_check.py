"""Checks of a vLLM server: a run of the built-in task in small, with the server that the settings ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.generation.server_process import starts_in
from nemo_edo.selftest.isolated import CheckError
from nemo_edo.selftest.outcome import Outcome, failed, impossible, passed
from nemo_edo.selftest.this_machine import OTHER_FOLDER, Machine

LIMIT_S = 240.0
SMALL = [
    "generation=vllm", "arms={grpo: {algorithm: grpo, alpha: 0}}", "data.arithmetic.train_problems=64",
    "data.arithmetic.test_problems=8", "sft.steps=2", "sft.micro_batch_size=32", "grpo.iterations=2",
    "grpo.problems_per_iteration=8", "grpo.minibatch_size=32", "grpo.micro_batch_size=32",
    "sampling.samples_per_prompt=8", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "generation.servers.restarts=0",  # a run restarts a server that has died; here it is what is looked for
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
        if machine.no_server is not None:
            return impossible(machine.no_server)
        if why := machine.no_folder(number):
            return failed(why, OTHER_FOLDER)
        precision = "bf16" if machine.gpus else "fp32"
        folder = machine.folder / f"server_{number}"
        settings = [*SMALL, f"precision={precision}", f"output_dir={folder}", "name=run", *self.settings]
        if machine.rank == 0:  # an earlier selftest's; the other ranks begin after this
            shutil.rmtree(folder, ignore_errors=True)
        log = folder / "run" / "servers" / "server_0.log"
        remedy = f"read {log}; docs/servers.md has what a server needs"
        try:
            machine.isolation.run(number, _train, settings, world=True, limit_s=LIMIT_S)
        except CheckError as error:
            return failed("; ".join([str(error), *_deaths(log)]), remedy)
        if machine.rank > 0:
            return passed("")
        if deaths := _deaths(log):
            return failed(*deaths, remedy)
        gaps = [line["sampler_gap"] for line in _lines(folder / "run" / "metrics.jsonl") if "sampler_gap" in line]
        said = f"log-probabilities are {max(gaps):.1e} nats from the trainer's, in 2 iterations"
        if not max(gaps) <= GAP[precision]:  # NaN is too far
            remedy = "the server computes with other weights, or in another precision: docs/servers.md"
            return failed(f"{said}; expected at most {GAP[precision]:.0e}", remedy, sampler_gap=max(gaps))
        return passed(said, sampler_gap=max(gaps))


def _train(settings: list[str]) -> None:
    from nemo_edo.config.compose import compose_run
    from nemo_edo.doctor.preflight import preflight
    from nemo_edo.run import jobs

    jobs.train(preflight(compose_run("quickstart", settings)))


def _deaths(log: Path) -> list[str]:
    """What to say of a server that a refit has restarted: nothing where it was started once."""
    starts = starts_in(log) if log.is_file() else 0
    return [f"its server died and was restarted at a refit ({starts} starts)"] if starts > 1 else []


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
