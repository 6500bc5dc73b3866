"""From a job's configuration to its model, its workload and its warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workloads.workload import ScheduledRequest, Workload

if TYPE_CHECKING:
    from harness.models import LoadedModel


def load_or_outline(spec: Mapping[str, Any], device: str) -> LoadedModel:
    """The model of a job on ``device``; only its outline if its engine runs the model elsewhere, or none."""
    from harness.backends import needs_weights
    from harness.models import ModelSpec, load_model, outline_model

    model = ModelSpec(**_model_settings(spec))
    return load_model(model, device) if needs_weights(spec["engine"]["name"]) else outline_model(model)


def _model_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings; the engine's attention implementation wins where the model leaves it open.

    Raises:
        ValueError: both name one and they differ.
    """
    settings = dict(spec["model"])
    wanted = spec["engine"].get("attn_implementation")
    if wanted is not None and settings["attn_implementation"] not in (None, wanted):
        raise ValueError(
            f"engine.attn_implementation is {wanted!r}, model.attn_implementation {settings['attn_implementation']!r}: "
            "set one of them"
        )
    if wanted is not None:
        settings["attn_implementation"] = wanted
    return settings


def workload_of(spec: Mapping[str, Any], loaded: LoadedModel) -> Workload:
    """The workload of a job in the model's vocabulary.

    Raises:
        ValueError: it cannot be built, or its engine would wait for ever on it.
    """
    from workloads import build_workload

    workload = build_workload(
        spec["workload"],
        spec["arrival"],
        vocab_size=loaded.vocab_size,
        seed=spec["measure"]["seed"],
        tokenizer=loaded.tokenizer,
        special_ids=special_ids(loaded),
    )
    check_compatible(workload, spec["engine"])
    return workload


def warmup_of(
    workloads: Sequence[Workload], settings: Mapping[str, Any], loaded: LoadedModel
) -> tuple[ScheduledRequest, ...]:
    """The requests that warm an engine up, none of which begins like one of ``workloads``."""
    from workloads import build_warmup

    return build_warmup(
        [request for workload in workloads for request in workload.requests],
        settings["warmup_requests"],
        loaded.vocab_size,
        settings["seed"],
        special_ids=special_ids(loaded),
    )


def special_ids(loaded: LoadedModel) -> frozenset[int]:
    """Token ids with a meaning of their own (BOS, EOS, padding, chat marks), which random prompts leave out."""
    found: set[int | None] = set()
    for holder in (loaded.model.config.get_text_config(), loaded.model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(holder, name, None)
            found |= set(value) if isinstance(value, list | tuple) else {value}
    if loaded.tokenizer is not None:
        found |= set(loaded.tokenizer.all_special_ids)
    return frozenset(i for i in found if i is not None and 0 <= i < loaded.vocab_size)


def check_compatible(workload: Workload, engine: Mapping[str, Any]) -> None:
    """Refuse a workload that the engine would wait for ever on.

    Raises:
        ValueError: a static wave that never gives up waiting, where requests wait for the ends of others: in a closed
            loop smaller than the wave, between the turns of sessions, or between phases.
    """
    if engine["name"] != "static" or engine.get("wave_timeout_s") is not None:
        return
    wave = engine.get("wave")
    shown = "all requests" if wave is None else wave
    if workload.sessions < len(workload) or len(workload.phases) > 1:
        what = "turns of sessions wait for the answers" if not workload.phases else "phases wait for the ends of those"
        raise ValueError(f"engine.wave ({shown}) may never fill: {what} before them; set engine.wave_timeout_s")
    if workload.concurrency is not None and (wave is None or wave > workload.concurrency):
        raise ValueError(
            f"engine.wave ({shown}) can never fill in a closed loop of {workload.concurrency}: set engine.wave to at "
            f"most {workload.concurrency} or set engine.wave_timeout_s"
        )
