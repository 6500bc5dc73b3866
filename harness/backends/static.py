"""Padded static batching: waves of ``model.generate``, the baseline continuous batching is measured against.

A wave is a batch of requests, left-padded to its longest prompt. It runs until its last request has ended; a row that
ended earlier is computed on, and those tokens are padding: counted as such, never delivered.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Cache

from harness.backends.base import TokenSink
from harness.backends.failures import classify_failure
from harness.backends.generation import GenerationSettings, eos_ids, generation_config
from harness.backends.settings import check_settings
from harness.backends.wave import Wave
from harness.errors import one_line
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest


@dataclass(frozen=True)
class StaticSettings:
    """How waves are made.

    Attributes:
        wave: requests in a wave; None = all that have been submitted when it starts.
        wave_timeout_s: start a smaller wave when its first request has waited so long; None = wait until the wave is
            full or the input is closed.
        cache_implementation: as for ``generate`` ("static" for its static cache); None = its default.
        pad_to: tokens that every prompt is padded to, as engines of fixed shapes do; None = the wave's longest.
    """

    wave: int | None = None
    wave_timeout_s: float | None = None
    cache_implementation: str | None = None
    pad_to: int | None = None

    def __post_init__(self) -> None:
        if self.wave is not None and self.wave < 1:
            raise ValueError(f"engine.wave is {self.wave}: give at least 1 request, or null for all in one wave")
        if self.wave_timeout_s is not None and not self.wave_timeout_s >= 0:
            raise ValueError(f"engine.wave_timeout_s is {self.wave_timeout_s}: give at least 0, or null to wait")
        if self.pad_to is not None and self.pad_to < 1:
            raise ValueError(f"engine.pad_to is {self.pad_to}: give at least 1 token, or null for the wave's longest")


class StaticBackend:
    """Waves of ``model.generate``, run one after another in a thread of its own."""

    name = "static"
    needs_weights = True

    def __init__(
        self,
        model: Any,
        settings: StaticSettings,
        generation: GenerationSettings,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._generation = generation
        self._given = given or {}
        self._eos_ids = eos_ids(model, generation)
        self._sink: TokenSink | None = None
        self._waiting: list[tuple[float, ScheduledRequest]] = []  # (monotonic time of submission, request)
        self._changed = threading.Condition()
        self._closed = False
        self._stopped = threading.Event()
        self._worker: threading.Thread | None = None
        self._waves = 0
        self._kv_bytes: int | None = None
        self._steps: list[dict[str, Any]] = []
        # generate fills what its config leaves open from the model's own, say a repetition penalty: take that away
        self._models_own = model.generation_config
        model.generation_config = generation_config(model, generation)

    @classmethod
    def create(cls, model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> StaticBackend:
        """Raises ValueError for a setting it does not have or cannot use."""
        return cls(model, cls.configure(settings, generation), generation, settings)

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> StaticSettings:
        """Its settings; raises ValueError as :meth:`create`."""
        check_settings(cls.name, settings, StaticSettings.__dataclass_fields__)
        return StaticSettings(**settings)

    # -- Backend -------------------------------------------------------------------------------------------------

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Run ``requests`` as one wave.

        Raises:
            RuntimeError: it failed; nothing could be measured then.
        """
        if not requests:
            return
        try:
            width = self._width(requests)
            self._generate(Wave(requests, width, self._eos_ids, None, 0, _unlogged, self._stopped.is_set))
        except Exception as error:
            raise RuntimeError(f"warm-up failed: {one_line(error)}") from error

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:
        """Nothing to do: waves take requests as they are."""

    def start(self, sink: TokenSink) -> None:
        if self._worker is not None:
            self._worker.join()  # of the run before: it has taken its last wave
        self._sink, self._closed = sink, False
        self._waves, self._steps, self._kv_bytes = 0, [], None
        self._worker = threading.Thread(target=self._work, name="static-waves", daemon=True)
        self._worker.start()

    def submit(self, request: ScheduledRequest) -> None:
        vocab = self._model.config.get_text_config().vocab_size
        bad = next((i for i in request.prompt_ids if not 0 <= i < vocab), None)
        if not request.prompt_ids or bad is not None:
            cause = "the prompt is empty" if bad is None else f"token id {bad} is not in the vocabulary of {vocab}"
            self._report_end(request, Outcome.REJECTED, cause)
            return
        if self._settings.pad_to is not None and len(request.prompt_ids) > self._settings.pad_to:
            cause = (
                f"the prompt of {len(request.prompt_ids)} tokens is longer than engine.pad_to={self._settings.pad_to}"
            )
            self._report_end(request, Outcome.REJECTED, cause)
            return
        with self._changed:
            self._waiting.append((time.monotonic(), request))
            self._changed.notify_all()

    def close_input(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the running wave at its next token; requests still open end as UNFINISHED. Safe to call again."""
        if self._model is None:
            return
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        for _, request in self._waiting:
            self._report_end(request, Outcome.UNFINISHED, None)
        self._waiting.clear()
        self._model.generation_config = self._models_own
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def config(self) -> list[ConfigValue]:
        text = self._model.config
        rows = [
            ConfigValue(name, getattr(self._settings, name), "user" if name in self._given else "default")
            for name in StaticSettings.__dataclass_fields__
        ]
        rows.append(ConfigValue("attn_implementation_in_use", text._attn_implementation, "derived: model"))
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """One row a forward pass of a wave. ``kv_tokens`` counts padded positions too: they are read."""
        return [row | {"step": index} for index, row in enumerate(self._steps)]

    def counters(self) -> dict[str, float | int | None]:
        return {"steps": len(self._steps), "waves": self._waves, "preemptions": 0}

    def memory(self) -> dict[str, int | None]:
        """Weights, and the cache of the wave that had the largest when it ended; None if none has."""
        if self._closed and self._worker is not None:
            self._worker.join(1.0)  # a wave returns just after its last request has ended
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        return {"weights_bytes": weights, "kv_cache_bytes": self._kv_bytes}

    # -- waves ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (requests := self._next_wave()) is not None:
            with self._changed:
                left = len(self._waiting)
            self._waves += 1
            width = self._width(requests)
            wave = Wave(requests, width, self._eos_ids, self._sink, left, self._steps.append, self._stopped.is_set)
            try:
                self._generate(wave)
            except Exception as error:
                # This wave's requests fail; the next wave has its own chance (it may be smaller or shorter).
                text = one_line(error)
                wave.fail(partial(classify_failure, text), text)
                if isinstance(error, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
            else:
                wave.close()

    def _next_wave(self) -> list[ScheduledRequest] | None:
        """Wait for the next wave; None once there will be none."""
        size, timeout = self._settings.wave, self._settings.wave_timeout_s
        with self._changed:
            while not self._stopped.is_set():
                if not self._waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                full = size is not None and len(self._waiting) >= size
                left = None if timeout is None else self._waiting[0][0] + timeout - time.monotonic()
                if full or self._closed or (left is not None and left <= 0):
                    taken = self._waiting[:size]
                    del self._waiting[: len(taken)]
                    return [request for _, request in taken]
                self._changed.wait(left)
        return None

    def _width(self, requests: Sequence[ScheduledRequest]) -> int:
        """Prompt positions of each row of a wave; a warm-up's longest prompt may be longer than ``pad_to``."""
        return max(self._settings.pad_to or 0, *(len(r.prompt_ids) for r in requests))

    def _generate(self, wave: Wave) -> None:
        """Run one wave: ids and mask are [rows, width], padded on the left."""
        config = generation_config(self._model, self._generation)
        config.max_new_tokens = max(r.max_new_tokens for r in wave.requests)
        config.cache_implementation = self._settings.cache_implementation
        pad, width = config.pad_token_id, wave.width
        ids = torch.tensor([[pad] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in wave.requests])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in wave.requests])
        if self._generation.seed is not None:
            torch.manual_seed(self._generation.seed + self._waves)
        wave.begin()
        with torch.inference_mode():
            ended = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                generation_config=config,
                streamer=wave.streamer(),
                stopping_criteria=wave.stopping_criteria(),
                return_dict_in_generate=True,
            )
        self._kv_bytes = max(self._kv_bytes or 0, _cache_bytes(ended.past_key_values))

    def _report_end(self, request: ScheduledRequest, outcome: Outcome, error: str | None) -> None:
        if self._sink is not None:
            self._sink.on_end(request.request_id, outcome, time.perf_counter_ns(), error)


def _cache_bytes(cache: Cache) -> int:
    """Keys and values of every layer, padding included."""
    held = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def _unlogged(step: dict[str, Any]) -> None:
    """Steps of a warm-up are not part of the log."""
