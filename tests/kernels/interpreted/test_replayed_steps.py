"""The engine on captured sizes, without a device that captures: what a graph would replay is run anew on the padded
inputs, with nothing but what the graph knows. Tokens are those of ``model.generate``, in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import engine
from engine import ContinuousBatchingConfig
from engine.runner import ModelRunner
from engine.runner.batch import StepShape
from engine.runner.buckets import StepBuckets

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPTS = [[(7 * i + 3 * k) % 61 for k in range(length)] for i, length in enumerate((3, 50, 9, 1, 40, 11, 2, 30, 6, 5))]
NEW_TOKENS = 4


class _Again:
    """In the place of `StepGraphs`."""

    def __init__(self, runner: Any, buckets: StepBuckets) -> None:
        self.buckets, self._runner = buckets, runner
        self._inputs = torch.zeros(max(shape.size for shape in buckets.shapes()), dtype=torch.int32)
        self.used: list[tuple[StepShape, StepShape]] = []

    pool_bytes = 0

    def __len__(self) -> int:
        return len(self.buckets.shapes())

    def find(self, exact: StepShape) -> Any:
        shape = self.buckets.find(exact)
        if shape is None:
            return None
        self.used.append((exact, shape))
        runner, views = self._runner, shape.carve(self._inputs)
        step = SimpleNamespace(shape=shape, inputs=self._inputs, sample_slots=views["sample_slots"])
        step.logits = torch.empty(shape.samples, SIZES["vocab_size"])
        step.greedy = torch.empty(shape.samples, dtype=torch.int64)

        def replay() -> None:
            step.logits.copy_(runner.forward(shape, views, runner.padding_metadata(shape, views)))
            step.greedy.copy_(runner.greedy(step.logits, views))

        step.graph = SimpleNamespace(replay=replay)
        return step


@pytest.mark.parametrize("pages", [None, 0])
@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [(LlamaForCausalLM, LlamaConfig, {}), (MistralForCausalLM, MistralConfig, {"window": 9})],
)
def test_padding_changes_no_token(
    kind: Any, config: Any, more: dict[str, int], pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-graph-03: steps of few and many prefill rows, with and without decode rows, on sizes that fit none exactly."""
    torch.manual_seed(0)
    model = kind._from_config(config(**SIZES, **more), attn_implementation="eager").eval()
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    expected = []
    for prompt in PROMPTS:
        one = torch.tensor([prompt])
        output = model.generate(one, attention_mask=torch.ones_like(one), generation_config=generation)
        expected.append(output[0, len(prompt) :].tolist())
    runners: list[ModelRunner] = []

    def warm_up(runner: ModelRunner) -> None:
        settings: Any = runner.config
        buckets = StepBuckets.plan(
            max_rows=settings.max_requests_per_batch, max_tokens=settings.max_batch_tokens, table_pages=40,
            page_size=settings.page_size, groups=1, mixed=True, decode=True, any_lengths=True,
        )  # fmt: skip
        graphs: Any = _Again(runner, buckets)
        runner.graphs = graphs
        runners.append(runner)

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up)
    model.config._attn_implementation = "triton"
    settings = ContinuousBatchingConfig(
        page_size=4, num_blocks=120, max_batch_tokens=72, max_requests_per_batch=20, max_blocks_per_request=pages
    )
    manager = engine.init_continuous_batching(model, generation, settings)
    assert manager.resolved_config.attention_backend == "triton"
    ids = manager.add_requests(PROMPTS)
    manager.start()
    done = {output.request_id: output.generated_tokens for output in manager}
    log = manager.step_log
    manager.destroy()
    assert [done[i] for i in ids] == expected
    assert all(step.graph for step in log)
    assert max(step.prefill_rows for step in log) > 2
    (runner,) = runners
    used: list[tuple[StepShape, StepShape]] = runner.graphs.used  # type: ignore[union-attr]
    mixed = [(exact, shape) for exact, shape in used if exact.prefills]
    assert any(0 < exact.decodes < shape.decodes for exact, shape in mixed), "padding rows among the rows"
    assert any(exact.tokens < shape.tokens for exact, shape in mixed)
    assert [step.padded_rows for step in log] == [shape.tokens - exact.tokens for exact, shape in used]
