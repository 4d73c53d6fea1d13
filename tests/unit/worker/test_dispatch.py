"""Calls to other ranks: each gets its rows, and whatever befalls a rank is one message that names it."""

import json
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.errors import UserError, WorkerFailed
from nemo_edo.worker import dispatch
from nemo_edo.worker.dispatch import END, NEWS, Answer, Workers, _Rank, answer, pack
from nemo_edo.worker.worker import Worker


def double(worker: Worker, rows: torch.Tensor, more: int = 0) -> torch.Tensor:
    return 2 * rows + more


def remember(worker: Worker, value) -> list:
    worker.seen = [*getattr(worker, "seen", []), value]
    return worker.seen


def with_own(worker: Worker, take=None) -> bool:
    return take is not None


def tell(worker: Worker, news: str) -> None:
    worker.tell(news)


def fail_at(worker: Worker, argument: tuple[int, type[Exception]] | None, rank: int) -> int:
    if argument is not None:
        raise argument[1](f"rank {argument[0]} cannot")
    return rank


def serve(connection, replies=None) -> None:
    """What ``serve.serve`` does, in a thread; replies: of a process that answers otherwise (None: it goes)."""
    worker = Worker()
    worker.tell = lambda news: connection.send_bytes(pack(Answer(NEWS, news)))
    while True:
        message = pickle.loads(connection.recv_bytes())
        if message == (END,):
            return
        answered = answer(worker, message, bool) if replies is None else replies(message)
        if answered is None:
            connection.close()
            return
        connection.send_bytes(pack(answered))


def start(*replies) -> Workers:
    """The controller's view of a rank for each of the replies of rank 1, ..."""
    others = []
    for rank, reply in enumerate(replies, start=1):
        ours, theirs = Pipe()
        threading.Thread(target=serve, args=(theirs, reply), daemon=True).start()
        others.append(_Rank(rank, f"node{rank}", ours))
    return Workers(others)


def test_each_rank_gets_its_argument_and_answers_in_the_order_of_the_ranks():
    workers = start(None, None)
    assert workers.size == 3
    rows = [torch.arange(n + 1) for n in range(3)]
    assert [found.tolist() for found in workers.call(double, 1, each=rows)] == [[1], [1, 3], [1, 3, 5]]
    workers.call(remember, "a")
    assert workers.call(remember, "b") == [["a", "b"]] * 3
    assert workers.call(with_own, own=print) == [True, False, False]
    workers.end()


def test_what_ranks_tell_during_a_call_arrives_with_their_number():
    workers, heard = start(None, None), []
    workers.call(tell, each=["of 0", "of 1", "of 2"], news=lambda rank, news: heard.append((rank, news)))
    workers.call(tell, each=["unheard"] * 3)
    assert sorted(heard) == [(0, "of 0"), (1, "of 1"), (2, "of 2")]


def test_one_process_calls_its_worker_without_copying_anything():
    rows = torch.zeros(3)
    assert Workers().call(remember, rows)[0][0] is rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_tensors_arrive_to_the_last_bit_and_can_be_written_to(dtype):
    for tensor in (torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype), torch.zeros(0, 4, dtype=dtype)):
        found = pickle.loads(pack({"rows": tensor.t()}))["rows"]
        assert found.dtype == dtype and torch.equal(found, tensor.t())
        found.zero_()


def test_ranks_of_one_share_get_the_same_bytes_and_no_other_ranks_rows(monkeypatch):
    sent = []
    monkeypatch.setattr(dispatch, "pack", lambda message, plain=pack: sent.append(message) or plain(message))
    workers = start(None, None, None)
    one, two = torch.zeros(5), torch.ones(7)
    workers.call(double, each=[one, one, two, two])
    calls = [message for message in sent if isinstance(message, tuple)]
    assert [message[2][0].tolist() for message in calls] == [one.tolist(), two.tolist()]


def test_an_error_that_all_ranks_raise_is_raised_once_and_the_ranks_go_on():
    workers = start(None, None)
    with pytest.raises(UserError, match="rank 0 cannot"):
        workers.call(fail_at, 0, each=[(rank, UserError) for rank in range(3)])
    assert workers.call(fail_at, 5, each=[None] * 3) == [5, 5, 5]


@pytest.mark.parametrize(("error", "raised", "told"), [
    (UserError, UserError, "rank 2 on node2: rank 2 cannot"),
    (KeyError, WorkerFailed, "rank 2 on node2 failed in fail_at: KeyError: 'rank 2 cannot'\nTraceback")])
def test_an_error_of_one_rank_names_it(error, raised, told):
    workers = start(None, None)
    with pytest.raises(raised) as found:
        workers.call(fail_at, 0, each=[None, None, (2, error)])
    assert str(found.value).startswith(told)


def test_an_error_of_rank_0_is_explained_by_the_rank_that_it_follows_from():
    workers = start(None, lambda message: time.sleep(0.3))  # rank 2 ends
    with pytest.raises(WorkerFailed, match="rank 2 on node2 has ended during fail_at"):
        workers.call(fail_at, 0, each=[(0, RuntimeError), None, None])
    gone = "[gloo/transport] Connection closed by peer"
    workers = start(lambda message: Answer(message[0], error=gone), lambda message: time.sleep(0.3))
    with pytest.raises(WorkerFailed, match="rank 2 on node2 has ended"):
        workers.call(fail_at, 0, each=[None] * 3)


def test_a_rank_that_ends_or_answers_out_of_step_ends_the_run():
    workers = start(lambda message: None)
    with pytest.raises(WorkerFailed, match="rank 1 on node1 has ended"):
        workers.call(with_own)
    with pytest.raises(WorkerFailed, match="rank 1 on node1 has ended"):  # nothing waits for it any more
        workers.call(with_own)
    workers = start(lambda message: Answer(message[0] - 1))
    with pytest.raises(WorkerFailed, match="rank 1 on node1 answered call 0, not 1"):
        workers.call(with_own)


def test_a_rank_that_was_asked_to_stop_tells_the_controller():
    workers = start(lambda message: Answer(message[0], asked_to_stop=True))
    assert not workers.asked_to_stop
    workers.call(with_own)
    assert workers.asked_to_stop


def test_who_has_not_answered_is_known_while_a_call_waits():
    done = threading.Event()
    workers = start(None, lambda message: done.wait() and Answer(message[0]))
    assert workers.waited_for() == ""
    calling, limit = threading.Thread(target=workers.call, args=(with_own,)), time.monotonic() + 60
    calling.start()
    while workers.waited_for() != "rank 2 on node2 did not answer with_own" and time.monotonic() < limit:
        time.sleep(0.01)
    assert workers.waited_for() == "rank 2 on node2 did not answer with_own"
    done.set()
    calling.join()
    assert workers.waited_for() == ""


def test_ranks_meet_whoever_else_connects(monkeypatch):
    told = queue.Queue()
    monkeypatch.setattr(dispatch, "_store", lambda *_: SimpleNamespace(set=lambda key, value: told.put(value)))
    monkeypatch.setattr(dispatch, "HELLO_S", 0.2)
    with ThreadPoolExecutor() as pool:
        met = pool.submit(dispatch._meet, 1, bool)
        port, secret = json.loads(told.get(timeout=60))
        silent = socket.create_connection(("127.0.0.1", port))
        socket.create_connection(("127.0.0.1", port)).close()
        for hello in (b"{", b"1", b'["another", 1, "node"]', b'[0, 1, "node"]', b'["another"]'):
            dispatch._connection(socket.create_connection(("127.0.0.1", port))).send_bytes(hello)
        socket.create_connection(("127.0.0.1", port)).sendall(b"GET / HTTP/1.1\r\n\r\n")
        worker = dispatch._connection(socket.create_connection(("127.0.0.1", port)))
        worker.send_bytes(json.dumps([secret, 1, "node1"]).encode())
        assert [str(other) for other in met.result(timeout=60)] == ["rank 1 on node1"]
    silent.close()


STUCK = """
import threading, time
from multiprocessing.connection import Pipe
from nemo_edo.worker import dispatch
dispatch.GRACE_S = 0.5
def stuck(worker): time.sleep(600)
ours, theirs = Pipe()
def reply():
    theirs.recv_bytes()
    time.sleep(0.5)  # rank 0 is in its part by then
    {reply}
threading.Thread(target=reply, daemon=True).start()
dispatch.Workers([dispatch._Rank(1, "node7", ours)]).call(stuck)
"""


@pytest.mark.parametrize(("reply", "told"), [
    ("theirs.close()", "rank 1 on node7 has ended during stuck"),
    ("theirs.send_bytes(dispatch.pack(dispatch.Answer(1, error='MemoryError')))",
     "rank 1 on node7 failed in stuck: MemoryError")])
def test_where_rank_0_waits_in_a_collective_for_a_rank_that_failed_the_process_ends_with_one_message(reply, told):
    done = subprocess.run([sys.executable, "-c", STUCK.format(reply=reply)], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1
    assert done.stderr == f"nemo-edo: error: {told}; rerun the command to resume\n"
