"""Log probabilities are those of a plain forward pass over the finished sequence, with everything that was asked for
done to its logits by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import generate_batch

NEW = 10
PROMPTS = [[5, 9, 11, 2, 8, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8]]
Open = Callable[..., Any]


def raw_logprobs(model: Any, output: Any) -> torch.Tensor:
    """[tokens, vocabulary]"""
    sequence = [*output.prompt_ids, *output.generated_tokens]
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0].float()
    return logits[len(output.prompt_ids) - 1 : -1]


def processed(logits: torch.Tensor, output: Any) -> torch.Tensor:
    """Repetition penalty 1.3, then temperature 0.7 and top-k 5."""
    rows = []
    for i, row in enumerate(logits):
        row = row.clone()
        for token in {*output.prompt_ids, *output.generated_tokens[:i]}:
            row[token] = row[token] * 1.3 if row[token] < 0 else row[token] / 1.3
        row = row / 0.7
        row[row < row.topk(5).values[-1]] = float("-inf")
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("num_blocks", "ahead"), [(40, False), (40, True), (8, False), (8, True)])
def test_processed_and_raw_in_one_batch(num_blocks: int, ahead: bool, m1: Any, open_manager: Open) -> None:
    """A-lp-01, A-lp-02: with the k most likely, streamed, and after preemption: always one a token."""
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=0.7, top_k=5, repetition_penalty=1.3)
    manager = open_manager(
        generation=generation,
        start=False,
        num_blocks=num_blocks,
        safety_margin=0.0,
        return_logprobs=True,
        allow_block_sharing=False,
    )
    for i, ids in enumerate(PROMPTS):
        manager.add_request(ids, request_id=f"p{i}", seed=i, top_logprobs=i, streaming=True)
        manager.add_request(ids, request_id=f"r{i}", seed=i, top_logprobs=7, logprobs_mode="raw", streaming=True)
    manager.warmup()
    manager._core._depth = int(ahead)
    manager.start()
    chunks: dict[str, list[Any]] = {}
    for output in manager:
        chunks.setdefault(output.request_id, []).append(output)
    assert (manager.counters()["preemptions"] > 0) is (num_blocks == 8)
    for name, outputs in chunks.items():
        assert [len(o.logprobs) for o in outputs] == [o.num_generated for o in outputs] == list(range(1, NEW + 1))
        last, k = outputs[-1], 7 if name[0] == "r" else int(name[1])
        assert all(o.top_logprobs == last.top_logprobs[: o.num_generated] for o in outputs)
        logits = raw_logprobs(m1, last)
        logprobs = (logits if name[0] == "r" else processed(logits, last)).log_softmax(-1)
        assert last.logprobs == pytest.approx(
            [float(logprobs[i, t]) for i, t in enumerate(last.generated_tokens)], abs=1e-4
        )
        if k == 0:
            assert last.top_logprobs == []
            continue
        assert len(last.top_logprobs) == NEW
        for row, top in zip(logprobs, last.top_logprobs, strict=True):
            best = row.topk(k)
            assert [p for _, p in top] == pytest.approx(
                [v for v in best.values.tolist() if v > float("-inf")], abs=1e-4
            )
            assert [i for i, _ in top] == best.indices[: len(top)].tolist()
    for i in range(len(PROMPTS)):
        assert chunks[f"p{i}"][-1].generated_tokens == chunks[f"r{i}"][-1].generated_tokens, "the mode changes no token"


def test_without_return_logprobs_they_are_refused(open_manager: Open) -> None:
    manager = open_manager()
    for given in ({"top_logprobs": 2}, {"logprobs_mode": "raw"}):
        with pytest.raises(ValueError, match=r"needs ContinuousBatchingConfig\(return_logprobs=True\)"):
            manager.add_request([1, 2], **given)
    with pytest.raises(ValueError, match="top_logprobs=2 needs"):
        generate_batch(manager.model, [[1]], GenerationConfig(max_new_tokens=2), manager.config, top_logprobs=2)
    assert manager.add_request([1, 2], top_logprobs=0, logprobs_mode="processed") is not None
    (output,) = manager
    assert output.logprobs == output.top_logprobs == []
