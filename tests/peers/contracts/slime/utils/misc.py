import importlib


def load_function(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
