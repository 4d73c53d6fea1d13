"""The arguments of each ``nemo-edo`` command, and its help."""

import argparse
import os
import textwrap
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nemo_edo
from nemo_edo.config import RunConfig
from nemo_edo.config.checks import setting_types
from nemo_edo.config.shipped import shipped_configs
from nemo_edo.utils.wording import did_you_mean

HELP_WIDTH = 80
GROUPS = ("machine", "precision", "attention", "split", "training", "server")  # groups of the selftest's checks
Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and settings, as argparse takes them


@dataclass(frozen=True)
class Command:
    """How a command is called."""

    help: str
    page: str  # of the documentation: a file in docs/
    examples: tuple[str, ...]  # without the nemo-edo in front
    arguments: tuple[Argument, ...]
    lists_configs: bool = False


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; the command's name is ``command``. Ends the process with a message for what cannot be parsed, and
    after the help, which is all there is without a command."""
    parser, commands = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        complete(parser, commands)
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    if not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"no command {argv[0]}{did_you_mean(argv[0], commands)} (there are: {', '.join(commands)})")
    args, rest = parser.parse_known_args(argv)
    command = commands[args.command]
    # argparse accepts positional arguments in one place only; overrides may come before and after an option.
    for option in (argument.partition("=")[0] for argument in rest if argument.startswith("-")):
        known = [name[2:] for action in command._actions for name in action.option_strings if name.startswith("--")]
        meant = did_you_mean(option.lstrip("-"), known).replace("mean ", "mean --")
        takes_settings = "KEY=VALUE" in command.format_usage()
        settings = ", and a setting is written without dashes: KEY=VALUE" if takes_settings and not meant else ""
        command.error(f"unknown option {option}{meant} ({command.prog} --help lists them{settings})")
    if rest and "overrides" not in args:
        command.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command line's parser, and that of each command by its name."""
    formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=HELP_WIDTH)
    parser = argparse.ArgumentParser(
        prog="nemo-edo",
        description=_sentence(nemo_edo.__doc__.rstrip(".")),
        formatter_class=formatter,
        epilog="start here:\n  nemo-edo train                 the quickstart: minutes on a CPU\n"
        "  nemo-edo COMMAND --help        arguments, examples and the page of the docs\n\n"
        "docs: README.md, docs/quickstart.md, docs/configuration.md",
    )
    parser.add_argument("--version", action="version", version=f"nemo-edo {nemo_edo.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    made = {}
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  nemo-edo {example}" for example in command.examples)
        configs = ""
        if command.lists_configs:
            names = shipped_configs()
            plain = [name for name in names if "/" not in name and name != "score"]  # which is another command's
            lines = textwrap.wrap(", ".join(plain), HELP_WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
            papers = [name for name in names if "/" in name and "/base/" not in name]
            others = f"  and {len(papers)} of experiment/, listed in docs/sweeps.md"
            configs = "\n".join(["configs (--config-name):", *lines, others]) + "\n\n"
        made[name] = subparsers.add_parser(
            name, help=command.help, description=_sentence(command.help), formatter_class=formatter,
            epilog=f"examples:\n{examples}\n\n{configs}docs: docs/{command.page}",
        )  # fmt: skip
        for names, settings in command.arguments:
            made[name].add_argument(*names, **settings)
    return parser, made


def _sentence(text: str) -> str:
    return "\n".join(textwrap.wrap(f"{text[0].upper()}{text[1:]}.", HELP_WIDTH))


def _argument(*names: str, **settings: Any) -> Argument:
    return names, settings


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _config(default: str | None = "quickstart", help: str = "default: %(default)s") -> tuple[Argument, ...]:
    bad_rows = "for invalid rows of problem files; default: the config's"
    return (
        _argument("--config-name", default=default, metavar="NAME", help=help),
        _argument("--config-path", metavar="DIR", help="folder of the config; default: the package's configs"),
        _argument("--on-bad-rows", choices=("skip", "error"), help=bad_rows),
    )


_OVERRIDES = _argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, in Hydra's override syntax")
_RUN = _argument("run", type=Path, metavar="RUN", help="the run's folder")
_ARM = _argument("--arm", metavar="NAME", help="default: every arm")
_ONLY = _argument(
    "--only", nargs="+", default=(), metavar="GROUP", choices=GROUPS,
    help=f"groups of the selftest's checks to run, of {', '.join(GROUPS)}; default: all",
)  # fmt: skip

COMMANDS = {
    "train": Command(
        "train a policy for each arm of a config, and write the report", "quickstart.md",
        ("train", "train --config-name idpo_quickstart seed=2", "train name=strong arms.ed_grpo_floor.alpha=600",
         "train --print-config grpo.iterations=3", "train -m seed=1,2,3 name=seeds"),
        (*_config(),
         _argument("-m", "--multirun", action="store_true",
                   help="a sweep: one run for each combination of the values KEY=A,B"),
         _argument("--jobs", type=_count, metavar="N", help="with -m: concurrent runs; default: 1"),
         _argument("--processes", type=_count, metavar="N", help="with -m: torchrun processes per run"),
         _argument("--print-config", action="store_true",
                   help="print every setting with its value, as YAML, and train nothing"),
         _argument("--cfg", choices=("job",), dest="print_config", help="the same in Hydra's words: --cfg job"),
         _OVERRIDES),
        lists_configs=True,
    ),
    "launch": Command(
        "submit a config, or a sweep, as a Slurm job", "slurm.md",
        ("launch cluster=slurm --dry-run", "launch cluster=slurm cluster.nodes=2 --selftest --dry-run",
         "launch -m --config-name alpha_sweep seed=1,2 cluster=slurm --dry-run"),
        (*_config(),
         _argument("-m", "--multirun", action="store_true", help="a sweep, as a job array with one report"),
         _argument("--selftest", action="store_true",
                   help="run nemo-edo selftest on the config's nodes instead of training"),
         _ONLY,
         _argument("--dry-run", action="store_true", help="print the job's script without submitting it"),
         _OVERRIDES),
        lists_configs=True,
    ),
    "collect": Command(
        "generate and store the responses of a config's first iteration, without training", "reliability.md",
        ("collect --arm grpo", "collect --config-name rivals"),
        (*_config(), _ARM, _OVERRIDES),
        lists_configs=True,
    ),
    "evaluate": Command(
        "evaluate a run's trained policies, or any model", "evaluation.md",
        ("evaluate runs/quickstart evaluation.samples=16", "evaluate runs/a runs/b --stored",
         "evaluate --config-name evaluate model.path=DIR data.test=FILE"),
        (_argument("overrides", nargs="*", metavar="RUN|KEY=VALUE",
                   help="the run's folder (several with --stored), and settings"),
         _ARM,
         _argument("--stored", action="store_true",
                   help="use the stored responses: loads no model, generates nothing"),
         *_config(None, "instead of RUN: evaluate the config's untrained model")),
    ),
    "search": Command(
        "solve test problems by SearchLLM, with a run's policy or any model", "evaluation.md",
        ("search runs/quickstart --arm grpo search.reward_model=DIR",),
        (_argument("overrides", nargs="*", metavar="RUN|KEY=VALUE", help="the run's folder, and settings (search.*)"),
         _argument("--arm", metavar="NAME", help="default: the only arm"),
         *_config(None, "instead of RUN: search with the config's untrained model")),
    ),
    "score": Command(
        "score a run's stored responses with a process reward model", "evaluation.md",
        ("score runs/quickstart --model DIR --name prm",),
        (_RUN,
         _argument("--model", required=True, metavar="FOLDER|URL",
                   help="the reward model, or a vLLM server that serves it"),
         _argument("--name", required=True, metavar="NAME", help="the name to store the scores under"),
         _ARM,
         _argument("--tokenizer", type=Path, metavar="DIR",
                   help="for a model at a URL: folder of its tokenizer and config.json"),
         _OVERRIDES),
    ),
    "report": Command(
        "write the report of one or several runs, a single HTML file", "sweeps.md",
        ("report runs/quickstart", "report 'runs/seed_*' -o seeds.html --baseline GRPO"),
        (_argument("runs", nargs="+", metavar="RUN", help="a run's folder, a sweep's folder, or a pattern of folders"),
         _argument("-o", "--out", type=Path, metavar="OUT.html", help="default: report.html in the common folder"),
         _argument("--baseline", metavar="LABEL", help="for several runs: the arm to compare with")),
    ),
    "study": Command(
        "train every cell of tasks x arms x doses x seeds, and write their results to one CSV file", "studies.md",
        ("study run doses --jobs 4", "study status doses"),
        (_argument("action", choices=("run", "status"),
                   help="run: the cells that are left; status: how many these are, their CPU hours, and which have "
                   "changed"),
         _argument("file", metavar="FILE", help="a study's YAML file, or the name of one in conf/studies/"),
         _argument("--jobs", type=_count, default=1, metavar="N", help="processes; default: %(default)s")),
    ),
    "doctor": Command(
        "check a config and this machine before a run", "scaling.md",
        ("doctor", "doctor --config-name grpo_gsm8k model=llama3_1_8b --gpus 8"),
        (*_config(None, "default: check the machine only"),
         _argument("--gpus", type=_count, metavar="N", help="GPUs of all nodes; default: this machine's"),
         _argument("--gpu-memory", metavar="SIZE", help="memory of each GPU; default: this machine's, or 80GB"),
         _OVERRIDES),
        lists_configs=True,
    ),
    "selftest": Command(
        "try at small scale what this machine can do: precisions, splits, training, servers", "first_day.md",
        ("selftest", "selftest --only machine precision"),
        (_argument("--folder", type=Path, default=Path("runs/selftest"),
                   help="for files that every node must see, and selftest.json; default: runs/selftest"),
         _ONLY),
    ),
    "export": Command(
        "write a trained policy as a Hugging Face folder", "quickstart.md",
        ("export runs/quickstart exported/grpo --arm grpo", "export runs/lora exported/adapter --arm grpo --adapter"),
        (_RUN, _argument("out", type=Path, metavar="OUT", help="the folder to write"),
         _argument("--arm", metavar="NAME",
                   help="default: the only arm, or the arm that changes nothing in its algorithm's section"),
         _argument("--adapter", action="store_true",
                   help="the LoRA adapters alone, as a PEFT folder, with their base model in it"),
         _argument("--push-to-hub", metavar="REPOSITORY",
                   help="OWNER/NAME on the Hugging Face hub, where the folder is uploaded as well (log in: hf auth "
                   "login)"),
         _argument("--max-shard-size", default="5GB", metavar="SIZE",
                   help="size of each weights file; default: %(default)s")),
    ),
    "replay": Command(
        "find the responses behind a training step that a guard stopped", "reliability.md",
        ("replay runs/quickstart/failures/grpo_step_00000012.safetensors",),
        (_argument("file", type=Path, metavar="FILE", help="RUN/failures/ARM_step_XXXXXXXX.safetensors"), _OVERRIDES),
    ),
}  # fmt: skip


# --- what the Tab key completes, by argcomplete: commands and options, configs, and settings of a run -----------------


def complete(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> None:
    """Answers the shell and ends the process, where the shell has asked (``_ARGCOMPLETE``)."""
    import argcomplete  # installed by those who use it

    for command in commands.values():
        for action in command._actions:  # argparse has no public list of them
            if action.dest == "config_name":
                action.completer = lambda prefix, **_: shipped_configs()  # type: ignore[attr-defined]
            elif action.dest == "overrides":
                action.completer = lambda prefix, **_: settings(prefix)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def settings(prefix: str) -> list[str]:
    """The keys below the prefix, a level at a time: ``grpo.`` for a section, ``grpo.beta=`` for a setting."""
    keys = [f"{key}{'.' if is_dataclass(hint) else '='}" for key, hint in setting_types(RunConfig).items()]
    return [key for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :].rstrip(".")]
