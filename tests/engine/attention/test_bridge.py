"""The model's attention setting is swapped for the time of a forward pass, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention import BACKENDS, AttentionMetadata, ForwardContext, paged_attention
from engine.attention.bridge import ATTENTION_NAME, paged_attention_forward

CONTEXT = ForwardContext(BACKENDS["eager"](), AttentionMetadata(0, torch.empty(0), ()), ())


def test_the_setting_is_put_back_also_after_an_exception(m1: Any) -> None:
    def body() -> None:
        with paged_attention(m1, CONTEXT):
            assert m1.config._attn_implementation == ATTENTION_NAME
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert m1.config._attn_implementation == "eager"


def test_training_mode_is_off_inside_and_module_by_module_as_before_outside() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model.config = type("Config", (), {"_attn_implementation": "sdpa"})()  # type: ignore[assignment]
    model[1].eval()
    with paged_attention(model, CONTEXT):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_without_a_context_the_error_says_who_uses_the_model() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    layer = torch.nn.Identity()
    layer.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"used by a running continuous batching manager.*manager.stop"):
        paged_attention_forward(layer, tensor, tensor, tensor, None)


def test_attention_sinks_are_refused(m1: Any) -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    with paged_attention(m1, CONTEXT), pytest.raises(ValueError, match="sinks are not supported"):
        paged_attention_forward(torch.nn.Identity(), tensor, tensor, tensor, None, s_aux=tensor)
