"""A rank's process other than the controller's: it executes calls until the controller ends."""

import faulthandler
import os
import pickle
import queue
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from nemo_edo.utils.processes import start_vital_thread
from nemo_edo.worker.dispatch import END, NEWS, STACKS, Answer, answer, meet_controller, pack
from nemo_edo.worker.worker import Worker


def serve() -> int:
    """Returns the exit status. SIGTERM and SIGINT do not end the process: the next answer tells the controller."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    connection = meet_controller(lambda: bool(received))
    calls: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    busy = threading.Event()
    start_vital_thread("calls", _read, connection, calls, busy)
    worker = Worker()
    worker.tell = lambda news: connection.send_bytes(pack(Answer(NEWS, news)))
    while (message := calls.get()) is not None:
        busy.set()
        answered = pack(answer(worker, message, lambda: bool(received)))
        busy.clear()
        try:
            connection.send_bytes(answered)
        except OSError:  # the controller has ended, and said why
            return 1
        del message
    return 0


def _read(connection: Connection, calls: queue.SimpleQueue, busy: threading.Event) -> None:
    """Reads calls in a thread: the worker may be in a collective when the controller ends, or asks for its stacks."""
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            message = (END,)
        if message[0] == STACKS:
            folder = Path(message[1])
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"stacks_rank_{os.environ['RANK']}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        elif message[0] == END:
            if busy.is_set() or not calls.empty():
                os._exit(1)
            calls.put(None)
            return
        else:
            calls.put(message)
