import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_edo.config import DataConfig
from nemo_edo.data.problems import load_problems, manifest_path, normal_question

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests/data/benchmarks"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/prepare_data")
    import prepare
    import s1k_eval

    yield prepare, s1k_eval
    for name in ("prepare", "s1k_eval"):
        del sys.modules[name]


def run(tool, *arguments: object) -> None:
    assert tool.main([str(argument) for argument in arguments]) == 0


def test_prepared_file_has_the_problems_of_the_official_one_and_a_manifest(tools, tmp_path, capsys):
    prepare, _ = tools
    out, official = tmp_path / "aime24.jsonl", SAMPLES / "aime24.jsonl"
    run(prepare, "aime24", "test", "--input", official, "--out", out)
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["rows"], manifest["answer_kinds"], manifest["benchmark"]) == (30, {"math": 30}, "aime24")
    expected, prepared = (
        load_problems(file, DataConfig(benchmark="aime24")).problems for file in (official, out))
    assert [replace(problem, source="") for problem in prepared] == [replace(p, source="") for p in expected]
    assert prepared[3].source == f"{out}:4"


def test_changed_file_other_benchmark_and_broken_manifest_are_errors(tools, tmp_path):
    prepare, _ = tools
    out = tmp_path / "aime24.jsonl"
    run(prepare, "aime24", "test", "--input", SAMPLES / "aime24.jsonl", "--out", out)
    with pytest.raises(ValueError, match="has problems of aime24, but the config says aime25"):
        load_problems(out, DataConfig(benchmark="aime25"))
    out.write_text(out.read_text().replace("Find", "Seek", 1))
    with pytest.raises(ValueError, match="SHA-256 checksum .* has changed"):
        load_problems(out, DataConfig(on_bad_rows="skip"))
    manifest_path(out).write_text("{}")
    with pytest.raises(ValueError, match="is not a manifest"):
        load_problems(out, DataConfig(on_bad_rows="skip"))


def test_evaluation_split_is_disjoint_from_s1k_and_fixed_by_its_seed_alone(tools, tmp_path):
    _, s1k_eval = tools
    pool, s1k = SAMPLES / "s1k_pool.jsonl", SAMPLES / "s1k.jsonl"
    out, turned = tmp_path / "split.jsonl", tmp_path / "turned.jsonl"

    def questions(file: Path, *more: object) -> list[str]:
        run(s1k_eval, "--pool", file, "--s1k", s1k, "--any-rows", "--questions", 20, "--out", out, *more)
        return [normal_question(one.question) for one in load_problems(out, DataConfig(benchmark="s1k_eval")).problems]

    found = questions(pool)
    taken = {normal_question(json.loads(line)["question"]) for line in s1k.read_text().splitlines()}
    assert len(set(found)) == 20 and not taken & set(found)
    turned.write_text("\n".join(pool.read_text().splitlines()[::-1]))
    assert questions(turned) == found != questions(pool, "--seed", 1)
