"""Writes a checkpoint's files in a separate process while training continues, by ``dist_checkpointing`` with
``async_sharded_save``: each rank copies its share to host memory, a forked process writes it, and once those of all
ranks are done, the ranks finish the checkpoint together."""

from __future__ import annotations

import errno
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import CheckpointException

from nemo_edo.errors import UserError
from nemo_edo.parallel.main_rank import on_main
from nemo_edo.utils.files import checksum
from nemo_edo.utils.processes import end_with

_KILLED = "a process that writes its files was killed, as the system does where memory is short"


class Writing:
    """A state that is being written into a folder. What the training does to the state meanwhile does not reach it."""

    def __init__(
        self, state: dict, folder: Path, *, content_metadata: dict[str, Any], finish: Callable[[dict[str, str]], None]
    ) -> None:
        """Every rank calls it at the same place. finish: called, on every rank, once all files but its own are there,
        with the checksums of those that this rank has written."""
        self._folder = folder
        # Megatron's own queue lives in a third process, which would survive a trainer that is killed.
        filesystem_async._results_queue = _Mailbox()
        request = dist_checkpointing.save(
            state,
            str(folder),
            async_sharded_save=True,
            content_metadata=content_metadata,
            async_strategy="mcore",  # the default needs a package that is not on PyPI in the version it asks for
        )
        checksums = _Mailbox()
        if request.async_fn is not None:  # this rank has something to write
            transforms, _ = request.async_fn.args  # of write_preloaded_data_multithread
            request = request._replace(async_fn=partial(_write, transforms, os.getpid(), checksums))
        request.add_finalize_fn(lambda: finish(checksums.get(default={})))
        self._calls = AsyncCallsQueue()
        self._calls.schedule_async_request(request)

    def is_finished(self, *, wait: bool = False) -> bool:
        """Whether all of it is written; the first call that finds it so finishes the checkpoint. Every rank calls it
        at the same place. wait: until it is written. Raises UserError, on every rank, where one could not write."""
        if self._calls.get_num_unfinalized_calls():
            try:
                self._calls.maybe_finalize_async_calls(blocking=wait)
            except CheckpointException as error:  # on all ranks; the first alone knows of what
                failures = error.failures
                rank, why = on_main(lambda: next((rank, str(why)) for rank, (why, _) in failures.items()))
                raise UserError(
                    f"{self._folder} could not be written by rank {rank}: {why}; earlier checkpoints are kept: remove "
                    "the cause, and rerun the command to resume from the last"
                ) from error
        return not self._calls.get_num_unfinalized_calls()


def _write(
    transforms: list, trainer: int, checksums: _Mailbox, rank: int, buckets: Sequence[tuple], results: _Mailbox
) -> None:
    """Megatron's writer in the forked process, and the checksums of what it wrote, while the files are in memory. Each
    bucket is a file. Megatron's loop over them would report a failed one by the class of its error alone."""
    end_with(trainer)
    written = {}
    for place, bucket in enumerate(buckets):
        _, written[place] = FileSystemWriterAsync.write_preloaded_data(
            transforms, place, write_bucket=bucket, results_queue=None, count_queue=None, use_fsync=True
        )
        if isinstance(failed := written[place], Exception):
            # The system's error behind a library's; where torch's writer of archives hides it, that of a full disk.
            behind: BaseException | None = failed
            while behind is not None and not isinstance(behind, OSError):
                behind = behind.__cause__ or behind.__context__
            hidden = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if "unexpected pos" in str(failed) else failed
            results.put(behind or hidden)
            return
    results.put(written)
    paths = [Path(path) for path, *_ in buckets]
    checksums.put({path.name: checksum(path) for path in paths if path.is_file()})


class _Mailbox:
    """What a forked process leaves for its parent, as much of it as there is: a pipe would wait for a reader."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()

    def put(self, value: Any) -> None:
        pickle.dump(value, self._file)
        self._file.flush()

    def get(self, default: Any) -> Any:
        """``default`` where nothing was left."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            return default

    def get_nowait(self) -> Any:
        """What Megatron reads: the results, or an error in their place."""
        return self.get(default=RuntimeError(_KILLED))
