"""The ``nemo-edo`` command: reads its arguments and calls the part that does the work, imported only then."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from nemo_edo import __version__
from nemo_edo.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 2 where the user's input is at fault."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments from one place only, but overrides may stand before and after an option.
    if rest and ("overrides" not in args or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        args.command(args, rest)
    except UserError as error:
        print(f"nemo-edo: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-edo", description=sys.modules["nemo_edo"].__doc__)
    parser.add_argument("--version", action="version", version=f"nemo-edo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy for each arm of a config, and write the report")
    train.add_argument("--config-name", default="quickstart", metavar="NAME", help="default: %(default)s")
    train.add_argument("--config-path", metavar="DIR", help="a folder of configs; default: those of the package")
    train.add_argument("--on-bad-rows", choices=("skip", "error"), help="what a bad row of a problems file does")
    _add_overrides(train)
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("evaluate", help="evaluate the trained policies of a run")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    evaluate.add_argument("--arm", metavar="NAME", help="default: every arm")
    _add_overrides(evaluate)
    evaluate.set_defaults(command=_evaluate)

    report = commands.add_parser("report", help="write a run's report anew, one HTML file")
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    report.set_defaults(command=_report)

    export = commands.add_parser("export", help="write a trained policy as a Hugging Face folder")
    export.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    export.add_argument(
        "--arm", metavar="NAME", help="default: the only arm, or the one that is the config's grpo section as it is"
    )
    export.set_defaults(command=_export)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, in Hydra's override syntax")


def _train(args: argparse.Namespace, more_overrides: list[str]) -> None:
    from nemo_edo.configuration import compose_run

    bad_rows = [f"data.on_bad_rows={args.on_bad_rows}"] if args.on_bad_rows else []
    cfg = compose_run(args.config_name, args.overrides + more_overrides + bad_rows, args.config_path)

    runner = _runner()  # torch and Megatron: only once the configuration is known to be good
    runner.train(cfg)


def _evaluate(args: argparse.Namespace, more_overrides: list[str]) -> None:
    runner = _runner()
    runner.evaluate(args.run, args.arm, args.overrides + more_overrides)


def _report(args: argparse.Namespace, _: list[str]) -> None:
    from nemo_edo.evaluation.report import write_report

    _say(str(write_report(args.run)))


def _export(args: argparse.Namespace, _: list[str]) -> None:
    runner = _runner()
    runner.export(args.run, args.out, args.arm)


def _runner():
    from nemo_edo.tracking import quiet_libraries

    quiet_libraries()
    from nemo_edo import runner

    return runner


def _say(message: str) -> None:
    """Prints once for all the processes that torchrun starts. Errors, in contrast, are shown by every rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message)
