"""The engines that can be measured, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from harness.backends.base import Backend, TokenSink
from harness.backends.generation import GenerationSettings
from workloads.names import unknown_name

__all__ = ["BACKENDS", "Backend", "GenerationSettings", "TokenSink", "check", "create"]


# Imported only when chosen: measuring one engine must not load another.
def _ours() -> Any:
    from harness.backends.ours import OursBackend

    return OursBackend


def _transformers() -> Any:
    from harness.backends.transformers import TransformersBackend

    return TransformersBackend


def _static() -> Any:
    from harness.backends.static import StaticBackend

    return StaticBackend


def _openai_http() -> Any:
    from harness.backends.openai_http import OpenAiHttpBackend

    return OpenAiHttpBackend


def _null() -> Any:
    from harness.backends.null import NullBackend

    return NullBackend


def _vllm() -> Any:
    from harness.backends.vllm import VllmBackend

    return VllmBackend


BACKENDS: Mapping[str, Callable[[], Any]] = {
    "ours": _ours,
    "transformers": _transformers,
    "static": _static,
    "openai_http": _openai_http,
    "null": _null,
    "vllm": _vllm,
}
"""By name, how to get the class. It has ``configure(settings, generation)`` and ``needs_weights``: with them,
``create(model, settings, generation)``; without, because no model runs in this process, ``create(settings, generation,
tokenizer)``. An engine that does so in a process of its own on this machine says ``on_device``."""


_PACKAGES = {"vllm": "vllm"}
"""By engine, the package on PyPI that it needs beyond what this project itself needs."""


def needs_weights(name: str) -> bool:
    """Whether the engine runs the model in the measuring process; if not, the model's outline is enough."""
    return bool(_class(name).needs_weights)


def uses_device(name: str) -> bool:
    """Whether the engine runs on this machine's device, in the measuring process or in one of its own."""
    chosen = _class(name)
    return bool(chosen.needs_weights or getattr(chosen, "on_device", False))


def create(
    name: str,
    model: Any,
    engine_config: Mapping[str, Any] | None = None,
    generation: GenerationSettings | None = None,
    tokenizer: Any | None = None,
) -> Backend:
    """The backend ``name`` on a loaded model, ready to warm up.

    Args:
        model: transformers causal LM in eval mode on its device; the backend owns it from here on. Not used by an
            engine that needs no weights.
        tokenizer: of the model, for engines that take text; None if it has none.
        engine_config: settings of that engine; one left out or None has the engine's default. ``attn_implementation``
            may be among them: it has done its work when the model was loaded.
        generation: sampling and stopping; None = greedy, EOS ignored.

    Raises:
        ValueError: unknown backend or setting (with the nearest right one), or a value the engine refuses.
    """
    chosen, settings, generation = _class(name), _given(engine_config), generation or GenerationSettings()
    backend: Backend
    if chosen.needs_weights:
        backend = chosen.create(model, settings, generation)
    else:
        backend = chosen.create(settings, generation, tokenizer)
    return backend


def check(name: str, engine_config: Mapping[str, Any] | None, generation: GenerationSettings) -> None:
    """Refuse what no model could make right; as :func:`create`, without a model.

    Raises:
        ValueError: as :func:`create`; or the engine's package is not installed here.
    """
    _class(name).configure(_given(engine_config), generation)
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"it needs a package that is not installed: pip install {package}")


def _class(name: str) -> Any:
    if name not in BACKENDS:
        raise unknown_name("engine", name, BACKENDS)
    return BACKENDS[name]()


def _given(engine_config: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {key: value for key, value in (engine_config or {}).items() if value is not None}
    given.pop("attn_implementation", None)
    return given
