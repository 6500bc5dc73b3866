"""What a determined user tried to break the engine with; each test states what is right."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig

from engine import (
    ContinuousBatchingConfig,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    generate_batch,
    init_continuous_batching,
)
from harness.models import ModelSpec, load_model

PROMPT = list(range(1, 20))


def tiny(name="tiny-llama"):
    return load_model(ModelSpec(name=name), "cpu").model


def config(**changes):
    return ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64, **changes})


def generation(**changes):
    return GenerationConfig(**{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **changes})


def reference(model, ids, count=8):
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=generation(max_new_tokens=count)
        )
    return out[0, len(ids) :].tolist()


def batch(model, prompts, g=None, c=None, **kw):
    return generate_batch(model, prompts, g or generation(), c or config(), progress_bar=False, **kw)


# --- wrong tokens -----------------------------------------------------------------------------------------------------


def test_persistent_manager_after_weights_changed_in_place():
    """An optimizer step between two calls: nothing of the old weights' keys is used again."""
    model = tiny()
    try:
        batch(model, [PROMPT], persistent_manager=True)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.5 * torch.randn_like(p))
        again = batch(model, [PROMPT], persistent_manager=True)["req_0"]
        assert again.generated_tokens == reference(model, PROMPT), f"{again.cached_tokens} stale tokens reused"
    finally:
        destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("how", ["assign", "data", "module"])
def test_persistent_manager_after_weights_were_replaced(how):
    """load_state_dict(assign=True), p.data = …, a replaced lm_head: the fused pass reads the new tensors."""
    model = tiny()
    c = config(allow_block_sharing=False)
    try:
        batch(model, [PROMPT], c=c, persistent_manager=True)
        if how == "assign":
            state = {k: v.clone() * (1 + 0.5 * torch.randn_like(v)) for k, v in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        elif how == "data":
            for p in model.parameters():
                p.data = p.data * (1 + 0.5 * torch.randn_like(p))
        else:
            head = model.lm_head
            model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
        again = batch(model, [PROMPT], c=c, persistent_manager=True)["req_0"]
        assert again.generated_tokens == reference(model, PROMPT)
    finally:
        destroy_cached_continuous_batching_manager(model)


def test_a_patched_forward_of_an_instance_is_not_fused_away():
    """accelerate, liger and many research scripts replace module.forward."""
    model = tiny()
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) * 2
    assert batch(model, [PROMPT])["req_0"].generated_tokens == reference(model, PROMPT)


def test_a_hook_added_between_two_sessions_is_noticed():
    """The fused pass would not call it. (Added while the loop runs, it is not seen: docs/differences.md.)"""
    model = tiny()
    manager = init_continuous_batching(model, generation(), config())
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"has changed since the manager was made .*hooks"):
        manager.start()
    handle.remove()
    manager.start()
    manager.destroy()


def test_a_refused_prompt_does_not_get_the_tokens_of_an_earlier_session():
    """Unread outputs of a persistent manager's earlier session are not this call's."""
    model, g, c = tiny(), generation(), config()
    try:
        with continuous_batching_context_manager(
            model, g, continuous_batching_config=c, persistent_manager=True
        ) as manager:
            manager.add_request([9, 9, 9], request_id="req_1")  # finished at exit, never read
        out = batch(model, [[1, 2, 3], []], g, c, persistent_manager=True)
        assert out["req_1"].status.name == "FAILED"
    finally:
        destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("bad", [{"temperature": 1e39, "suppress_tokens": [3]}, {"presence_penalty": 1e39}])
def test_values_beyond_float32_are_refused_or_mean_what_they_say(bad):
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
def test_a_penalty_on_top_of_a_bias_stays_within_float32(temperature):
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


# --- hang, leak, loss -------------------------------------------------------------------------------------------------


def test_a_handler_that_raises_takes_no_output_from_another():
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


def test_a_model_with_a_persistent_manager_can_be_collected():
    """A persistent manager holds its model and is held by it, and by nothing else."""
    model = tiny()
    seen = weakref.ref(model)
    batch(model, [PROMPT], persistent_manager=True)
    del model
    gc.collect()
    assert seen() is None


def test_one_call_does_not_stop_another_users_running_persistent_manager():
    """generate_batch(persistent_manager=True) inside a running session gets a manager of its own."""
    model, g, c = tiny(), generation(), config()
    try:
        with continuous_batching_context_manager(model, g, continuous_batching_config=c, persistent_manager=True):
            pass
        with continuous_batching_context_manager(
            model, g, continuous_batching_config=c, persistent_manager=True
        ) as manager:
            manager.add_request([5, 6, 7], request_id="mine", max_new_tokens=100)
            batch(model, [[1, 2, 3]], g, c, persistent_manager=True)
            assert manager.is_running()
            assert [o.request_id for o in manager] == ["mine"]
    finally:
        destroy_cached_continuous_batching_manager(model)


def test_other_settings_do_not_kill_a_running_persistent_manager():
    model, g = tiny(), generation()
    try:
        with continuous_batching_context_manager(
            model, g, continuous_batching_config=config(), persistent_manager=True
        ):
            pass
        with continuous_batching_context_manager(
            model, g, continuous_batching_config=config(), persistent_manager=True
        ) as manager:
            manager.add_request([5, 6, 7], request_id="mine", max_new_tokens=200)
            init_continuous_batching(model, g, config(page_size=8)).destroy()
            assert [(o.request_id, o.status.name) for o in manager] == [("mine", "FINISHED")]
    finally:
        destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_second_manager_may_begin_in_the_middle_of_the_firsts_step(kind):
    """For the time of a step the model's attention setting is the first manager's; the second's is the owner's.
    (OPT is asked besides, by a forward pass, how its layers attend.)"""
    if kind == "llama":
        model = tiny()
    else:
        from transformers import OPTConfig, OPTForCausalLM

        sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
        own = OPTConfig(vocab_size=97, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, **sizes)
        model = OPTForCausalLM._from_config(own, attn_implementation="eager").eval()
    expected = reference(model, PROMPT)  # before a manager has the model
    c = config(use_fused_forward=False)
    first = init_continuous_batching(model, generation(), c)
    first.start()
    inside, go_on = threading.Event(), threading.Event()
    forward = model.forward

    def held(*args, **kwargs):
        inside.set()
        assert go_on.wait(20)
        return forward(*args, **kwargs)

    model.forward = held
    made = []
    try:
        first.add_request(PROMPT)
        assert inside.wait(20)
        model.forward = forward
        second = threading.Thread(target=lambda: made.append(batch(model, [PROMPT], c=c)))
        second.start()
        second.join(0.3)
        go_on.set()
        second.join(20)
        assert made, "the second manager met the first one's step"
        assert made[0]["req_0"].generated_tokens == expected
        assert [o.generated_tokens for o in first] == [expected]
    finally:
        go_on.set()
        first.destroy()


def test_system_exit_in_forward_ends_every_request():
    """Whatever ends the loop ends its requests."""
    model = tiny("tiny-gpt2")
    manager = init_continuous_batching(model, generation(), config())

    def leave(*args):
        raise SystemExit(3)

    model.transformer.h[0].mlp.register_forward_hook(leave)
    manager.start()
    try:
        manager.add_request([1, 2, 3], request_id="a")
        assert [o.request_id for o in manager] == ["a"]
        assert not manager._intake.live
    finally:
        manager.destroy()


# --- one request ends the others --------------------------------------------------------------------------------------


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
def test_no_value_of_one_request_ends_the_loop(bad):
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


def test_an_eos_outside_the_vocabulary_in_the_generation_config():
    """transformers' generate runs this; common for resized and random-weight checkpoints."""
    out = batch(tiny(), [PROMPT], generation(eos_token_id=[102], min_new_tokens=2))
    assert out["req_0"].status.name == "FINISHED", out["req_0"].error


def test_an_event_loop_that_closes_at_the_wrong_moment_ends_nobody_else():
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


def test_a_zero_dimensional_tensor_fails_alone():
    out = batch(tiny(), [[1, 2], torch.tensor(5), [3, 4]])
    assert [o.status.name for o in out.values()] == ["FINISHED", "FAILED", "FINISHED"]


# --- life cycle from several threads ----------------------------------------------------------------------------------


def test_stop_from_several_threads():
    manager = init_continuous_batching(tiny(), generation(), config())
    manager.start()
    manager.add_request([1, 2, 3], max_new_tokens=200)
    errors = []

    def stop():
        try:
            manager.stop()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=stop) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    manager.destroy()
    assert not errors


def test_start_from_several_threads_runs_one_loop():
    most = 0
    for _ in range(10):
        manager = init_continuous_batching(tiny(), generation(), config())
        threads = [threading.Thread(target=manager.start) for _ in range(6)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        most = max(most, sum(t.name == "continuous-batching" and t.is_alive() for t in threading.enumerate()))
        manager.destroy()
    assert most <= 1


def test_a_failed_warm_up_is_not_taken_for_done(monkeypatch):
    from engine.core import EngineCore

    manager = init_continuous_batching(tiny(), generation(), config())

    def fail(self):
        raise RuntimeError("capture failed")

    monkeypatch.setattr(EngineCore, "warm_up", fail)
    with pytest.raises(RuntimeError):
        manager.start()
    try:
        assert not manager.warmed_up
    finally:
        manager.destroy()


def test_a_request_cancelled_before_the_start_is_cancelled():
    manager = init_continuous_batching(tiny(), generation(), config())
    manager.add_request([1, 2, 3], request_id="a")
    manager.cancel_request("a")
    manager.destroy()
    assert Counter(o.status.name for o in manager) == {"CANCELLED": 1}


def test_children_count_for_the_queue_limit():
    manager = init_continuous_batching(tiny(), generation(), config(max_queue_size=2))
    try:
        with pytest.raises(ValueError, match="50 sequences of a prompt are more than max_queue_size=2"):
            manager.add_request([1, 2], num_return_sequences=50)
        assert not manager._intake.live
    finally:
        manager.destroy()


def test_a_numpy_eos_is_an_id():
    """As prompts may hold numpy integers."""
    import numpy as np

    manager = init_continuous_batching(tiny(), generation(), config())
    try:
        manager.add_request([1, 2], eos_token_id=np.int64(5))
    finally:
        manager.destroy()


@pytest.mark.parametrize("eos", [["5"], "5", True, [1.9]])
def test_an_eos_that_is_no_id_is_refused(eos):
    manager = init_continuous_batching(tiny(), generation(), config())
    try:
        with pytest.raises(ValueError, match="eos_token_id must be a token id"):
            manager.add_request([1, 2], eos_token_id=eos)
    finally:
        manager.destroy()


def test_an_unhashable_scheduler_type_is_a_value_error():
    with pytest.raises(ValueError, match="scheduler_type"):
        ContinuousBatchingConfig(scheduler_type=["fifo"])
