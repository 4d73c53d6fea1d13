"""The docs are as good as the code: their commands, configs and Python work, their tables and links are current."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import cli_page
import config_table
import pytest
import site_hooks

import nemo_edo
import nemo_edo.checks.selftest
import nemo_edo.run
import nemo_edo.search
from nemo_edo import losses, metrics, test_time
from nemo_edo.cli import main
from nemo_edo.cli.arguments import COMMANDS as DECLARED
from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_job, compose_run, resolved_yaml

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
ROOT_PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in site_hooks.PAGES}
API = {f"api/{path.name}": path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/api/*.md"))}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, content) of each fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page, block) for page, text in PAGES.items() for block in pattern.findall(text)]


def commands() -> list[tuple[str, list[str]]]:
    """(page, arguments) of each ``nemo-edo`` of a shell block: started by itself, by torchrun or in a container."""
    found = []
    for page, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "nemo-edo" in words and words[:2] != ["docker", "build"]:
                last = len(words) - 1 - words[::-1].index("nemo-edo")
                found.append((page, words[last + 1 :]))
    return [*found, *((f"{name} --help", shlex.split(example)) for name, command in DECLARED.items()
                      for example in command.examples)]


COMMANDS = commands()


def each_config_once() -> list:
    """A command of each config: composing one takes a third of a second, and what other commands set is looked up by
    ``test_settings_that_a_page_names_exist``."""
    found = {}
    for page, arguments in COMMANDS:
        at = [place for place, word in enumerate(arguments) if word == "--config-name"]
        config = arguments[0], *(arguments[place + 1] for place in at)
        found.setdefault(tuple(arguments) if arguments[0] == "report" else config, (page, arguments))
    return [pytest.param(page, arguments, id=f"{page}: {' '.join(arguments)}"[:80])
            for page, arguments in found.values()]


def ends_of_lists(argument: str) -> str:
    """``seed=1,2,3`` as ``seed=1,3``: the members of a sweep between differ in values of one kind."""
    return re.sub(r"^([\w.]+=[\w.-]+)(?:,[\w.-]+)*(,[\w.-]+)$", r"\1\2", argument)


@pytest.fixture(scope="module")
def quickstart() -> RunConfig:
    return compose_run("quickstart", [])


@pytest.fixture
def folder_of_the_docs(quickstart: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the config files that a page spells out, and the config of runs that they name."""
    for text in PAGES.values():
        for name, content in re.findall(r"`([\w/]+\.yaml)`:\n\n```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
    for name in ("quickstart", "grpo_gsm8k"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text(resolved_yaml(quickstart))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("page", "arguments"), each_config_once())
def test_command_of_the_docs_is_accepted(folder_of_the_docs, monkeypatch, page: str, arguments: list):
    from nemo_edo.checks import preflight
    from nemo_edo.cluster import launch as slurm
    from nemo_edo.experiments import study, sweep
    from nemo_edo.report import page, run_folders, run_set
    from nemo_edo.reward_models import process_reward
    from nemo_edo.reward_models import train as train_reward_model
    from nemo_edo.run import policy_evaluation
    from tools.paper_tables import tables

    monkeypatch.setattr(preflight, "preflight", lambda cfg: cfg)
    monkeypatch.setattr(preflight, "_is_elsewhere", lambda path: True)
    monkeypatch.setattr(slurm, "submit", lambda launch: ["1"])
    for module, name in ((nemo_edo.run, "jobs"), (nemo_edo.search, "job"), (policy_evaluation, "evaluate_stored"),
                         (train_reward_model, "train_reward_model"), (process_reward, "score_run"),
                         (nemo_edo.checks.selftest, "selftest"), (tables, "write_table")):
        monkeypatch.setattr(module, name, MagicMock(), raising=False)
    monkeypatch.setattr(sweep, "run_sweep", lambda planned, jobs, processes: monkeypatch.setattr(
        sweep.SweepGrid, "left", lambda self: []) or [])
    monkeypatch.setattr(study, "run_study", lambda study, jobs: [])
    monkeypatch.setattr(study.Study, "unfinished", lambda self: [])
    monkeypatch.setattr(page, "write_report", lambda found, out, baseline: SimpleNamespace(lines=[]))
    monkeypatch.setattr(run_set, "read_runs", lambda found: found)
    monkeypatch.setattr(run_folders, "find_runs", lambda runs: run_folders.FoundRuns((), {}, None))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "of the shell that submits")
    try:
        # A cluster's shared folder is one of this test: a launch makes it, to see that it can be written to.
        here = [one.replace("dir=/shared/", f"dir={folder_of_the_docs}/shared/") for one in arguments]
        status = main([ends_of_lists(argument) for argument in here])
    except SystemExit as stopped:  # --version
        status = stopped.code
    assert status == 0


PEERS = re.compile(r"\b(?:import|from) \S*\b(?:trl|skyrl)")
OWN_PYTHON = [(page, code) for page, code in blocks("python") if not PEERS.search(code)]
"""Without the examples in TRL, which tests/peers runs."""


@pytest.mark.parametrize(("page", "code"), OWN_PYTHON, ids=lambda value: value[:20])
def test_python_of_the_docs_runs(page: str, code: str, capsys):
    exec(compile(code, page, "exec"), {"__name__": page})
    assert capsys.readouterr().out


def test_tables_of_the_settings_and_the_page_of_the_command_line_are_current():
    page = PAGES["configuration.md"]
    assert config_table.updated(page) == page, "run: python tools/docs/config_table.py"
    assert cli_page.page() == PAGES["cli.md"], "run: python tools/docs/cli_page.py"


def keys(section: object, prefix: str = "") -> list[str]:
    found = []
    for name, value in vars(section).items():
        found += [prefix + name, *(keys(value, f"{prefix}{name}.") if hasattr(value, "__dataclass_fields__") else [])]
    return found


@pytest.mark.parametrize("page", [*PAGES, *API, "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_and_paths_lead_to_files_of_the_repository(page: str):
    """Anchors are checked by ``mkdocs build --strict``."""
    folder, text = (ROOT / ("" if page in ROOT_PAGES else "docs") / page).parent, (PAGES | API | ROOT_PAGES)[page]
    links = [link for link in re.findall(r"\[[^\]]*\]\(([^):#\s]+)(?:#\S*)?\)", text) if not (folder / link).exists()]
    named = re.findall(r"`((?:nemo_edo|conf|tests|docs)/[\w./-]*|[\w/]+\.py)`", text)
    paths = [path for path in named if not (ROOT / path).exists() and not list(ROOT.glob(f"nemo_edo/**/{path}"))]
    assert (links, paths) == ([], [])


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(quickstart: RunConfig, page: str):
    """A name in backticks that begins with a section's name, such as grpo.alpha, and what commands set."""
    known = set(keys(quickstart))
    if page in ("configuration.md", "evaluation.md"):
        known |= set(keys(compose_job("reward_model", ["model.path=BASE", "data.run=RUN"])))
        known |= set(keys(compose_job("score", [])))
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = set(re.findall(r"`(\w+(?:\.\w+)+)(?:=[^`]*)?`", PAGES[page]))
    files = (".py", ".yaml", ".safetensors", ".json")
    settings = {name for name in named if name.partition(".")[0] in sections and not name.endswith(files)}
    overrides = [re.match(r"[+~]*([\w.]+)=", word) for there, words in COMMANDS if there == page for word in words]
    free = ("arms.", "exp_manager.", "model.architecture.", "data.source_args.", "data.chat_template_kwargs.",
            "rewards.functions.")
    settings |= {found[1] for found in overrides if found}
    settings = {name for name in settings if not name.startswith(free)}
    assert settings <= known | {"precision", "parallelism", "generation"}


@pytest.mark.parametrize(("module", "page"), [
    (losses, "losses"), (metrics, "metrics"), (test_time, "test_time"), (nemo_edo, "runs"),
])
def test_the_reference_has_every_public_name_once(module, page: str):
    shown = re.findall(r"^::: nemo_edo\.\w+\.(\w+)$", API[f"api/{page}.md"], re.MULTILINE)
    named = nemo_edo.__all__ if module is nemo_edo else [
        name for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("nemo_edo.") and not name.startswith("_")]
    assert {*named} <= {*shown} and all(hasattr(module, name) for name in shown)
    assert len(shown) == len(set(shown))
