"""Sampling on a GPU: processors with captured graphs and async batching, the newest token on the device only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus
from engine.requests import Request
from engine.sampling import Sampler, SamplingParams

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
        sampler, last = Sampler(torch.device(where), True), torch.ones(6, dtype=torch.int32, device=where)
        on_device = logits.to(where)
        sampler.choose(on_device, requests, [6] * 6, last)
        if where == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            choice = sampler.choose(on_device, requests, [6] * 6, last)
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        answers.append(choice.to_lists())
    (tokens, logprobs, tops), (device_tokens, device_logprobs, device_tops) = answers
    assert device_tokens == tokens
    assert device_logprobs == pytest.approx(logprobs, abs=1e-4)
    for top, device_top in zip(tops, device_tops, strict=True):
        assert (top is None) is (device_top is None)
        if top is not None and device_top is not None:
            assert [i for i, _ in device_top] == [i for i, _ in top]
