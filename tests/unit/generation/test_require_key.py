"""A managed server asks for its key everywhere except at the health check."""

import asyncio

import pytest

from nemo_edo.generation.inside_server.require_key import RequireKey


def status(monkeypatch, path: str, key: str | None, kind: str = "http") -> object:
    """The server's status; "passed" where the request has reached it."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    told: list = []

    async def app(scope, receive, send) -> None:
        told.append("passed")

    async def send(message: dict) -> None:
        told.append(message.get("status", message["type"]))

    asyncio.run(RequireKey(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return told[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/", "/health/..", "//health"])
def test_every_path_but_the_health_check_needs_the_key_and_the_servers_start_does_not(monkeypatch, path: str):
    assert [status(monkeypatch, path, key) for key in (None, "another", "")] == [401] * 3
    assert status(monkeypatch, path, "the key") == "passed"
    assert status(monkeypatch, path, None, "websocket") == "websocket.close"
    assert status(monkeypatch, "/health", None) == status(monkeypatch, path, None, "lifespan") == "passed"
