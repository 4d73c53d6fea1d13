"""A run of many arms needs the memory of one."""

import json
import weakref
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
ARMS = 3
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 2048}
SETTINGS = [
    "sft.steps=1", "sft.batch_size=4", "grpo.iterations=1", "grpo.problems_per_iteration=2", "grpo.minibatch_size=2",
    "sampling.samples_per_prompt=2", "sampling.max_new_tokens=4", "evaluation.samples=2", "evaluation.rollouts=1",
    "evaluation.bootstrap=10", "data.arithmetic.test_problems=2", "data.arithmetic.train_problems=4",
    "data.arithmetic.warmup_problems=8", "threads=1", "replicate_baseline=false",
    f"arms={{{', '.join(f'a{i}: {{}}' for i in range(ARMS))}}}",
    *(f"model.architecture.{name}={value}" for name, value in SIZES.items()),
]


def record(out: Path) -> None:
    """In the run's process: ``out`` will have a JSON line for each model: how many earlier ones are alive, and the
    process's bytes, before it is built."""
    from nemo_edo.worker.worker import Worker

    models: list[weakref.ref] = []
    drop, build = Worker.drop, Worker.build

    def dropped(worker):
        drop(worker)
        alive = sum(model() is not None for model in models)
        with out.open("a") as file:
            file.write(json.dumps({"alive": alive, "rss": psutil.Process().memory_info().rss}) + "\n")

    def built(worker, *args):
        place = build(worker, *args)
        models.extend([weakref.ref(worker.model), weakref.ref(worker.model.built.chunks[0])])
        return place

    Worker.drop, Worker.build = dropped, built


def test_no_arms_model_is_alive_when_the_next_is_built_and_more_arms_take_the_memory_of_one(tmp_path: Path, nemo_edo):
    seen = tmp_path / "seen.jsonl"
    nemo_edo.succeed("train", "--config-name=quickstart", f"output_dir={tmp_path}", *SETTINGS,
                     before=[("tests.e2e.test_memory:record", seen)])
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [line["alive"] for line in lines] == [0] * (1 + ARMS)
    before_arms = [line["rss"] for line in lines[1:]]
    assert max(before_arms) < 1.1 * before_arms[0]
