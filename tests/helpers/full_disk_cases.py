"""Two ranks save a checkpoint, and one of them meets a full disk. Run by a WorkerPool."""

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

import torch
from helpers import tiny_models

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item"


def full_as_a_writer_writes() -> contextlib.AbstractContextManager:
    return mock.patch(WRITER, side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def saved(model: Path, folder: Path, full: str, rank: int) -> str:
    """What a rank says of a save in which the disk is full for one rank."""
    from nemo_edo.megatron import checkpoint

    policy = tiny_models.build_policy(model, ParallelismConfig(tensor_model_parallel_size=2))
    fails = torch.distributed.get_rank() == rank
    try:
        with globals()[full]() if fails else contextlib.nullcontext():
            checkpoint.save(policy, folder)
    except UserError as error:
        return str(error)
    return "saved"
