"""How tokens are chosen, the same for every backend, and the transformers GenerationConfig it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NO_EOS = -1
"""What transformers' continuous batching takes for "no token ends a request"."""


@dataclass
class GenerationSettings:
    """Sampling and stopping. Not frozen, so that it can also be a Hydra schema.

    Attributes:
        do_sample: False = greedy; then temperature, top_k, top_p and seed must stay unset.
        temperature: what logits are divided by; None = 1.0.
        top_k: as many of the likeliest tokens; None = all.
        top_p: the likeliest tokens that together have this probability; None = 1.0, all.
        seed: of the backend's random generator.
        ignore_eos: every request runs to its max_new_tokens; the default, because prompts of random ids make an
            end-of-sequence token meaningless and equal output lengths make engines comparable.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        if not self.do_sample:
            unused = [n for n in ("temperature", "top_k", "top_p", "seed") if getattr(self, n) is not None]
            if unused:
                raise ValueError(
                    f"{', '.join(unused)} set but do_sample is false: set do_sample=true or leave them out"
                )


def eos_ids(model: Any, settings: GenerationSettings) -> frozenset[int]:
    """Token ids that end a request: the model's own, none if they are ignored or the model has none."""
    if settings.ignore_eos:
        return frozenset()
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            ids = value if isinstance(value, list | tuple) else [value]
            return frozenset(int(i) for i in ids if i >= 0)
    return frozenset()


def generation_config(model: Any, settings: GenerationSettings, no_eos: int | None = None) -> Any:
    """A transformers GenerationConfig that states ``settings`` and takes nothing over from the model's own.

    Args:
        no_eos: ``eos_token_id`` to state when nothing ends a request.
    """
    from transformers import GenerationConfig

    text = model.config.get_text_config()
    pad = getattr(text, "pad_token_id", None)
    sampling: dict[str, Any] = {}
    if settings.do_sample:
        sampling = {
            "temperature": 1.0 if settings.temperature is None else settings.temperature,
            "top_k": 0 if settings.top_k is None else settings.top_k,
            "top_p": 1.0 if settings.top_p is None else settings.top_p,
        }
    return GenerationConfig(
        do_sample=settings.do_sample,
        eos_token_id=sorted(eos_ids(model, settings)) or no_eos,
        pad_token_id=0 if pad is None or pad < 0 else pad,
        **sampling,
    )
