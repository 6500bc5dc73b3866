"""Sampling on a GPU: processors with captured graphs and async batching, the newest token on the device only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus
from engine.kernels import (
    filter_cuts,
    filter_cuts_torch,
    gumbel_argmax,
    gumbel_argmax_torch,
    gumbel_noise,
    kept_torch,
)
from engine.requests import Request
from engine.sampling import Sampler, SamplingParams
from engine.sampling.random import seed_key, stream_keys

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = 16
PROMPTS = [[5, 9, 11, 2, 8, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [60, 61, 60, 61, 60, 61, 60]]
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "bigram": {"no_repeat_ngram_size": 2},
    "lists": {
        "suppress_tokens": [1, 24, 34],
        "begin_suppress_tokens": [14],
        "sequence_bias": {(7,): 2.0, (5, 9): -9.0},
    },
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[8, 44], [25]],
        "min_new_tokens": 5,
    },
}


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


@pytest.fixture(scope="module")
def model(device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device)


def serve(
    model: Any, generation: dict[str, Any], requests: list[tuple[list[int], dict[str, Any]]], **config: Any
) -> Any:
    manager = ContinuousBatchingManager(
        model,
        GenerationConfig(max_new_tokens=NEW, **generation),
        ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 80, "max_batch_tokens": 32, "seed": 1, **config}),
    )
    for i, (prompt, options) in enumerate(requests):
        manager.add_request(prompt, request_id=str(i), **options)
    manager.start()
    done = {o.request_id: o for o in manager}
    counters, resolved = manager.counters(), manager.resolved_config
    manager.destroy()
    assert {o.status for o in done.values()} == {RequestStatus.FINISHED}, done
    return done, counters, resolved


@pytest.mark.parametrize("name", SETTINGS)
def test_processors_under_graphs_and_async(name: str, model: Any, device: str) -> None:
    """fp32: each request equals single-prompt generation, beside plain rows of the same steps."""
    expected = []
    for settings in ({}, SETTINGS[name]):
        config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, **settings)
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            expected.append(out[0, len(prompt) :].tolist())
    requests = [(p, s) for s in ({}, SETTINGS[name]) for p in PROMPTS]
    done, counters, resolved = serve(model, {}, requests, per_request_processors=True)
    assert [done[str(i)].generated_tokens for i in range(8)] == expected
    assert expected[:4] != expected[4:]
    if resolved.use_cuda_graph[1]:
        assert counters["graph_replays"] > 0
        assert resolved.use_async_batching


def test_children_are_forked_on_the_device(model: Any) -> None:
    """The partial page is copied after the step that writes it: children give what they give without a fork."""
    sampled = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9}
    requests = [([*p, *p, *p], {"num_return_sequences": 4, "seed": i}) for i, p in enumerate(PROMPTS)]
    forked, counters, _ = serve(model, sampled, requests, return_logprobs=True)
    assert counters["forks"] == 12
    queued, counters, _ = serve(model, sampled, requests, return_logprobs=True, max_requests_per_batch=1)
    assert counters["forks"] == 0
    assert {n: o.generated_tokens for n, o in forked.items()} == {n: o.generated_tokens for n, o in queued.items()}
    assert all(len(o.logprobs) == NEW for o in forked.values())


def test_a_device_chooses_what_the_cpu_chooses(device: str) -> None:
    """One step of mixed rows, on a vocabulary of 50,000; nothing waits for the device."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50_000, generator=generator) * 3
    params = [
        SamplingParams(),
        SamplingParams(0.7, 20, 0.95, seed=5),
        SamplingParams(1.0, top_p=0.5, seed=6),
        SamplingParams(1.0, min_p=0.05, seed=7, repetition_penalty=1.3, top_logprobs=4),
        SamplingParams(presence_penalty=3.0, frequency_penalty=1.0, no_repeat_ngram_size=2, logprobs_mode="raw"),
        SamplingParams(bad_words_ids=((1, 2),), logit_bias=((3, 4.0),), top_logprobs=2),
    ]
    answers = []
    for where in ("cpu", device):
        requests = []
        for slot, p in enumerate(params):
            request = Request.create(str(slot), [1, 2, 1, 2, 3], 9, frozenset(), p)
            request.slot = slot
            requests.append(request)
        sampler, last = Sampler(torch.device(where), True), torch.ones(6, dtype=torch.int64, device=where)
        on_device, slots = logits.to(where), torch.arange(6, device=where)
        sampler.choose(on_device, requests, [6] * 6, slots, last)
        last.fill_(1)
        if where == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            choice = sampler.choose(on_device, requests, [6] * 6, slots, last)
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        answers.append(choice.to_lists())
        assert last.tolist() == answers[-1][0]
    (tokens, logprobs, tops), (device_tokens, device_logprobs, device_tops) = answers
    assert device_tokens == tokens
    assert device_logprobs == pytest.approx(logprobs, abs=1e-4)
    for top, device_top in zip(tops, device_tops, strict=True):
        assert (top is None) is (device_top is None)
        if top is not None and device_top is not None:
            assert [i for i, _ in device_top] == [i for i, _ in top]


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [
        (40, 151_936, torch.bfloat16),
        (40, 151_936, torch.float32),
        (3, 262_208, torch.bfloat16),
        (1024, 32_001, torch.float16),
        (5, 97, torch.bfloat16),
        (5, 97, torch.float32),
    ],
)
def test_cuts_are_those_of_the_definition(
    rows: int, vocab: int, dtype: torch.dtype, filtered_exactly: Callable[..., Any], device: str
) -> None:
    """Real sizes, from flat to peaked: kernel and twin differ, and differ from fp64, where sums round only."""
    generator = torch.Generator(device).manual_seed(rows)
    normal = torch.randn(rows, vocab, generator=generator, device=device)
    each = [
        (1.0, vocab, 0.9, 0.0), (0.6, 20, 0.95, 0.0), (1.3, 50, 1.0, 0.1), (0.8, vocab // 2, 0.5, 0.0),
        (1.0, vocab, 0.999, 0.01), (1.0, vocab, 1.0, 0.0), (0.01, 1, 1e-6, 1.0), (2.0, min(3000, vocab), 1.0, 0.0),
    ]  # fmt: skip
    columns = zip(*(each[row % 8] for row in range(rows)), strict=True)
    temperature, top_k, top_p, min_p = settings = [torch.tensor(column, device=device) for column in columns]
    some = torch.tensor([rows - 1, 0], device=device)
    for spread in (0.3, 1.0, 4.0):
        logits = (normal * spread).to(dtype)
        logits[:, 7] = float("-inf")
        cuts = filter_cuts(logits, temperature, top_k, top_p, min_p)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = filter_cuts(logits, temperature, top_k, top_p, min_p)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(cuts.values, again.values), "sums are always made in the same order"
        assert torch.equal(cuts.last_ids, again.last_ids)
        mask, twins = kept_torch(logits, cuts), kept_torch(logits, filter_cuts_torch(logits, *settings))
        for row in sorted({*range(min(rows, 16)), *range(max(rows - 8, 0), rows)}):
            kept, doubtful = filtered_exactly(logits[row], *each[row % 8])
            certain = ~doubtful & (logits[row] > float("-inf"))
            for name, got in (("kernel", mask[row]), ("twin", twins[row])):
                differ = int(((got != kept) & certain).sum())
                assert not differ, (name, spread, row, each[row % 8], differ)
        alone = filter_cuts(logits, *(s[some] for s in settings), some)
        assert torch.equal(alone.values, cuts.values[some]), "a row is cut the same whatever rows stand beside it"
        assert torch.equal(alone.last_ids, cuts.last_ids[some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_are_those_of_the_twin(dtype: torch.dtype, device: str) -> None:
    """The same integers, so that all but near ties of rounded logarithms agree; in place, and without waiting."""
    rows, vocab = 256, 151_936
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator, device=device).to(dtype)
    keys = torch.randint(0, 2**31, (rows,), generator=generator, device=device)
    temperature = torch.rand(rows, generator=generator, device=device) + 0.5
    k, off = torch.full((rows,), 40, device=device), torch.ones(rows, device=device)
    slots, last = torch.randperm(300, device=device)[:rows], torch.full((300,), -1, device=device)
    for cuts in (None, filter_cuts(logits, temperature, k, off, off * 0)):
        gumbel_argmax(logits, temperature, keys, cuts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = gumbel_argmax(logits, temperature, keys, cuts, slots=slots, last_token=last)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(last[slots], got)
        want = gumbel_argmax_torch(logits, temperature, keys, cuts)
        scores = logits.float() / temperature[:, None] + gumbel_noise(keys, vocab)
        scores = scores if cuts is None else scores.masked_fill(~kept_torch(logits, cuts), float("-inf"))
        behind = scores.gather(1, want[:, None]) - scores.gather(1, got[:, None])
        assert (behind <= 1e-5).all()
        assert (got != want).sum() <= 2
    out = torch.full((rows,), -1, device=device)
    some = torch.arange(1, rows, 3, device=device)
    gumbel_argmax(logits, temperature[some], keys[some], None, some, out)
    assert torch.equal(out[some], gumbel_argmax(logits, temperature, keys)[some])
    assert (out == -1).sum() == rows - len(some)


def test_draws_have_the_right_distribution(device: str) -> None:
    """Chi-square of 50,000 draws in one launch."""
    n, logits = 50_000, torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.4, 1.6]], device=device)
    keys = torch.from_numpy(stream_keys(np.full(n, seed_key(3)), np.arange(n))).to(device)
    counts = gumbel_argmax(logits.expand(n, -1), torch.ones(n, device=device), keys).bincount(minlength=8)
    expected = logits[0].softmax(-1) * n
    assert ((counts - expected) ** 2 / expected).sum() < 24.32  # 99.9 %
