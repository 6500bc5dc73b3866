"""Conversations: each turn's prompt is everything said before and some new ids, so that prefixes repeat as in a chat.

The prompt of turn k is the prompt of turn k - 1, the answer to it, and new ids. In the closed form a turn is sent
think time after the answer before it ended, and holds what was really answered; the frozen workload has planned ids in
the answers' places, as many as were asked for, and whoever sends it replaces them (``ScheduledRequest.answering``). In
the open form due times and histories are fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workloads.arrivals import check_cv, check_seconds, gamma_times
from workloads.config import SessionsWorkload, make_lengths
from workloads.content import Content, Turn
from workloads.lengths import Lengths, table_facts
from workloads.names import unknown_name
from workloads.prompts import Prompt, allowed_ids, draw
from workloads.replay import check_caps
from workloads.streams import stream


@dataclass(frozen=True)
class _Drawn:
    """A turn before it has a history: its new ids, the planned answer, and the wait before it in seconds."""

    new: tuple[int, ...]
    answer: tuple[int, ...]
    think_s: float


def sessions_content(cfg: SessionsWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """The turns of ``cfg.sessions`` conversations, one conversation after the other."""
    check_sessions(cfg)
    ids = allowed_ids(vocab_size, special_ids)
    system = draw(stream(seed, "system_ids"), ids, cfg.system_tokens)
    prompts: list[Prompt] = []
    turns: list[Turn] = []
    outputs: list[int] = []
    closed, left_out = cfg.loop == "closed", 0
    lengths = _lengths(cfg)
    for session, conversation in enumerate(_conversations(cfg, lengths, ids, seed)):
        history, offset_s = system, 0.0
        for k, drawn in enumerate(conversation):
            prompt = history + drawn.new
            if cfg.context_cap is not None and len(prompt) + len(drawn.answer) > cfg.context_cap:
                left_out += len(conversation) - k
                break
            later, wait_s = k > 0, drawn.think_s if k > 0 else 0.0
            offset_s += wait_s
            turns.append(
                Turn(
                    session,
                    after=len(prompts) - 1 if later and closed else None,
                    offset_s=0.0 if closed else offset_s,
                    think_s=wait_s if closed else 0.0,
                    takes_answer=later and cfg.history == "answered",
                )
            )
            # What the group shares of a first turn is all of it: every later turn begins with it.
            prompts.append(Prompt(prompt, session, len(history) if later else len(prompt)))
            outputs.append(len(drawn.answer))
            history = prompt + drawn.answer
    if not prompts:
        raise ValueError(f"workload.context_cap is {cfg.context_cap}: no first turn is so short; raise it")
    facts = table_facts(lengths)
    if left_out:
        facts["notes"].append(
            f"{left_out} turns are left out: with them a conversation is longer than {cfg.context_cap} tokens"
        )
    return Content(prompts, outputs, stream(seed, "arrivals"), turns=turns, facts=facts)


def _lengths(cfg: SessionsWorkload) -> dict[str, Lengths]:
    return {
        name: make_lengths(getattr(cfg, name), f"workload.{name}") for name in ("turns", "new_tokens", "output_tokens")
    }


def _conversations(
    cfg: SessionsWorkload, lengths: Mapping[str, Lengths], ids: Sequence[int], seed: int
) -> Iterator[list[_Drawn]]:
    """Every turn of every conversation, sent or not, so that a cap changes nothing else. Streams are independent."""
    counts = lengths["turns"].sample(cfg.sessions, stream(seed, "turns"))
    total = sum(counts)
    new = iter(lengths["new_tokens"].sample(total, stream(seed, "prompt_lengths")))
    output = iter(lengths["output_tokens"].sample(total, stream(seed, "output_lengths")))
    think = iter(gamma_times(total, cfg.think_s, cfg.think_cv, stream(seed, "think_times")))
    prompt_ids, answer_ids = stream(seed, "prompt_ids"), stream(seed, "answer_ids")
    for n in counts:
        yield [
            _Drawn(draw(prompt_ids, ids, next(new)), draw(answer_ids, ids, next(output)), next(think)) for _ in range(n)
        ]


def check_sessions(cfg: SessionsWorkload) -> None:
    """ValueError for settings that mean nothing; tables of lengths are read."""
    _lengths(cfg)
    check_caps(sessions=cfg.sessions, context_cap=cfg.context_cap)
    if cfg.system_tokens < 0:
        raise ValueError(f"workload.system_tokens is {cfg.system_tokens}: give at least 0")
    check_seconds(cfg.think_s, "workload.think_s", zero=True)
    check_cv("workload.think_cv", cfg.think_cv, zero=True)
    if cfg.loop not in ("closed", "open"):
        raise unknown_name("workload.loop", cfg.loop, ("closed", "open"))
    if cfg.history not in ("answered", "planned"):
        raise unknown_name("workload.history", cfg.history, ("answered", "planned"))
    if (cfg.loop, cfg.history) == ("open", "answered"):
        raise ValueError(
            "workload.loop=open fixes every prompt beforehand, but workload.history=answered needs the answers: set "
            "workload.history=planned"
        )
