"""``nemo-edo search`` solves a run's test problems with any of its policies, stores what it found, and resumes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from helpers.reward_models import write_own_reward_model

pytestmark = pytest.mark.slow
ENDED, STOPPED, USER_ERROR = 0, 75, 2
DATA = ["data.arithmetic.num_operands=2", "data.arithmetic.test_problems=6", "data.arithmetic.train_problems=8",
        "data.arithmetic.warmup_problems=16", "sampling.max_new_tokens=12", "evaluation.samples=2",
        "evaluation.rollouts=1", "evaluation.bootstrap=20", "threads=1"]
SEARCH = ["search.steps=3", "search.branches=3", "search.width=2", "search.part_size=4", "search.trees=2"]
TRAIN = ["train", "--config-name", "quickstart", "arms=[entropy_bonus]", "replicate_baseline=false",
         "grpo.optimizer.lr=0.05", "grpo.optimizer.warmup_steps=0", "sft.steps=2", "sft.batch_size=16",
         "grpo.iterations=1", "grpo.problems_per_iteration=4", "grpo.minibatch_size=8",
         "sampling.samples_per_prompt=2", *DATA]


def count_tokens(out: Path) -> None:
    """In the command's process: ``out`` will have the number of tokens of each call of the engine."""
    from nemo_edo.worker.remote import RemoteEngine

    generate = RemoteEngine.generate

    def counting(engine, requests, sampling, *arrivals):
        rollouts = generate(engine, requests, sampling, *arrivals)
        with out.open("a") as file:
            file.write(f"{sum(len(rollout.response_ids) for rollout in rollouts)}\n")
        return rollouts

    RemoteEngine.generate = counting


def stop_after(parts: int) -> None:
    """In the command's process: it is asked to stop once so many parts are done."""
    from nemo_edo.run.stop_signal import StopSignal

    asked = []
    StopSignal.is_asked = lambda signal: asked.append(1) or len(asked) > parts


@pytest.fixture(scope="module")
def search(tmp_path_factory, nemo_edo):
    """search(*arguments, before=...): a search's status, output, and the tokens that its engine sampled."""
    folder = tmp_path_factory.mktemp("search")
    counts = folder / "counts"

    def run(*arguments: str, before=()) -> SimpleNamespace:
        counts.write_text("")
        done = nemo_edo("search", *arguments, f"search.reward_model={folder / 'prm'}", *SEARCH,
                        before=[("tests.e2e.test_search:count_tokens", counts), *before])
        return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr,
                               tokens=sum(map(int, counts.read_text().split())))

    write_own_reward_model(folder / "prm")
    run.config = ["--config-name", "search", "model=tiny_llama", "data=arithmetic", "precision=fp32",
                  f"output_dir={folder}", "name=model", *DATA]
    run.folder, run.model = folder, folder / "model"
    return run


@pytest.fixture(scope="module")
def searched(search):
    """A model that is evaluated and searched as it is."""
    done = search(*search.config)
    assert done.status == ENDED, done.err
    return done


def rows(run: Path, arm: str = "warmup", name: str = "search") -> list[dict]:
    return pq.read_table(run / "search" / arm / name / "results.parquet").to_pylist()


def test_every_problem_of_a_search_has_a_result_and_a_mean_and_the_first_ones_their_tree(search, searched):
    found = rows(search.model)
    assert [row["problem_id"] for row in found] == [f"test-{number}" for number in range(1, 7)]
    assert "6 problems searched" in searched.out
    for row in found:
        assert 0 < row["response_tokens"] <= 12 and row["response_tokens"] <= row["tokens"]
        assert row["samples"] <= 3 * (1 + 2 * 2) and row["nodes"] <= 1 + row["samples"] and row["iterations"] <= 3
        assert 0 < row["score"] < 1 and row["reward"] in (0, 1)
    metrics = json.loads((search.model / "search" / "warmup" / "search" / "summary.json").read_text())["metrics"]
    for name, column in (("accuracy", "reward"), ("tokens", "tokens"), ("nodes", "nodes")):
        assert metrics[name]["mean"] == pytest.approx(sum(row[column] for row in found) / len(found))
    for number, row in zip((1, 2), found, strict=False):
        tree = json.loads((search.model / "search" / f"warmup.search.test-{number}.json").read_text())
        assert len(tree["nodes"]) == row["nodes"] and tree["tokens"] == row["tokens"]
        assert tree["nodes"][tree["best"]]["reward"] == row["score"]
    assert (search.model / "report.html").read_text().count('class="tree"') == 2


def test_a_finished_search_samples_nothing_again_and_refuses_other_settings(search, searched):
    before = rows(search.model)
    again = search(*search.config)
    assert (again.status, again.tokens, rows(search.model)) == (ENDED, 0, before)
    other = search(*search.config, "search.exploration=9")
    assert other.status == USER_ERROR and "made with another search.exploration" in other.err


def test_a_search_that_was_stopped_resumes_to_the_same_results_with_no_token_sampled_twice(search, searched):
    first = rows(search.model)
    command = [str(search.model), "search.name=stopped"]
    stopped = search(*command, before=[("tests.e2e.test_search:stop_after", 1)])
    assert stopped.status == STOPPED and "4 of 6 problems have been searched" in stopped.err
    parts = (search.model / "search" / "warmup" / "stopped").rglob("*.parquet")
    assert [path.name for path in parts] == ["part_00000.parquet"]
    killed = search(*command[:1], "search.name=killed", before=[
        ("helpers.kills:prepare", ["nemo_edo.search.job:SearchStore.write_part", 1])])
    assert killed.status == -9 and (search.model / "search" / "warmup.killed.test-1.json").is_file()
    resumed = search(*command)
    assert resumed.status == ENDED and rows(search.model, name="stopped") == first
    assert stopped.tokens + resumed.tokens == sum(row["tokens"] for row in first)


def test_each_policy_of_a_trained_run_can_be_searched_with_and_no_other(search, nemo_edo):
    run = search.folder / "trained"
    nemo_edo.succeed(*TRAIN, f"output_dir={search.folder}", "name=trained")
    for arm in ("entropy_bonus", "warmup"):
        done = search(str(run), "--arm", arm)
        assert done.status == ENDED, done.err
    assert len(rows(run)) == 6 and rows(run) != rows(run, "entropy_bonus")
    unknown = search(str(run), "--arm", "idpo")
    assert unknown.status == USER_ERROR and "has no arm 'idpo'; it has warmup, entropy_bonus" in unknown.err


def test_a_reward_model_without_room_for_a_solution_is_refused_before_anything_is_searched(search, searched, nemo_edo):
    path = write_own_reward_model(search.folder / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    done = nemo_edo("search", str(search.model), f"search.reward_model={path}", "search.name=short", *SEARCH)
    assert done.returncode == USER_ERROR and "the reward model takes 16 tokens; the longest question has" in done.stderr
    assert not (search.model / "search" / "warmup" / "short").exists()
