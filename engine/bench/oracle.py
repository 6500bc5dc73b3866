"""What a request must come to: random requests, their tokens when served alone, and a check of what was delivered."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from engine.admission import Admission
from engine.attention import attention_setting
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.core import EngineCore
from engine.model_shape import ModelShape
from engine.requests import GenerationOutput, Request, RequestStatus, child_id
from engine.resolution import resolve
from engine.sampling.random import child_seed
from engine.stats import EngineStats

LONGEST_OUTPUT = 16


def sampling_defaults() -> GenerationConfig:
    """Defaults under which a request is greedy at temperature 0 and sampled otherwise."""
    return GenerationConfig(do_sample=True, top_k=0, temperature=1.0, max_new_tokens=LONGEST_OUTPUT)


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as a client states it.

    Attributes:
        temperature: 0 = greedy, whatever the seed.
        stop: a stop sequence, or nothing.
        sequences: it and its children.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = LONGEST_OUTPUT
    temperature: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    eos: int = -1
    stop: tuple[int, ...] = ()
    streaming: bool = False
    sequences: int = 1

    @classmethod
    def draw(cls, rng: random.Random, vocab_size: int, longest_prompt: int = 24) -> Wish:
        """A random one: prompts of a few families with a common beginning, short outputs."""
        lengths = [n for n in (1, 4, 7, 13, 16, 24) if n <= longest_prompt]
        family, length = rng.randrange(2), rng.choice(lengths)
        prompt = [(7 * family + 5 * i + i * i) % vocab_size for i in range(length)]
        prompt[-1] = (prompt[-1] + rng.randrange(2)) % vocab_size  # all but the last is shared with others
        temperature, top_k = rng.choice(((0.0, 0), (0.0, 0), (0.8, 0), (1.3, 10)))
        return cls(
            prompt=tuple(prompt),
            max_new_tokens=rng.randint(1, LONGEST_OUTPUT),
            temperature=temperature,
            top_k=top_k,
            repetition_penalty=rng.choice((1.0, 1.3)) if temperature == 0 else 1.0,
            seed=rng.randrange(2),
            streaming=rng.random() < 0.5,
            sequences=rng.choice((1, 1, 1, 2, 3)),
        )

    def arguments(self) -> dict[str, Any]:
        """Keywords of ``add_request`` besides the prompt and the id."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "streaming": self.streaming,
            "eos_token_id": self.eos,
            "num_return_sequences": self.sequences,
            **self.sampling(),
        }

    def sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
        return {**values, "stop_sequences": [list(self.stop)]} if self.stop else values

    def ids(self, request_id: str) -> list[str]:
        """Its id and those of its children."""
        return [request_id, *(child_id(request_id, i) for i in range(self.sequences - 1))]


class StepwiseEngine:
    """An engine without a thread: its owner calls ``core.step()``, so that every interleaving can be replayed.

    Args:
        model: a transformers causal LM.
        config: settings; ``per_request_processors`` must be on.
        ahead: collect a step's tokens only after the next one is launched, as async batching does.
    """

    def __init__(self, model: Any, config: ContinuousBatchingConfig, ahead: bool = False) -> None:
        shape = ModelShape.of(model)
        resolved = resolve(config, shape, WorkloadHints(), attention_setting(model))
        self._admission = Admission(shape, resolved, sampling_defaults(), seed=0)
        self._number = 0
        self.stats = EngineStats()
        self.outputs: list[GenerationOutput] = []
        self.core = EngineCore(model, shape, resolved, self.stats, lambda outputs, ended: self.outputs.extend(outputs))
        self.core._depth = int(ahead)

    def add(self, request_id: str, wish: Wish) -> Request:
        """Admit a request, or raise ValueError."""
        arguments = wish.arguments()
        request = self._admission.admit(
            request_id,
            self._number,
            list(wish.prompt),
            arguments.pop("max_new_tokens"),
            arguments.pop("streaming"),
            False,
            arguments.pop("eos_token_id"),
            num_return_sequences=arguments.pop("num_return_sequences"),
            sampling=arguments,
        )
        self._number += 1
        self.core.add(request)
        return request

    def drain(self, most_steps: int) -> None:
        """Step until nothing is left; RuntimeError if that takes more than ``most_steps``."""
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise RuntimeError(f"{len(self.core.requests)} requests are not over after {most_steps} steps")


class Oracle:
    """The tokens of requests served alone: greedy ones by ``model.generate``, sampled ones by an engine that has
    nothing else to do. Each is computed once, without EOS, and cut where a request ends."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[Any, ...], list[int]] = {}
        self._engine: StepwiseEngine | None = None
        self._longest = 0

    def draw(self, rng: random.Random) -> Wish:
        """A random request; every other one has an EOS or a stop sequence, mostly one that its output comes to."""
        wish = Wish.draw(rng, self._model.config.vocab_size)
        if rng.random() < 0.5:
            return wish
        own = self.tokens(wish)
        start = rng.randrange(len(own))
        if rng.random() < 0.5:
            return replace(wish, eos=own[start])
        return replace(wish, stop=tuple(own[start : start + rng.randint(1, 3)]))

    def know(self, wish: Wish) -> None:
        """Compute the request and its children now."""
        for child in (None, *range(wish.sequences - 1)):
            self.tokens(wish, child)

    def tokens(self, wish: Wish, child: int | None = None) -> list[int]:
        """What the request, or its ``child``-th child, generates if nobody cancels it."""
        seed = wish.seed if child is None else child_seed(wish.seed, child)
        seed = seed if wish.temperature else 0
        key = (wish.prompt, wish.temperature, wish.top_k, wish.repetition_penalty, seed)
        if key not in self._known:
            self._known[key] = self._sampled(wish, seed) if wish.temperature else self._greedy(wish)
        return cut(self._known[key][: wish.max_new_tokens], wish.eos, wish.stop)

    def _greedy(self, wish: Wish) -> list[int]:
        ids = torch.tensor([wish.prompt], device=self._model.device)
        config = GenerationConfig(
            max_new_tokens=LONGEST_OUTPUT,
            do_sample=False,
            pad_token_id=0,
            repetition_penalty=wish.repetition_penalty,
        )
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[0, len(wish.prompt) :].tolist()

    def _sampled(self, wish: Wish, seed: int) -> list[int]:
        alone = Wish(
            wish.prompt,
            temperature=wish.temperature,
            top_k=wish.top_k,
            repetition_penalty=wish.repetition_penalty,
            seed=seed,
        )
        engine = self._idle_engine(len(wish.prompt))
        engine.add("alone", alone)
        engine.drain(4 * LONGEST_OUTPUT)
        return engine.outputs.pop().generated_tokens

    def _idle_engine(self, prompt: int) -> StepwiseEngine:
        """One that has nothing else to do and remembers nothing: no prefixes are shared."""
        if self._engine is None or prompt > self._longest:
            if self._engine is not None:
                self._engine.core.close()
            self._longest = max(64, prompt)
            config = ContinuousBatchingConfig(
                page_size=16,
                num_blocks=4 * (-(-(self._longest + LONGEST_OUTPUT) // 16) + 1),
                max_batch_tokens=max(256, self._longest),
                max_requests_per_batch=1,
                allow_block_sharing=False,
                per_request_processors=True,
                auto_switch_to_flash=False,
                use_cuda_graph=False,
                use_async_batching=False,
            )
            self._engine = StepwiseEngine(self._model, config)
        return self._engine

    def close(self) -> None:
        """Leave the model as it was found."""
        if self._engine is not None:
            self._engine.core.close()
            self._engine = None


def with_other_weights(model: Any, seed: int) -> Any:
    """A copy of a model whose matrices hold random numbers of the same spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_((noise * parameter.float().std().cpu()).to(parameter.dtype))
    return other


def what_a_change_finds(core: EngineCore) -> tuple[dict[str, list[int]], set[str]]:
    """Of a drained engine: what each live sequence has generated, and those that hold nothing computed but by their
    tokens. Children wait with their parent and go on from what it holds."""
    live = {name: GenerationOutput(request).generated_tokens for name, request in core.requests.items()}
    waiting = core.scheduler.waiting
    anew = {
        name
        for name, request in core.requests.items()
        if name in waiting or (request.parent is not None and request.parent.request_id in waiting)
    }
    return live, anew


def cut(tokens: Sequence[int], eos: int, stop: Sequence[int]) -> list[int]:
    """``tokens`` up to and with the first EOS or stop sequence."""
    for end in range(1, len(tokens) + 1):
        if tokens[end - 1] == eos or (stop and list(tokens[max(0, end - len(stop)) : end]) == list(stop)):
            return list(tokens[:end])
    return list(tokens)


@dataclass(frozen=True, slots=True)
class _Expectation:
    """What a sequence must come to.

    Attributes:
        child: which of the request's children it is; None = the request itself.
        oracle: knows the model that computes what is behind ``prefix``.
        prefix: what it had generated when weights were changed last.
        is_known: whether that is all one model's doing. A sequence that keeps keys and values of the old weights across
            a change goes on from there: what it had generated stays, and the rules for its end hold.
    """

    wish: Wish
    child: int | None
    oracle: Oracle
    prefix: tuple[int, ...] = ()
    is_known: bool = True

    def tokens(self) -> list[int]:
        """All that it generates; only meaningful if that is known."""
        if not self.prefix:
            return self.oracle.tokens(self.wish, self.child)
        left = self.wish.max_new_tokens - len(self.prefix)
        rest = replace(self.wish, prompt=self.wish.prompt + self.prefix, max_new_tokens=left, eos=-1, stop=())
        return cut([*self.prefix, *self.oracle.tokens(rest, self.child)], self.wish.eos, self.wish.stop)

    def after_change(self, oracle: Oracle, generated: Sequence[int], anew: bool) -> _Expectation:
        # The randomness of a sampled sequence is that of its token's index, which no request served alone begins with.
        known = anew and (not generated or self.wish.temperature == 0)
        return replace(self, oracle=oracle, prefix=tuple(generated), is_known=known)

    def objection(self, tokens: Sequence[int], finished: bool) -> str | None:
        """What is wrong with generated tokens, in words."""
        if self.is_known:
            expected = self.tokens()
            if finished:
                return None if list(tokens) == expected else f"{tokens} is not {expected} ({self.wish})"
            good = list(tokens) == expected[: len(tokens)]
            return None if good else f"{tokens} is no beginning of {expected} ({self.wish})"
        common = min(len(tokens), len(self.prefix))
        if tuple(tokens[:common]) != self.prefix[:common]:
            return f"{tokens} does not begin with {self.prefix}, which it had when weights changed ({self.wish})"
        if list(tokens) != cut(tokens, self.wish.eos, self.wish.stop):
            return f"{tokens} goes on behind its end ({self.wish})"
        if finished and len(tokens) != self.wish.max_new_tokens and not _stops(tokens, self.wish):
            return f"{tokens} is not at its end ({self.wish})"
        return None


class Deliveries:
    """Checks outputs as they come: one terminal output for each request, streamed lengths 1, 2, 3 …, right tokens.

    Args:
        oracle: knows the tokens.
        failures: how the error of a request may begin that fails; any other failure is a violation.

    Attributes:
        violations: what was wrong, in words.
        ended: terminal status by id.
        partial: outputs that were not terminal.
    """

    def __init__(self, oracle: Oracle, failures: tuple[str, ...] = ()) -> None:
        self._oracle, self._failures = oracle, failures
        self._expected: dict[str, _Expectation] = {}
        self._lengths: dict[str, int] = {}
        self.violations: list[str] = []
        self.ended: dict[str, RequestStatus] = {}
        self.partial = 0

    def expect(self, request_id: str, wish: Wish) -> None:
        """A request was submitted under this id."""
        for index, member in enumerate(wish.ids(request_id)):
            self._expected[member] = _Expectation(wish, index - 1 if index else None, self._oracle)

    @property
    def open(self) -> list[str]:
        """Ids that have had no terminal output."""
        return [name for name in self._expected if name not in self.ended]

    def change_weights(self, oracle: Oracle, live: Mapping[str, Sequence[int]], anew: Collection[str]) -> None:
        """The served model became that of ``oracle`` while the engine stood still.

        Args:
            live: what each sequence that is not over has generated.
            anew: those of them without keys and values of the old weights.
        """
        self._oracle = oracle
        for name, generated in live.items():
            before = self._expected[name]
            objection = before.objection(generated, False)
            if objection is not None:
                self.violations.append(f"{name} before a change of weights: {objection}")
            self._expected[name] = before.after_change(oracle, generated, name in anew)

    def take(self, output: GenerationOutput) -> None:
        name = output.request_id
        expected = self._expected[name]
        wish = expected.wish
        tokens, before = output.generated_tokens, self._lengths.get(name, 0)
        if name in self.ended:
            self._complain(output, f"came after its terminal output ({self.ended[name].name})")
            return
        stopped = output.status in (RequestStatus.CANCELLED, RequestStatus.FAILED)
        if wish.streaming and len(tokens) != before + 1 and not (stopped and len(tokens) == before):
            self._complain(output, f"streamed length {len(tokens)} after {before}")
        if not output.is_finished() and not wish.streaming:
            self._complain(output, "a partial output that was not asked for")
        self._lengths[name] = len(tokens)
        if output.prompt_ids != list(wish.prompt):
            self._complain(output, "its prompt has changed")
        objection = expected.objection(tokens, output.status is RequestStatus.FINISHED)
        if objection is not None:
            self._complain(output, objection)
        if output.status is RequestStatus.FINISHED:
            reason = "stop" if _stops(tokens, wish) else "length"
            if output.finish_reason != reason:
                self._complain(output, f"finish_reason is {output.finish_reason}, not {reason}")
        if output.is_finished():
            self.ended[name] = output.status
            if stopped and not output.error:
                self._complain(output, "ended without a reason")
            if output.status is RequestStatus.FAILED and not (output.error or "").startswith(self._failures or "\0"):
                self._complain(output, f"failed: {output.error}")
        else:
            self.partial += 1

    def _complain(self, output: GenerationOutput, what: str) -> None:
        self.violations.append(f"{output.request_id} ({output.status.name}): {what}")


def _stops(tokens: Sequence[int], wish: Wish) -> bool:
    ends = bool(wish.stop) and list(tokens[-len(wish.stop) :]) == list(wish.stop)
    return bool(tokens) and (tokens[-1] == wish.eos or ends)
