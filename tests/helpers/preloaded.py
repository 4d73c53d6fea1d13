"""What the fork server of ``helpers.forked`` imports once for all of its processes: it takes ten seconds."""

import gc
import importlib
import os
import warnings

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read as torch is imported; nemo_edo.cli.commands says why
warnings.simplefilter("ignore")
from nemo_edo.megatron.platform import NEVER_USED, unimportable  # noqa: E402

with unimportable(NEVER_USED):
    for name in ("helpers.worker_pool", "helpers.cli", "helpers.tiny_models", "nemo_edo.models", "nemo_edo.run.jobs",
                 "nemo_edo.megatron.checkpoint", "nemo_edo.generation.megatron_engine",
                 "nemo_edo.generation.server_engine", "nemo_edo.rewards.custom", "nemo_edo.report.page"):
        importlib.import_module(name)

import torch  # noqa: E402

if not torch.cuda.device_count():  # which, unlike is_available, leaves CUDA to the forked processes
    from nemo_edo.megatron.cpu import without_cuda

    without_cuda.import_bridge()
elif "PRETENDED_CUDA" in os.environ:  # tests/rehearsal
    importlib.import_module("transformer_engine.pytorch")
    importlib.import_module("megatron.bridge")
gc.collect()
gc.freeze()  # the forked processes' collector need not touch what was imported, which would copy its pages
