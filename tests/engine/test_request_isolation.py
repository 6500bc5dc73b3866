"""One request, its values or its consumer, ends or spoils no other."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from engine import init_continuous_batching

PROMPT = list(range(1, 20))


@pytest.mark.parametrize("bad", [{"temperature": 1e39, "suppress_tokens": [3]}, {"presence_penalty": 1e39}])
def test_values_beyond_float32_are_refused_or_mean_what_they_say(bad, tiny, config, generation):
    """1e39 is finite in Python and inf in float32, where -inf/inf and 0*inf are NaN."""
    model = tiny()
    manager = init_continuous_batching(
        model, generation(do_sample=True), config(per_request_processors=True, return_logprobs=True)
    )
    manager.start()
    try:
        try:
            manager.add_request(PROMPT, max_new_tokens=6, seed=1, **bad)
        except ValueError:
            return
        out = next(iter(manager))
        assert all(p == p for p in out.logprobs), (out.generated_tokens, out.logprobs)
    finally:
        manager.destroy()


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_a_penalty_on_top_of_a_bias_stays_within_float32(temperature, tiny, config, generation):
    """1e30 divided by 1e-30 is inf, and the probabilities of inf are NaN."""
    c = config(per_request_processors=True, return_logprobs=True)
    manager = init_continuous_batching(tiny(), generation(do_sample=True), c)
    manager.start()
    try:
        manager.add_request(PROMPT, temperature=temperature, logit_bias={3: 1e30}, repetition_penalty=1e-30)
        out = next(iter(manager))
        assert (out.generated_tokens, out.logprobs) == ([3] * 8, [0.0] * 8)
    finally:
        manager.destroy()


def test_a_handler_that_raises_takes_no_output_from_another(tiny, config, generation):
    """Outputs of one step share one call on the event loop."""
    manager = init_continuous_batching(tiny(), generation(), config())
    got = []

    async def consume():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def broken(output):
            raise ValueError("consumer's bug")

        manager.register_result_handler("a", broken)
        manager.register_result_handler("b", lambda output: got.append(output))
        manager.add_request([1, 2, 3], request_id="a", max_new_tokens=5)
        manager.add_request([1, 2, 3], request_id="b", max_new_tokens=5)
        manager.start()
        await asyncio.sleep(1.0)

    try:
        asyncio.run(consume())
        assert [o.status.name for o in got] == ["FINISHED"]
    finally:
        manager.destroy()


@pytest.mark.parametrize(
    "bad",
    [
        {"eos_token_id": 102, "min_new_tokens": 2},  # vocabulary of 97; on a GPU a device-side assert
        {"eos_token_id": 2**70, "min_new_tokens": 2},
        {"top_k": 2**70, "temperature": 1.0},
        {"no_repeat_ngram_size": 2**70},
        {"top_logprobs": 2**70},
    ],
    ids=lambda bad: next(iter(bad.items())).__repr__()[:30],
)
def test_no_value_of_one_request_ends_the_loop(bad, tiny, config, generation):
    manager = init_continuous_batching(
        tiny(), generation(do_sample=True), config(per_request_processors=True, return_logprobs=True)
    )
    manager.start()
    try:
        manager.add_request([1, 2, 3], request_id="victim", max_new_tokens=40, temperature=0.0)
        with contextlib.suppress(ValueError):
            manager.add_request([4, 5, 6], request_id="bad", max_new_tokens=6, **bad)
        ends = {o.request_id: o for o in manager if o.is_finished()}
        assert ends["victim"].status.name == "FINISHED", ends["victim"].error
    finally:
        manager.destroy()


def test_an_eos_outside_the_vocabulary_in_the_generation_config(tiny, generation, batch):
    """transformers' generate runs this; common for resized and random-weight checkpoints."""
    out = batch(tiny(), [PROMPT], generation(eos_token_id=[102], min_new_tokens=2))
    assert out["req_0"].status.name == "FINISHED", out["req_0"].error


def test_an_event_loop_that_closes_at_the_wrong_moment_ends_nobody_else(tiny, config, generation):
    """A loop that closes just before call_soon_threadsafe() raises there, in the engine's thread."""
    manager = init_continuous_batching(tiny(), generation(), config())
    loop = asyncio.new_event_loop()

    async def register():
        manager.register_result_handler("a", lambda output: None)

    loop.run_until_complete(register())
    call = loop.call_soon_threadsafe

    def close_first(*args):
        loop.close()
        return call(*args)

    loop.call_soon_threadsafe = close_first
    try:
        manager.add_request([1, 2, 3], request_id="a", max_new_tokens=5, streaming=True)
        manager.add_request([1, 2, 4], request_id="b", max_new_tokens=20)
        manager.start()
        assert [o.status.name for o in manager.request_id_iter("b")] == ["FINISHED"]
    finally:
        manager.destroy()


def test_a_zero_dimensional_tensor_fails_alone(tiny, batch):
    out = batch(tiny(), [[1, 2], torch.tensor(5), [3, 4]])
    assert [o.status.name for o in out.values()] == ["FINISHED", "FAILED", "FINISHED"]


def test_children_count_for_the_queue_limit(tiny, config, generation):
    manager = init_continuous_batching(tiny(), generation(), config(max_queue_size=2))
    try:
        with pytest.raises(ValueError, match="50 sequences of a prompt are more than max_queue_size=2"):
            manager.add_request([1, 2], num_return_sequences=50)
        assert not manager._intake.live
    finally:
        manager.destroy()


def test_a_numpy_eos_is_an_id(tiny, config, generation):
    """As prompts may hold numpy integers."""
    import numpy as np

    manager = init_continuous_batching(tiny(), generation(), config())
    try:
        manager.add_request([1, 2], eos_token_id=np.int64(5))
    finally:
        manager.destroy()


@pytest.mark.parametrize("eos", [["5"], "5", True, [1.9]])
def test_an_eos_that_is_no_id_is_refused(eos, tiny, config, generation):
    manager = init_continuous_batching(tiny(), generation(), config())
    try:
        with pytest.raises(ValueError, match="eos_token_id must be a token id"):
            manager.add_request([1, 2], eos_token_id=eos)
    finally:
        manager.destroy()
