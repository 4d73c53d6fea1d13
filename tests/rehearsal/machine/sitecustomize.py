"""Python imports this by itself where this folder is on its path: torch then finds a GPU, in each process that imports
it. See tests/rehearsal/__init__.py."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys

ADAPTED = ("torch", "transformer_engine.common", "triton.runtime.autotuner", "triton.runtime.interpreter")


class _Adapting(importlib.abc.MetaPathFinder):
    """Loads the device before torch is executed, which looks for CUDA once, and adapts torch.cuda, Triton's interpreter
    and what loads Transformer Engine's extension after them."""

    def find_spec(self, name, path=None, target=None):
        if name not in ADAPTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            if name == "torch":
                library = ctypes.CDLL(os.environ["PRETENDED_CUDA"], mode=ctypes.RTLD_GLOBAL)
            execute(module)
            import pretended_cuda

            if name == "torch":
                pretended_cuda.install(module, library)
            elif name == "transformer_engine.common":
                module.load_framework_extension = lambda framework: importlib.import_module("transformer_engine_torch")
            elif name == "triton.runtime.autotuner":  # a kernel's configurations are all as fast: none is timed
                module.Autotuner._bench = lambda tuner, *arguments, config, **named: [1.0]
            else:
                pretended_cuda.refuse_pointers_of_the_host(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Adapting())
