"""One request to a server and its streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from harness.backends.http.answer import AnswerReader, Delivered, error_message
from harness.backends.http.events import EventParser
from harness.errors import one_line
from harness.record import Outcome

_ERROR_BYTES = 4096
_DRAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an exchange: ``status`` is the HTTP status, None if there was no answer at all."""

    outcome: Outcome
    time_ns: int
    error: str | None
    status: int | None


async def exchange(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    reader: AnswerReader,
    deliver: Callable[[Delivered, int], None],
    timeout_s: float | None,
    now_ns: Callable[[], int],
) -> Ended:
    """Send ``body`` and follow the answer to its end; errors of the network and the server are outcomes.

    Args:
        deliver: called with the tokens of each event and the moment at which its bytes had arrived.
        now_ns: the clock, on the scale of ``time.perf_counter_ns``.

    Raises:
        asyncio.CancelledError: the task was cancelled.
    """
    status: int | None = None
    try:
        async with asyncio.timeout(timeout_s), session.post(url, data=body) as response:
            status = response.status
            if status != 200:
                text = (await response.content.read(_ERROR_BYTES)).decode("utf-8", errors="replace")
                return Ended(Outcome(f"http_{status}"), now_ns(), _refusal(text), status)
            if response.content_type == "application/json":
                whole = json.loads(await response.read())
                now = now_ns()
                _pass_on([reader.take_chunk(whole)], deliver, now)
            else:
                now = await _stream(response, reader, deliver, now_ns)
            outcome, cause = reader.outcome(truncated=False)
    except TimeoutError:
        return Ended(Outcome.TIMEOUT, now_ns(), _timeout_text(timeout_s, status), status)
    except (aiohttp.ClientPayloadError, ConnectionError, aiohttp.ServerDisconnectedError) as error:
        if status != 200:
            return Ended(Outcome.ENGINE_ERROR, now_ns(), f"no answer: {one_line(error)}", status)
        outcome, cause = reader.outcome(truncated=True)
        return Ended(outcome, now_ns(), cause and f"{cause} ({one_line(error)})", status)
    except aiohttp.ClientError as error:
        return Ended(Outcome.ENGINE_ERROR, now_ns(), f"no answer: {one_line(error)}", status)
    except ValueError as error:  # a whole answer that is no JSON
        return Ended(Outcome.ENGINE_ERROR, now_ns(), f"the server sent no JSON: {one_line(error)}", status)
    return Ended(outcome, now, cause, status)


async def _stream(
    response: aiohttp.ClientResponse,
    reader: AnswerReader,
    deliver: Callable[[Delivered, int], None],
    now_ns: Callable[[], int],
) -> int:
    """Follow the events to the end of the stream; when its last bytes had arrived."""
    parser, now = EventParser(), now_ns()
    async for data in response.content.iter_any():
        now = now_ns()
        _pass_on([reader.take(event) for event in parser.feed(data)], deliver, now)
        if reader.done:
            await _drain(response)
            return now
    _pass_on([reader.take(event) for event in parser.close()], deliver, now)
    return now


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of the body, nearly always there already, so that the connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_DRAIN_S):
            await response.content.read()


def _pass_on(found: list[Delivered | None], deliver: Callable[[Delivered, int], None], time_ns: int) -> None:
    for delivered in found:
        if delivered is not None:
            deliver(delivered, time_ns)


def _refusal(text: str) -> str:
    try:
        return error_message(json.loads(text))
    except ValueError:
        return " ".join(text.split())[:500] or "the server gave no reason"


def _timeout_text(timeout_s: float | None, status: int | None) -> str:
    if timeout_s is None or status is None:
        return "no connection within engine.connect_timeout_s, or no answer within engine.request_timeout_s"
    return f"not ended after engine.request_timeout_s={timeout_s:g}"
