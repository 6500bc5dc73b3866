"""The snippets of the API guide, call for call, on a model this machine can run.

After ``attach(model)`` the guide's own code, written for transformers, runs unchanged: its config class, its statuses,
its method names. Only the model and the tokenizer are small ones of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

from engine import attach, detach


class ByteTokenizer:
    """Letters to ids and back, enough for the guide's calls."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [1 + byte % 90 for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + i) for i in ids if not (skip_special_tokens and i == self.eos_token_id))


@pytest.fixture(scope="module")
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Iterator[Any]:
    model = attach(tiny_model("tiny-llama", "sdpa"))
    yield model
    detach(model)


@pytest.fixture(scope="module")
def inputs(tokenizer: ByteTokenizer) -> list[list[int]]:
    prompts = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]
    return [tokenizer.encode(p) for p in prompts]


@pytest.fixture
def generation_config(tokenizer: ByteTokenizer) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture
def manager(model: Any, generation_config: GenerationConfig) -> Iterator[Any]:
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    yield manager
    manager.destroy()


def until_eos(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def test_generate_batch(
    model: Any,
    tokenizer: ByteTokenizer,
    inputs: list[list[int]],
    generation_config: GenerationConfig,
    reference: Callable[..., list[int]],
) -> None:
    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)

    texts = []
    for request_id, output in outputs.items():
        text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        texts.append(f"[{request_id}] {text}")

    expected = [until_eos(reference(model, ids, 64)) for ids in inputs]
    assert texts == [f"[req_{i}] {tokenizer.decode(e, skip_special_tokens=True)}" for i, e in enumerate(expected)]


def test_context_manager(model: Any, tokenizer: ByteTokenizer, generation_config: GenerationConfig) -> None:
    """A-mgr-03, A-mgr-04: the loop ends by itself; the short ones come before the long one."""
    results = []
    generation_config.eos_token_id = None  # so that lengths are those asked for
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_request(
            input_ids=tokenizer.encode("Write a detailed history of quantum mechanics."),
            request_id="long",
            max_new_tokens=512,
        )
        manager.add_request(
            input_ids=tokenizer.encode("What's up?"),
            request_id="short_0",
            max_new_tokens=32,
        )
        manager.add_request(
            input_ids=tokenizer.encode("Name a cat breed."),
            request_id="short_1",
            max_new_tokens=32,
        )

        for result in manager:
            text = tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
            results.append((result.request_id, result.num_generated))
            assert text

    assert sorted(results[:2]) == [("short_0", 32), ("short_1", 32)]
    assert results[2] == ("long", 512)


def test_shutdown(model: Any, inputs: list[list[int]], generation_config: GenerationConfig) -> None:
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    manager.add_requests(inputs=inputs)
    manager.stop()
    assert len(list(manager)) == 3
    assert manager.add_request(input_ids=inputs[0]) is None
    manager.start()
    manager.add_request(input_ids=inputs[0], max_new_tokens=400, eos_token_id=-1)
    manager.stop(hard_stop=True)
    assert "RuntimeError" in next(iter(manager)).error
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_adding_and_cancelling(manager: Any, inputs: list[list[int]]) -> None:
    input_ids = inputs[0]
    manager.add_request(input_ids=input_ids, request_id="my_request", max_new_tokens=400, eos_token_id=-1)

    manager.add_requests(inputs=inputs)

    manager.cancel_request(request_id="my_request")
    assert len({result.request_id for result in manager}) == 4


def test_per_request_sampling(model: Any, inputs: list[list[int]]) -> None:
    cb_config = ContinuousBatchingConfig(per_request_processors=True)
    generation_config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=0.7, top_p=0.9, top_k=40)
    inputs_a, inputs_b = inputs[:2]
    with model.continuous_batching_context_manager(
        generation_config=generation_config, continuous_batching_config=cb_config
    ) as manager:
        # each request gets its own sampling parameters
        manager.add_request(input_ids=inputs_a, temperature=0.9, top_p=0.95)
        manager.add_request(input_ids=inputs_b, temperature=0.1, top_k=10)
        assert [result.num_generated for result in manager] == [12, 12]


def test_retrieving(manager: Any, tokenizer: ByteTokenizer, inputs: list[list[int]]) -> None:
    manager.add_requests(inputs=inputs)
    for result in manager:
        assert tokenizer.decode(result.generated_tokens, skip_special_tokens=True)

    # next available result
    manager.add_request(input_ids=inputs[0])
    result = manager.get_result()
    assert result.is_finished()

    # filter for a specific request
    manager.add_request(input_ids=inputs[0], request_id="my_request")
    result = manager.get_result(request_id="my_request")
    assert result.request_id == "my_request"


def test_streaming(manager: Any, tokenizer: ByteTokenizer, inputs: list[list[int]]) -> None:
    from transformers.generation.continuous_batching import RequestStatus

    input_ids = inputs[0]
    pieces = []
    manager.add_request(input_ids=input_ids, request_id="streamed", streaming=True)

    for chunk in manager.request_id_iter(request_id="streamed"):
        token = tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
        pieces.append(token)
        if chunk.status == RequestStatus.FINISHED:
            break

    assert chunk.status == RequestStatus.FINISHED
    assert "".join(pieces) == tokenizer.decode(chunk.generated_tokens, skip_special_tokens=True)


def test_continuous_batching_config(model: Any, inputs: list[list[int]], generation_config: GenerationConfig) -> None:
    cb_config = ContinuousBatchingConfig(
        max_memory_percent=0.8,
        page_size=256,  # KV cache page size in tokens
        scheduler_type="fifo",  # "fifo" or "prefill_first"
    )

    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=generation_config,
        continuous_batching_config=cb_config,
    )
    assert len(outputs) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 128},
        {"max_batch_tokens": 16384},
        {"max_requests_per_batch": 256},
        {"safety_margin": 0.15},
        {"max_blocks_per_request": 64},
        {"max_blocks_per_request": 0},
        {"cpu_group_timeout": 600.0},
        {"allow_block_sharing": True},
        {"auto_switch_to_flash": False},
    ],
)
def test_single_settings(
    settings: dict[str, Any], model: Any, inputs: list[list[int]], reference: Callable[..., list[int]]
) -> None:
    cb_config = ContinuousBatchingConfig(**settings)
    outputs = model.generate_batch(inputs=inputs, continuous_batching_config=cb_config, max_new_tokens=4)
    assert [o.generated_tokens for o in outputs.values()] == [reference(model, ids, 4) for ids in inputs]


def test_log_probabilities(model: Any, tokenizer: ByteTokenizer, inputs: list[list[int]]) -> None:
    cb_config = ContinuousBatchingConfig(return_logprobs=True)
    outputs = model.generate_batch(inputs=inputs, continuous_batching_config=cb_config, max_new_tokens=4)
    lines = []
    for _request_id, output in outputs.items():
        for token_id, log_prob in zip(output.generated_tokens, output.logprobs):  # noqa: B905
            token = tokenizer.decode([token_id])
            lines.append(f"{token} | logprob: {log_prob}")
    assert len(lines) == 12


def test_page_size_three_is_refused_at_init(model: Any) -> None:
    """A-page-02: by our config at once, by transformers' when it is made or handed over."""
    with pytest.raises(ValueError, match="page_size"):
        model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(page_size=3))
