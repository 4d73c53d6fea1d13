"""The ``nemo-edo`` command: reads its arguments and calls the part that does the work, imported only then."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TextIO

from nemo_edo import __version__
from nemo_edo.cluster.control import FINISHED, STOPPED, tell_outcome
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError

STOPPED_BY_GUARD = 3


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0; 1 where a member of a sweep failed; 2 where the user's input is at
    fault; 3 where a guard has stopped a run; 75 (EX_TEMPFAIL) where a run was asked to stop and can be gone on with."""
    status = _run(argv)
    tell_outcome({0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}"))
    return status


def _run(argv: list[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments from one place only, but overrides may stand before and after an option.
    if rest and ("overrides" not in args or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.command(args, rest) or 0
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-edo", description=sys.modules["nemo_edo"].__doc__)
    parser.add_argument("--version", action="version", version=f"nemo-edo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy for each arm of a config, and write the report")
    _add_config(train)
    train.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: one run for each combination of the values KEY=A,B"
    )
    train.add_argument("--jobs", type=_count, metavar="N", help="with -m: runs at a time; default: 1")
    train.add_argument("--processes", type=_count, metavar="N", help="with -m: torchrun's processes of each run")
    _add_overrides(train)
    train.set_defaults(command=_train)

    launch = commands.add_parser("launch", help="submit a config, or a sweep of it, as a job of the cluster")
    _add_config(launch)
    launch.add_argument("-m", "--multirun", action="store_true", help="a sweep, as an array of jobs with one report")
    launch.add_argument("--dry-run", action="store_true", help="print the job's script, and do nothing")
    _add_overrides(launch)
    launch.set_defaults(command=_launch)

    collect = commands.add_parser("collect", help="draw and store the responses that a config's arms train on first")
    _add_config(collect)
    collect.add_argument("--arm", metavar="NAME", help="default: every arm")
    _add_overrides(collect)
    collect.set_defaults(command=_collect)

    evaluate = commands.add_parser("evaluate", help="evaluate the trained policies of a run")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    evaluate.add_argument("--arm", metavar="NAME", help="default: every arm")
    _add_overrides(evaluate)
    evaluate.set_defaults(command=_evaluate)

    report = commands.add_parser("report", help="write the report of a run, or of several together, one HTML file")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, a sweep's folder, or a pattern of them")
    report.add_argument("-o", "--out", type=Path, metavar="OUT.html", help="default: report.html in the common folder")
    report.add_argument("--baseline", metavar="LABEL", help="of several runs: the arm to compare with")
    report.set_defaults(command=_report)

    doctor = commands.add_parser("doctor", help="check a config, and this machine, before time is spent")
    doctor.add_argument("--config-name", metavar="NAME", help="default: none, the machine alone")
    doctor.add_argument("--config-path", metavar="DIR", help="a folder of configs; default: those of the package")
    doctor.add_argument("--gpus", type=_count, metavar="N", help="of all nodes together; default: this machine's")
    doctor.add_argument(
        "--gpu-memory", type=_size, metavar="SIZE", help="of each, such as 80GB; default: as found, or 80GB"
    )
    _add_overrides(doctor)
    doctor.set_defaults(command=_doctor)

    export = commands.add_parser("export", help="write a trained policy as a Hugging Face folder")
    export.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    export.add_argument(
        "--arm", metavar="NAME", help="default: the only arm, or the one that is the config's grpo section as it is"
    )
    export.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights; default: %(default)s"
    )
    export.set_defaults(command=_export)

    replay = commands.add_parser("replay", help="show which responses broke a step that a guard has stopped a run at")
    replay.add_argument("file", type=Path, metavar="FILE", help="RUN/failures/ARM_step_XXXXXXXX.safetensors")
    _add_overrides(replay)
    replay.set_defaults(command=_replay)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-name", default="quickstart", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--config-path", metavar="DIR", help="a folder of configs; default: those of the package")
    parser.add_argument("--on-bad-rows", choices=("skip", "error"), help="what a bad row of a problems file does")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, in Hydra's override syntax")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return value


def _size(text: str) -> int:
    from nemo_edo.doctor.report import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _train(args: argparse.Namespace, more_overrides: list[str]) -> int:
    from nemo_edo.configuration import compose_run

    overrides = _overrides(args, more_overrides)
    if args.multirun:
        return _sweep(args, overrides)
    if args.jobs or args.processes:
        raise UserError("--jobs and --processes are for sweeps: add -m")
    cfg = compose_run(args.config_name, overrides, args.config_path)

    runner = _runner()  # torch and Megatron: only once the configuration is known to be good
    runner.train(cfg)
    return 0


def _overrides(args: argparse.Namespace, more_overrides: list[str]) -> list[str]:
    bad_rows = [f"data.on_bad_rows={args.on_bad_rows}"] if args.on_bad_rows else []
    return args.overrides + more_overrides + bad_rows


def _collect(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.configuration import compose_run

    cfg = compose_run(args.config_name, _overrides(args, more_overrides), args.config_path)
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
    runner = _runner()
    runner.evaluate(args.run, args.arm, args.overrides + more_overrides)


def _report(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.evaluation import report, runs_report
    from nemo_edo.evaluation.run_set import find_runs

    found = find_runs(args.runs)
    if found.single:
        _say(str(report.write_report(found.single, args.out)))
        return
    for line in runs_report.write_runs_report(found, args.out, args.baseline):
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
    from nemo_edo.tracking import quiet_libraries

    quiet_libraries()
    from nemo_edo import runner

    return runner


def _say(message: str, file: TextIO | None = None) -> None:
    """Prints once for all the processes that torchrun starts. Errors, in contrast, are shown by every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=file)
