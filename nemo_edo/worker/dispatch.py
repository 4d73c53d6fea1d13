"""Calls from the controller to the workers, one on each rank. Rank 0's is in the controller's process.

A call is a function of ``Worker``, which goes by its name, and its arguments; tensors go as raw bytes. The controller
sends a call to all other ranks, executes rank 0's part itself, since the model's collectives need it, and then collects
the answers. Sockets and not a process group carry them: waiting takes no CPU time, has no limit, and ends when the
other process does."""

import contextlib
import hmac
import io
import json
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_edo.errors import RunStopped, UserError, WorkerFailed
from nemo_edo.utils.processes import start_vital_thread
from nemo_edo.utils.ranks import free_server, waiting
from nemo_edo.worker.worker import Worker

T = TypeVar("T")
News = Callable[[int, Any], None]
"""Gets a rank and what it tells during a call, from others than rank 0 in another thread; returns at once."""
KEY = "nemo_edo/controller"
"""The key in torch's store that says where the controller listens, and the secret that a worker shows there."""
MEETING_S = 600.0  # how long rank 0 waits for the others, which have begun with it and have nothing to do before
CONTROLLER_S = 1800.0  # how long the others wait for rank 0, which checks the command's input first
HELLO_S = 5.0  # for what a worker says when it has connected
GRACE_S = 30.0  # for rank 0 to come out of a collective after another rank has failed: NCCL waits for ten minutes
ANOTHER_IS_GONE = ("gloo/transport", "ncclRemoteError", "remote server shutdown")
"""What gloo, NCCL and torch's store say in a process whose neighbour has ended, or does not answer."""
STACKS, END = "stacks", "end"
NEWS = -1  # in place of a call's number


@dataclass(frozen=True)
class Answer:
    """What a worker makes of a call, or tells during one."""

    call: int  # its number; NEWS: the worker tells ``value`` during a call
    value: Any = None
    error: str | None = None  # its last line
    is_shared: bool = False  # whether every rank raises it, as where rank 0 tells the others of a missing file
    trace: str = ""
    asked_to_stop: bool = False  # whether this process got SIGTERM or SIGINT


@dataclass
class _Rank:
    """The controller's view of another rank."""

    rank: int
    node: str
    connection: Connection
    answers: list[Answer] = field(default_factory=list)
    lost: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Workers:
    """All ranks' workers, as the controller sees them. One thread calls them."""

    def __init__(self, others: Sequence[_Rank] = ()) -> None:
        self.local = Worker()
        self.asked_to_stop = False  # whether another rank's process was
        self._others = list(others)
        self._calls, self._name = 0, ""  # the name of the call under way
        self._news: News = _ignored  # of the call under way
        self.local.tell = lambda news: self._news(0, news)
        self._is_local_busy = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        if self._others:
            start_vital_thread("answers", self._receive)

    @property
    def size(self) -> int:
        return 1 + len(self._others)

    def call(
        self, work: Callable[..., T], *given: Any, each: Sequence[Any] | None = None, own: Any = None,
        news: News | None = None,
    ) -> list[T]:  # fmt: skip
        """What ``work(worker, *given)`` returns on each rank.
        each: an argument for each rank, before the others. own: one for rank 0's worker alone, after the others; it
        stays in this process. news: gets what ranks tell during the call.
        Raises what rank 0's worker raises, UserError where another rank alone has one, and WorkerFailed, with rank and
        node, where one fails otherwise or ends."""
        self._calls, self._name, self._news = self._calls + 1, work.__name__, news or _ignored
        arguments = [()] * self.size if each is None else [(argument,) for argument in each]
        receivers: dict[int, list[_Rank]] = {}  # the ranks of one data-parallel share get the same bytes
        for other in self._others:
            receivers.setdefault(id(arguments[other.rank] and arguments[other.rank][0]), []).append(other)
        for others in receivers.values():
            packed = pack((self._calls, work, (*arguments[others[0].rank], *given)))
            for other in others:
                self._send(other, packed)
        if (failure := self._failure()) is not None:
            raise WorkerFailed(failure)
        self._is_local_busy = True
        value, error = None, None
        try:
            value = work(self.local, *arguments[0], *given, *(() if own is None else (own,)))
        except Exception as caught:  # another rank's failure may explain it; where all raise the same, the run goes on
            error = caught
        finally:
            self._is_local_busy = False
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure() is not None or all(other.answers for other in self._others),
                None if error is None else GRACE_S,
            )
            failure, answers = self._failure(), [other.answers for other in self._others]
            for other in self._others:
                other.answers = []
        self._name, self._news = "", _ignored
        if failure is None and error is not None and self._others and _another_is_gone(str(error)):
            failure = f"rank 0 has lost another one in {work.__name__}: {str(error).partition(chr(10))[0]}"
        if failure is not None:
            raise WorkerFailed(failure) from error
        if error is not None:
            raise error
        for other, (answer,) in zip(self._others, answers, strict=True):
            if answer.error is not None:  # one that every rank was to raise
                raise UserError(f"{other}: {answer.error}")
        return [value, *(answer.value for (answer,) in answers)]

    def waited_for(self) -> str:
        """The ranks that have not answered the last call, in words; empty: none."""
        silent = [str(other) for other in self._others if not other.answers] if self._name else []
        return f"{', '.join(silent)} did not answer {self._name}" if silent else ""

    def write_stacks(self, folder: Path) -> None:
        """Has the other ranks write the stacks of their threads."""
        for other in self._others:
            self._send(other, pack((STACKS, str(folder))))

    def end(self) -> None:
        for other in self._others:
            self._send(other, pack((END,)))
        for other in self._others:
            other.lost = True

    # --- answers --------------------------------------------------------------------------------------------------

    def _failure(self) -> str | None:
        """What no rank can go on after. Of several, the one that the others follow from. While rank 0 executes its
        part, any error: rank 0 is to raise a shared one as well."""
        busy = self._is_local_busy
        answers = [(other, other.answers[0]) for other in self._others if other.answers]
        for other in self._others:
            if other.lost and not other.answers:
                return f"{other} has ended during {self._name or 'the start'}"
        for other, answer in answers:
            if answer.call != self._calls:
                return f"{other} answered call {answer.call}, not {self._calls} ({self._name})"
        failed = [(other, answer) for other, answer in answers if answer.error and (busy or not answer.is_shared)]
        first = [one for one in failed if not _another_is_gone(one[1].error)]
        for other, answer in first or (failed if busy or len(answers) == len(self._others) else ()):
            return f"{other} failed in {self._name}: {answer.error}\n{answer.trace}".rstrip()
        return None

    def _receive(self) -> None:
        """Receives answers, in a thread: rank 0 may wait for a failed rank in a collective."""
        waiting = {other.connection: other for other in self._others}
        failed_at = None
        while waiting or failed_at is not None:
            ready = wait(list(waiting), None if failed_at is None else 1.0)
            with self._changed:
                for connection in ready:
                    other = waiting[connection]
                    try:
                        answer = pickle.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        other.lost = True
                        del waiting[connection]
                        continue
                    if answer.call == NEWS:
                        self._news(other.rank, answer.value)
                        continue
                    self.asked_to_stop |= answer.asked_to_stop
                    other.answers.append(answer)
                failure = self._failure() if self._is_local_busy else None
                self._changed.notify_all()
            failed_at = None if failure is None else failed_at or time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
                print(f"nemo-edo: error: {failure}; rerun the command to resume", file=sys.stderr, flush=True)
                os._exit(1)

    def _send(self, other: _Rank, packed: bytes) -> None:
        with self._sending:
            try:
                other.connection.send_bytes(packed)
            except OSError:  # its end is found where its answer is read
                other.lost = True


def _ignored(rank: int, news: Any) -> None:
    """The listener of a call that needs no news."""


def _another_is_gone(error: str) -> bool:
    return any(words in error for words in ANOTHER_IS_GONE)


def pack(message: Any) -> bytes:
    """The pickled message; functions go by their names, tensors on the CPU as the bytes of NumPy arrays."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(message)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented


# --- meeting ------------------------------------------------------------------------------------------------------

_workers: Workers | None = None


def workers(is_asked_to_stop: Callable[[], bool] = bool) -> Workers:
    """This run's workers, on rank 0. The first call waits until all ranks are there; errors as for ``waiting``."""
    global _workers
    if _workers is None:
        others = int(os.environ.get("WORLD_SIZE", "1")) - 1
        _workers = Workers(_meet(others, is_asked_to_stop) if others else ())
    return _workers


def dismiss(*, met_only: bool = False) -> None:
    """Lets the other ranks end, whether the command had work for them or not. met_only: only where it had."""
    global _workers
    if not met_only and os.environ.get("WORLD_SIZE", "1") != "1":
        workers()
    if _workers is not None:
        _workers.end()
        _workers = None


def met() -> Workers | None:
    """This run's workers, where the ranks have met."""
    return _workers


def _place() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


@cache
def _store(is_asked_to_stop: Callable[[], bool] = bool) -> torch.distributed.Store:
    """Torch's store, which rank 0 has unless torchrun does; errors as for ``waiting``."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    for _ in () if serves else waiting(lambda: f"rank 0 at {_place()}", CONTROLLER_S, is_asked_to_stop):
        try:
            socket.create_connection((address, port), 5.0).close()
            break
        except OSError:
            time.sleep(0.2)
    try:
        # It would wait for all ranks without a word, and run no handler of a signal meanwhile.
        return torch.distributed.TCPStore(
            address, port, is_master=serves, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except torch.distributed.DistError as error:
        first = str(error).partition("\n")[0]
        raise UserError(f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT, {_place()}: {first}") from error


def _meet(others: int, is_asked_to_stop: Callable[[], bool]) -> list[_Rank]:
    secret, met = secrets.token_hex(16), []

    def missing() -> str:
        there = {other.rank for other in met}
        names = [str(rank) for rank in range(1, others + 1) if rank not in there]
        return f"rank{'s' * (len(names) > 1)} {', '.join(names)} of {others + 1} at {_place()}"

    with free_server(others) as server:
        server.settimeout(0.5)
        _store(is_asked_to_stop).set(KEY, json.dumps([server.getsockname()[1], secret]))
        for _ in waiting(missing, MEETING_S, is_asked_to_stop):
            # Others may connect, such as a scanner of ports: nothing is unpickled before the secret is here.
            with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
                connection = _connection(server.accept()[0])
                if not connection.poll(HELLO_S):
                    continue
                shown, rank, node = json.loads(connection.recv_bytes(1024))
                if hmac.compare_digest(shown, secret):
                    met.append(_Rank(rank, node, connection))
            if len(met) == others:
                break
    return sorted(met, key=lambda other: other.rank)


def meet_controller(is_asked_to_stop: Callable[[], bool]) -> Connection:
    """A worker's connection to the controller. Errors as for ``ranks.waiting``."""
    store = _store(is_asked_to_stop)
    while not store.check([KEY]):  # get would wait without a handler of a signal
        if is_asked_to_stop():
            raise RunStopped("asked to stop while it waited for rank 0")
        time.sleep(0.2)
    port, secret = json.loads(store.get(KEY))
    connection = _connection(socket.create_connection((os.environ["MASTER_ADDR"], port)))
    connection.send_bytes(json.dumps([secret, int(os.environ["RANK"]), socket.gethostname()]).encode())
    return connection


def _connection(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node may go without a word
    for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return Connection(sock.detach())


def answer(worker: Worker, message: tuple, asked_to_stop: Callable[[], bool]) -> Answer:
    """Executes a call on a worker's rank."""
    number, work, given = message
    try:
        return Answer(number, work(worker, *given), asked_to_stop=asked_to_stop())
    except Exception as caught:
        last = traceback.format_exception_only(caught)[-1].strip()
        error = str(caught) if isinstance(caught, UserError) else last
        shared = isinstance(caught, UserError | OSError)
        return Answer(number, None, error, shared, "" if shared else traceback.format_exc(), asked_to_stop())
