"""What each ``nemo-edo`` command calls: the part of the package that does the work, which is imported only then."""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nemo_edo.checks.installed import about, what_trainer_lacks
from nemo_edo.cli.arguments import parse
from nemo_edo.config.shipped import shipped_configs
from nemo_edo.errors import CANNOT_WRITE, RunStopped, StoppedByGuard, UserError, WorkerFailed
from nemo_edo.run.control import outcome_of, tell_outcome
from nemo_edo.utils.processes import end_with_torchrun
from nemo_edo.utils.ranks import check_ranks
from nemo_edo.utils.wording import printable

if TYPE_CHECKING:
    from nemo_edo.config import RunConfig
    from nemo_edo.experiments.grid import FailedCell
    from nemo_edo.run.stored_run import StoredRun


def _train(args: argparse.Namespace) -> int:
    overrides = _overrides(args)
    if args.multirun:
        if args.print_config:
            raise UserError("--print-config is for one run: leave out -m")
        from nemo_edo.experiments.sweep import plan_sweep, run_sweep

        if "RANK" in os.environ:
            raise UserError("a sweep starts its runs' processes itself: use --processes N instead of torchrun")
        sweep = plan_sweep(args.config_name, overrides, args.config_path)
        failures = run_sweep(sweep, jobs=args.jobs or 1, processes=args.processes or 1)
        _tell_failures(failures)
        left = sweep.left()
        print(f"{len(sweep.cells) - len(left)} of {len(sweep.cells)} runs have finished.")
        if len(left) > len(failures):
            print(f"{len(left) - len(failures)} are in training by another command.")
        print(f"To write their report: nemo-edo report {shlex.quote(str(sweep.folder))}")
        return 1 if left else 0
    if args.jobs or args.processes:
        raise UserError("--jobs and --processes are for sweeps: add -m")
    from nemo_edo.config import RewardModelRunConfig
    from nemo_edo.config.compose import compose_job, require_run, resolved_yaml

    cfg = compose_job(args.config_name, overrides, args.config_path)
    if args.print_config:
        say(resolved_yaml(cfg).rstrip())
        return 0
    if isinstance(cfg, RewardModelRunConfig):
        from nemo_edo.reward_models.train import train_reward_model

        train_reward_model(cfg)
        return 0
    from nemo_edo.checks.preflight import preflight
    from nemo_edo.utils.processes import process_began

    cfg = preflight(require_run(cfg, args.config_name))
    _jobs().train(cfg, process_began() if args.own_process else None)
    say(f"command: nemo-edo {shlex.join(args.given)} (resumes the run where it was stopped)")
    return 0


def _launch(args: argparse.Namespace) -> None:
    from nemo_edo.cluster.launch import launch, plan, plan_selftest, time_plan

    config = (args.config_name, _overrides(args), args.config_path)
    if args.multirun and args.selftest:
        raise UserError("--selftest tries the nodes, not a sweep: leave out -m")
    if args.only and not args.selftest:
        raise UserError("--only is for --selftest")
    planned = plan_selftest(*config, args.only) if args.selftest else plan(*config, multirun=args.multirun)
    if args.dry_run and (estimate := time_plan(planned)):
        print(estimate, file=sys.stderr)  # the script alone is the output
    say(launch(planned, dry_run=args.dry_run))


def _collect(args: argparse.Namespace) -> None:
    cfg = _named_config(args)  # checked before _jobs imports torch
    _jobs().collect(cfg, args.arm)


def _evaluate(args: argparse.Namespace) -> None:
    runs, overrides = _runs_and_overrides(args, stored=args.stored)
    if args.config_name is not None:
        cfg = _named_config(args)
        say_all(_jobs().evaluate_model(cfg))
    elif not runs:
        raise UserError("name the folder of a run, or a config with --config-name")
    elif args.stored:
        from nemo_edo.run.policy_evaluation import evaluate_stored

        say_all(evaluate_stored(runs, args.arm, overrides))
    elif len(runs) > 1:
        raise UserError(f"evaluate takes one run, not {len(runs)}; --stored takes several")
    else:
        opened = _opened(runs[0], args, overrides, "evaluation.")
        _jobs().evaluate(opened, args.arm)


def _search(args: argparse.Namespace) -> None:
    runs, overrides = _runs_and_overrides(args)
    if args.config_name is None and len(runs) != 1:
        raise UserError(f"name the folder of one run, or a config with --config-name; got {len(runs)} runs")
    cfg = _named_config(args) if args.config_name is not None else None
    opened = _opened(runs[0], args, overrides, "search.", "generation.") if cfg is None else None
    from nemo_edo.search import job

    say_all(job.search(opened, args.arm) if cfg is None else job.search_model(cfg))


def _score(args: argparse.Namespace) -> None:
    from nemo_edo.config.compose import compose_job

    # With the URL, so that composing the config checks the other settings of servers together with it.
    urls = [f"servers.urls=['{args.model}']"] if args.model.startswith(("http://", "https://")) else []
    cfg = compose_job("score", urls + args.overrides)
    from nemo_edo.reward_models import process_reward

    say_all(process_reward.score_run(args.run, args.model, args.name, args.arm, args.tokenizer, cfg))


def _report(args: argparse.Namespace) -> None:
    from nemo_edo.report.run_folders import find_runs

    found = find_runs(args.runs)
    from nemo_edo.report.page import write_report  # loads pandas
    from nemo_edo.report.run_set import read_runs
    from nemo_edo.run_folder import taken

    with taken(found.folders):
        say_all(write_report(read_runs(found), args.out, args.baseline).lines)


def _study(args: argparse.Namespace) -> int:
    from nemo_edo.experiments.study import read_study, run_study, status_lines, study_file, verdict_lines

    study = read_study(study_file(args.file))
    if args.action == "status":
        say_all(status_lines(study))
        return 0
    _tell_failures(run_study(study, jobs=args.jobs))
    left = len(study.unfinished())
    print(f"{len(study.cells) - left} of {len(study.cells)} cells are in {study.table}")
    say_all(verdict_lines(study))
    return 1 if left else 0


def _doctor(args: argparse.Namespace) -> int:
    try:
        from nemo_edo.checks.doctor import diagnose
        from nemo_edo.utils.files import parse_size
    except ModuleNotFoundError:
        if args.config_name is not None or what_trainer_lacks() is None:
            raise
        say_all(f"{name:12} {said}" for name, said in about().items())  # of an installation of the functions alone
        return 0

    overrides = _overrides(args)
    if args.config_name is None and overrides:
        raise UserError(f"{' '.join(overrides)}: settings need --config-name")
    memory = args.gpu_memory and parse_size("--gpu-memory", args.gpu_memory, ("GB", "GIB"))
    text, good = diagnose(args.config_name, overrides, args.config_path, count=args.gpus, memory=memory)
    say(text)
    return 0 if good else 2


def _selftest(args: argparse.Namespace) -> int:
    from nemo_edo.checks.selftest import selftest

    return 0 if selftest(args.folder, args.only) else 1


def _export(args: argparse.Namespace) -> None:
    from nemo_edo.utils.files import parse_size

    size = parse_size("--max-shard-size", args.max_shard_size)
    opened = _opened(args.run, args, [])
    _jobs().export(opened, args.out, args.arm, size, args.adapter, args.push_to_hub)


def _replay(args: argparse.Namespace) -> None:
    _jobs().replay(args.file, args.overrides)


def _overrides(args: argparse.Namespace) -> list[str]:
    for text in args.overrides:
        if text in shipped_configs():
            raise UserError(f"{text}: a config is named with --config-name {text}")
    return [*args.overrides, *([f"data.on_bad_rows={args.on_bad_rows}"] if args.on_bad_rows else [])]


def _named_config(args: argparse.Namespace) -> RunConfig:
    """Checked before torch and Megatron are imported."""
    from nemo_edo.checks.preflight import preflight
    from nemo_edo.config.compose import compose_run

    return preflight(compose_run(args.config_name, _overrides(args), args.config_path))


def _opened(run: Path, args: argparse.Namespace, overrides: list[str], *only: str) -> StoredRun:
    """Checked before torch and Megatron are imported."""
    from nemo_edo.run.stored_run import open_run

    return open_run(run, overrides, only=[*only, "allow_changed="], command=args.command)


def _runs_and_overrides(args: argparse.Namespace, *, stored: bool = False) -> tuple[list[Path], list[str]]:
    """The folders of runs, none with --config-name, and the overrides. Raises UserError where they do not fit."""
    runs = [Path(one) for one in args.overrides if "=" not in one or os.path.isdir(one)]
    if args.config_name is None and (args.config_path or args.on_bad_rows):
        raise UserError("--config-path and --on-bad-rows need --config-name; a run's folder has its own config")
    if args.config_name is not None and (runs or args.arm or stored):
        wrong = runs[0] if runs else "--arm" if args.arm else "--stored"
        raise UserError(f"{wrong} cannot be combined with --config-name, which names one policy: the config's model")
    return runs, [one for one in args.overrides if Path(one) not in runs]


def _tell_failures(failures: list[FailedCell]) -> None:
    for failure in failures:
        message = f"nemo-edo: {failure.cell.name} failed with status {failure.status}: see {failure.log}"
        print(message, file=sys.stderr)


def _jobs():
    """Imports torch and Megatron: called only once the configuration is valid."""
    from nemo_edo.utils.memory import large_imports

    with large_imports():
        from nemo_edo.run import jobs
    return jobs


def say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def say(message: str, file: TextIO | None = None) -> None:
    """Prints on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(message), file=file)


_CALLS = (_train, _launch, _collect, _evaluate, _search, _score, _report, _study, _doctor, _selftest, _export, _replay)
RUN = {call.__name__.removeprefix("_"): call for call in _CALLS}
"""The function of each of ``arguments.COMMANDS``; it returns the exit status (None: 0)."""

WITH_WORKERS = ("train", "collect", "evaluate", "search", "export", "replay")
"""Commands that rank 0 runs, and the other ranks of torchrun work for."""
OPEN_FILES = 1024  # how many files a run may open at least
STOPPED_BY_GUARD = 3  # the exit status


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0 on success; 1 where members of a sweep or checks failed, a worker
    was lost, or a study has cells left; 2 for an error in the user's input; 3 where a guard stopped the run; 75
    (EX_TEMPFAIL) where a run was asked to stop and can resume; 130 where Ctrl-C ended another command."""
    end_with_torchrun()  # before the imports, which take a while
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    args.given, args.own_process = given, argv is None
    has_workers = args.command in WITH_WORKERS and os.environ.get("WORLD_SIZE", "1") != "1"
    is_worker = has_workers and os.environ.get("RANK", "0") != "0"
    if not is_worker and args.command in WITH_WORKERS:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and most < OPEN_FILES:
            return _error(f"ulimit -n is {most}: a run opens more files than that; raise it to {OPEN_FILES} or more")
        if limit != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, OPEN_FILES), most))
    status = _run(args, is_worker=is_worker)
    if os.environ.get("RANK", "0") != "0":
        return status
    # Lets the other ranks end. Where the command failed before they had work, torchrun ends them.
    if has_workers and (not status or "nemo_edo.worker.dispatch" in sys.modules):
        from nemo_edo.worker.dispatch import dismiss

        dismiss(met_only=status != 0)
    if status != 1 or args.command not in WITH_WORKERS:  # a job whose run has lost a worker is queued again
        tell_outcome(outcome_of(status))
    return status


def _run(args: argparse.Namespace, *, is_worker: bool) -> int:
    try:
        check_ranks()
        if args.command != "doctor":  # which an installation of the functions alone has, too
            from nemo_edo.utils.quiet import quiet_libraries

            quiet_libraries()
        if not is_worker:
            return RUN[args.command](args) or 0
        # Where the first rank's command ends before the ranks have met, torch would print a stack of C++ as well.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from nemo_edo.worker.serve import serve

        return serve()
    except UserError as error:
        return _error(str(error))
    except ModuleNotFoundError as error:
        lacking = what_trainer_lacks()
        if lacking is None:  # not for want of an installation
            raise
        return _error(f"{args.command} needs {error.name}, and {lacking}")
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _error(f"{place}{error.strerror}; make room or give access, and rerun the command")
    except WorkerFailed as failed:
        return _error(f"{failed}\nnemo-edo: rerun the command to resume", 1)
    except StoppedByGuard as stopped:
        hint = "its state is saved; the same command resumes it, if necessary with other guards.* settings"
        say(f"nemo-edo: stopped by a guard: {stopped}\nnemo-edo: {hint}", file=sys.stderr)
        return STOPPED_BY_GUARD
    except RunStopped as stopped:
        say(f"nemo-edo: {stopped}; the same command resumes the run", file=sys.stderr)
        return os.EX_TEMPFAIL
    except KeyboardInterrupt:  # where no run is in progress: while it starts, or in a command that has no state
        say("nemo-edo: interrupted; what was finished is saved, and the same command resumes", file=sys.stderr)
        return 128 + signal.SIGINT


def _error(message: str, status: int = 2) -> int:
    """Prints an error, what it quotes of files and servers escaped for the terminal; returns the exit status."""
    print(printable(f"nemo-edo: error: {message}"), file=sys.stderr)
    return status
