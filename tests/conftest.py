"""What every test of the engine shares: invariants on, tiny models, and the single-prompt reference."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

os.environ["ENGINE_CHECK"] = "1"  # the engine checks its invariants after every step, in child processes too

# A shell that starts this in the background lets it ignore Ctrl-C, and with it every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Reference = Callable[[Any, Sequence[int], int], list[int]]


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """Hydra sets the root logger's level; the next test's warnings must still be heard."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[[], Any]:
    """Makes a two-layer Llama of 97 tokens in fp32, attention written out; the same weights each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=97,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=512,
                    bos_token_id=None,
                    eos_token_id=None,
                    pad_token_id=0,
                    initializer_range=0.3,
                    attn_implementation="eager",
                )
            ).eval()

    return build


@pytest.fixture(scope="session")
def m1(tiny_llama: Callable[[], Any]) -> Any:
    """One of those, for tests that leave a model as it was."""
    return tiny_llama()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str, str], Any]:
    """Shipped tiny models by preset and attention implementation, each built once; random weights of a fixed seed."""
    built: dict[tuple[str, str], Any] = {}

    def build(preset: str, attention: str = "eager") -> Any:
        from harness.models import ModelSpec, load_model

        if (preset, attention) not in built:
            spec = ModelSpec(name=preset, dtype="float32", attn_implementation=attention)
            built[preset, attention] = load_model(spec, "cpu").model
        return built[preset, attention]

    return build


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Greedy ``model.generate`` of one prompt alone, ``n`` new tokens, no EOS; computed in this process, kept by model
    and prompt (a shorter answer is the beginning of a longer one)."""
    import torch

    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def run(model: Any, prompt: Sequence[int], n: int) -> list[int]:
        key = (id(model), tuple(prompt))
        if len(known.get(key, [])) < n:
            ids = torch.tensor([list(prompt)], device=model.device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0
            )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key][:n]

    return run


@pytest.fixture(scope="session")
def filtered_exactly() -> Callable[..., Any]:
    """What top-k, top-p and min-p keep of a row, in fp64 and by definition: larger logits first, lower ids first among
    equals. Returns two masks on the row's device, the second true where a bound is met to 1e-4 of it, so that rounding
    may decide."""
    import torch

    def run(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Any, Any]:
        x = logits.double()
        order = (-x).argsort(stable=True)
        kept = x >= x[order[min(top_k, len(x)) - 1]]
        weights = ((x - x.max()) / temperature).exp()
        own = weights * kept
        doubtful = torch.zeros_like(kept)
        if top_p < 1:
            before = torch.empty_like(own)
            before[order] = own[order].cumsum(0) - own[order]
            goal = float(torch.tensor(top_p, dtype=torch.float32)) * own.sum()
            doubtful = kept & ((before - goal).abs() <= 1e-4 * goal)
            kept = kept & (before < goal)
        if min_p > 0:
            bound = float(torch.tensor(min_p, dtype=torch.float32))
            doubtful = (doubtful | kept) & ((weights - bound).abs() <= 1e-4 * bound) | (doubtful & (weights >= bound))
            kept = kept & (weights >= bound)
        return kept, doubtful

    return run


@pytest.fixture(scope="session")
def c1() -> Callable[..., Any]:
    """Small settings: 32 blocks of 4 tokens, 16 tokens a step, nothing switched on that a CPU lacks."""
    from engine import ContinuousBatchingConfig

    def build(**changes: Any) -> Any:
        base = {
            "page_size": 4,
            "num_blocks": 32,
            "max_batch_tokens": 16,
            "auto_switch_to_flash": False,
            "use_cuda_graph": False,
            "use_async_batching": False,
        }
        return ContinuousBatchingConfig(**{**base, **changes})

    return build


@pytest.fixture
def open_manager(m1: Any, c1: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Make managers on the tiny Llama with the small settings; they are destroyed after the test."""
    from transformers import GenerationConfig

    from engine import ContinuousBatchingManager

    opened = []

    def build(model: Any = None, generation: Any = None, start: bool = True, **changes: Any) -> Any:
        generation = GenerationConfig(max_new_tokens=8) if generation is None else generation
        manager = ContinuousBatchingManager(m1 if model is None else model, generation, c1(**changes))
        opened.append(manager)
        if start:
            manager.start()
        return manager

    yield build
    for manager in opened:
        manager.destroy()
