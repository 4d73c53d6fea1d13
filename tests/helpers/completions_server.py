"""A server of OpenAI's completions API with scripted faults, to test its clients.

    python completions_server.py PORT STATE

STATE is a JSON file, read at each request, with any of: "hang" (completions get no answer), "status" (of every
completion), "slow_s", "die_after" (so many completions, the process kills itself), "die_at_refit" (the process kills
itself at a refit, once), "model" (the name of the served one), "answer" (replaces the body of a completion),
"faulty_every" (every so many-th completion gets one of ``faults``).
``/log`` returns the seeds of the completions so far, in order. Of vLLM's endpoints it has those of a refit, which loads
nothing.
"""

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path

KEY = "key-of-the-tests"

STOP_ID = 1


def completion(request: dict) -> dict:
    """Three tokens determined by the seed, and the stop token, cut at max_tokens."""
    seed = request["seed"]
    ids = [2 + seed % 90, 2 + seed // 90 % 90, 2 + seed // 8100 % 90, STOP_ID][: request["max_tokens"]]
    reason = "stop" if ids[-1] == STOP_ID else "length"
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": reason}
    return {"choices": [choice]}


def faults(request: dict) -> list[tuple[int, object]]:
    """Statuses and bodies that no completion may have; None: the connection is closed."""
    good = completion(request)
    return [(500, {"error": "as told"}), (429, {"error": "as told"}), (200, b"{"), (200, {"choices": []}), (200, None),
            (200, {"choices": [{**good["choices"][0], "token_ids": [2]}]})]


class CompletionsServer:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.seeds: list[int] = []
        self.open = 0
        self.most_open = 0
        self.weights = "default"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n")
                               if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                has_key = f"authorization: bearer {KEY}" in head.lower()
                status, answer = await self.answer(head.split(" ", 2)[1], body, has_key)
                data = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
                writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    async def answer(self, path: str, body: bytes, has_key: bool) -> tuple[int, object]:
        state = json.loads(self.state.read_text()) if self.state.is_file() else {}
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            models = [{"id": state.get("model", "policy"), "max_model_len": 64}]
            return (200, {"data": models}) if has_key else (401, {"error": "key"})
        if path == "/log":
            return 200, {"seeds": self.seeds, "most_open": self.most_open}
        if not has_key:
            return 401, {"error": "key"}
        if path == "/collective_rpc" and state.get("die_at_refit"):
            self.state.unlink()  # the next process lives on
            os.kill(os.getpid(), signal.SIGKILL)
        if path in ("/collective_rpc", "/reset_prefix_cache"):
            return 200, {"success": True}
        if path in ("/update_weight_version", "/weight_info"):
            self.weights = json.loads(body or b"{}").get("new_version", self.weights)
            return 200, {"weight_version": self.weights}
        request = json.loads(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(1e6 if state.get("hang") else state.get("slow_s", 0.0))
        finally:
            self.open -= 1
        if "die_after" in state and len(self.seeds) >= state["die_after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seeds.append(request["seed"])
        turn, off = divmod(len(self.seeds), state.get("faulty_every", math.inf))
        if not off:
            told = faults(request)
            status, answer = told[int(turn) % len(told)]
            if answer is None:
                raise ConnectionResetError
            return status, answer
        if "status" in state:
            return state["status"], {"error": "as told"}
        return 200, state.get("answer", completion(request))


async def main(port: int, state: Path) -> None:
    server = await asyncio.start_server(CompletionsServer(state).serve, "127.0.0.1", port, backlog=1024)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
