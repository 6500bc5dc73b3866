"""A real server on localhost that says what a test scripts, event by event, on a clock that moves only with it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


class StepClock:
    """Reads what the server set last; counts its readings, so that the server can wait for the client."""

    def __init__(self) -> None:
        self.value_ns = 0
        self.readings = 0

    def __call__(self) -> int:
        self.readings += 1
        return self.value_ns


@dataclass
class Answer:
    """What the server says to one request.

    Attributes:
        events: (ms on the clock, what is sent then): a dict as an SSE event, str as its raw data, bytes as they are.
        end: ``done`` sends [DONE] and closes in order; ``eof`` closes in order without it; ``drop`` breaks off in the
            middle of the body; ``hang`` sends nothing more and keeps the connection.
    """

    events: list[tuple[float, Any]] = field(default_factory=list)
    end: str = "done"
    status: int = 200
    body: bytes | None = None
    content_type: str = "text/event-stream"


def text(value: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of /v1/completions."""
    usage = more.pop("usage", None)
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}
    return chunk if usage is None else chunk | {"usage": usage}


def usage(prompt: int, completion: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


class FakeServer:
    """``answer`` decides what each POST is told; ``requests`` keeps what was asked.

    ``in_step``: the client reads ``clock``, and the next event is sent only after it has.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        self.in_step = False
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[str] = ["fake"]
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: Answer([(0, text("x", "length"))])
        self.released = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.released.set()

        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            found = {"data": [{"id": m} for m in self.models]} if path.endswith("/models") else {"version": "1.2"}
            writer.write(_response(200, json.dumps(found).encode(), "application/json"))
            return True
        asked = json.loads(body)
        self.requests.append(asked)
        self.headers.append(headers)
        answer = self.answer(asked)
        if answer.body is not None:
            writer.write(_response(answer.status, answer.body, answer.content_type))
            return True
        return await self._stream(answer, writer)

    async def _stream(self, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for ms, what in answer.events:
            await self._send(writer, ms, what)
        if answer.end == "hang":
            while not self.released.is_set():
                await asyncio.sleep(0.01)
            return False
        if answer.end == "drop":
            await writer.drain()
            return False
        data = b"data: [DONE]\n\n" if answer.end == "done" else b""
        writer.write(_chunk(data) if data else b"")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _send(self, writer: asyncio.StreamWriter, ms: float, what: Any) -> None:
        """Send and wait until the client has read the clock for it: no two events are ever read as one."""
        data = (
            what
            if isinstance(what, bytes)
            else f"data: {what if isinstance(what, str) else json.dumps(what)}\n\n".encode()
        )
        self.clock.value_ns = round(ms * 1e6)
        before = self.clock.readings
        writer.write(_chunk(data))
        await writer.drain()
        while self.in_step and self.clock.readings == before:
            await asyncio.sleep(0.001)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _response(status: int, body: bytes, content_type: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture(name="Answer")
def answer_class() -> type[Answer]:
    return Answer


@pytest.fixture(name="text")
def text_chunk() -> Callable[..., dict[str, Any]]:
    return text


@pytest.fixture(name="usage")
def usage_counts() -> Callable[[int, Any], dict[str, Any]]:
    return usage
