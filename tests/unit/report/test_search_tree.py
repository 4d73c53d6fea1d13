"""Search trees: the record of a search, its drawing, and mistakes in the file."""

import json

import pytest
import torch
from helpers.run_folder import write_run_folder

from nemo_edo.report.page import write_report
from nemo_edo.report.run_set import one_run
from nemo_edo.report.search_tree import SHOWN, read_trees, tree_record
from nemo_edo.test_time.search_llm import SearchConfig, SearchLLM, Step, StepScore


class Digits:
    """Proposes the digits; a path of three steps is finished."""

    def propose(self, paths, count, seeds):
        return [[Step(str(i), len(path.steps) == 2, 1) for i in range(count)] for path in paths]


class Sums:
    def score(self, paths):
        return [StepScore(sum(map(float, path.steps)), torch.eye(4)[len(path.steps)]) for path in paths]


@pytest.fixture
def result():
    [found] = SearchLLM(Digits(), Sums(), SearchConfig(3, 3, 2, 0.5)).search(["How <b>much</b>?"], 0)
    return found


@pytest.fixture
def run(tmp_path):
    return write_run_folder(tmp_path / "run", arms=("grpo",), iterations=2, problems=5)


def write(run, record, name="q0") -> None:
    (run / "search").mkdir(exist_ok=True)
    (run / "search" / f"{name}.json").write_text(json.dumps(record))


def test_a_search_is_read_back_as_it_was_with_the_nodes_of_its_answer_marked(run, result):
    write(run, tree_record(result))
    [tree] = read_trees(run)
    assert (tree.name, tree.question, len(tree.nodes)) == ("q0", "How <b>much</b>?", len(result.nodes))
    for read, node in zip(tree.nodes, result.nodes, strict=True):
        assert read["step"] == (node.path.steps[-1] if node.path.steps else "")
        for name in ("parent", "reward", "width", "value", "finished", "made_at", "expanded_at"):
            assert read[name] == getattr(node, name)
    assert tuple(node["step"] for node in tree.answer) == result.path.steps
    place, path = result.best, set()
    while place is not None:
        path.add(place)
        place = result.nodes[place].parent
    assert {place for place, node in enumerate(tree.nodes) if node["chosen"]} == path


def test_the_report_draws_every_node_and_escapes_its_text(run, result):
    assert read_trees(run) == []
    assert 'id="search"' not in write_report(one_run(run)).path.read_text()
    for place in range(SHOWN + 1):
        write(run, tree_record(result), f"q{place}")
    assert [tree.name for tree in read_trees(run)] == [f"q{place}" for place in range(SHOWN)]
    for place in range(1, SHOWN + 1):
        (run / "search" / f"q{place}.json").unlink()
    page = write_report(one_run(run)).path.read_text()
    assert page.count('<g class="node') == len(result.nodes)
    assert "How <b>much</b>?" not in page and "How &lt;b&gt;much&lt;/b&gt;?" in page
    assert page.count('" width="10" height="10"/>') == sum(node.finished for node in result.nodes)
