"""The ``nemo-edo`` command: calls the part of the package that does the work, which is imported only then."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import nemo_edo
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.run.control import FINISHED, STOPPED, tell_outcome
from nemo_edo.utils.processes import end_with_torchrun

if TYPE_CHECKING:
    from nemo_edo.config import RunConfig

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says of a full disk, a used up quota, and a place that may not be written to."""
STOPPED_BY_GUARD = 3
"""The exit status."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0 on success; 1 where a member of a sweep failed; 2 for an error in
    the user's input; 3 where a guard stopped the run; 75 (EX_TEMPFAIL) where a run was asked to stop and can resume."""
    end_with_torchrun()  # before the imports, which take a while
    status = _run(argv)
    tell_outcome({0: FINISHED, os.EX_TEMPFAIL: STOPPED}.get(status, f"failed with status {status}"))
    return status


def _run(argv: list[str] | None) -> int:
    parser = _build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse accepts positional arguments in one place only; overrides may come before and after an option.
    if rest and ("overrides" not in args or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return COMMANDS[args.command][1](args, rest) or 0
    except UserError as error:
        print(f"nemo-edo: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror}; make room or give access, and rerun the command"
        print(f"nemo-edo: error: {message}", file=sys.stderr)
        return 2
    except StoppedByGuard as stopped:
        hint = "its state is saved; the same command resumes it, if necessary with other guards.* settings"
        _say(f"nemo-edo: stopped by a guard: {stopped}\nnemo-edo: {hint}", file=sys.stderr)
        return STOPPED_BY_GUARD
    except RunStopped as stopped:
        _say(f"nemo-edo: {stopped}; the same command resumes the run", file=sys.stderr)
        return os.EX_TEMPFAIL


def _train(args: argparse.Namespace, more_overrides: list[str]) -> int:
    from nemo_edo.config import RewardModelRunConfig
    from nemo_edo.config.compose import compose_job, require_run

    overrides = _overrides(args, more_overrides)
    if args.multirun:
        return _sweep(args, overrides)
    if args.jobs or args.processes:
        raise UserError("--jobs and --processes are for sweeps: add -m")
    cfg = compose_job(args.config_name, overrides, args.config_path)
    if isinstance(cfg, RewardModelRunConfig):
        _quiet()
        from nemo_edo.reward_models.train import train_reward_model

        train_reward_model(cfg)
        return 0
    from nemo_edo.doctor.preflight import preflight

    cfg = preflight(require_run(cfg, args.config_name))
    _jobs().train(cfg)
    return 0


def _overrides(args: argparse.Namespace, more_overrides: list[str]) -> list[str]:
    bad_rows = [f"data.on_bad_rows={args.on_bad_rows}"] if args.on_bad_rows else []
    return [*args.overrides, *more_overrides, *bad_rows]


def _named_config(args: argparse.Namespace, more_overrides: list[str]) -> RunConfig:
    """Checked before torch and Megatron are imported."""
    from nemo_edo.config.compose import compose_run
    from nemo_edo.doctor.preflight import preflight

    return preflight(compose_run(args.config_name, _overrides(args, more_overrides), args.config_path))


def _runs_and_overrides(
    args: argparse.Namespace, more_overrides: list[str], *, stored: bool = False
) -> tuple[list[Path], list[str]]:
    """The folders of runs, none with --config-name, and the overrides. Raises UserError for arguments that cannot be
    combined."""
    given = args.overrides + more_overrides
    runs = [Path(one) for one in given if "=" not in one or Path(one).is_dir()]
    if args.config_name is None and (args.config_path or args.on_bad_rows):
        raise UserError("--config-path and --on-bad-rows need --config-name; a run's folder has its own config")
    if args.config_name is not None and (runs or args.arm or stored):
        wrong = runs[0] if runs else "--arm" if args.arm else "--stored"
        raise UserError(f"{wrong} cannot be combined with --config-name, which names one policy: the config's model")
    return runs, [one for one in given if Path(one) not in runs]


def _collect(args: argparse.Namespace, more_overrides: list[str]) -> None:
    cfg = _named_config(args, more_overrides)
    _jobs().collect(cfg, args.arm)


def _sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    from nemo_edo.run.sweep import plan_sweep, run_sweep

    if "RANK" in os.environ:
        raise UserError("a sweep starts its runs' processes itself: use --processes N instead of torchrun")
    sweep = plan_sweep(args.config_name, overrides, args.config_path)
    failures = run_sweep(sweep, jobs=args.jobs or 1, processes=args.processes or 1)
    for failure in failures:
        message = f"nemo-edo: {failure.member.name} failed with status {failure.status}: see {failure.log}"
        print(message, file=sys.stderr)
    print(f"{len(sweep.members) - len(failures)} of {len(sweep.members)} runs have finished.")
    print(f"To write their report: nemo-edo report {shlex.quote(str(sweep.folder))}")
    return 1 if failures else 0


def _launch(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.cluster.launch import launch, plan

    planned = plan(args.config_name, _overrides(args, more_overrides), args.config_path, multirun=args.multirun)
    _say(launch(planned, dry_run=args.dry_run))


def _evaluate(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runs, overrides = _runs_and_overrides(args, more_overrides, stored=args.stored)
    if args.config_name is not None:
        cfg = _named_config(args, more_overrides)
        _say_all(_jobs().evaluate_model(cfg))
        return
    if not runs:
        raise UserError("name the folder of a run, or a config with --config-name")
    if args.stored:
        from nemo_edo.run.evaluate_stored import evaluate_stored

        _say_all(evaluate_stored(runs, args.arm, overrides))
        return
    if len(runs) > 1:
        raise UserError(f"evaluate takes one run, not {len(runs)}; --stored takes several")
    _jobs().evaluate(runs[0], args.arm, overrides)


def _search(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runs, overrides = _runs_and_overrides(args, more_overrides)
    if args.config_name is None and len(runs) != 1:
        raise UserError(f"name the folder of one run, or a config with --config-name; got {len(runs)} runs")
    cfg = _named_config(args, more_overrides) if args.config_name is not None else None
    _quiet()
    from nemo_edo.search import job

    _say_all(job.search(runs[0], args.arm, overrides) if cfg is None else job.search_model(cfg))


def _report(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.report.page import write_report
    from nemo_edo.report.run_set import find_runs, read_runs

    if args.table is not None:
        _table(args)
        return
    _say_all(write_report(read_runs(find_runs(args.runs)), args.out, args.baseline).lines)


def _table(args: argparse.Namespace) -> None:
    from nemo_edo.report.paper.published import TABLES
    from nemo_edo.report.paper.tables import write_table
    from nemo_edo.report.run_set import find_runs

    if args.table not in TABLES:
        raise UserError(f"--table is {args.table!r}, expected one of {', '.join(TABLES)}")
    if args.baseline is not None:
        raise UserError("--baseline cannot be combined with --table: the paper's tables have no baseline")
    _say_all(write_table(find_runs(args.runs), args.table, args.out))


def _score(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.config.compose import compose_job

    # With the URL, so that composing the config checks the other settings of servers together with it.
    urls = [f"servers.urls=['{args.model}']"] if args.model.startswith(("http://", "https://")) else []
    cfg = compose_job("score", urls + args.overrides + more_overrides)
    _quiet()
    from nemo_edo.reward_models import score_run

    _say_all(score_run.score_run(args.run, args.model, args.name, args.arm, args.tokenizer, cfg))


def _doctor(args: argparse.Namespace, more_overrides: list[str]) -> int:
    from nemo_edo.doctor.report import diagnose
    from nemo_edo.utils.files import parse_size

    overrides = args.overrides + more_overrides
    if args.config_name is None and overrides:
        raise UserError(f"{' '.join(overrides)}: settings need --config-name")
    memory = args.gpu_memory and parse_size("--gpu-memory", args.gpu_memory, ("GB", "GIB"))
    text, good = diagnose(args.config_name, overrides, args.config_path, count=args.gpus, memory=memory)
    _say(text)
    return 0 if good else 2


def _export(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.utils.files import parse_size

    size = parse_size("--max-shard-size", args.max_shard_size)
    _jobs().export(args.run, args.out, args.arm, size)


def _replay(args: argparse.Namespace, more_overrides: list[str]) -> None:
    _jobs().replay(args.file, args.overrides + more_overrides)


def _jobs():
    """Imports torch and Megatron: called only once the configuration is valid."""
    _quiet()
    from nemo_edo.run import jobs

    return jobs


def _quiet() -> None:
    from nemo_edo.run.tracking import quiet_libraries

    quiet_libraries()


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        _say(line)


def _say(message: str, file: TextIO | None = None) -> None:
    """Prints on the first rank only. Errors of the user's input are printed on every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=file)


# --- arguments ----------------------------------------------------------------------------------------------------


def _build_parser() -> argparse.ArgumentParser:
    """Parses into the command's name, ``command``, and its arguments."""
    parser = argparse.ArgumentParser(prog="nemo-edo", description=nemo_edo.__doc__)
    parser.add_argument("--version", action="version", version=f"nemo-edo {nemo_edo.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add_arguments, _ in COMMANDS.values():
        add_arguments(commands)
    return parser


def _add_train(commands) -> None:
    command = commands.add_parser("train", help="train a policy for each arm of a config, and write the report")
    _add_config(command)
    command.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: one run for each combination of the values KEY=A,B"
    )
    command.add_argument("--jobs", type=_count, metavar="N", help="with -m: concurrent runs; default: 1")
    command.add_argument("--processes", type=_count, metavar="N", help="with -m: torchrun processes per run")
    _add_overrides(command)


def _add_launch(commands) -> None:
    command = commands.add_parser("launch", help="submit a config, or a sweep, as a Slurm job")
    _add_config(command)
    command.add_argument("-m", "--multirun", action="store_true", help="a sweep, as a job array with one report")
    command.add_argument("--dry-run", action="store_true", help="print the job's script without submitting it")
    _add_overrides(command)


def _add_collect(commands) -> None:
    command = commands.add_parser(
        "collect", help="generate and store the responses of a config's first iteration, without training"
    )
    _add_config(command)
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    _add_overrides(command)


def _add_evaluate(commands) -> None:
    command = commands.add_parser("evaluate", help="evaluate a run's trained policies, or any model")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="RUN|KEY=VALUE",
        help="the run's folder (several with --stored), and settings",
    )
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    command.add_argument(
        "--stored", action="store_true", help="use the stored responses: loads no model, generates nothing"
    )
    _add_config(command, default=None, help="instead of RUN: evaluate the config's untrained model")


def _add_search(commands) -> None:
    command = commands.add_parser("search", help="solve test problems by SearchLLM, with a run's policy or any model")
    command.add_argument(
        "overrides", nargs="*", metavar="RUN|KEY=VALUE", help="the run's folder, and settings (search.*)"
    )
    command.add_argument("--arm", metavar="NAME", help="default: the only arm")
    _add_config(command, default=None, help="instead of RUN: search with the config's untrained model")


def _add_score(commands) -> None:
    command = commands.add_parser("score", help="score a run's stored responses with a process reward model")
    command.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument(
        "--model", required=True, metavar="FOLDER|URL", help="the reward model, or a vLLM server that serves it"
    )
    command.add_argument("--name", required=True, metavar="NAME", help="the name to store the scores under")
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    command.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="for a model at a URL: folder of its tokenizer and config.json"
    )
    _add_overrides(command)


def _add_report(commands) -> None:
    command = commands.add_parser("report", help="write the report of one or several runs, a single HTML file")
    command.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, a sweep's folder, or a pattern of folders"
    )
    command.add_argument("-o", "--out", type=Path, metavar="OUT.html", help="default: report.html in the common folder")
    command.add_argument(
        "--table",
        metavar="NAME",
        help="instead: a table of the paper (main, ood, seeds, alpha, test_time, iterations) with the runs' numbers, "
        "to the terminal or to OUT.html, OUT.md or OUT.csv",
    )
    command.add_argument("--baseline", metavar="LABEL", help="for several runs: the arm to compare with")


def _add_doctor(commands) -> None:
    command = commands.add_parser("doctor", help="check a config and this machine before a run")
    command.add_argument("--config-name", metavar="NAME", help="default: check the machine only")
    _add_config_path(command)
    command.add_argument("--gpus", type=_count, metavar="N", help="GPUs of all nodes; default: this machine's")
    command.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory of each GPU; default: this machine's, or 80GB"
    )
    _add_overrides(command)


def _add_export(commands) -> None:
    command = commands.add_parser("export", help="write a trained policy as a Hugging Face folder")
    command.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    command.add_argument(
        "--arm", metavar="NAME", help="default: the only arm, or the arm that changes nothing in the grpo section"
    )
    command.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="size of each weights file; default: %(default)s"
    )


def _add_replay(commands) -> None:
    command = commands.add_parser("replay", help="find the responses behind a training step that a guard stopped")
    command.add_argument("file", type=Path, metavar="FILE", help="RUN/failures/ARM_step_XXXXXXXX.safetensors")
    _add_overrides(command)


def _add_config(
    command: argparse.ArgumentParser, default: str | None = "quickstart", help: str = "default: %(default)s"
) -> None:
    command.add_argument("--config-name", default=default, metavar="NAME", help=help)
    _add_config_path(command)
    command.add_argument(
        "--on-bad-rows", choices=("skip", "error"), help="for invalid rows of problem files; default: the config's"
    )


def _add_config_path(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config-path", metavar="DIR", help="folder of the config; default: the package's configs")


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, in Hydra's override syntax")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


COMMANDS = {
    "train": (_add_train, _train),
    "launch": (_add_launch, _launch),
    "collect": (_add_collect, _collect),
    "evaluate": (_add_evaluate, _evaluate),
    "search": (_add_search, _search),
    "score": (_add_score, _score),
    "report": (_add_report, _report),
    "doctor": (_add_doctor, _doctor),
    "export": (_add_export, _export),
    "replay": (_add_replay, _replay),
}
"""What declares a command's arguments, and what runs it."""
