"""``nemo-edo search`` on tiny models, in one process: on a model as it is, and on a run's trained policies. Writes
FOLDER/results.json for tests/e2e/test_search.py."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
from commands import run
from reward_models import write_own_reward_model

from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.worker.remote import RemoteEngine

DATA = ["data.arithmetic.num_operands=2", "data.arithmetic.test_problems=6", "data.arithmetic.train_problems=8",
        "data.arithmetic.warmup_problems=16", "sampling.max_new_tokens=12", "evaluation.samples=2",
        "evaluation.rollouts=1", "evaluation.bootstrap=20", "threads=1"]
SEARCH = ["search.steps=3", "search.branches=3", "search.width=2", "search.part_size=4", "search.trees=2"]
TRAIN = ["train", "--config-name", "quickstart", "arms=[entropy_bonus]",
         "replicate_baseline=false", "grpo.optimizer.lr=0.05",
         "grpo.optimizer.warmup_steps=0", "sft.steps=2", "sft.batch_size=16",
         "grpo.iterations=1", "grpo.problems_per_iteration=4", "grpo.minibatch_size=8",
         "sampling.samples_per_prompt=2"]


def rows(folder: Path) -> list[dict]:
    return pq.read_table(folder / "results.parquet").to_pylist()


class Counted:
    """Counts what the engine is asked for."""

    def __init__(self) -> None:
        self.calls = self.requests = self.tokens = 0
        generate = RemoteEngine.generate

        def counting(engine, requests, sampling):
            rollouts = generate(engine, requests, sampling)
            self.calls += 1
            self.requests += len(requests)
            self.tokens += sum(len(rollout.response_ids) for rollout in rollouts)
            return rollouts

        RemoteEngine.generate = counting

    def taken(self) -> dict:
        now = {"calls": self.calls, "requests": self.requests, "tokens": self.tokens}
        self.calls = self.requests = self.tokens = 0
        return now


def stopped_after(parts: int, arguments: list[str]) -> dict:
    """A command that is asked to stop once so many parts are done."""
    is_asked, asked = StopSignal.is_asked, []

    def agree(signal) -> bool:
        asked.append(1)
        return len(asked) > parts

    StopSignal.is_asked = agree
    try:
        return run(arguments)
    finally:
        StopSignal.is_asked = is_asked


def main(folder: Path) -> None:
    reward_model = f"search.reward_model={write_own_reward_model(folder / 'prm')}"
    runs, counted, results = folder / "runs", Counted(), {}
    config = ["search", "--config-name", "search", "model=tiny_llama", "data=arithmetic", "precision=fp32",
              f"output_dir={runs}", "name=model", *DATA, *SEARCH]
    results["no_reward_model"] = {**run(config), "begun": (runs / "model").exists()}
    results["model"] = run([*config, reward_model])
    of_model = runs / "model" / "search"
    first = rows(of_model / "warmup" / "search")
    counted.taken()
    results["again"] = {**run([*config, reward_model]), **counted.taken(),
                        "same": rows(of_model / "warmup" / "search") == first}
    results["other_settings"] = run([*config, reward_model, "search.width=1"])

    of_run = ["search", str(runs / "model"), reward_model, *SEARCH]
    stopped = stopped_after(1, [*of_run, "search.name=stopped"])
    parts = sorted(path.name for path in (of_model / "warmup" / "stopped").rglob("*.parquet"))
    before = counted.taken()
    results["stopped"] = {**stopped, **before, "parts": parts}
    results["went_on"] = {**run([*of_run, "search.name=stopped"]), **counted.taken(),
                          "same": rows(of_model / "warmup" / "stopped") == first}
    results["one_part"] = {**run([*of_run, "search.name=one", "search.part_size=50"]), **counted.taken(),
                           "same": rows(of_model / "warmup" / "one") == first}
    results["other_seed"] = {**run([*of_run, "search.name=seed", "search.seed=9"]),
                             "same": rows(of_model / "warmup" / "seed") == first}
    results["first"] = first
    results["trees"] = {path.name: json.loads(path.read_text()) for path in of_model.glob("warmup.search.*.json")}
    results["summary"] = json.loads((of_model / "warmup" / "search" / "summary.json").read_text())
    results["in_report"] = (runs / "model" / "report.html").read_text().count('class="tree"')

    results["train"] = run([*TRAIN, f"output_dir={runs}", "name=trained", *DATA])
    trained = ["search", str(runs / "trained"), reward_model, *SEARCH]
    counted.taken()
    results["arm"] = {**run(trained), "rows": rows(runs / "trained" / "search" / "entropy_bonus" / "search")}
    results["warmup"] = {**run([*trained, "--arm", "warmup"]),
                         "rows": rows(runs / "trained" / "search" / "warmup" / "search")}
    results["no_such_arm"] = run([*trained, "--arm", "idpo"])
    results["strange"] = run([*trained, "seed=3"])
    results["no_run"] = run(["search", str(folder), reward_model])
    results["no_room"] = run([*trained, "search.name=short", f"search.reward_model={short_reward_model(folder)}"])
    (folder / "results.json").write_text(json.dumps(results))


def short_reward_model(folder: Path) -> Path:
    """A reward model whose context holds a question, and not a whole solution behind it."""
    path = write_own_reward_model(folder / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
