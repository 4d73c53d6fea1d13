"""Responses come from servers, each request's once, whatever the servers do meanwhile."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_edo.config import ServersConfig
from nemo_edo.errors import PartlyDrawn, RunStopped, UserError
from nemo_edo.generation import dispatch
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import Launch
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.http_client import ServerError
from nemo_edo.types import GenerationRequest, SamplingParams

HELPER = Path(__file__).parents[2] / "helpers" / "completions_server.py"
QUICK = {"backoff_s": 0.02, "backoff_limit_s": 0.1, "health_limit_s": 5.0, "restarts": 3, "max_in_flight": 8}
SAMPLING = SamplingParams(1.0, 1.0, 8)
STOP, VOCABULARY = 1, 100


class ScriptedAPI:
    """The ServerAPI of tests/helpers/completions_server.py."""

    backend, package, install = "vllm", "asyncio", "nothing"

    def model_name(self, model: Path) -> str:
        return "policy"

    def command(self, launch: Launch, model: Path, port: int) -> list[str]:
        return [launch.python, str(HELPER), str(port), str(model)]

    def environment(self, launch: Launch, key: str) -> dict[str, str]:
        return {}

    def extra_fields(self, stop_id: int) -> dict:
        return {}


def launch(log: Path, **fields) -> Launch:
    values = {"python": sys.executable, "host": "127.0.0.1", "dtype": "float32", "max_length": 64,
              "logprobs_after_temperature": True, "gpus": (), "threads": 1, "cpu_cache_gb": 1, "memory_share": 0.5,
              "max_in_flight": 8, "sleeps": False, "adapter_rank": None, "arguments": (), "log": log}
    return Launch(**{**values, **fields})


@pytest.fixture
def start(tmp_path: Path):
    """Starts a server for each state that it is given; they end with the test."""
    replicas: list[Replica] = []

    def start(*states: dict) -> list[Replica]:
        for place, state in enumerate(states):
            (tmp_path / f"state_{place}.json").write_text(json.dumps(state))
            replica = Replica(f"server {place}", key="key", api=ScriptedAPI(), launch=launch(tmp_path / f"{place}.log"),
                              model_folder=tmp_path / f"state_{place}.json", start_limit_s=30.0)
            replica.launch()
            replicas.append(replica)
        for replica in replicas:
            replica.wait_until_ready()
        return replicas

    yield start
    for replica in replicas:
        replica.stop()


def engine(replicas: Sequence[Replica], **settings) -> ServerEngine:
    return ServerEngine(replicas, ScriptedAPI(), ServersConfig(**{**QUICK, **settings}), stop_id=STOP,
                        vocab_size=VOCABULARY, decode=lambda ids: " ".join(map(str, ids)),
                        model_folder=replicas[0].model_folder, logprobs_after_temperature=True)


def requests(number: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"p-{i}", i % 3, (5, i), seed=1000 + i) for i in range(number)]


def log_of(replica: Replica) -> dict:
    return replica.request("GET", "/log")


def assert_whole(rollouts, asked) -> None:
    """One rollout for each request, in order: its seed's tokens."""
    assert [(r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in rollouts] == [
        (r.problem_id, r.sample_index, r.prompt_ids, r.seed) for r in asked]
    assert all(r.response_ids == (2 + r.seed % 90, 2 + r.seed // 90 % 90, 2, STOP) for r in rollouts)
    assert all(r.response_logprobs == (-0.5,) * 4 and r.finished for r in rollouts)


def test_every_request_is_answered_once_and_replicas_share_them(start):
    replicas = start({"slow_s": 0.5}, {"slow_s": 0.5})
    asked = requests(60)
    servers = engine(replicas)
    servers.policy_version = 7
    rollouts = servers.draw(asked, SAMPLING)
    assert_whole(rollouts, asked)
    assert {rollout.policy_version for rollout in rollouts} == {7}
    assert rollouts[0].text == "12 13 2"
    logs = [log_of(replica) for replica in replicas]
    assert sorted(seed for log in logs for seed in log["seeds"]) == [request.seed for request in asked]
    assert all(len(log["seeds"]) >= 20 and log["most_open"] <= 8 for log in logs)


def test_a_request_goes_to_the_replica_with_the_fewest_under_way(start):
    replicas = start({"slow_s": 2.0}, {"slow_s": 2.0})
    assert_whole(engine(replicas, max_in_flight=64).draw(requests(40), SAMPLING), requests(40))
    assert [len(log_of(replica)["seeds"]) for replica in replicas] == [20, 20]


def test_the_faster_replica_gets_more_requests(start):
    replicas = start({"slow_s": 2.0}, {})
    assert_whole(engine(replicas).draw(requests(100), SAMPLING), requests(100))
    slow, fast = (len(log_of(replica)["seeds"]) for replica in replicas)
    assert fast > 2 * slow > 0


def test_a_server_that_is_killed_is_started_again_until_all_is_drawn(start):
    replicas = start({"die_after": 5})
    servers, back = engine(replicas, max_in_flight=2), []
    servers.on_restart = back.append
    assert_whole(servers.draw(requests(30), SAMPLING), requests(30))
    assert len(back) == replicas[0].generation - 1 == 5  # six lives of five answers


def test_a_server_that_never_lives_long_enough_for_an_answer_is_given_up_with_its_reason(start, caplog):
    replicas = start({"die_after": 0})
    with caplog.at_level(logging.ERROR), pytest.raises(PartlyDrawn) as given_up:
        engine(replicas).draw(requests(5), SAMPLING)
    assert "0 of 5 responses were drawn" in str(given_up.value)
    assert "no server is left: server 0" in str(given_up.value) and "its process has ended" in str(given_up.value)
    assert replicas[0].generation == 4


def test_where_one_server_is_given_up_another_one_does_its_share(start):
    replicas = start({"die_after": 0}, {})
    assert_whole(engine(replicas, restarts=1).draw(requests(40), SAMPLING), requests(40))


def test_a_hanging_server_is_started_again_and_its_requests_go_elsewhere(start):
    replicas = start({"hang": True}, {})
    assert_whole(engine(replicas, request_limit_s=2.0, restarts=1).draw(requests(40), SAMPLING), requests(40))
    assert replicas[0].generation == 2


def test_a_server_that_answers_requests_is_not_started_again_for_its_silence_about_its_health(start, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_EVERY_S", 0.1)
    replicas = start({"mute": True, "slow_s": 0.6})
    assert_whole(engine(replicas, health_limit_s=30.0, max_in_flight=4).draw(requests(24), SAMPLING), requests(24))
    assert replicas[0].generation == 1


def test_a_server_that_answers_neither_requests_nor_about_its_health_is_started_again(start, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_EVERY_S", 0.1)
    replicas = start({"mute": True, "hang_after": 6})
    assert_whole(engine(replicas, health_limit_s=5.0, max_in_flight=4).draw(requests(10), SAMPLING), requests(10))
    assert replicas[0].generation == 2


def test_a_server_that_says_it_is_not_well_is_started_again(start, monkeypatch):
    [replica] = start({})
    replica.model_folder.write_text(json.dumps({"status": 500, "unhealthy": True}))
    launch_again = replica.launch
    monkeypatch.setattr(replica, "launch", lambda: replica.model_folder.write_text("{}") and launch_again())
    servers = engine([replica], health_limit_s=1.0, restarts=9, attempts=99)
    assert_whole(servers.draw(requests(4), SAMPLING), requests(4))
    assert replica.generation > 1


def test_hundreds_of_requests_are_in_flight_at_a_server_at_a_time(start):
    replicas = start({"hold_until_open": 501})
    servers = engine(replicas, max_in_flight=600)
    assert_whole(servers.draw(requests(600), SAMPLING), requests(600))
    assert log_of(replicas[0])["most_open"] > 500


def test_what_was_drawn_before_the_last_server_went_comes_with_the_error(start):
    [replica] = start({"die_after": 10})
    given = Replica("server 0", url=replica.url, key="key")
    with pytest.raises(PartlyDrawn) as given_up:
        engine([given], restarts=1, health_limit_s=0.5, max_in_flight=2).draw(requests(30), SAMPLING)
    assert len(given_up.value.drawn) == 10
    assert "10 of 30 responses" in str(given_up.value) and replica.url in str(given_up.value)
    assert_whole(given_up.value.drawn, [r for r in requests(30) if r.seed in {d.seed for d in given_up.value.drawn}])


@pytest.mark.parametrize("state", [{"status": 500}, {"status": 429}, {"answer": {"choices": []}}])
def test_a_request_that_always_fails_ends_the_drawing_after_its_attempts(start, state: dict):
    replicas = start(state)
    with pytest.raises(PartlyDrawn, match="failed 4 times .generation.servers.attempts.; the last time: server 0"):
        engine(replicas, attempts=4).draw(requests(1), SAMPLING)
    assert len(log_of(replicas[0])["seeds"]) == 4


def test_an_error_of_the_program_in_bringing_a_server_back_is_raised_and_not_waited_out(start):
    servers = engine(start({"die_after": 0}))

    def on_restart(replica):
        raise ZeroDivisionError

    servers.on_restart = on_restart
    with pytest.raises(ZeroDivisionError):
        servers.draw(requests(5), SAMPLING)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_is_refused_is_not_tried_again(start, status: int):
    replicas = start({"status": status})
    with pytest.raises(PartlyDrawn, match=f"server 0 .*POST /v1/completions: status {status}: .*as told"):
        engine(replicas).draw(requests(1), SAMPLING)
    assert len(log_of(replicas[0])["seeds"]) == 1


def test_a_drawing_that_is_asked_to_stop_ends_soon(start):
    replicas, stop = start({"hang": True}), threading.Event()
    threading.Timer(0.5, stop.set).start()
    begun = time.monotonic()
    with pytest.raises(RunStopped):
        engine(replicas).draw(requests(20), SAMPLING, stop=stop)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("after_temperature", "sampling"), [(True, (0.7, 0.9, 8)), (False, (0.7, 1.0, 8))])
def test_log_probabilities_of_another_distribution_are_refused(start, after_temperature: bool, sampling: tuple):
    servers = engine(start({}))
    servers._after_temperature = after_temperature
    with pytest.raises(UserError):
        servers.draw(requests(1), SamplingParams(*sampling))
    assert servers.draw(requests(1), SamplingParams(0.0, 1.0, 8))  # greedy decoding has neither


# --- replicas -----------------------------------------------------------------------------------------------------


def failing(tmp_path: Path, code: str, limit_s: float = 60.0) -> Replica:
    api = ScriptedAPI()
    api.command = lambda launch, model, port: [sys.executable, "-c", code]
    return Replica("server 0", key="key", api=api, launch=launch(tmp_path / "log"), model_folder=tmp_path,
                   start_limit_s=limit_s)


def test_a_server_that_ends_as_it_starts_shows_its_status_and_its_log(tmp_path: Path):
    replica = failing(tmp_path, "print('no room for the model'); raise SystemExit(3)")
    with pytest.raises(ServerError, match=r"(?s)has ended with status 3; the end of .*no room for the model"):
        replica.start()


def test_a_server_that_is_not_ready_in_time_shows_its_log(tmp_path: Path):
    replica = failing(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    try:
        replica.launch()
        while "loading" not in (tmp_path / "log").read_text():
            time.sleep(0.1)
        with pytest.raises(ServerError, match=r"(?s)is not ready after 0.5 s; the end of .*loading"):
            replica.wait_until_ready(0.5)
    finally:
        replica.stop()


def test_a_port_that_another_server_answers_at_is_noticed(start, tmp_path: Path):
    [replica] = start({})
    replica._api.model_name = lambda model: "another policy"
    with pytest.raises(ServerError, match="is not the server that was started"):
        replica.wait_until_ready()


def test_a_wrong_key_is_told_by_status_and_server(start):
    [replica] = start({})
    stranger = Replica("stranger", url=replica.url, key="another")
    with pytest.raises(ServerError, match=r"stranger \(http://127.0.0.1:\d+\): GET /v1/models: status 401"):
        stranger.wait_until_ready()


def test_a_server_sees_nothing_of_the_trainers_own_environment(tmp_path: Path, monkeypatch):
    for name in ("PYTHONPATH", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "the trainer's")
    replica = failing(tmp_path, "import os; print(sorted(os.environ)); raise SystemExit(1)")
    with pytest.raises(ServerError) as error:
        replica.start()
    told = str(error.value)
    assert "'PATH'" in told and not any(f"'{name}'" in told for name in ("PYTHONPATH", "RANK", "TORCHELASTIC_RUN_ID"))



# --- stop strings ---------------------------------------------------------------------------------------------------


def answering(ids: list[int], reason: str) -> dict:
    """A state in which every completion is this one."""
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": reason}
    return {"answer": {"choices": [choice]}}


def test_an_answer_is_cut_at_a_stop_string_that_the_server_did_not_see(start):
    """As of a server that knows stop strings as token ids only. The engine decodes ids as "12 34"."""
    stopped = SamplingParams(1.0, 1.0, 8, stop=("4 5",))
    [rollout] = engine(start(answering([3, 34, 57, 8, STOP], "stop"))).draw(requests(1), stopped)
    assert (rollout.response_ids, rollout.text, rollout.stop) == ((3, 34, 57), "3 34 57", "4 5")
    assert rollout.response_logprobs == (-0.5,) * 3 and not rollout.finished


def test_an_answer_without_a_stop_string_is_kept_whole(start):
    stopped = SamplingParams(1.0, 1.0, 8, stop=("4 5",))
    [rollout] = engine(start(answering([3, 34, STOP], "stop"))).draw(requests(1), stopped)
    assert (rollout.response_ids, rollout.text, rollout.stop, rollout.finished) == ((3, 34, STOP), "3 34", None, True)


def test_an_end_at_a_stop_string_that_the_text_does_not_contain_is_a_fault(start):
    stopped = SamplingParams(1.0, 1.0, 8, stop=("4 5",))
    with pytest.raises(PartlyDrawn, match="is said to end at a stop string, and contains none: '3 34'"):
        engine(start(answering([3, 34], "stop")), attempts=2).draw(requests(1), stopped)
