"""Loaded by managed servers in their environment: imports the standard library only. vLLM requires its key below /v1
and a few other prefixes, but not at the endpoints that change weights, call its workers' methods or put it to sleep.
This middleware requires it everywhere except at the health check."""

import hmac
import os

OPEN = ("/health",)
DENIED = b'{"error": "Unauthorized"}'


class RequireKey:
    """ASGI middleware: 401 without ``Authorization: Bearer KEY``, of the environment's VLLM_API_KEY."""

    def __init__(self, app):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(DENIED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": DENIED})

    def _has_key(self, scope):
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self.expected)
