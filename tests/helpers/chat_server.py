"""A server of OpenAI's chat API with scripted replies, to test the judge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Rule = Callable[[int, dict], tuple]
"""From the number of the request and its body to (status, body) or (status, body, headers). A text is the reply of a
chat completion."""


def completion(text: str | None, finish_reason: str = "stop") -> dict:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"choices": [{"message": {"content": text}, "finish_reason": finish_reason}], "usage": usage}


class ChatServer:
    """A context manager. ``url`` is its address; ``bodies``, ``paths`` and ``headers`` are those of its requests, in
    order."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self._lock = threading.Lock()

    def __enter__(self) -> ChatServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
                with outer._lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.times.append(time.monotonic())
                status, answer, *more = outer.rule(number, body)
                data = answer if isinstance(answer, bytes) else json.dumps(
                    completion(answer) if isinstance(answer, str) else answer
                ).encode()  # fmt: skip
                self.send_response(status)
                for name, value in {**(more[0] if more else {}), "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
