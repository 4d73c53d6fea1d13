"""Records which of a run's earlier models are alive, and the process's memory, as each new one is built."""

import json
import weakref
from pathlib import Path

import psutil


def record(out: Path) -> None:
    """From now on, ``out`` has a JSON line for each model: {"alive", "rss"} (bytes) before it is built."""
    from nemo_edo.run import build

    models: list[weakref.ref] = []
    whole = build.build_model

    def build_model(*args, **settings):
        alive = sum(model() is not None for model in models)
        with out.open("a") as file:
            file.write(json.dumps({"alive": alive, "rss": psutil.Process().memory_info().rss}) + "\n")
        model = whole(*args, **settings)
        models.extend([weakref.ref(model), weakref.ref(model.built.chunks[0])])
        return model

    build.build_model = build_model
