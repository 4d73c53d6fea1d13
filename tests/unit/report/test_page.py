"""The page: one self-contained file that escapes what it shows, its samples and search trees, and its numbers."""

import base64
import csv
import gzip
import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.report import sample_browser as module
from nemo_edo.report.comparison import compare
from nemo_edo.report.conclusions import terminal_table
from nemo_edo.report.page import COLUMNS, facts, write_report
from nemo_edo.report.run_folders import find_runs
from nemo_edo.report.run_set import one_run, read_runs
from nemo_edo.report.sample_browser import SHOWN, read_trees, sample_browser, tree_record
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.test_time.search_llm import SearchConfig, SearchLLM, Step, StepScore
from nemo_edo.types import Rollout, ScoredRollout

ATTACK = "<script>alert('attack')</script>"


class Page:
    """What a browser would fetch or run, the visible text, and the sections."""

    def __init__(self, text: str) -> None:
        embedded = r"(<(script|style)\b[^>]*>)(.*?)</\2>"
        self.scripts = [content for _, _, content in re.findall(embedded, text, re.DOTALL)]
        markup = re.sub(embedded, r"\1", text, flags=re.DOTALL)
        tags = "".join(re.findall(r"<[^>]+>", markup))
        self.links = re.findall(r"""\s(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]*)""", tags)
        self.sections = re.findall(r'<section[^>]* aria-labelledby="([^"]*)"', tags)
        self.text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", markup)))


SIZES = {"iterations": 3, "problems": 20, "attack": ATTACK}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """The text of one run's page."""
    folder = write_run_folder(tmp_path_factory.mktemp("alone") / "run", **SIZES)
    assert write_report(one_run(folder)).path == folder / "report.html"
    assert (folder / "report.csv").is_file() and json.loads((folder / "report.json").read_text())
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """The page of two seeds and a third that has not finished."""
    folder = tmp_path_factory.mktemp("several")
    for seed in (1, 2, 3):
        write_run_folder(folder / f"seed_{seed}", seed=seed, **SIZES)
    write_run_folder(folder / "another", seed=1, arms=(), alphas={"policy": 0.1}, **SIZES)
    (folder / "seed_3" / "summary.json").unlink()
    return write_report(read_runs(find_runs([str(folder)]))).path


def test_a_page_forbids_every_request_and_the_runs_text_is_shown_and_never_becomes_markup(alone, several):
    for text, shown in ((alone, 8), (several.read_text(), 5)):
        page = Page(text)
        assert page.links and all(link.startswith("#") for link in page.links) and "default-src 'none'" in text
        assert "url(" not in text[text.index("<style>") : text.index("</style>")]
        assert text.count("plotly.js (basic - minified) v") == 1 and len(text) < 2_000_000
        assert page.text.count(ATTACK) > shown  # of one run in responses, a question and the config, too
        assert not any("alert('attack')" in script and "\\u003c" not in script for script in page.scripts)
        assert ATTACK not in text


def test_one_report_and_that_of_several_have_the_same_sections_and_the_runs_that_were_left_out(alone, several):
    one, set_of_runs = Page(alone), Page(several.read_text())
    assert one.sections == set_of_runs.sections == ["results", "diversity", "diagnostics", "setup"]
    assert "exploration_coefficient01e-060.30" in one.text.replace(" ", "")
    named = [str(several.parent / run) for run in ("seed_1", "seed_2", "seed_3")]
    assert all(part in set_of_runs.text for part in (*named, "left out: it has not finished", "1 left out"))
    assert "Time: train 9.0 s, log pi old 4.0 s, without a name 0.5 s." in one.text
    assert "Time: train 27.0 s, log pi old 12.0 s, without a name 1.5 s, all runs together." in set_of_runs.text


def test_the_facts_are_of_the_runs_algorithm_and_of_the_evaluations_that_are_stored(tmp_path):
    folder = write_run_folder(tmp_path / "run", arms=("grpo",), **SIZES)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"algorithm": "idpo", "idpo": {**config["idpo"], "problems_per_iteration": 77}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for path in (folder / "evaluations").glob("*.json"):  # again, with 2 x 5 samples
        path.write_text(json.dumps({**json.loads(path.read_text()), "samples": 5}))
    found = facts(compare(one_run(folder)))
    assert ", 77 prompts x " in found["Training"] and "greedy and 2 x 5 responses each" in found["Test"]
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "algorithm": "sft"}))
    assert "prompts" not in facts(compare(one_run(folder)))["Training"]


def test_csv_and_json_have_the_table_with_every_seed(several: Path, tmp_path: Path):
    floor, alone = "ED-GRPO 0.3, floor -0.1", "ED-GRPO α=0.1"
    written = write_report(read_runs(find_runs([str(several.parent)])), tmp_path / "new" / "study.html", "GRPO")
    comparison = written.comparison
    with written.path.with_suffix(".csv").open(newline="") as file:
        rows = {(row["arm"], row["metric"]): row for row in csv.DictReader(file)}
    row, single = rows[floor, "entropy"], rows[alone, "entropy"]
    assert tuple(row) == COLUMNS
    assert float(row["mean"]) == comparison.table[floor]["entropy"].interval.mean
    assert float(row["difference_low"]) == comparison.difference(floor, "entropy").interval.low
    assert (row["seeds"], row["common_seeds"], row["baseline"]) == ("2", "2", "GRPO")
    assert (single["seeds"], single["low"], single["high"]) == ("1", "", "")
    record = json.loads(written.path.with_suffix(".json").read_text())
    assert record["table"][0]["by_seed"].keys() == record["matched"]["accuracies"].keys() == {"1", "2"}
    assert record["arms"][alone] == [1]
    assert record["conclusions"] == written.conclusions
    assert (written.lines[0], written.lines[-1]) == (terminal_table(comparison), f"report: {written.path}")


@pytest.mark.parametrize(("out", "told"), [
    ("report.csv", "ends in .html"), ("summary.html", "summary.json would be replaced"),
    ("table.html", "table.csv would be replaced")])
def test_a_report_replaces_no_file_but_reports(several: Path, out: str, told: str):
    run = several.parent / "seed_1"
    (run / "table.csv").write_text("task,arm\n")
    with pytest.raises(UserError, match=told):
        write_report(one_run(run), run / out)


SAMPLED = 8


def store(folder, arm: str, iteration: int, kind: str, each: int, text: str, success_at: float = 1.0) -> None:
    scored = [ScoredRollout(Rollout(f"test-{p}", s, (1,), (2,), (-1.0,), f"{text} p{p} s{s}", s % 3 > 0, 0, s),
                            float(s % 2), str(s) if s else None, True, "", success_at=success_at)
              for p in range(3) for s in range(each)]
    RolloutStore(folder / "evaluations" / arm / kind).write(iteration, scored)


@pytest.fixture
def stored(tmp_path):
    """Three problems; one arm of four iterations, with responses of its final and of an earlier evaluation."""
    path = write_run_folder(tmp_path / "run", arms=("grpo",), iterations=4, problems=3)
    store(path, "warmup", 0, "sampled", 2, "start", success_at=-1.0)  # as rewards.success_at says
    store(path, "grpo", 4, "greedy", 1, "best")
    store(path, "grpo", 4, "sampled", SAMPLED, "final")
    store(path, "grpo", 2, "sampled", SAMPLED, "earlier")
    return path


def unpacked(found) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(found.packed)))


def test_every_problem_has_every_response_of_the_final_evaluations(stored):
    found = sample_browser(compare(one_run(stored)))
    data = unpacked(found)
    assert data["policies"] == [
        {"label": "Start (before RL)", "trained": False}, {"label": "GRPO", "trained": True}]
    assert [problem["id"] for problem in data["problems"]] == ["test-0", "test-1", "test-2"]
    start, grpo = data["problems"][1]["responses"]
    assert grpo == [[True, 0.0, False, None, "best p1 s0", False], *(
        [False, float(s % 2), s % 3 > 0, str(s) if s else None, f"final p1 s{s}", s % 2 > 0 and s % 3 > 0]
        for s in range(SAMPLED))]
    assert [right for *_, right in start] == [False, True]  # the first one was cut off
    assert (found.problems, found.each, found.complete) == (3, SAMPLED, True)


def test_what_does_not_fit_is_left_out_evenly_and_the_greedy_response_stays(stored, monkeypatch):
    comparison, kept = compare(one_run(stored)), []
    while not kept or kept[-1] != (1, 1):
        found = sample_browser(comparison)
        assert len(found.packed) <= module.MOST_CHARACTERS
        kept.append((found.problems, found.each))
        for problem in unpacked(found)["problems"]:
            assert [one[4].split()[0] for one in problem["responses"][1]] == ["best", *["final"] * found.each]
        assert found.complete == (len(kept) == 1)
        monkeypatch.setattr(module, "MOST_CHARACTERS", len(found.packed) - 1)
    assert kept == [(3, 8), (3, 4), (3, 2), (3, 1), (1, 1)]


def test_a_run_without_stored_responses_has_none_and_a_policy_with_damaged_ones_is_left_out_and_named(stored, tmp_path):
    assert sample_browser(compare(one_run(write_run_folder(tmp_path / "other", arms=("grpo",), problems=3)))) is None
    shard = stored / "evaluations" / "grpo" / "sampled" / "iter_00004" / "rank_0_of_1.parquet"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.warns(UserWarning, match=f"no responses of grpo: {shard}: is not a readable"):
        found = sample_browser(compare(one_run(stored)))
    assert [one["trained"] for one in unpacked(found)["policies"]] == [False]


def test_a_search_is_read_back_as_it_was_and_the_page_has_every_node_with_its_text_escaped(tmp_path, alone):
    """The search proposes the digits, and a path of three steps is finished."""
    proposer = SimpleNamespace(propose=lambda paths, count, seeds: [
        [Step(str(i), len(path.steps) == 2, 1) for i in range(count)] for path in paths])
    reward_model = SimpleNamespace(score=lambda paths: [
        StepScore(sum(map(float, path.steps)), torch.eye(4)[len(path.steps)]) for path in paths])
    [result] = SearchLLM(proposer, reward_model, SearchConfig(3, 3, 2, 0.5)).search(["How <b>much</b>?"], 0)
    run = write_run_folder(tmp_path / "run", arms=("grpo",), iterations=2, problems=5)
    (run / "search").mkdir()
    for place in range(SHOWN + 1):
        (run / "search" / f"q{place}.json").write_text(json.dumps(tree_record(result)))
    trees = read_trees(run)
    assert [tree.name for tree in trees] == [f"q{place}" for place in range(SHOWN)]
    assert trees[0].question == "How <b>much</b>?"
    for read, node in zip(trees[0].nodes, result.nodes, strict=True):
        assert read["step"] == (node.path.steps[-1] if node.path.steps else "")
        for name in ("parent", "reward", "width", "value", "finished", "made_at", "expanded_at"):
            assert read[name] == getattr(node, name)
    assert tuple(node["step"] for node in trees[0].answer) == result.path.steps
    assert [place for place, node in enumerate(trees[0].nodes) if node["chosen"]][-1] == result.best
    page = write_report(one_run(run)).path.read_text()
    assert 'id="search"' in page and 'id="search"' not in alone
    assert page.count('<g class="node') == SHOWN * len(result.nodes)
    assert page.count('" width="10" height="10"/>') == SHOWN * sum(node.finished for node in result.nodes)
    assert "How <b>much</b>?" not in page and "How &lt;b&gt;much&lt;/b&gt;?" in page
