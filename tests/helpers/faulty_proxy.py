"""A proxy in front of a server that spoils a share of the answers to completions: delays, resets, 500s, cut bodies and
garbage, chosen by a seeded generator. Everything else passes through.

    python faulty_proxy.py TARGET_URL PORT SHARE SEED

Prints "ready" once it listens. What it has done is told as JSON at /faults.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import sys
from urllib.parse import urlsplit

KINDS = ("delay", "reset", "500", "cut", "garbage", "no logprobs")
DELAY_S = 1.0


class FaultyProxy:
    def __init__(self, target: str, share: float, seed: int) -> None:
        self.target = urlsplit(target)
        self.share = share
        self.random = random.Random(seed)
        self.done: collections.Counter[str] = collections.Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; requests follow each other on it."""
        try:
            while head := await _head(reader):
                body = await reader.readexactly(_length(head))
                path = head.split(b" ", 2)[1]
                if path == b"/faults":
                    await _write(writer, 200, json.dumps(self.done).encode())
                elif not await self._answer(head, body, path, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client or the server has gone
        finally:
            writer.close()

    async def _answer(self, head: bytes, body: bytes, path: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        spoiled = path == b"/v1/completions" and self.random.random() < self.share
        kind = self.random.choice(KINDS) if spoiled else "passed"
        self.done[kind] += 1
        if kind == "500":
            await _write(writer, 500, b"Internal Server Error")
            return True
        if kind == "delay":
            await asyncio.sleep(DELAY_S)
        answer_head, answer = await self._forward(head, body)
        if kind == "reset":
            writer.transport.abort()
            return False
        if kind == "cut":
            writer.write(answer_head + answer[: len(answer) // 2])
            await writer.drain()
            return False
        if kind == "garbage":
            await _write(writer, 200, bytes(self.random.randrange(256) for _ in range(200)))
            return True
        if kind == "no logprobs":
            parsed = json.loads(answer)
            parsed["choices"][0]["logprobs"]["token_logprobs"].pop()
            await _write(writer, 200, json.dumps(parsed).encode())
            return True
        writer.write(answer_head + answer)
        await writer.drain()
        return True

    async def _forward(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self.target.hostname, self.target.port)
        try:
            writer.write(head + body)
            await writer.drain()
            answer_head = await _head(reader)
            return answer_head, await reader.readexactly(_length(answer_head))
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """A message's first line and headers; nothing at the connection's end."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _write(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def main(target: str, port: int, share: float, seed: int) -> None:
    server = await asyncio.start_server(FaultyProxy(target, share, seed).serve, "127.0.0.1", port)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
