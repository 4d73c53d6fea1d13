"""The docs are as good as the code: their commands, configs and Python work, their tables and links are current."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import nemo_edo
from nemo_edo.cli import main
from nemo_edo.config import RunConfig
from nemo_edo.configuration import arm_configs, compose_job, compose_run, resolved_yaml

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
CONFIG_TABLE = runpy.run_path(str(ROOT / "tools" / "docs" / "config_table.py"))


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
    return found


COMMANDS = commands()


class Runner(SimpleNamespace):
    """Stands in for nemo_edo.runner: checks what it is handed as far as that goes without a model."""

    def train(self, cfg: RunConfig) -> None:
        self.trained = cfg

    def collect(self, cfg: RunConfig, arm: str | None) -> None:
        assert arm is None or arm in arm_configs(cfg)

    def evaluate(self, run: Path, arm: str | None, overrides: list[str]) -> None:
        arms = {"warmup", *arm_configs(compose_run("quickstart", overrides))}
        assert arm is None or arm in arms

    def evaluate_model(self, cfg: RunConfig) -> list[str]:
        assert cfg.algorithm == "none"
        return []

    def replay(self, file: Path, overrides: list[str]) -> None:
        assert file.parent.name == "failures" and not overrides

    def export(self, run: Path, out: Path, arm: str | None, max_shard_bytes: int) -> None:
        assert arm in {"warmup", *arm_configs(compose_run("quickstart", []))}


def evaluate_stored(runs: list[Path], arm: str | None, overrides: list[str]) -> list[str]:
    """Stands in for the evaluation from stored responses, which no page's run has."""
    Runner().evaluate(runs[0], arm, overrides)
    return []


class SearchRun:
    """Stands in for nemo_edo.search_run."""

    def search(self, run: Path, arm: str | None, overrides: list[str]) -> list[str]:
        cfg = compose_run("quickstart", overrides)
        assert cfg.search.reward_model and arm in {"warmup", *arm_configs(cfg)}
        return []

    def search_model(self, cfg: RunConfig) -> list[str]:
        assert cfg.algorithm == "none" and cfg.search.reward_model
        return []


@pytest.fixture(scope="module")
def quickstart() -> RunConfig:
    return compose_run("quickstart", [])


@pytest.fixture
def folder_of_the_docs(quickstart: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the config files that a page spells out, and a finished quickstart's config."""
    for text in PAGES.values():
        for name, content in re.findall(r"`([\w/]+\.yaml)`:\n\n```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(quickstart))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=[f"{page}: {' '.join(a)}"[:80] for page, a in COMMANDS])
def test_command_of_the_docs_is_accepted(folder_of_the_docs, monkeypatch, page: str, arguments: list[str]):
    from nemo_edo import evaluator_run, sweep
    from nemo_edo.cluster import slurm
    from nemo_edo.evaluation import report, run_set, runs_report, tables_report
    from nemo_edo.rewards import score_run, train_reward_model

    monkeypatch.setattr(slurm, "submit", lambda launch: ["1"])
    monkeypatch.setattr(evaluator_run, "evaluate_stored", evaluate_stored)
    monkeypatch.setattr(nemo_edo, "runner", Runner(), raising=False)
    monkeypatch.setattr(nemo_edo, "search_run", SearchRun(), raising=False)
    monkeypatch.setattr(train_reward_model, "train_reward_model", lambda cfg: None)
    monkeypatch.setattr(score_run, "score_run", lambda run, model, name, arm, tokenizer, cfg: [])
    monkeypatch.setattr(sweep, "run_sweep", lambda sweep, jobs, processes: [])
    monkeypatch.setattr(report, "write_report", lambda run, out: run / "report.html")
    monkeypatch.setattr(runs_report, "write_runs_report", lambda found, out, baseline: [])
    monkeypatch.setattr(tables_report, "write_table", lambda found, name, out: [])
    monkeypatch.setattr(run_set, "find_runs", lambda runs: SimpleNamespace(single=None))
    monkeypatch.delenv("RANK", raising=False)
    try:
        status = main(arguments)
    except SystemExit as stopped:  # --version
        status = stopped.code
    assert status == 0


def test_commands_are_found_behind_torchrun_and_docker_and_over_several_lines():
    assert {page for page, _ in COMMANDS} >= {"README.md", "quickstart.md", "configuration.md", "dockerfile.md"}
    [train, *_] = [arguments for page, arguments in COMMANDS if page == "dockerfile.md" and arguments[0] == "train"]
    assert train[-1] == "data.test=/data/test.jsonl"


def test_names_of_the_training_examples_are_all_different():
    """Each example would be refused after another one of its name."""
    named = [tuple(a for a in arguments if a.startswith("name=")) or tuple(arguments) for page, arguments in COMMANDS
             if page in ("quickstart.md", "sweeps.md") and arguments[0] == "train"]
    assert len(named) > 5
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value[:20])
def test_python_of_the_docs_runs(page: str, code: str, capsys):
    exec(compile(code, page, "exec"), {"__name__": page})
    assert capsys.readouterr().out


def test_arms_of_the_docs_compose(tmp_path: Path):
    arms = [block for page, block in blocks("yaml") if block.startswith("arms:")]
    assert arms
    for number, block in enumerate(arms):
        (tmp_path / f"a{number}.yaml").write_text("defaults: [{model: tiny_llama}, _self_]\n"
                                                  f"sampling: {{max_new_tokens: 8}}\n{block}")
        assert len(arm_configs(compose_run(f"a{number}", [], tmp_path))) > 1


def test_tables_of_the_settings_are_current():
    for name, tables in (("configuration.md", "settings_tables"), ("reward_models.md", "reward_model_tables")):
        page = PAGES[name]
        assert CONFIG_TABLE["updated"](page, CONFIG_TABLE[tables]()) == page, "run: python tools/docs/config_table.py"


def test_tables_hold_every_setting_that_a_config_can_name(quickstart: RunConfig):
    listed = set(re.findall(r"^\| `([\w.]+)` \|", CONFIG_TABLE["settings_tables"](), re.MULTILINE))
    assert listed == set(keys(quickstart))


def keys(section: object, prefix: str = "") -> list[str]:
    found = []
    for name, value in vars(section).items():
        found += [prefix + name, *(keys(value, f"{prefix}{name}.") if hasattr(value, "__dataclass_fields__") else [])]
    return found


@pytest.mark.parametrize("page", ["", "BEGIN", "END BEGIN", "BEGIN END END"])
def test_a_page_without_one_pair_of_markers_is_refused(page: str):
    text = page.replace("BEGIN", CONFIG_TABLE["BEGIN"]).replace("END", CONFIG_TABLE["END"])
    with pytest.raises(ValueError, match="the page needs one line"):
        CONFIG_TABLE["updated"](text)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_to_files_of_the_repository(page: str):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    links = [link for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#:]+)\)", PAGES[page]) if not (folder / link).exists()]
    named = re.findall(r"`((?:nemo_edo|conf|tests|docs)/[\w./-]*|[\w/]+\.py)`", PAGES[page])
    paths = [path for path in named if not (ROOT / path).exists() and not list(ROOT.glob(f"nemo_edo/**/{path}"))]
    assert (links, paths) == ([], [])


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_the_prose_names_exist(quickstart: RunConfig, page: str):
    """A name in backticks that begins with a section's name, such as grpo.alpha."""
    known = set(keys(quickstart))
    if page in ("reward_models.md", "search.md"):
        known |= set(keys(compose_job("reward_model", ["model.path=BASE", "data.run=RUN"])))
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = set(re.findall(r"`(\w+(?:\.\w+)+)(?:=[^`]*)?`", PAGES[page]))
    settings = {name for name in named if name.partition(".")[0] in sections and not name.endswith((".py", ".yaml"))}
    assert settings <= known
