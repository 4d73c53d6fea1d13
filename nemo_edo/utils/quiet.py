"""Libraries that leave the terminal to the run: their loggers, warnings and threads."""

import logging
import os
import sys
import tempfile
import threading
import warnings

from nemo_edo.errors import CANNOT_WRITE

CHATTY = ("megatron", "nemo_logger", "httpx")
"""Loggers that report every optimizer and bucket they set up, or every request; their warnings stay."""


def quiet_libraries() -> None:
    """Leaves the terminal to the run's own lines: called before the libraries are imported."""
    is_main = os.environ.get("RANK", "0") == "0"
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING if is_main else logging.ERROR)
    if not is_main:
        warnings.simplefilter("ignore")  # the first process says the same
    # It deprecates its own writer for NVIDIA's resiliency extension, and the format of 2025.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # it recommends another class
    logging.getLogger("megatron.bridge.utils.fusions").setLevel(logging.ERROR)  # kernels.json says what is in use
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a machine with nvcc and without a GPU
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)  # NeMo's telemetry warns that nobody asked for it
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it takes its level from there; Bridge has it complain
    if not os.access(os.path.expanduser("~"), os.W_OK):  # where Bridge has its locks otherwise
        os.environ.setdefault("MEGATRON_CONFIG_LOCK_DIR", tempfile.gettempdir())
    os.environ.setdefault("MEGATRON_SUPPRESS_FUSION_WARNINGS", "1")  # Bridge names a missing CUDA kernel for each model
    # A dozen on import that Apex and Transformer Engine are absent (``megatron/cpu/`` is for that very case), and what
    # libraries deprecate of each other.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # Megatron's sources, as they are compiled
    # Megatron reads a checkpoint's common part in each process by itself.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    warnings.filterwarnings("ignore", "The argument order of load has been changed")
    warnings.filterwarnings("ignore", "The `srun` command is available")  # Lightning trains nothing here
    logging.raiseExceptions = False  # a traceback for each line that a log file on a full disk cannot take
    threading.excepthook = _one_line_for_a_failed_write


def _one_line_for_a_failed_write(args: threading.ExceptHookArgs) -> None:
    """No traceback where a logger's thread cannot write, as on a full disk: the logger's next use raises it."""
    if isinstance(args.exc_value, OSError) and args.exc_value.errno in CANNOT_WRITE:
        message = f"nemo-edo: error: a logger's thread could not write ({args.exc_value}); make room or give access"
        print(message, file=sys.stderr, flush=True)
    else:
        threading.__excepthook__(args)
