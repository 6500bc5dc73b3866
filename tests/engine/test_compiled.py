"""Compiled forward passes: tokens of single-prompt generation, one graph without breaks, a bounded number of
compilations and none while requests are served."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import CompileConfig

from engine.attention import AttentionMetadata, GroupTables
from engine.bench.tiny_models import tiny_model as build_tiny
from engine.models import CompiledExecutor, TraceableExecutor


class Backend:
    """A torch.compile backend that runs the graph as it was traced, and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.sizes.append(sum(1 for node in graph.graph.nodes if "continuous_batching" in str(node.target)))
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Backend]:
    counters.clear()
    yield Backend()
    assert not counters["graph_break"]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_tiny("tiny-llama")


@pytest.fixture(scope="module")
def gemma2() -> Any:
    return build_tiny("tiny-gemma2")


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 40, 1, 2, 17, 9, 23, 3)[:count]
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]


def serve(manager: Any, asked: list[list[int]], count: int = 8) -> list[list[int]]:
    ids = manager.add_requests(asked, max_new_tokens=count)
    done = {output.request_id: output for output in manager}
    assert [done[name].error for name in ids] == [None] * len(ids)
    return [done[name].generated_tokens for name in ids]


@pytest.mark.parametrize(
    ("fused", "dynamic", "tokens", "compilations"),
    [
        (True, True, 16, 2),
        (True, None, 16, 3),
        (True, False, 16, 5),  # 1, 2, 4, 8 and 16 tokens
        (False, True, 16, 2),
        (False, False, 4, 3),
    ],
)
def test_tokens_equal_generate_and_serving_compiles_nothing(
    llama: Any,
    reference: Any,
    open_manager: Any,
    backend: Backend,
    fused: bool,
    dynamic: bool | None,
    tokens: int,
    compilations: int,
) -> None:
    """A-comp-01, A-comp-03: prompts in chunks, rows of one token and of many, steps of every size."""
    config = CompileConfig(fullgraph=True, dynamic=dynamic, backend=backend)
    manager = open_manager(
        llama, varlen_compile_config=config, use_fused_forward=fused, max_batch_tokens=tokens, num_blocks=64
    )
    assert len(backend.sizes) == compilations
    assert set(backend.sizes) == {2}  # attention of both layers is in the graph, as an operator
    assert manager.counters()["compile_s"] > 0
    assert serve(manager, prompts(), 20) == [reference(llama, prompt, 20) for prompt in prompts()]
    log = manager.step_log
    assert len(log) >= 20
    assert {record.kind for record in log} >= {"decode", "mixed"}
    assert len({record.decode_rows + record.prefill_tokens for record in log}) >= 3
    assert len(backend.sizes) == compilations
    manager.reset_counters()
    assert manager.counters()["compile_s"] > 0


def test_sliding_and_full_layers_with_softcaps(
    gemma2: Any, reference: Any, open_manager: Any, backend: Backend
) -> None:
    manager = open_manager(
        gemma2, varlen_compile_config=CompileConfig(fullgraph=True, dynamic=True, backend=backend), num_blocks=64
    )
    assert serve(manager, prompts()) == [reference(gemma2, prompt, 8) for prompt in prompts()]
    assert backend.sizes == [4, 4]


def mixture_of_experts() -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_what_cannot_be_traced_whole_is_compiled_in_pieces(reference: Any, open_manager: Any) -> None:
    """Without ``fullgraph``, as at every level, what cannot be traced runs as it is."""
    model, counting = mixture_of_experts(), Backend()
    manager = open_manager(model, varlen_compile_config=CompileConfig(dynamic=True, backend=counting))
    assert not manager.resolved_config.use_fused_forward
    assert serve(manager, prompts(3), 4) == [reference(model, prompt, 4) for prompt in prompts(3)]
    assert sum(counting.sizes) >= model.config.num_hidden_layers


def test_level_0_compiles_nothing(llama: Any, open_manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-comp-01."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("level 0 called torch.compile")

    monkeypatch.setattr(torch, "compile", never)
    manager = open_manager(llama)
    serve(manager, prompts(2), 2)
    assert manager.counters()["compile_s"] is None


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_level_compiles_every_step_on_a_cpu(
    llama: Any, reference: Any, open_manager: Any, monkeypatch: pytest.MonkeyPatch, backend: Backend, level: int
) -> None:
    """A-comp-02, A-comp-03: mode and dynamic of the level reach torch; steps of decode rows take the varlen path."""
    real, calls = torch.compile, []

    def watched(function: Any, **options: Any) -> Any:
        calls.append(options)
        return real(function, backend=backend, dynamic=options["dynamic"], fullgraph=True)

    monkeypatch.setattr(torch, "compile", watched)
    manager = open_manager(llama, default_compile_level=level)
    assert serve(manager, prompts()) == [reference(llama, prompt, 8) for prompt in prompts()]
    assert {call["mode"] for call in calls} == {"default" if level == 1 else "max-autotune-no-cudagraphs"}
    assert len(calls) == len(backend.sizes) == (5 if level == 3 else 2)


def test_another_engine_and_another_session_compile_for_themselves(
    llama: Any, m1: Any, reference: Any, open_manager: Any, backend: Backend
) -> None:
    """Ten compilations and more: torch's limit of eight a function is not theirs together."""
    config = CompileConfig(fullgraph=True, dynamic=True, backend=backend)
    for model in (llama, m1, llama, m1):
        manager = open_manager(model, varlen_compile_config=config)
        assert serve(manager, prompts(2)) == [reference(model, prompt, 8) for prompt in prompts(2)]
    manager.stop()
    manager.start()
    assert serve(manager, prompts(2)) == [reference(m1, prompt, 8) for prompt in prompts(2)]
    assert len(backend.sizes) == 2 * (4 + 1)


def test_nothing_is_left_behind(open_manager: Any, backend: Backend) -> None:
    """torch's caches do not keep the executor, and so the cache's memory, alive."""
    manager = open_manager(build_tiny("tiny-llama"), varlen_compile_config=CompileConfig(dynamic=True, backend=backend))
    serve(manager, prompts(2))
    executor = weakref.ref(manager._core.runner.executor._executor)
    assert executor() is not None
    manager.destroy()
    gc.collect()
    assert executor() is None


@pytest.mark.parametrize("fused", [True, False])
def test_new_weights_are_seen(reference: Any, open_manager: Any, backend: Backend, fused: bool) -> None:
    """Written in place during a pause: nothing is compiled anew."""
    model, other = build_tiny("tiny-llama"), build_tiny("tiny-llama", seed=1)
    config = CompileConfig(fullgraph=True, dynamic=True, backend=backend)
    manager = open_manager(model, varlen_compile_config=config, use_fused_forward=fused)
    before = serve(manager, prompts(3))
    with manager.pause():
        model.load_state_dict(other.state_dict())
    after = serve(manager, prompts(3))
    assert after == [reference(other, prompt, 8) for prompt in prompts(3)]
    assert after != before
    assert len(backend.sizes) == 2


def test_what_cannot_be_compiled_is_an_error_at_start(llama: Any, open_manager: Any) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("not on this machine")

    manager = open_manager(llama, start=False, varlen_compile_config=CompileConfig(backend=broken))
    with pytest.raises(
        RuntimeError, match=r"torch\.compile of the varlen path \(1 tokens\) failed(.|\n)*not on this machine"
    ):
        manager.start()
    assert not manager.is_running()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_on_a_cpu(reference: Any, open_manager: Any) -> None:
    """Level 1 as it is, with torch's own compiler."""
    counters.clear()
    model = build_tiny("tiny-llama")
    manager = open_manager(model, default_compile_level=1)
    assert counters["stats"]["unique_graphs"] == 2
    assert serve(manager, prompts()) == [reference(model, prompt, 8) for prompt in prompts()]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


class Sums(TraceableExecutor):
    """Stands for a model: a "logit" of a token is its id, plus 100 for each of its step's tokens that attention saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    @contextmanager
    def during(self, positions: torch.Tensor, metadata: AttentionMetadata) -> Iterator[None]:
        self._step = metadata
        yield

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append((ids.shape[0], index.shape[0]))
        return (ids * 2 + positions)[index].unsqueeze(1)

    def close(self) -> None:
        pass


def step(tokens: int, prefills: bool) -> AttentionMetadata:
    slots = torch.arange(tokens)
    return AttentionMetadata(
        num_decode=0 if prefills else tokens,
        kv_lengths=torch.ones(tokens, dtype=torch.int32),
        groups=(GroupTables(torch.zeros((tokens, 1), dtype=torch.int32), slots, None),),
        cu_query=torch.tensor([0, tokens], dtype=torch.int32) if prefills else None,
    )


@pytest.mark.parametrize("decode_path", [True, False])
def test_steps_of_decode_rows_take_their_own_path(backend: Backend, decode_path: bool) -> None:
    """A config of one path only: steps of the other run as they are. Without a decode path there is only varlen."""
    config = CompileConfig(fullgraph=True, dynamic=True, backend=backend)
    ids = torch.arange(3, dtype=torch.int32)
    for varlen, decode in ((config, None), (None, config)):
        backend.sizes.clear()
        model = Sums()
        executor = CompiledExecutor(model, varlen, decode, decode_path, max_tokens=16, max_rows=8)
        executor.warm_up(step(1, prefills=False))
        warm = len(backend.sizes)
        assert warm == 2
        for prefills in (True, False):
            takes = decode if decode_path and not prefills else varlen
            model.seen.clear()
            logits = executor.logits(ids, ids, step(3, prefills), ids)
            assert logits[:, 0].tolist() == [0, 3, 6]
            assert len(model.seen) == (0 if takes is not None else 1)
        assert len(backend.sizes) == warm


def test_static_sizes_are_powers_of_two_and_as_many(backend: Backend) -> None:
    """At most 24 tokens and 6 rows: 1, 2, 4, 8, 16, 24 tokens on the varlen path, 1, 2, 4, 6 on the decode path."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend)
    executor = CompiledExecutor(Sums(), config, config, True, max_tokens=24, max_rows=6)
    executor.warm_up(step(1, prefills=False))
    assert len(backend.sizes) == 6 + 4
    for tokens in range(1, 25):
        ids = torch.arange(10, 10 + tokens, dtype=torch.int32)
        index = torch.tensor([tokens - 1], dtype=torch.int32)
        for prefills in (True, False):
            rows = index if prefills else ids[:6] - 10
            if prefills or tokens <= 6:
                logits = executor.logits(ids, ids, step(tokens, prefills), rows)
                assert logits[:, 0].tolist() == [3 * ids[row].item() for row in rows]
    assert len(backend.sizes) == 10
    captured = torch.zeros(40, dtype=torch.int32)  # a captured step may be larger than the largest planned one
    assert executor.logits(captured, captured, step(40, True), captured[:6]).shape == (6, 1)
    assert len(backend.sizes) == 11
