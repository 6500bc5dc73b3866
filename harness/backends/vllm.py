"""vLLM's asynchronous engine, in a process of its own as vLLM makes it, fed with token ids.

It loads the model itself. Requests run in an event loop of their own thread; a token's time is when the loop had it, as
a server built on that engine would.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.backends.base import TokenSink
from harness.backends.failures import classify_failure
from harness.backends.generation import GenerationSettings
from harness.backends.loop_thread import LoopThread
from harness.backends.settings import check_settings
from harness.errors import one_line
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest

_FINISHED = ("length", "stop")
_FORGET_S = 2.0

_IN_USE = (
    ("model_config", ("dtype", "max_model_len", "enforce_eager")),
    ("cache_config", ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching")),
    ("scheduler_config", ("max_num_batched_tokens", "max_num_seqs", "async_scheduling")),
)
"""What is read back from the engine, by part of its configuration."""


@dataclass(frozen=True)
class VllmSettings:
    """Arguments of vLLM's ``AsyncEngineArgs``; None = its own default.

    Attributes:
        model, load_format, revision: as those of the group ``model``, from which the configuration fills them.
        dtype: of weights and cache; "auto" = what the model's config says.
        block_size: tokens of a block of the KV cache.
        max_model_len: longest prompt and answer together, in tokens.
        max_num_batched_tokens: tokens of one step at most.
        max_num_seqs: requests of one step at most.
        gpu_memory_utilization: share of the GPU's memory it may take.
        enable_prefix_caching: reuse the blocks of prompts that begin alike.
        enforce_eager: without CUDA graphs and torch.compile.
    """

    model: str
    load_format: str = "auto"
    revision: str | None = None
    dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None


class VllmBackend:
    """Serves requests through ``AsyncLLM``; see :class:`VllmSettings`."""

    name = "vllm"
    needs_weights = False
    on_device = True

    def __init__(self, settings: VllmSettings, generation: GenerationSettings, given: Mapping[str, Any]) -> None:
        self._settings, self._generation, self._given = settings, generation, given
        self._sink: TokenSink | None = None
        self._engine: Any = None
        self._prompts: dict[str, dict[str, list[int]]] = {}
        self._runs = 0
        self._loop = LoopThread("vllm-client")

    @classmethod
    def create(cls, settings: Mapping[str, Any], generation: GenerationSettings, tokenizer: Any | None) -> VllmBackend:
        """Raises ValueError for a setting it does not have or cannot use."""
        return cls(cls.configure(settings, generation), generation, settings)

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> VllmSettings:
        """Its settings; raises ValueError as :meth:`create`."""
        check_settings(cls.name, settings, VllmSettings.__dataclass_fields__)
        if "model" not in settings:
            raise ValueError("engine.model is not set: give a preset, a folder or a hub id")
        return VllmSettings(**settings)

    # -- Backend -------------------------------------------------------------------------------------------------

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Load the model, let the engine compile and capture, and run ``requests`` to their end.

        Raises:
            RuntimeError: vLLM is not installed or does not start, or a request failed.
        """
        self._loop.wait(self._open())
        for error in self._loop.wait(self._run_together(requests)):
            if error is not None:
                raise RuntimeError(f"warm-up failed: {one_line(error)}")

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:
        """Put ``requests`` into vLLM's form, so that nothing is left to do when they are due."""
        self._prompts = {r.request_id: {"prompt_token_ids": list(r.prompt_ids)} for r in requests}

    def start(self, sink: TokenSink) -> None:
        """Forget the prefixes of what came before.

        Raises:
            RuntimeError: vLLM does not, so prompts could be found in its cache.
        """
        if not self._loop.wait(self._forget()):
            raise RuntimeError(f"vLLM's prefix cache was still in use {_FORGET_S:g} s after the last request")
        self._runs += 1
        self._sink = sink

    def submit(self, request: ScheduledRequest) -> None:
        prompt = self._prompts.pop(request.request_id, None) or {"prompt_token_ids": list(request.prompt_ids)}
        self._loop.begin(request.request_id, lambda: self._serve(request, prompt))

    def close_input(self) -> None:
        """Nothing waits for more input."""

    def stop(self) -> None:
        """End every request that is open (as UNFINISHED), the engine and the event loop. Safe to call again."""
        self._loop.stop(self._close)

    def config(self) -> list[ConfigValue]:
        """The arguments, then what the engine made of those left open."""
        import vllm

        rows = [
            ConfigValue(f.name, getattr(self._settings, f.name), "user" if f.name in self._given else "default")
            for f in fields(self._settings)
        ]
        for part, names in _IN_USE:
            settled = getattr(self._engine.vllm_config, part)
            rows += [
                ConfigValue(f"{name}_in_use", _plain(getattr(settled, name, None)), f"derived: vllm {vllm.__version__}")
                for name in names
            ]
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """None: its steps run in another process and are not logged."""
        return []

    def counters(self) -> dict[str, float | int | None]:
        return {"kv_blocks_total": self._engine.vllm_config.cache_config.num_gpu_blocks}

    def memory(self) -> dict[str, int | None]:
        """None: it is in the engine's process; telemetry sees the device's."""
        return {}

    # -- in the event loop ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # a measurement reports to nobody
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise RuntimeError(
                f"vLLM cannot be imported ({one_line(error)}): install it, or choose another engine"
            ) from error
        given = {f.name: getattr(self._settings, f.name) for f in fields(self._settings)}
        folder, random = _files(self._settings)
        given |= {"model": folder, "revision": None, "load_format": "dummy" if random else "auto"}
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                skip_tokenizer_init=True,
                disable_log_stats=True,
                seed=0 if self._generation.seed is None else self._generation.seed,
                **{name: value for name, value in given.items() if value is not None},
            )
        )

    async def _forget(self) -> bool:
        """Blocks of a request are given back by the engine's next step, which may come after the request's end."""
        give_up = time.monotonic() + _FORGET_S
        while not (done := bool(await self._engine.reset_prefix_cache())) and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        return done

    async def _run_together(self, requests: Sequence[ScheduledRequest]) -> list[BaseException | None]:
        ended = await asyncio.gather(*(self._finish(r) for r in requests), return_exceptions=True)
        return [e if isinstance(e, BaseException) else None for e in ended]

    async def _finish(self, request: ScheduledRequest) -> None:
        ended = None
        async for output in self._stream(request, {"prompt_token_ids": list(request.prompt_ids)}):
            ended = output
        if ended is None or ended.outputs[0].finish_reason not in _FINISHED:
            reason = None if ended is None else ended.outputs[0].finish_reason
            raise RuntimeError(f"{request.request_id} ended with finish reason {reason!r}")

    def _stream(self, request: ScheduledRequest, prompt: Mapping[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        g = self._generation
        sampling = SamplingParams(
            temperature=(1.0 if g.temperature is None else g.temperature) if g.do_sample else 0.0,
            top_k=g.top_k or 0,
            top_p=1.0 if g.top_p is None else g.top_p,
            max_tokens=request.max_new_tokens,
            ignore_eos=g.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # An id of its own in each run: the engine may still be giving up the one of that name of the run before.
        return self._engine.generate(prompt, sampling, request_id=f"{self._runs}-{request.request_id}")

    async def _serve(self, request: ScheduledRequest, prompt: Mapping[str, Any]) -> None:
        sink, request_id, delivered = self._sink, request.request_id, 0
        assert sink is not None
        outcome, cached = Outcome.ENGINE_ERROR, None
        error: str | None = "the stream ended without a reason"
        try:
            async for output in self._stream(request, prompt):
                answer = output.outputs[0]
                sink.on_tokens(request_id, list(answer.token_ids), time.perf_counter_ns())
                delivered += len(answer.token_ids)
                if output.finished:
                    outcome, error = _outcome(answer.finish_reason, delivered)
                    cached = output.num_cached_tokens
        except asyncio.CancelledError:  # by stop
            outcome, error = Outcome.UNFINISHED, None
        except ValueError as refusal:
            outcome, error = Outcome.REJECTED, one_line(refusal)
        except Exception as failure:  # this request fails, the run goes on
            error = one_line(failure)
            outcome = classify_failure(error, "decode" if delivered else "prefill")
        sink.on_end(request_id, outcome, time.perf_counter_ns(), error, cached_tokens=cached)

    async def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def _files(settings: VllmSettings) -> tuple[str, bool]:
    """Folder of the model, and whether its weights are random.

    Raises:
        RuntimeError: a model that is a single file.
    """
    from harness.models import ModelSpec
    from harness.models.sources import find_source

    source = find_source(ModelSpec(settings.model, load_format=settings.load_format, revision=settings.revision))
    if source.folder is None:
        raise RuntimeError(f"{source.description} is one file; this engine needs a folder in transformers' layout")
    return str(source.folder), source.random


def _outcome(reason: str | None, delivered: int) -> tuple[Outcome, str | None]:
    """Outcome of a finished request by vLLM's finish reason, and the error if it is one."""
    if reason not in _FINISHED:
        return Outcome.ENGINE_ERROR, f"finish reason {reason!r}"
    if delivered == 0:
        return Outcome.EMPTY, None
    return (Outcome.OK_LENGTH if reason == "length" else Outcome.OK_EOS), None


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
