"""What a server sends is read up to a limit, and ends in one message without the key, whichever client asked."""

import contextlib
import gzip
import logging
import socket
import threading
import time
import traceback
from pathlib import Path

import pytest
from helpers.chat_server import ChatServer
from helpers.completions_server import STOP_ID, completion

from nemo_edo.config import JudgeConfig, ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.rewards.judge import Judge
from nemo_edo.rewards.judge_cache import JudgeCache
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.api_key import key_of_environment
from nemo_edo.utils.http import ServerError

SECRET = "sentinel0123456789"
KEY = f"sk-{SECRET}/+="
ESCAPED = "".join(f"\\u{ord(one):04X}" for one in KEY)
REQUEST = GenerationRequest("p-0", 0, (5, 6), seed=7)


def generate(url: str, folder: Path, **settings) -> None:
    replica = Replica("server 0", url=url.removesuffix("/v1"), key=KEY)
    replica.model_name = "policy"
    quick = {"attempts": 2, "restarts": 1, "backoff_s": 0.01, "health_limit_s": 5.0, **settings}
    engine = ServerEngine([replica], VLLM(), ServersConfig(**quick), stop_ids=[STOP_ID], vocab_size=100, decode=str,
                          model_folder=folder, logprobs_after_temperature=True)  # fmt: skip
    [rollout] = engine.generate_until([REQUEST], SamplingParams(1.0, 1.0, 8))
    assert rollout.response_ids == (9, 2, 2, STOP_ID)


def await_ready(url: str, folder: Path) -> None:
    Replica("server 0", url=url.removesuffix("/v1"), key=KEY).wait_until_ready(5.0)


def judge(url: str, folder: Path) -> None:
    settings = JudgeConfig(url=url, model="judge-1", api_key_variable="SENTINEL", attempts=2, backoff_s=0.01)
    Judge(settings, JudgeCache(folder / "judge.sqlite"), None).check()


@pytest.mark.parametrize("client", [generate, await_ready, judge])
@pytest.mark.parametrize(("answer", "said"), [
    ((401, {"error": f"wrong key {KEY}"}), r"status 401: .*wrong key \*\*\*"),
    ((401, f'{{"error": "{ESCAPED}"}}'.encode()), r"status 401: .*\*\*\*"),
    ((403, ("x" * 490 + KEY).encode()), r"status 403: x+\*\*\*"),
    ((500, KEY.replace("/", "%2f").encode()), r"status 500: \*\*\*"),
    ((302, b"", {"location": f"http://127.0.0.1:1/{KEY}"}), "status 302"),
    ((200, f"<html>{KEY}".encode()), r"not JSON: <html>\*\*\*"),
    ((200, {"choices": KEY, "data": [KEY], "model": KEY}), ""),
    ((200, b"{}", {f"bad name {KEY}": "1"}), ""),
    ((200, b"[" * 100_000), "nested too deeply"),
    ((200, b'{"model": "another", "model": "policy"}'), "an object that has a key twice"),
    ((200, gzip.compress(bytes(2**26)), {"content-encoding": "gzip"}), "a body in 'gzip', expected one without"),
    ((200, b"{}", {"content-encoding": KEY}), "a body in"),
    ((200, bytes(2**22)), "a body of more than [12],.* bytes"),
    ((503, bytes(2**22)), "status 503: a body of more than [12],.* bytes"),
])  # fmt: skip
def test_any_answer_ends_in_a_message_without_the_key(client, answer, said, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("SENTINEL", KEY)
    caplog.set_level(logging.INFO)
    with ChatServer(lambda *_: answer if server.paths[-1] != "/health" else (200, b"")) as server:
        with pytest.raises(UserError, match=f"(?s){said}") as error:
            client(server.url, tmp_path)
    assert server.headers[-1]["Accept-Encoding"] == "identity"
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode(errors="replace")
    seen = "".join([*traceback.format_exception(error.value), caplog.text, capfd.readouterr().out, files])
    assert SECRET not in seen and ESCAPED not in seen
    assert any(header.get("Authorization") == f"Bearer {KEY}" for header in server.headers)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"])
def test_a_request_ends_in_time_whatever_part_of_the_answer_arrives_byte_by_byte(beginning):
    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(beginning)
            while True:
                time.sleep(0.05)
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        replica = Replica("server 0", url=f"http://127.0.0.1:{listener.getsockname()[1]}", key=KEY)
        begun = time.monotonic()
        with pytest.raises(ServerError, match=r"GET /health: no whole answer after 0\.3 s"):
            replica.request("GET", "/health", timeout_s=0.3)
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("asked_s", "limit_s", "waited_s"), [("1", 60.0, 0.95), ("3600", 0.2, 0.2)])
def test_a_server_is_left_alone_for_its_retry_after_up_to_the_limit(asked_s, limit_s, waited_s, tmp_path):
    asked = []

    def rule(number: int, body: dict) -> tuple:
        if not body:
            return 200, b""
        asked.append(number)
        return (200, completion(body)) if len(asked) > 1 else (429, b"slow down", {"Retry-After": asked_s})

    with ChatServer(rule) as server:
        generate(server.url, tmp_path, retry_after_limit_s=limit_s)
    first, second = (server.times[number] for number in asked)
    assert second - first >= waited_s


@pytest.mark.parametrize(("value", "named"), [
    (None, "not set"), ("", "empty"), (f"{SECRET}\n", "character 19 of 19 .* white space"),
    (f"a {SECRET}", "character 2 .* white space"), (f"{SECRET}é", "no printable ASCII"),
    (f"{SECRET}\x7f", "no printable ASCII"), (SECRET[:7], "7 characters .* at least 8")])  # fmt: skip
def test_a_key_that_cannot_be_sent_or_hidden_is_refused_without_showing_it(monkeypatch, value: str | None, named: str):
    monkeypatch.delenv("SENTINEL", raising=False)
    if value is not None:
        monkeypatch.setenv("SENTINEL", value)
    with pytest.raises(UserError, match=f"some.setting is SENTINEL, .*{named}") as error:
        key_of_environment("some.setting", "SENTINEL")
    assert SECRET[:7] not in str(error.value)
    assert key_of_environment("some.setting", None).headers == {}
