"""Finds out what a server can do, with requests whose prompts are never measured."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.backends.http.answer import AnswerReader
from harness.backends.http.exchange import Ended

PROBED_TOKENS = 4

_RUNNING: Mapping[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TOTAL: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
_IDS: Mapping[str, Any] = {"return_token_ids": True}

Ask = Callable[[Mapping[str, Any]], Awaitable[tuple[Ended, AnswerReader]]]
"""Sends the fields of one request (the model added) and returns how it ended and what it said."""


class ProbeFailed(RuntimeError):
    """The server does not answer even the plainest request; the message says what it said."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server takes and tells.

    Attributes:
        prompt_ids: whether prompts are sent as token ids (else as text).
        running_usage: whether it states the usage so far in every chunk.
        token_ids: whether it returns the ids of what it generates.
        usage: whether it states token counts at all.
        fields: optional fields it took; sent with every request.
        refused: names of optional fields it refused.
    """

    prompt_ids: bool
    running_usage: bool
    token_ids: bool
    usage: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


async def probe(
    ask: Ask, prompts: Sequence[tuple[bool, Mapping[str, Any]]], planned: int, wanted: Mapping[str, Any]
) -> Abilities:
    """Ask until it is known which prompt and which optional fields the server takes.

    Args:
        prompts: fields that state the same prompt, best first, each with whether it is token ids.
        planned: tokens in that prompt.
        wanted: optional fields that the configuration asks for.

    Raises:
        ProbeFailed: none of ``prompts`` was answered.
    """
    optional = {**_RUNNING, **_IDS, **wanted}
    ended = None
    for last, (by_ids, prompt) in zip([False] * (len(prompts) - 1) + [True], prompts, strict=True):
        ended, reader = await ask({**prompt, **optional})
        fields: dict[str, Any] = optional
        if ended.status not in (None, 200):  # something in it is not known to this server
            ended, reader = await ask(prompt)
            if _answered(ended):
                fields, reader = await _accepted(ask, prompt, wanted)
        if _answered(ended) and (last or not by_ids or _plausible(reader.prompt_tokens, planned)):
            return Abilities(
                prompt_ids=by_ids,
                running_usage=reader.states_usage_throughout,
                token_ids=reader.counted_by is None and reader.deliveries > 0,
                usage=reader.output_tokens is not None,
                fields=fields,
                refused=tuple(sorted(optional.keys() - fields.keys())),
            )
        if ended.status is None:
            break
    assert ended is not None
    raise ProbeFailed(
        f"the server did not answer a request of {planned} prompt tokens ({ended.outcome}): {ended.error}"
    )


async def _accepted(
    ask: Ask, prompt: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[dict[str, Any], AnswerReader]:
    """The optional fields the server takes, tried one by one, and its answer with all of them."""
    fields: dict[str, Any] = {}
    each: list[Mapping[str, Any]] = [{name: value} for name, value in wanted.items()]
    for candidate in (_RUNNING, _TOTAL, _IDS, *each):
        if candidate.keys() <= fields.keys():
            continue
        ended, _ = await ask({**prompt, **candidate})
        if _answered(ended):
            fields |= candidate
    _, reader = await ask({**prompt, **fields})
    return fields, reader


def _answered(ended: Ended) -> bool:
    return ended.status == 200 and ended.outcome.value not in ("engine_error", "timeout")


def _plausible(stated: int | None, sent: int) -> bool:
    """Whether the server took the ids as ids: as many tokens, or one more where it adds a beginning of its own."""
    return stated is None or stated in (sent, sent + 1)


def as_json(fields: Mapping[str, Any]) -> bytes:
    """The body of a request."""
    return json.dumps(fields, separators=(",", ":")).encode()
