"""``nemo-edo doctor``: what a machine has and, of a config, whether it can be run there. Starts no process
but the one that computes with the config's model."""

from __future__ import annotations

from nemo_edo.checks.check_list import CHECKS
from nemo_edo.checks.config_checks import Devices, case
from nemo_edo.checks.findings import FAIL, Finding, RunsIn, failed, passed
from nemo_edo.checks.installed import about
from nemo_edo.checks.machine import Gpu, Machine
from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.errors import UserError
from nemo_edo.utils import host_memory

DEFAULT_GPU = 80 * 10**9
"""Bytes of a hypothetical GPU: an H100's."""
INDENT = 13


def diagnose(
    config_name: str | None, overrides: list[str], config_path: str | None, *, count: int | None, memory: int | None
) -> tuple[str, bool]:
    """The text for a terminal, and whether nothing was found that keeps the run from starting.

    config_name None: about the machine only. count, memory: GPUs (of all nodes together) and bytes of each, for
    hypothetical GPUs. Raises ConfigError for a config that does not compose.
    """
    composed = None if config_name is None else compose_incomplete(config_name, overrides, config_path)
    machine = Machine.alone()
    findings = [(check.name, check.run(machine)) for check in CHECKS if RunsIn.DOCTOR in check.runs_in]
    if composed is not None:
        findings += of_config(*composed, devices(machine.gpus, count, memory))
    lines = [f"{name:{INDENT - 1}} {said}" for name, said in about().items()]
    for name, finding in findings:
        if finding.status != FAIL and finding.detail:
            lines.append(f"{name:{INDENT - 1}} " + finding.detail.replace("\n", "\n" + " " * INDENT))
    problems = [finding for _, finding in findings if finding.status == FAIL]
    lines += [line for problem in problems for line in _problem_lines(problem)] or ["ok"]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()), not problems


def devices(gpus: list[Gpu], count: int | None, memory: int | None) -> Devices:
    """The machine's, or hypothetical ones instead; without either, the CPU as one device."""
    here = count is None and memory is None
    if here and not gpus:
        return Devices(here, 1, host_memory.total_bytes(), cpu=True)
    smallest = min((gpu.bytes for gpu in gpus), default=DEFAULT_GPU)
    return Devices(here, count or len(gpus) or 1, memory or smallest)


def of_config(cfg: RunConfig, missing: list[str], found: Devices) -> list[tuple[str, Finding]]:
    """The name and the finding of each check of a config; one finding where the config cannot be a ``Case``."""
    try:
        subject = case(cfg, missing, found)
    except UserError as error:
        return [("to be given", passed(", ".join(missing))), ("config", failed(str(error)))]
    findings = []
    for check in CHECKS:
        if RunsIn.CONFIG in check.runs_in:
            try:
                findings.append((check.name, check.run(subject)))
            except UserError as error:
                findings.append((check.name, failed(str(error))))
    return findings


def _problem_lines(finding: Finding) -> list[str]:
    """A line for each of the finding's, with its own remedy where there are as many."""
    details, remedies = finding.detail.splitlines(), finding.remedy.splitlines()
    if len(details) == len(remedies):
        return [f"PROBLEM      {detail}: {remedy}" for detail, remedy in zip(details, remedies, strict=True)]
    return f"PROBLEM      {finding.detail}. {finding.remedy}".rstrip(". ").splitlines()
