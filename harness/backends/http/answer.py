"""What the events of one answer say: tokens, how many, the end and its reason.

Pure bookkeeping without clock or network. A delivery counts as tokens if something says so: token ids, log
probabilities, a running usage count, or text. A chunk with only a role, or with empty text and nothing else, is none.
A server's number of generated tokens that cannot be true (more than were asked for, none although some came, no whole
number) is set aside: what was seen counts then, and the record says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.backends.failures import classify_failure
from harness.backends.http.events import ServerEvent
from harness.record import Outcome

_ENDED_BY_A_STOP = ("stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")
_ENDED_BY_THE_CAP = ("length", "max_tokens")
_CANCELLED = ("abort", "cancelled", "canceled")
_LARGEST_ID = _LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Delivered:
    """Tokens of one event: their ids, or (None) how many; ``count`` None = the event does not say."""

    token_ids: tuple[int, ...] | None
    count: int | None


class AnswerReader:
    """Follows one answer.

    Args:
        max_new_tokens: the cap that was asked for.
        running_usage: whether the server states the usage so far in every chunk. If not, a usage in the last chunk is
            the total and says nothing about that chunk.

    Attributes:
        finish_reason, error: as the server says; None = not yet.
        prompt_tokens, output_tokens, cached_tokens: the server's own counts; None = it states none that can be true.
        done: whether ``[DONE]`` came.
    """

    def __init__(self, max_new_tokens: int, running_usage: bool) -> None:
        self._max_new_tokens = max_new_tokens
        self._running_usage = running_usage
        self._usage_seen = 0
        self._impossible = False
        self._counted_by: set[str] = set()
        self._delivered_tokens = 0
        self.deliveries = 0
        self._texts = self._texts_with_usage = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False

    @property
    def counted_by(self) -> str | None:
        """How the number of tokens is known (a key of ``harness.record.COUNTED_BY``); None = by their ids."""
        if self._counted_by == {"ids"}:
            return None
        if "text" not in self._counted_by and self._counted_by:
            return "logprobs" if self._counted_by <= {"ids", "logprobs"} else "counts"
        if self._impossible:
            return "impossible"
        return "nothing" if self.output_tokens is None else "total"

    @property
    def states_usage_throughout(self) -> bool:
        """Whether every chunk with text stated the usage; one chunk alone may have stated the total."""
        return self._texts_with_usage == self._texts > 1

    def take(self, event: ServerEvent) -> Delivered | None:
        """The tokens of ``event``; None if it held none."""
        if event.data.strip() == "[DONE]":
            self.done = True
            return None
        try:
            chunk = json.loads(event.data)
        except ValueError:
            self.error = self.error or f"the server sent no JSON: {event.data[:200]!r}"
            return None
        return self.take_chunk(chunk, event.kind)

    def take_chunk(self, chunk: Any, kind: str = "") -> Delivered | None:
        """As :meth:`take`, of a decoded chunk."""
        if not isinstance(chunk, Mapping):
            self.error = self.error or f"the server sent no JSON object: {str(chunk)[:200]}"
            return None
        if chunk.get("error") or kind == "error":
            self.error = self.error or error_message(chunk)
            return None
        if malformed := _malformed(chunk):
            self.error = self.error or malformed
            return None
        choice = (chunk.get("choices") or [None])[0]
        grown = self._take_usage(chunk.get("usage"), choice)
        found = None if choice is None else self._tokens(choice, grown, isinstance(chunk.get("usage"), Mapping))
        if found is not None:
            self.deliveries += 1
        return found

    def outcome(self, truncated: bool) -> tuple[Outcome, str | None]:
        """How the answer ended, and why if not well.

        Args:
            truncated: whether the connection broke off before the answer's own end.
        """
        if self.error is not None:
            return classify_failure(self.error, "decode" if self.deliveries else "prefill"), self.error
        reason = self.finish_reason
        if reason in _ENDED_BY_A_STOP:
            return Outcome.OK_EOS, self._without_a_token()
        if reason in _ENDED_BY_THE_CAP:
            return Outcome.OK_LENGTH, self._without_a_token()
        if reason in _CANCELLED:
            return Outcome.CANCELLED, f"the server ended it: finish_reason {reason}"
        if reason is not None:
            return Outcome.ENGINE_ERROR, f"the server ended it: finish_reason {reason}"
        known = self._delivered_tokens if self.output_tokens is None else self.output_tokens
        if self.done and known >= self._max_new_tokens:
            return Outcome.OK_LENGTH, self._without_a_token()
        if truncated or self.deliveries or not self.done:
            return Outcome.STREAM_TRUNCATED, "the stream ended without a finish_reason"
        return Outcome.EMPTY, "the stream held no token and no finish_reason"

    def _without_a_token(self) -> str | None:
        """Why an answer that ended as if all were well holds nothing (its record will be EMPTY); None if it does."""
        if self.deliveries or not self.output_tokens:
            return None
        return f"the server counts {self.output_tokens} generated tokens and delivered none"

    def _take_usage(self, usage: Any, choice: Mapping[str, Any] | None) -> int | None:
        """Note the server's counts; how many tokens more than at the last chunk, if it keeps a running count."""
        if not isinstance(usage, Mapping):
            return None
        self.prompt_tokens = _count(usage.get("prompt_tokens"), 1) or self.prompt_tokens
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping):
            cached = _count(details.get("cached_tokens"), 0)
            self.cached_tokens = self.cached_tokens if cached is None else cached
        stated = usage.get("completion_tokens")
        if stated is None:
            return None
        some_came = self.deliveries > 0 or (choice is not None and bool(_text(choice)))
        completion = _count(stated, 1 if some_came else 0)
        self._impossible = completion is None or not self._usage_seen <= completion <= self._max_new_tokens
        if completion is None or self._impossible:
            self.output_tokens, self._running_usage = None, False
            return None
        self.output_tokens = completion
        if not self._running_usage or choice is None:
            return None
        grown, self._usage_seen = completion - self._usage_seen, completion
        return grown

    def _tokens(self, choice: Mapping[str, Any], grown: int | None, with_usage: bool) -> Delivered | None:
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])
        body, text = _body(choice), _text(choice)
        self._texts += bool(text)
        self._texts_with_usage += bool(text) and with_usage
        if text and not with_usage:
            self._running_usage = False  # not running after all: the usage at the end will be the total
        ids = choice.get("token_ids") or body.get("token_ids")
        if ids and all(isinstance(i, int) and 0 <= i <= _LARGEST_ID for i in ids):
            return self._found("ids", Delivered(tuple(ids), len(ids)))
        logprobs = choice.get("logprobs") or {}
        entries = logprobs.get("content") or logprobs.get("tokens")
        if entries:
            return self._found("logprobs", Delivered(None, len(entries)))
        if grown is not None:  # text that was held back came with an earlier token
            return self._found("counts", Delivered(None, grown)) if grown > 0 else None
        if "message" in choice and self.output_tokens:  # a whole answer at once, with its count
            return self._found("counts", Delivered(None, self.output_tokens))
        return self._found("text", Delivered(None, None)) if text else None

    def _found(self, by: str, delivered: Delivered) -> Delivered:
        self._counted_by.add(by)
        self._delivered_tokens += delivered.count or 1
        return delivered


def error_message(body: Any) -> str:
    """The text of an error in any of the shapes servers use."""
    error = body
    if isinstance(body, Mapping):
        error = body.get("error") or body.get("detail") or body.get("message") or body
    if isinstance(error, Mapping):
        error = error.get("message") or json.dumps(dict(error))
    return " ".join(str(error).split())[:500]


def _body(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    return choice.get("delta") or choice.get("message") or {}


def _text(choice: Mapping[str, Any]) -> Any:
    body = _body(choice)
    return choice.get("text") or body.get("content") or body.get("reasoning_content") or body.get("reasoning")


def _malformed(chunk: Mapping[str, Any]) -> str | None:
    """What of a chunk is not of the type that the interface states, in words; None if all is."""
    choices = chunk.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(c, Mapping) for c in choices)):
        return f"the server sent choices that are no list of objects: {str(choices)[:200]!r}"
    for choice in choices or ():
        for name in ("delta", "message", "logprobs"):
            if choice.get(name) is not None and not isinstance(choice[name], Mapping):
                return f"the server sent a {name} that is no object: {str(choice[name])[:200]!r}"
        logprobs = choice.get("logprobs") or {}
        lists = {
            "token_ids": choice.get("token_ids") or _body(choice).get("token_ids"),
            "logprobs": logprobs.get("content") or logprobs.get("tokens"),
        }
        for name, value in lists.items():
            if value and not isinstance(value, list):
                return f"the server sent {name} that are no list: {str(value)[:200]!r}"
    return None


def _count(value: Any, least: int) -> int | None:
    """``value`` if it is a number of tokens of at least ``least``, else None; servers have been seen to send null, NaN,
    fractions and nonsense."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST_COUNT:
        return None
    return int(value) if value == int(value) else None
