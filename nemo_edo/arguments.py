"""What the ``nemo-edo`` command line takes."""

from __future__ import annotations

import argparse
from pathlib import Path

import nemo_edo


def parser() -> argparse.ArgumentParser:
    """Its result has the command's name as ``command``."""
    whole = argparse.ArgumentParser(prog="nemo-edo", description=nemo_edo.__doc__)
    whole.add_argument("--version", action="version", version=f"nemo-edo {nemo_edo.__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add in (_train, _launch, _collect, _evaluate, _search, _score, _report, _doctor, _export, _replay):
        add(commands)
    return whole


def _train(commands) -> None:
    command = commands.add_parser("train", help="train a policy for each arm of a config, and write the report")
    _add_config(command)
    command.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: one run for each combination of the values KEY=A,B"
    )
    command.add_argument("--jobs", type=_count, metavar="N", help="with -m: runs at a time; default: 1")
    command.add_argument("--processes", type=_count, metavar="N", help="with -m: torchrun's processes of each run")
    _add_overrides(command)


def _launch(commands) -> None:
    command = commands.add_parser("launch", help="submit a config, or a sweep of it, as a job of the cluster")
    _add_config(command)
    command.add_argument("-m", "--multirun", action="store_true", help="a sweep, as an array of jobs with one report")
    command.add_argument("--dry-run", action="store_true", help="print the job's script, and do nothing")
    _add_overrides(command)


def _collect(commands) -> None:
    command = commands.add_parser("collect", help="draw and store the responses that a config's arms train on first")
    _add_config(command)
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    _add_overrides(command)


def _evaluate(commands) -> None:
    command = commands.add_parser("evaluate", help="evaluate the trained policies of a run, or any model")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="RUN|KEY=VALUE",
        help="the run's folder (of --stored, one or more), and settings",
    )
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    command.add_argument(
        "--stored", action="store_true", help="from the responses that are stored: no model, nothing is drawn"
    )
    _add_config(command, default=None, help="instead of RUN: evaluate the config's model as it is")


def _search(commands) -> None:
    command = commands.add_parser("search", help="solve a run's test problems by SearchLLM, or those of any model")
    command.add_argument(
        "overrides", nargs="*", metavar="RUN|KEY=VALUE", help="the run's folder, and settings (search.*)"
    )
    command.add_argument("--arm", metavar="NAME", help="default: the only arm")
    _add_config(command, default=None, help="instead of RUN: the config's model as it is")


def _score(commands) -> None:
    command = commands.add_parser("score", help="score a run's stored responses with a process reward model")
    command.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument(
        "--model", required=True, metavar="FOLDER|URL", help="the reward model, or a vLLM server of it"
    )
    command.add_argument("--name", required=True, metavar="NAME", help="what the scores are called from now on")
    command.add_argument("--arm", metavar="NAME", help="default: every arm")
    command.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="of a model at a URL: its tokenizer, config.json"
    )
    _add_overrides(command)


def _report(commands) -> None:
    command = commands.add_parser("report", help="write the report of a run, or of several together, one HTML file")
    command.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, a sweep's folder, or a pattern of them"
    )
    command.add_argument("-o", "--out", type=Path, metavar="OUT.html", help="default: report.html in the common folder")
    command.add_argument(
        "--table",
        metavar="NAME",
        help="instead: a table of the paper (main, ood, seeds, alpha, test_time, iterations) beside the runs' numbers, "
        "to the terminal or to OUT.html, OUT.md or OUT.csv",
    )
    command.add_argument("--baseline", metavar="LABEL", help="of several runs: the arm to compare with")


def _doctor(commands) -> None:
    command = commands.add_parser("doctor", help="check a config, and this machine, before time is spent")
    command.add_argument("--config-name", metavar="NAME", help="default: none, the machine alone")
    command.add_argument("--config-path", metavar="DIR", help="a folder of configs; default: those of the package")
    command.add_argument("--gpus", type=_count, metavar="N", help="of all nodes together; default: this machine's")
    command.add_argument(
        "--gpu-memory", type=_size, metavar="SIZE", help="of each, such as 80GB; default: as found, or 80GB"
    )
    _add_overrides(command)


def _export(commands) -> None:
    command = commands.add_parser("export", help="write a trained policy as a Hugging Face folder")
    command.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    command.add_argument(
        "--arm", metavar="NAME", help="default: the only arm, or the one that is the config's grpo section as it is"
    )
    command.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights; default: %(default)s"
    )


def _replay(commands) -> None:
    command = commands.add_parser("replay", help="show which responses broke a step that a guard has stopped a run at")
    command.add_argument("file", type=Path, metavar="FILE", help="RUN/failures/ARM_step_XXXXXXXX.safetensors")
    _add_overrides(command)


def _add_config(
    command: argparse.ArgumentParser, default: str | None = "quickstart", help: str = "default: %(default)s"
) -> None:
    command.add_argument("--config-name", default=default, metavar="NAME", help=help)
    command.add_argument("--config-path", metavar="DIR", help="a folder of configs; default: those of the package")
    command.add_argument("--on-bad-rows", choices=("skip", "error"), help="what a bad row of a problems file does")


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, in Hydra's override syntax")


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
