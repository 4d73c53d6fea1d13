"""Checks of a vLLM server: a run of the built-in task in small, with the server that the settings ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.checks.findings import Finding, failed, impossible, passed
from nemo_edo.checks.machine import CheckError, Machine
from nemo_edo.checks.machine_checks import no_server

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
class ServerRun:
    """A check: responses of a vLLM server whose weights are replaced between two iterations."""

    settings: Sequence[str] = ()

    def __call__(self, machine: Machine) -> Finding:
        # The first rank starts servers; all ranks must decide alike.
        if why := machine.exchange("no_server", no_server() if machine.rank == 0 else None)[0]:
            return impossible(why)
        precision = "bf16" if machine.gpus else "fp32"
        folder = machine.folder / machine.check.replace(" ", "_").replace(",", "")
        settings = [*SMALL, f"precision={precision}", f"output_dir={folder}", "name=run", *self.settings]
        if machine.rank == 0:  # an earlier selftest's; the other ranks begin after this
            shutil.rmtree(folder, ignore_errors=True)
        log = folder / "run" / "servers" / "server_0.log"
        remedy = f"read {log}; docs/servers.md has what a server needs"
        try:
            machine.run(_train, settings, world=True, limit_s=LIMIT_S)
        except CheckError as error:
            return failed("; ".join([str(error), *_deaths(log)]), remedy)
        if machine.rank > 0:
            return passed("")
        if deaths := _deaths(log):
            return failed(*deaths, remedy)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
        gap = max(line["sampler_gap"] for line in lines if "sampler_gap" in line)
        said = f"log-probabilities are {gap:.1e} nats from the trainer's, in 2 iterations"
        if not gap <= GAP[precision]:  # NaN is too far
            remedy = "the server computes with other weights, or in another precision: docs/servers.md"
            return failed(f"{said}; expected at most {GAP[precision]:.0e}", remedy, sampler_gap=gap)
        return passed(said, sampler_gap=gap)


def _train(settings: list[str]) -> None:
    from nemo_edo.checks.preflight import preflight
    from nemo_edo.config.compose import compose_run
    from nemo_edo.run import jobs

    jobs.train(preflight(compose_run("quickstart", settings)))


def _deaths(log: Path) -> list[str]:
    """One message if a refit has restarted the server, otherwise none."""
    from nemo_edo.generation.replica import starts_in

    starts = starts_in(log) if log.is_file() else 0
    return [f"its server died and was restarted at a refit ({starts} starts)"] if starts > 1 else []
