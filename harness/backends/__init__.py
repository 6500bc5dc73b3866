"""The engines that can be measured, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.backends.base import Backend, TokenSink
from harness.backends.generation import GenerationSettings
from workloads.names import unknown_name

__all__ = ["BACKENDS", "Backend", "GenerationSettings", "TokenSink", "create"]

Factory = Callable[[Any, Mapping[str, Any], GenerationSettings], Backend]


# Imported only when chosen: measuring one engine must not load another.
def _ours(model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> Backend:
    from harness.backends.ours import OursBackend

    return OursBackend.create(model, settings, generation)


def _transformers(model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> Backend:
    from harness.backends.transformers import TransformersBackend

    return TransformersBackend.create(model, settings, generation)


def _static(model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> Backend:
    from harness.backends.static import StaticBackend

    return StaticBackend.create(model, settings, generation)


BACKENDS: Mapping[str, Factory] = {"ours": _ours, "transformers": _transformers, "static": _static}


def create(
    name: str,
    model: Any,
    engine_config: Mapping[str, Any] | None = None,
    generation: GenerationSettings | None = None,
) -> Backend:
    """The backend ``name`` on a loaded model, ready to warm up.

    Args:
        model: transformers causal LM in eval mode on its device; the backend owns it from here on.
        engine_config: settings of that engine; one left out or None has the engine's default. ``attn_implementation``
            may be among them: it has done its work when the model was loaded.
        generation: sampling and stopping; None = greedy, EOS ignored.

    Raises:
        ValueError: unknown backend or setting (with the nearest right one), or a value the engine refuses.
    """
    if name not in BACKENDS:
        raise unknown_name("engine", name, BACKENDS)
    given = {key: value for key, value in (engine_config or {}).items() if value is not None}
    given.pop("attn_implementation", None)
    return BACKENDS[name](model, given, generation or GenerationSettings())
