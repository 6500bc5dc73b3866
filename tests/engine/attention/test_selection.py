"""Which backend a model runs on, with the reason in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engine.attention.selection as selection
from engine.attention import choose_backend
from engine.attention.flash import why_not_flash

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choose(requested: str | None, auto: bool = True, supports: bool = True, page_size: int = 256) -> tuple[str, str]:
    choice = choose_backend(requested, auto, supports, CUDA, torch.bfloat16, 64, page_size)
    return choice.name, choice.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, flash-attn 2 and Triton, where only the page size can stand in the way."""
    monkeypatch.setattr(
        selection, "why_not_flash", lambda _d, _t, _h, page: None if page % 256 == 0 else "its pages are multiples"
    )
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(selection, "why_not_flash3", lambda *_: "not installed")


@pytest.mark.usefixtures("gpu")
def test_eager_and_sdpa_models_are_switched_to_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-attn-03, A-attn-04."""
    assert choose("sdpa") == ("triton", "switched from sdpa (auto_switch_to_flash)")
    assert choose("eager", page_size=16)[0] == "triton"
    assert choose("sdpa", auto=False) == ("sdpa", "the model was loaded with it")
    assert choose("eager", supports=False)[0] == "eager"
    assert choose("sdpa", auto=False, page_size=16)[0] == "sdpa"
    assert choose_backend("sdpa", True, True, CUDA, torch.float32, 64, 256).name == "sdpa"
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: "triton cannot be imported")
    assert choose("eager")[0] == "flash_attention_2"
    assert choose("eager", page_size=16)[0] == "eager"
    monkeypatch.setattr(selection, "why_not_flash3", lambda *_: None)
    assert choose("eager")[0] == "flash_attention_3"


@pytest.mark.usefixtures("gpu")
def test_a_page_size_that_flash_cannot_do_takes_another_backend_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-page-05."""
    assert choose("flash_attention_2") == ("flash_attention_2", "the model was loaded with it")
    name, reason = choose("flash_attention_2", page_size=128)
    assert name == "triton"
    assert "flash_attention_2 was asked for, but its pages are multiples" in reason
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: "triton cannot be imported")
    assert choose("flash_attention_2", page_size=128)[0] == "sdpa"
    assert choose("sdpa", page_size=16)[0] == "sdpa"
    with pytest.raises(ValueError, match="attn_implementation='triton' cannot be used: triton cannot be imported"):
        choose("triton")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((CPU, torch.bfloat16, 64, 256), "needs a CUDA device, the model is on cpu"),
        ((CUDA, torch.float32, 64, 256), "the model is float32"),
        ((CUDA, torch.float16, 264, 256), "the model has 264"),
        ((CUDA, torch.float16, 65, 256), "the model has 65"),
        ((CUDA, torch.bfloat16, 64, 128), "page_size is 128"),
    ],
)
def test_the_obstacle_is_named(arguments: Any, words: str) -> None:
    obstacle = why_not_flash(*arguments)
    assert obstacle is not None
    assert words in obstacle


def test_without_a_name_sdpa_is_the_default() -> None:
    assert choose_backend(None, True, True, CPU, torch.float32, 64, 16).name == "sdpa"


def test_the_engines_own_kernels_are_refused_where_they_cannot_serve() -> None:
    with pytest.raises(ValueError, match=r"'triton' cannot be used: it takes head sizes from 32 to 256"):
        choose_backend("triton", True, True, CUDA, torch.float32, 16, 16)
