"""Every request is answered once, whatever the servers do meanwhile."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import completions_server

from nemo_edo.config import ServersConfig
from nemo_edo.errors import PartlyGenerated, RunStopped
from nemo_edo.generation import dispatch
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import ServerAPI
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.servers import name_weights, require_weights
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.utils.http import NoAnswer, ServerError

QUICK = {"backoff_s": 0.02, "backoff_limit_s": 0.1, "health_limit_s": 5.0, "restarts": 3, "max_in_flight": 8}
SAMPLING = SamplingParams(1.0, 1.0, 8)
STOP, VOCABULARY = 1, 100


class ScriptedAPI(ServerAPI):
    """Of tests/helpers/completions_server.py, or of the code ``settings.python``."""

    def command(self, model: Path, port: int) -> list[str]:
        code = self.settings.python
        return [sys.executable, *(["-c", code] if code else [completions_server.__file__, str(port), str(model)])]

    def environment(self, key: str) -> dict[str, str]:
        return {}

    @staticmethod
    def extra_fields(stop_ids: Sequence[int]) -> dict:
        return {}


def managed(folder: Path, name: str, code: str | None = None) -> Replica:
    """A replica, not started, whose server reads the state ``folder/name.json``, or runs the code."""
    api, state = ScriptedAPI(ServersConfig(python=code), "float32", folder / f"{name}.log"), folder / f"{name}.json"
    return Replica(name, key=completions_server.KEY, ready_limit_s=60.0, api=api, model_folder=state)


@pytest.fixture
def start(tmp_path: Path):
    """Starts a server for each state; stops them after the test."""
    replicas: list[Replica] = []

    def start(*states: dict) -> list[Replica]:
        for place, state in enumerate(states):
            replicas.append(managed(tmp_path, f"server {place}"))
            replicas[-1].model_folder.write_text(json.dumps(state))
            replicas[-1].start_process()
        for replica in replicas:
            replica.wait_until_ready()
        return replicas

    yield start
    for replica in replicas:
        replica.stop()


def engine(replicas: Sequence[Replica], **settings) -> ServerEngine:
    return ServerEngine(replicas, ScriptedAPI, ServersConfig(**{**QUICK, **settings}), stop_ids=[STOP],
                        vocab_size=VOCABULARY, decode=lambda ids: " ".join(map(str, ids)))


def requests(number: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"p-{i}", i % 3, (5, i), seed=1000 + i) for i in range(number)]


def assert_answers(rollouts: Sequence[Rollout], asked: Sequence[GenerationRequest]) -> None:
    """One rollout for each request, in order: its seed's tokens."""
    assert [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts] == [
        (r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in asked]
    assert all([*r.response_ids] == [2 + r.seed % 90, 2 + r.seed // 90 % 90, 2, STOP] for r in rollouts)
    assert all([*r.response_logprobs] == [-0.5] * 4 and r.finished for r in rollouts)


def assert_answers_all(servers: ServerEngine, number: int) -> None:
    assert_answers(servers.generate(requests(number), SAMPLING), requests(number))


def test_every_request_with_the_key_is_answered_once_and_replicas_share_them_within_max_in_flight(start):
    replicas = start({"slow_s": 0.5}, {"slow_s": 0.5})
    asked = requests(60)
    servers = engine(replicas)
    servers.policy_version = 7
    rollouts = servers.generate(asked, SAMPLING)
    assert_answers(rollouts, asked)
    assert {rollout.policy_version for rollout in rollouts} == {7} and rollouts[0].text == "12 13 2"
    logs = [replica.request("GET", "/log") for replica in replicas]
    assert sorted(seed for log in logs for seed in log["seeds"]) == [request.seed for request in asked]
    assert all(len(log["seeds"]) >= 20 and log["most_open"] <= 8 for log in logs)
    with pytest.raises(ServerError, match=r"stranger \(http://127.0.0.1:\d+\): .*status 401"):
        Replica("stranger", url=replicas[0].url, key="another").wait_until_ready()


def test_faults_in_a_fifth_of_the_answers_change_no_sample(start):
    replicas = start({"faulty_every": 5})
    assert_answers_all(engine(replicas, attempts=9), 300)
    assert len(replicas[0].request("GET", "/log")["seeds"]) >= 300 / 0.8 - 1


@pytest.mark.parametrize(("state", "attempts", "named"), [
    *((state, 4, "generation.servers.attempts.*server 0") for state in ({"status": 429}, {"answer": {"choices": []}})),
    ({"status": 404}, 1, "server 0 .*status 404")])
def test_a_request_that_fails_is_given_up_after_its_attempts_and_a_refused_one_at_once(start, state, attempts, named):
    replicas = start(state)
    with pytest.raises(PartlyGenerated, match=named):
        engine(replicas, attempts=4).generate(requests(1), SAMPLING)
    assert len(replicas[0].request("GET", "/log")["seeds"]) == attempts


class Kept:
    """Arrivals that are asked to stop once they have so many responses."""

    def __init__(self, number: int = 10**6) -> None:
        self.rollouts, self.number = [], number

    def add(self, rollouts) -> None:
        self.rollouts += rollouts

    def stop_if_asked(self) -> None:
        if len(self.rollouts) >= self.number:
            raise RunStopped("asked")


def test_responses_are_handed_over_before_a_stop_and_while_others_are_generated_once_weights_are_checked(
        start, monkeypatch):
    monkeypatch.setattr(dispatch, "HAND_OVER_EVERY_S", 0.05)
    replicas, kept = start({"slow_s": 0.0}, {"hang": True}), Kept(4)
    with pytest.raises(RunStopped):  # long before the requests that hang would end
        engine(replicas, max_in_flight=4).generate(requests(8), SAMPLING, kept)
    assert_answers(sorted(kept.rollouts, key=lambda one: one.seed),
                   [one for one in requests(8) if one.seed in {rollout.seed for rollout in kept.rollouts}])

    def require(replica) -> None:
        raise ServerError("other weights")

    servers, kept = engine(replicas, max_in_flight=4), Kept()
    servers.weights = SimpleNamespace(restore=lambda replica: None, require=require)
    with pytest.raises(ServerError, match="other weights"):
        servers.generate(requests(8), SAMPLING, kept)
    assert kept.rollouts == []


def test_a_killed_server_is_restarted_until_all_requests_are_answered(start):
    replicas = start({"die_after": 5})
    assert_answers_all(engine(replicas, max_in_flight=2), 10)  # weights are none of an evaluation's
    servers, restored, starts = engine(replicas, max_in_flight=2), [], replicas[0].starts
    servers.weights = SimpleNamespace(restore=restored.append, require=lambda replica: None)
    assert_answers_all(servers, 30)
    assert len(restored) == replicas[0].starts - starts >= 5  # lives of five answers


@pytest.mark.parametrize("slow_s", [0.3, 2.0])
def test_a_server_that_is_restarted_has_the_weights_before_they_are_checked(start, monkeypatch, slow_s: float):
    """Whether the other one's last response comes during the restart, or after a check during the refit."""
    monkeypatch.setattr(dispatch, "HAND_OVER_EVERY_S", 0.05)
    replicas = start({"die_after": 1}, {"slow_s": slow_s})

    def restore(replica) -> None:
        time.sleep(0.5)
        name_weights(replica, "run/1")

    for replica in replicas:
        name_weights(replica, "run/1")
    servers = engine(replicas)
    servers.weights = SimpleNamespace(restore=restore, require=lambda replica: require_weights(replica, "run/1"))
    assert_answers_all(servers, 8)
    assert replicas[0].starts >= 2


@pytest.mark.parametrize("faulty_every", [1, 3])
def test_a_server_that_another_has_restarted_gets_the_weights_unless_it_has_answered(start, faulty_every: int):
    [replica] = start({"faulty_every": faulty_every})
    unmanaged, restored = Replica("server 0", replica.url, completions_server.KEY, ready_limit_s=5.0), []
    unmanaged.model_name = "policy"

    def require(replica) -> None:
        if not restored:
            raise ServerError("other weights")

    servers = engine([unmanaged], max_in_flight=1, attempts=2)
    servers.weights = SimpleNamespace(restore=restored.append, require=require)
    with pytest.raises(PartlyGenerated if faulty_every == 1 else ServerError, match="attempts|other weights"):
        servers.generate(requests(20), SAMPLING)
    assert len(restored) == (1 if faulty_every == 1 else 0)
    assert faulty_every == 1 or len(replica.request("GET", "/log")["seeds"]) <= 4


def test_a_server_that_cannot_have_the_weights_again_is_stopped_and_the_others_answer(start):
    replicas = start({"die_after": 1}, {"slow_s": 0.5})
    servers = engine(replicas, restarts=1)
    name_weights(replicas[1], "run/1")

    def require(replica) -> None:
        if replica.starts > 1 or replica is replicas[1]:
            require_weights(replica, "run/1")

    servers.weights = SimpleNamespace(restore=require, require=require)
    assert_answers_all(servers, 8)
    assert replicas[0].has_ended and replicas[0].starts == 2


def test_a_server_that_dies_before_any_answer_is_retired_with_its_reason(start):
    replicas = start({"die_after": 0})
    with pytest.raises(PartlyGenerated, match="(?s)0 of 5.*no server is left: server 0.*process has ended"):
        engine(replicas).generate(requests(5), SAMPLING)
    assert replicas[0].starts == 4


def test_requests_of_a_server_that_hangs_even_when_restarted_go_to_another(start, monkeypatch):
    replicas = start({"hang": True}, {})

    def require(replica) -> None:
        if replica is replicas[0]:  # its health is good, and its engine does not answer
            raise NoAnswer("no answer within 60 s")

    monkeypatch.setattr(dispatch, "HAND_OVER_EVERY_S", 0.05)
    servers = engine(replicas, request_limit_s=2.0, restarts=1)
    servers.weights = SimpleNamespace(restore=lambda replica: None, require=require)
    assert_answers_all(servers, 40)
    assert replicas[0].starts == 2


def test_the_error_of_the_last_server_carries_the_responses_so_far(start):
    [replica] = start({"die_after": 10})
    unmanaged = Replica("server 0", replica.url, completions_server.KEY, ready_limit_s=0.5)
    unmanaged.model_name = "policy"
    with pytest.raises(PartlyGenerated, match="10 of 30") as gave_up:
        engine([unmanaged], restarts=1, health_limit_s=0.5, max_in_flight=2).generate(requests(30), SAMPLING)
    assert replica.url in str(gave_up.value) and len(gave_up.value.responses) == 10
    seeds = {rollout.seed for rollout in gave_up.value.responses}
    assert_answers(gave_up.value.responses, [request for request in requests(30) if request.seed in seeds])


@pytest.mark.parametrize(("ids", "kept", "stop"), [
    ((3, 34, 57, 8, STOP), (3, 34, 57), "4 5"), ((3, 34, STOP), (3, 34, STOP), None)])  # fmt: skip
def test_a_response_ends_at_a_stop_string_that_the_server_did_not_see(start, ids: tuple, kept: tuple, stop: str | None):
    """As from a server that knows stop strings as token ids only. The engine decodes ids as "12 34"."""
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
    servers = engine(start({"answer": {"choices": [choice]}}))
    [rollout] = servers.generate(requests(1), SamplingParams(1.0, 1.0, 8, stop=("4 5",)))
    assert (tuple(rollout.response_ids), rollout.stop, rollout.finished) == (kept, stop, stop is None)
    assert rollout.text == ("3 34" if stop is None else "3 34 57")
    assert [*rollout.response_logprobs] == [-0.5] * len(kept)


@pytest.mark.parametrize(("code", "limit_s", "named", "said"), [
    ("print('no room'); raise SystemExit(3)", 60, "status 3", "no room"),
    ("import time; print('loading', flush=True); time.sleep(60)", 0.5, "0.5 s", "loading")])
def test_a_server_that_ends_or_is_not_ready_in_time_is_reported_with_its_log(tmp_path, code, limit_s, named, said):
    replica = managed(tmp_path, "server 0", code)
    try:
        replica.start_process()
        while said not in replica.log_tail():
            time.sleep(0.1)
        replica.ready_limit_s = limit_s
        with pytest.raises(ServerError, match=f"(?s)server 0.*{named}.*{said}"):
            replica.wait_until_ready()
    finally:
        replica.stop()


def test_a_server_does_not_inherit_the_trainers_variables(tmp_path: Path, monkeypatch):
    hidden = ("PYTHONPATH", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS",
              "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in hidden:
        monkeypatch.setenv(name, "the trainer's")
    replica = managed(tmp_path, "server 0", "import os; print(sorted(os.environ)); raise SystemExit(1)")
    with pytest.raises(ServerError) as error:
        replica.start()
    assert "'PATH'" in str(error.value) and not any(f"'{name}'" in str(error.value) for name in hidden)


@pytest.mark.parametrize(("answers", "limit"), [(0, 300 + 0.1 * 1000), (100, 300 + 4 * 0.5 * 1000)])
def test_a_request_may_take_as_long_as_its_tokens_do_at_the_measured_pace(answers: int, limit: float):
    dispatcher = dispatch.Dispatcher([], ServersConfig())
    for _ in range(answers):
        dispatcher._measure({"usage": {"completion_tokens": 10}}, 5.0)
    assert dispatcher._limit_of({"max_tokens": 1000}) == pytest.approx(limit)
    assert dispatch.Dispatcher([], ServersConfig(request_limit_s=7.0))._limit_of({"max_tokens": 1000}) == 7.0
