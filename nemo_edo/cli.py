"""The ``nemo-edo`` command: reads its arguments and calls the part that does the work, imported only then."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nemo_edo import arguments
from nemo_edo.cluster.control import FINISHED, STOPPED, tell_outcome
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError

if TYPE_CHECKING:
    from nemo_edo.config import RunConfig

STOPPED_BY_GUARD = 3


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0; 1 where a member of a sweep failed; 2 where the user's input is at
    fault; 3 where a guard has stopped a run; 75 (EX_TEMPFAIL) where a run was asked to stop and can be gone on with."""
    status = _run(argv)
    tell_outcome({0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}"))
    return status


def _run(argv: list[str] | None) -> int:
    parser = arguments.parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments from one place only, but overrides may stand before and after an option.
    if rest and ("overrides" not in args or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return COMMANDS[args.command](args, rest) or 0
    except UserError as error:
        print(f"nemo-edo: error: {error}", file=sys.stderr)
        return 2
    except StoppedByGuard as stopped:
        hint = "it is saved, and the same command goes on from here, with other guards.* if need be"
        _say(f"nemo-edo: stopped by a guard: {stopped}\nnemo-edo: {hint}", file=sys.stderr)
        return STOPPED_BY_GUARD
    except RunStopped as stopped:
        _say(f"nemo-edo: {stopped}; the same command goes on from here", file=sys.stderr)
        return os.EX_TEMPFAIL


def _train(args: argparse.Namespace, more_overrides: list[str]) -> int:
    from nemo_edo.config import RewardModelRunConfig
    from nemo_edo.configuration import compose_job, require_run

    overrides = _overrides(args, more_overrides)
    if args.multirun:
        return _sweep(args, overrides)
    if args.jobs or args.processes:
        raise UserError("--jobs and --processes are for sweeps: add -m")
    cfg = compose_job(args.config_name, overrides, args.config_path)

    if isinstance(cfg, RewardModelRunConfig):
        _quiet()
        from nemo_edo.rewards import train_reward_model

        train_reward_model.train_reward_model(cfg)
        return 0
    runner = _runner()  # torch and Megatron: only once the configuration is known to be good
    runner.train(require_run(cfg, args.config_name))
    return 0


def _overrides(args: argparse.Namespace, more_overrides: list[str]) -> list[str]:
    bad_rows = [f"data.on_bad_rows={args.on_bad_rows}"] if args.on_bad_rows else []
    return [*args.overrides, *more_overrides, *bad_rows]


def _named_config(args: argparse.Namespace, more_overrides: list[str]) -> RunConfig:
    from nemo_edo.configuration import compose_run

    return compose_run(args.config_name, _overrides(args, more_overrides), args.config_path)


def _runs_and_overrides(
    args: argparse.Namespace, more_overrides: list[str], *, stored: bool = False
) -> tuple[list[Path], list[str]]:
    """The folders of runs, none where a config is named, and the overrides. Raises UserError for arguments that do not
    go with the one or with the other."""
    given = args.overrides + more_overrides
    runs = [Path(one) for one in given if "=" not in one or Path(one).is_dir()]
    if args.config_name is None and (args.config_path or args.on_bad_rows):
        raise UserError("--config-path and --on-bad-rows go with --config-name; a run's folder has its config")
    if args.config_name is not None and (runs or args.arm or stored):
        wrong = runs[0] if runs else "--arm" if args.arm else "--stored"
        raise UserError(f"{wrong}: with --config-name the run is the config's own, and has one policy")
    return runs, [one for one in given if Path(one) not in runs]


def _collect(args: argparse.Namespace, more_overrides: list[str]) -> None:
    cfg = _named_config(args, more_overrides)
    runner = _runner()
    runner.collect(cfg, args.arm)


def _sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    from nemo_edo.sweep import plan_sweep, run_sweep

    if "RANK" in os.environ:
        raise UserError("a sweep starts the processes of its runs itself: instead of torchrun, use --processes N")
    sweep = plan_sweep(args.config_name, overrides, args.config_path)
    failures = run_sweep(sweep, jobs=args.jobs or 1, processes=args.processes or 1)
    for failure in failures:
        message = f"nemo-edo: {failure.member.name} failed with status {failure.status}: see {failure.log}"
        print(message, file=sys.stderr)
    print(f"{len(sweep.members) - len(failures)} of {len(sweep.members)} members have finished.")
    print(f"Their report: nemo-edo report {shlex.quote(str(sweep.folder))}")
    return 1 if failures else 0


def _launch(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.cluster.launch import launch, plan

    overrides = _overrides(args, more_overrides)
    planned = plan(args.config_name, overrides, args.config_path, multirun=args.multirun)
    _say(launch(planned, dry_run=args.dry_run))


def _evaluate(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runs, overrides = _runs_and_overrides(args, more_overrides, stored=args.stored)
    if args.config_name is not None:
        cfg = _named_config(args, more_overrides)
        runner = _runner()
        for line in runner.evaluate_model(cfg):
            _say(line)
        return
    if not runs:
        raise UserError("name the folder of a run, or a config with --config-name")
    if args.stored:
        from nemo_edo.evaluator_run import evaluate_stored

        for line in evaluate_stored(runs, args.arm, overrides):
            _say(line)
        return
    if len(runs) > 1:
        raise UserError(f"evaluate takes one run at a time, not {len(runs)}; several go with --stored")
    runner = _runner()
    runner.evaluate(runs[0], args.arm, overrides)


def _search(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runs, overrides = _runs_and_overrides(args, more_overrides)
    if args.config_name is None:
        if len(runs) != 1:
            raise UserError(f"name the folder of one run, or a config with --config-name; given are {len(runs)} runs")
        search_run = _search_run()
        said = search_run.search(runs[0], args.arm, overrides)
    else:
        cfg = _named_config(args, more_overrides)
        search_run = _search_run()
        said = search_run.search_model(cfg)
    for line in said:
        _say(line)


def _report(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.evaluation import report, runs_report
    from nemo_edo.evaluation.run_set import find_runs

    if args.table is not None:
        _table(args)
        return
    found = find_runs(args.runs)
    if found.single:
        _say(str(report.write_report(found.single, args.out)))
        return
    for line in runs_report.write_runs_report(found, args.out, args.baseline):
        _say(line)


def _table(args: argparse.Namespace) -> None:
    from nemo_edo.evaluation import tables_report
    from nemo_edo.evaluation.paper_tables import TABLES
    from nemo_edo.evaluation.run_set import find_runs

    if args.table not in TABLES:
        raise UserError(f"--table is {args.table!r}, expected one of {', '.join(TABLES)}")
    if args.baseline is not None:
        raise UserError("--baseline is for a report, not for --table: the paper's tables have none")
    for line in tables_report.write_table(find_runs(args.runs), args.table, args.out):
        _say(line)


def _score(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.configuration import compose_job

    # Other settings of servers are checked beside their URLs.
    urls = [f"servers.urls=['{args.model}']"] if args.model.startswith(("http://", "https://")) else []
    cfg = compose_job("score", urls + args.overrides + more_overrides)
    _quiet()
    from nemo_edo.rewards import score_run

    for line in score_run.score_run(args.run, args.model, args.name, args.arm, args.tokenizer, cfg):
        _say(line)


def _doctor(args: argparse.Namespace, more_overrides: list[str]) -> int:
    from nemo_edo.doctor.report import diagnose

    overrides = args.overrides + more_overrides
    if args.config_name is None and overrides:
        raise UserError(f"{' '.join(overrides)}: settings of which config? Name it with --config-name")
    text, good = diagnose(args.config_name, overrides, args.config_path, count=args.gpus, memory=args.gpu_memory)
    _say(text)
    return 0 if good else 2


def _export(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.sizes import parse_size

    max_shard_bytes = parse_size("--max-shard-size", args.max_shard_size)
    runner = _runner()
    runner.export(args.run, args.out, args.arm, max_shard_bytes)


def _replay(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runner = _runner()
    runner.replay(args.file, args.overrides + more_overrides)


def _runner():
    _quiet()
    from nemo_edo import runner

    return runner


def _search_run():
    _quiet()
    from nemo_edo import search_run

    return search_run


def _quiet() -> None:
    from nemo_edo.tracking import quiet_libraries

    quiet_libraries()


def _say(message: str, file: TextIO | None = None) -> None:
    """Prints once for all the processes that torchrun starts. Errors, in contrast, are shown by every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=file)


COMMANDS = {
    "train": _train,
    "launch": _launch,
    "collect": _collect,
    "evaluate": _evaluate,
    "search": _search,
    "score": _score,
    "report": _report,
    "doctor": _doctor,
    "export": _export,
    "replay": _replay,
}
