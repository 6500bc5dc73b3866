"""From configs to one frozen workload, and to warm-up requests that are never measured ones."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from workloads.anchors import nano_content, staged_content
from workloads.arrivals import ARRIVALS, Arrival
from workloads.bursts import bursts_content, check_bursts
from workloads.config import (
    BurstsWorkload,
    LengthTableWorkload,
    NanoWorkload,
    PromptsFileWorkload,
    ServeGenWorkload,
    SessionsWorkload,
    StagedWorkload,
    SyntheticWorkload,
    TraceWorkload,
    WorkloadConfig,
    make_arrival,
    workload_config,
)
from workloads.content import Content, Turn
from workloads.length_table import length_table_content, read_table_of
from workloads.prompts import allowed_ids, draw
from workloads.prompts_file import Tokenizer, prompts_file_content
from workloads.replay import check as check_settings
from workloads.replay import trace_content
from workloads.servegen import check_servegen, read_pool, servegen_content
from workloads.sessions import check_sessions, sessions_content
from workloads.streams import stream
from workloads.synthetic import check_synthetic, synthetic_content
from workloads.traces import read_trace
from workloads.workload import ScheduledRequest, Workload

logger = logging.getLogger(__name__)

# Two prompts with this many equal leading ids can share a page of the smallest page size an engine may have.
_SMALLEST_PAGE = 4


def build_workload(
    workload_cfg: WorkloadConfig | Mapping[str, Any],
    arrival_cfg: Any,
    *,
    vocab_size: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
    special_ids: Collection[int] = (),
) -> Workload:
    """Build the workload that the two configs describe.

    Args:
        workload_cfg: a schema of ``workloads.config`` or a mapping with ``kind`` (a DictConfig is one).
        arrival_cfg: likewise for ``workloads.arrivals``.
        vocab_size: token ids are below it.
        seed: used where the workload config has ``seed: null``.
        tokenizer: only for prompts files with text.
        special_ids: ids random prompts avoid (the anchors, defined by their draws, do not).

    Raises:
        ValueError: a setting or a file that means nothing, named; ``TraceError`` for lines of files.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}: give the size of the model's vocabulary")
    cfg = workload_config(workload_cfg)
    arrival = make_arrival(arrival_cfg)
    used_seed = seed if cfg.seed is None else cfg.seed
    if isinstance(cfg, BurstsWorkload):
        check_bursts(cfg, arrival)
    content = _content(cfg, vocab_size, used_seed, tokenizer, special_ids)
    requests = _scheduled(content, arrival)
    facts = dict(content.facts)
    if unused := _unused_times(cfg, content, arrival):
        facts["notes"] = [*facts["notes"], unused]
    for note in facts.get("notes", ()):
        logger.warning("%s", note)
    spec = {
        "workload": dataclasses.asdict(cfg) | {"seed": used_seed},
        "arrival": {"kind": _kind(arrival)}
        | {f.name: getattr(arrival, f.name) for f in dataclasses.fields(type(arrival))},  # type: ignore[arg-type]
        "vocab_size": vocab_size,
        "special_ids": sorted(special_ids),
        **facts,
    }
    gaps = cfg.measured_gaps if isinstance(cfg, BurstsWorkload) else None
    return Workload(cfg.name, requests, arrival.concurrency, spec, None if gaps is None else (gaps[0], gaps[1]))


def _scheduled(content: Content, arrival: Arrival) -> tuple[ScheduledRequest, ...]:
    """Requests in order of their due times; what arrives are sessions where the content has them."""
    n = len(content.prompts)
    turns = content.turns or [Turn(session=k) for k in range(n)]
    sessions = 1 + max(turn.session for turn in turns)
    due = arrival.due_times(sessions, content.arrival_rng, content.recorded_s)
    think = arrival.think_times(sessions, content.arrival_rng)
    due_s = [due[turn.session] + turn.offset_s for turn in turns]
    order = sorted(range(n), key=lambda k: due_s[k])  # stable: turns of one moment stay in their order
    name = {k: f"r{position:05d}" for position, k in enumerate(order)}
    opening = {turn.session: k for k, turn in reversed(list(enumerate(turns)))}
    return tuple(
        ScheduledRequest(
            name[k],
            due_s[k],
            content.prompts[k].ids,
            content.max_new_tokens[k],
            content.prompts[k].prefix_group,
            content.prompts[k].prefix_tokens,
            follows=None if (after := turns[k].after) is None else name[after],
            think_s=turns[k].think_s + (think[turns[k].session] if opening[turns[k].session] == k else 0.0),
            takes_answer=turns[k].takes_answer,
            phase=turns[k].phase,
        )
        for k in order
    )


def _kind(arrival: Arrival) -> str:
    return next(name for name, cls in ARRIVALS.items() if type(arrival) is cls)


def _unused_times(cfg: WorkloadConfig, content: Content, arrival: Arrival) -> str | None:
    """That own times are left aside. Of a trace it goes without saying: its lengths are often wanted alone."""
    if not isinstance(cfg, PromptsFileWorkload) or content.recorded_s is None or _kind(arrival) == "as_recorded":
        return None
    return (
        f"{cfg.path}: due_s is not used, arrival={_kind(arrival)} says when requests are sent: arrival=as_recorded "
        "uses it"
    )


class _AnyTokenizer:
    """Stands for a model's tokenizer where only the file is looked at."""

    def encode(self, text: str) -> list[int]:
        return [0] * max(1, len(text) // 4)


def check_sources(
    workload_cfg: WorkloadConfig | Mapping[str, Any], arrival_cfg: Any, *, takes_text: bool = True
) -> tuple[str, ...]:
    """Find a bad setting or file before a model is loaded for it: read the files that are named.

    What depends on the model (ids outside its vocabulary) is left to `build_workload`.

    Args:
        takes_text: whether the model has a tokenizer.

    Returns:
        What is left out of the files or put right, one sentence each.

    Raises:
        ValueError: as `build_workload`.
    """
    cfg = workload_config(workload_cfg)
    make_arrival(arrival_cfg)
    if isinstance(cfg, TraceWorkload):
        check_settings(cfg)
        return tuple(read_trace(cfg.path, cfg.format).notes)
    if isinstance(cfg, ServeGenWorkload):
        check_servegen(cfg)
        return read_pool(cfg.path).notes
    if isinstance(cfg, LengthTableWorkload):
        return read_table_of(cfg).notes
    if isinstance(cfg, PromptsFileWorkload):
        tokenizer = _AnyTokenizer() if takes_text else None
        content = prompts_file_content(cfg, vocab_size=1 << 31, seed=0, tokenizer=tokenizer)
        unused = _unused_times(cfg, content, make_arrival(arrival_cfg))
        return (*content.facts["notes"], *([unused] if unused else []))
    if isinstance(cfg, SessionsWorkload):
        check_sessions(cfg)
    elif isinstance(cfg, BurstsWorkload):
        check_bursts(cfg, make_arrival(arrival_cfg))
    elif isinstance(cfg, SyntheticWorkload):
        check_synthetic(cfg)
    return ()


def _content(
    cfg: WorkloadConfig, vocab_size: int, seed: int, tokenizer: Tokenizer | None, special_ids: Collection[int]
) -> Content:
    if isinstance(cfg, NanoWorkload):
        return nano_content(cfg, vocab_size=vocab_size, seed=seed)
    if isinstance(cfg, StagedWorkload):
        return staged_content(cfg, vocab_size=vocab_size, seed=seed)
    if isinstance(cfg, PromptsFileWorkload):
        return prompts_file_content(cfg, vocab_size=vocab_size, seed=seed, tokenizer=tokenizer)
    if isinstance(cfg, TraceWorkload):
        return trace_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)
    if isinstance(cfg, ServeGenWorkload):
        return servegen_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)
    if isinstance(cfg, LengthTableWorkload):
        return length_table_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)
    if isinstance(cfg, SessionsWorkload):
        return sessions_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)
    if isinstance(cfg, BurstsWorkload):
        return bursts_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)
    return synthetic_content(cfg, vocab_size=vocab_size, seed=seed, special_ids=special_ids)


def build_warmup(
    requests: Sequence[ScheduledRequest],
    n: int,
    vocab_size: int,
    seed: int,
    *,
    max_new_tokens: int = 16,
    special_ids: Collection[int] = (),
) -> tuple[ScheduledRequest, ...]:
    """``n`` requests to warm an engine up with, all due at once.

    Their lengths are spread over those of ``requests``, longest included, so that the same shapes are met; their ids
    come from a stream of their own and no prompt begins with the same four ids as a measured one, so that nothing
    measured is found in a prefix cache.

    Args:
        requests: all that will be measured.
        max_new_tokens: cap on generated tokens, where the workload asks for more.
    """
    if n < 0 or max_new_tokens < 1:
        raise ValueError(f"warm-up of {n} requests with {max_new_tokens} new tokens: give at least 0 and 1")
    by_length = sorted(requests, key=lambda r: (len(r.prompt_ids), r.request_id))
    ids = allowed_ids(vocab_size, special_ids)
    rng = stream(seed, "warmup_ids")
    measured = {r.prompt_ids[:_SMALLEST_PAGE] for r in requests}
    warmup = []
    for k in range(n):
        like = by_length[-1 - k * len(by_length) // n]
        # at least a page long, so that it can equal no shorter measured prompt
        length = max(len(like.prompt_ids), _SMALLEST_PAGE)
        for _ in range(1000):
            prompt = draw(rng, ids, length)
            if prompt[:_SMALLEST_PAGE] not in measured:
                break
        else:
            raise ValueError(
                f"no warm-up prompt differs from all {len(requests)} measured ones in its first {_SMALLEST_PAGE} ids: "
                f"the vocabulary of {len(ids)} ids is too small; warm up with 0 requests"
            )
        warmup.append(ScheduledRequest(f"warmup{k:03d}", 0.0, prompt, min(like.max_new_tokens, max_new_tokens)))
    return tuple(warmup)
