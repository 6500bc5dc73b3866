"""Managers that share a model: none takes the outputs, the session or the memory of another."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from engine import (
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    init_continuous_batching,
)

PROMPT = list(range(1, 20))


def test_a_refused_prompt_does_not_get_the_tokens_of_an_earlier_session(tiny, config, generation, batch):
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


def test_a_model_with_a_persistent_manager_can_be_collected(tiny, batch):
    """A persistent manager holds its model and is held by it, and by nothing else."""
    model = tiny()
    seen = weakref.ref(model)
    batch(model, [PROMPT], persistent_manager=True)
    del model
    gc.collect()
    assert seen() is None


def test_one_call_does_not_stop_another_users_running_persistent_manager(tiny, config, generation, batch):
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


def test_other_settings_do_not_kill_a_running_persistent_manager(tiny, config, generation):
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
def test_a_second_manager_may_begin_in_the_middle_of_the_firsts_step(
    kind, tiny, config, generation, generate_now, batch
):
    """For the time of a step the model's attention setting is the first manager's; the second's is the owner's.
    (OPT is asked besides, by a forward pass, how its layers attend.)"""
    if kind == "llama":
        model = tiny()
    else:
        from transformers import OPTConfig, OPTForCausalLM

        sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
        own = OPTConfig(vocab_size=97, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, **sizes)
        model = OPTForCausalLM._from_config(own, attn_implementation="eager").eval()
    expected = generate_now(model, PROMPT)  # before a manager has the model
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
