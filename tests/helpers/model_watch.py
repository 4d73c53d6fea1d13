"""Records which of a run's earlier models are alive, and the process's memory, as each new one is built."""

import json
import weakref
from pathlib import Path

import psutil


def record(out: Path) -> None:
    """From now on, ``out`` has a JSON line for each model: {"alive", "rss"} (bytes) before it is built."""
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
