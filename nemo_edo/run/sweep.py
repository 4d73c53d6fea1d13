"""A sweep: one run for each combination of the values that overrides list, each in its own folder and process.

A process, because Megatron's platform changes it for good, and what one run leaves in memory must not affect the next.
The same command resumes a stopped sweep: finished members are left alone, the others resume.
Members with the same warm-up share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import OverrideParseException

from nemo_edo.config.compose import ConfigError, compose_run, resolved_yaml
from nemo_edo.errors import RunStopped
from nemo_edo.evaluation.results import START
from nemo_edo.report.run_set import sweep_members
from nemo_edo.run.folder import CONFIG, JOURNAL, METRICS, RunFolder
from nemo_edo.run.sweep_console import SweepConsole
from nemo_edo.utils.files import check_folder

LONGEST_NAME = 120
"""Characters of a member's name: file systems take 255 bytes, and a run's own files come on top in some of them."""
POLL_SECONDS = 0.1
WARM_UP_SETTINGS = ("seed", "threads", "model", "precision", "parallelism", "lora", "data", "sft")
"""All that the result of the warm-up depends on."""
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, several times as fast, where PyYAML was built with it."""


def train_command(config_name: str, overrides: Sequence[str], config_dir: str | None, processes: int) -> list[str]:
    """The command that trains a config with this interpreter, by torchrun where it takes several processes."""
    module = ["-m", "nemo_edo"]
    if processes > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *module]
    folder = ["--config-path", config_dir] if config_dir else []
    return [sys.executable, *module, "train", "--config-name", config_name, *folder, *overrides]


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    """Its folder below the sweep's, named after what is swept: ``alpha=0.001,seed=2``."""
    overrides: tuple[str, ...]
    """The whole of its command line after the config's name, its ``name`` and ``output_dir`` included."""
    config: str
    """The resolved config, as YAML."""


@dataclass(frozen=True)
class Sweep:
    """Members that have all been composed and checked."""

    config_name: str
    config_dir: str | None
    folder: Path
    """``output_dir/name`` of the config; a member's run folder is ``folder / member.name``."""
    members: tuple[Member, ...]

    def command(self, member: Member, processes: int = 1) -> list[str]:
        """The command that runs a member, for this machine's shell or a cluster's scheduler."""
        return train_command(self.config_name, member.overrides, self.config_dir, processes)

    def log(self, member: Member) -> Path:
        return self.folder / "logs" / f"{member.name}.log"

    def finished(self, member: Member) -> bool:
        """Whether its run came to its end; that the folder has the run of this config was checked before."""
        return RunFolder(self.folder / member.name).is_finished


@dataclass(frozen=True)
class Failure:
    member: Member
    status: int
    log: Path


def plan_sweep(config_name: str, overrides: Sequence[str], config_dir: str | None = None) -> Sweep:
    """The members of a sweep: every combination of the values that overrides list, in Hydra's sweep syntax.

    ``KEY=A,B``, ``KEY=choice(A,B)`` and ``KEY=range(START,STOP,STEP)``; the last key varies fastest. Raises
    ``ConfigError`` where nothing is swept or any member's config is wrong, and ``UserError`` where a member's folder
    belongs to another run: before the first member starts.
    """
    parsed = _parse(overrides)
    choices = [_choices(override) for override in parsed]
    swept = [place for place, override in enumerate(parsed) if override.is_sweep_override()]
    if not swept:
        raise ConfigError("nothing is swept: give a setting several values, as in seed=1,2,3")
    combinations = list(product(*choices))
    first = compose_run(config_name, list(combinations[0]), config_dir)
    folder = Path(first.output_dir) / first.name
    names = _names([[combination[place] for place in swept] for combination in combinations])
    members = []
    for name, combination in zip(names, combinations, strict=True):
        overrides = (*combination, f"output_dir={quoted(str(folder))}", f"name={quoted(name)}")
        config = resolved_yaml(compose_run(config_name, list(overrides), config_dir))
        RunFolder(folder / name).check_free(config)
        members.append(Member(name, overrides, config))
    return Sweep(config_name, config_dir, folder, tuple(members))


def run_sweep(sweep: Sweep, *, jobs: int = 1, processes: int = 1, say: Callable[[str], None] = print) -> list[Failure]:
    """Runs the members that have not finished, ``jobs`` at a time, and returns those that failed.

    A failure stops no other member. Raises RunStopped where this process is stopped (SIGTERM, or Ctrl-C): the members
    that run are asked to stop and waited for, and the same sweep resumes from there.
    """
    write_members(sweep)
    waiting = [member for member in sweep.members if not sweep.finished(member)]
    console = SweepConsole(len(sweep.members), len(sweep.members) - len(waiting), jobs, say)
    failures, running, started = [], {}, 0
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while started < len(waiting) or running:
            while started < len(waiting) and len(running) < jobs:
                member = waiting[started]
                started += 1
                console.started(member.name, sweep.log(member), share_warm_up(sweep, member))
                running[_start(sweep, member, jobs, processes)] = member
            time.sleep(POLL_SECONDS)
            console.look()
            for process in [process for process in running if process.poll() is not None]:
                member = running.pop(process)
                if process.returncode:
                    failures.append(Failure(member, process.returncode, sweep.log(member)))
                console.ended(member.name, process.returncode)
    except KeyboardInterrupt as interrupt:
        raise RunStopped(f"the sweep in {sweep.folder} was stopped") from interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
        console.close()
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failures


def share_warm_up(sweep: Sweep, member: Member) -> str | None:
    """Gives a member that has not begun the finished warm-up of another one, where theirs is the same; returns whose.

    The member's folder then looks as if its run had been stopped right after the warm-up's last step. Files of
    checkpoints are never written again once they are there, so that links will do.
    """
    target, settings = sweep.folder / member.name, _warm_up_settings(member)
    if target.exists() or not settings["sft"]["steps"]:
        return None
    donors = (
        other
        for other in sweep.members
        if START in RunFolder(sweep.folder / other.name).journal() and _warm_up_settings(other) == settings
    )
    donor = next(donors, None)
    if donor is None:
        return None
    source, new = RunFolder(sweep.folder / donor.name), RunFolder(sweep.folder / f".{member.name}.new")
    shutil.rmtree(new.path, ignore_errors=True)  # of a sweep that was killed here
    shutil.copytree(source.checkpoint(START), new.checkpoint(START), copy_function=os.link)
    with (source.path / METRICS).open(encoding="utf-8") as lines:
        steps = list(takewhile(lambda line: json.loads(line)["kind"] == "sft_step", lines))
    (new.path / METRICS).write_text("".join(steps), encoding="utf-8")
    (new.path / JOURNAL).write_text("{}\n", encoding="utf-8")
    (new.path / CONFIG).write_text(member.config, encoding="utf-8")
    new.path.rename(target)
    return donor.name


def _warm_up_settings(member: Member) -> dict[str, Any]:
    config = yaml.load(member.config, Loader=YAML_LOADER)
    return {key: config[key] for key in WARM_UP_SETTINGS}


def write_members(sweep: Sweep) -> None:
    """``sweep.yaml``: the members with their overrides, those of earlier sweeps in the folder included."""
    path = sweep.folder / "sweep.yaml"
    check_folder(sweep.folder)
    (sweep.folder / "logs").mkdir(parents=True, exist_ok=True)
    members = sweep_members(sweep.folder) if path.exists() else {}
    members |= {member.name: list(member.overrides) for member in sweep.members}
    text = yaml.safe_dump({"config": sweep.config_name, "members": members}, sort_keys=False, width=1000)
    path.write_text(text, encoding="utf-8")


def _start(sweep: Sweep, member: Member, jobs: int, processes: int) -> subprocess.Popen:
    environment = dict(os.environ)
    if jobs > 1:  # otherwise each member would start a thread on every core
        threads = max(1, len(os.sched_getaffinity(0)) // (jobs * processes))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    with sweep.log(member).open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            sweep.command(member, processes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(f"command line: {error.override}: not in Hydra's form KEY=VALUE") from error


def _choices(override: Override) -> list[str]:
    """The overrides, one value each, that one of the command line stands for."""
    if not override.is_sweep_override():
        return [override.input_line]
    place = f"command line: {override.input_line}"
    if override.key_or_group in ("name", "output_dir"):
        raise ConfigError(f"{place}: a sweep's members are named after their other settings; give one value")
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise ConfigError(f"{place}: list the values, as in KEY=A,B, KEY=choice(A,B) or KEY=range(START,STOP,STEP)")
    choices = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    repeated = [choice for choice, count in Counter(choices).items() if count > 1]
    if repeated:
        raise ConfigError(f"{place}: {repeated[0]} is listed twice")
    return choices


def _names(swept: list[list[str]]) -> list[str]:
    """A folder's name for each member from its swept overrides: ``alpha=0.001,seed=2``."""
    keys = [line.partition("=")[0].lstrip("+") for line in swept[0]]
    last = [re.split(r"[.@]", key)[-1] for key in keys]
    shown = [short if last.count(short) == 1 else key for short, key in zip(last, keys, strict=True)]
    names = [
        ",".join(f"{key}={line.partition('=')[2]}" for key, line in zip(shown, lines, strict=True)) for lines in swept
    ]
    plain = [re.sub(r"[^\w.,=+-]+", "_", re.sub(r"[\[\]{}'\"]", "", name)) for name in names]
    return [
        short
        if plain.count(short) == 1 and len(short) <= LONGEST_NAME
        else f"{short[: LONGEST_NAME - 9]}-{_digest(name)}"
        for short, name in zip(plain, names, strict=True)
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def quoted(text: str) -> str:
    """A text for Hydra's override grammar, whatever commas and equal signs are in it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return f"'{escaped}'"
