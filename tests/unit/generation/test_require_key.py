"""A server that the run starts asks for its key everywhere but at the look at its health."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

import nemo_edo.generation

MIDDLEWARE = Path(nemo_edo.generation.__file__).parent / "inside_server" / "require_key.py"


def status(monkeypatch, path: str, key: str | None, kind: str = "http") -> object:
    """What the server says; "passed" where the request has reached it."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    told: list = []

    async def app(scope, receive, send) -> None:
        told.append("passed")

    async def send(message: dict) -> None:
        told.append(message.get("status", message["type"]))

    require_key = runpy.run_path(str(MIDDLEWARE))["RequireKey"](app)
    asyncio.run(require_key({"type": kind, "path": path, "headers": headers}, None, send))
    return told[0]


PATHS = ["/v1/completions", "/collective_rpc", "/sleep", "/metrics", "/", "/health/..", "//health"]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_health_needs_the_key(monkeypatch, path: str):
    assert status(monkeypatch, path, None) == 401
    assert status(monkeypatch, path, "another") == 401
    assert status(monkeypatch, path, "") == 401
    assert status(monkeypatch, path, "the key") == "passed"
    assert status(monkeypatch, path, None, "websocket") == "websocket.close"


def test_health_needs_none_nor_does_the_servers_own_start(monkeypatch):
    assert status(monkeypatch, "/health", None) == "passed"
    assert status(monkeypatch, "/collective_rpc", None, "lifespan") == "passed"
