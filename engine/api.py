"""Entry points: generate a batch, open a manager, or bind both to a model so that transformers code runs unchanged."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from engine.admission import InvalidRequest, prefix_order, sequence_count
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.manager import ContinuousBatchingManager
from engine.requests import FinishReason, GenerationOutput, Request, RequestStatus, child_id
from engine.sampling import SamplingParams
from engine.sampling.generation import generation_defaults

logger = logging.getLogger(__name__)

_KEPT = "_cb_engine_kept_manager"


class _Kept:
    """A persistent manager on its model: it lives and dies with it, and is no part of a copy of it."""

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _kept_manager(model: Any) -> ContinuousBatchingManager | None:
    kept = model.__dict__.get(_KEPT)
    return None if kept is None else kept.manager


def _check_flags(**given: Any) -> None:
    """TypeError for anything but True and False: settings in the wrong place would be lost without a word."""
    for name, value in given.items():
        if not isinstance(value, bool):
            kind = type(value).__name__
            hint = "; pass settings as continuous_batching_config=…" if kind.endswith("Config") else ""
            raise TypeError(f"{name} must be True or False, got {kind}{hint}")


def init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | Any | None = None,
    workload_hints: WorkloadHints | Any | None = None,
) -> ContinuousBatchingManager:
    """A manager for ``model``, not started yet: the caller starts and stops it.

    A persistent manager kept on the model is handed out again if the settings given are none or its own, and replaced
    otherwise.

    Args:
        model: a transformers causal LM.
        generation_config: defaults of requests; None = the model's own.
        continuous_batching_config: settings of the engine; None = defaults.
        workload_hints: longest prompt, longest generation and number of requests, where known.

    Raises:
        ValueError: the model or the settings cannot be served.
    """
    generation = _generation_config(model, generation_config)
    inside = getattr(generation, "continuous_batching_config", None)
    if inside is not None:
        warnings.warn(
            "a ContinuousBatchingConfig inside GenerationConfig is deprecated; pass continuous_batching_config",
            FutureWarning,
            stacklevel=2,
        )
        continuous_batching_config = continuous_batching_config or inside
    kept = _kept_manager(model)
    if kept is not None and not kept.is_running():  # a running one is somebody else's session
        if kept.has_settings(generation_config, continuous_batching_config):
            return kept
        logger.info("other settings were given: the persistent manager is replaced")
        destroy_cached_continuous_batching_manager(model)
    return ContinuousBatchingManager(model, generation, continuous_batching_config, workload_hints)


@contextmanager
def continuous_batching_context_manager(
    model: Any,
    generation_config: Any = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | Any | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | Any | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """A running manager; on exit it is stopped (requests are finished first, unless the body raised) and destroyed.

    Args:
        block, timeout: as in `ContinuousBatchingManager.stop`.
        persistent_manager: keep the manager, its cache and graphs on the model for the next use.
        warmup: accepted for compatibility; a manager is always warmed up when it starts.
        Others: as in `init_continuous_batching`.

    Raises:
        TypeError: a flag is none, for example the settings in the place of ``block``.
    """
    _check_flags(block=block, persistent_manager=persistent_manager, warmup=warmup)
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    unread = manager.discard_results()
    if unread:
        logger.warning("%d outputs of the persistent manager's last session were never read and are dropped", unread)
    manager.start()
    clean = False
    try:
        yield manager
        clean = True
    finally:
        manager.stop(block=block, timeout=timeout, hard_stop=not clean, keep_for_next_session=persistent_manager)
        if persistent_manager and _kept_manager(model) in (None, manager):
            model.__dict__[_KEPT] = _Kept(manager)
        else:
            manager.destroy()


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | Any | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = True,
    persistent_manager: bool = False,
    warmup: bool = True,
    **generation_kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generate for every prompt and return when all are over.

    Args:
        model: a transformers causal LM.
        inputs: token ids of the prompts; lengths may differ, nothing is padded.
        generation_config: stop rules and sampling; None = the model's own.
        continuous_batching_config: settings of the engine; None = defaults.
        record_timestamps: note when each token reached the host.
        progress_bar: show one (only on a terminal).
        persistent_manager: keep the manager on the model for the next use.
        generation_kwargs: fields of GenerationConfig for this call (``max_new_tokens=64``), and the engine's own
            presence_penalty, frequency_penalty, logit_bias, stop_sequences, top_logprobs, logprobs_mode.

    Returns:
        By request id, in the order of ``inputs``; with ``num_return_sequences=n`` each prompt's n - 1 children come
        before it, as in transformers: ``req_0__child#0``, …, ``req_0``. A request that can never be run is there as
        FAILED with the cause, beside the others' results.

    Raises:
        TypeError: an unknown keyword, or text or an iterator instead of lists of token ids.
        ValueError: the model or the settings cannot be served, or ``num_return_sequences`` is not 1 … 16,384.
    """
    _check_flags(
        record_timestamps=record_timestamps,
        progress_bar=progress_bar,
        persistent_manager=persistent_manager,
        warmup=warmup,
    )
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(f"inputs must be a list of prompts, got {type(inputs).__name__}")
    if isinstance(inputs, str) or any(isinstance(prompt, str) for prompt in inputs):
        raise TypeError("inputs are lists of token ids, not text; encode it with the model's tokenizer first")
    if len(inputs) == 0:
        return {}
    generation = generation_defaults(_generation_config(model, generation_config), generation_kwargs)
    sequences = sequence_count(generation.num_return_sequences)
    hints = WorkloadHints(
        max_prompt_length=max(map(_length, inputs)),
        max_generated_length=generation.max_new_tokens or 0,
        num_requests=len(inputs) * sequences,
    )
    results: dict[str, GenerationOutput] = {}
    with continuous_batching_context_manager(
        model,
        generation_config=generation,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
        # A manager that outlives this call is not cut to this call's requests.
        workload_hints=None if persistent_manager else hints,
    ) as manager:
        families = {
            i: [*(child_id(f"req_{i}", child) for child in range(sequences - 1)), f"req_{i}"]
            for i in range(len(inputs))
        }
        order = list(range(len(inputs)))
        if manager.resolved_config.allow_block_sharing:
            order = prefix_order(inputs)
        for i in order:
            try:
                manager.add_request(
                    inputs[i], request_id=f"req_{i}", record_timestamps=record_timestamps, queue_timeout=None
                )
            except InvalidRequest as error:
                results.update({name: _refused(name, inputs[i], str(error)) for name in families[i]})
        with tqdm(
            total=len(inputs) * sequences, initial=len(results), unit="request", disable=None if progress_bar else True
        ) as bar:
            for output in manager:
                if output.is_finished():
                    results[output.request_id] = output
                    bar.update()
    ordered = {name: results[name] for family in families.values() for name in family}
    failed = [output for output in ordered.values() if output.error is not None]
    if failed:
        first = failed[0]
        logger.warning(
            "%d of %d requests failed, first %s: %s", len(failed), len(ordered), first.request_id, first.error
        )
    return ordered


def destroy_cached_continuous_batching_manager(model: Any) -> None:
    """Release the persistent manager kept on ``model``, if there is one."""
    kept = model.__dict__.pop(_KEPT, None)
    if kept is not None and kept.manager is not None:
        kept.manager.destroy()


_BOUND = (
    generate_batch,
    init_continuous_batching,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
)


def attach(model: Any) -> Any:
    """Bind the entry points on ``model``, over transformers' own, so that code written for those runs on this engine.
    Returns the model."""
    for function in _BOUND:
        model.__dict__[function.__name__] = functools.partial(function, model)
    return model


def detach(model: Any) -> Any:
    """Undo `attach` and release a persistent manager: the model is as it was. Returns the model."""
    destroy_cached_continuous_batching_manager(model)
    for function in _BOUND:
        model.__dict__.pop(function.__name__, None)
    return model


def _generation_config(model: Any, given: Any) -> Any:
    """What is given, else the model's own."""
    own = getattr(model, "generation_config", None)
    if given is None and own is None:
        raise ValueError(f"{type(model).__name__} has no generation_config; a transformers causal LM is needed")
    return own if given is None else given


def _length(prompt: Any) -> int:
    """Length of a prompt; 0 of what is none and will be refused."""
    try:
        return len(prompt)
    except TypeError:
        return 0


def _refused(request_id: str, prompt: Sequence[int], reason: str) -> GenerationOutput:
    ids = list(prompt) if isinstance(prompt, Sequence) else []
    request = Request.create(request_id, ids, 1, frozenset(), SamplingParams())
    request.end(RequestStatus.FAILED, reason)
    return GenerationOutput(request)


__all__ = [
    "FinishReason",
    "attach",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "detach",
    "generate_batch",
    "init_continuous_batching",
]
