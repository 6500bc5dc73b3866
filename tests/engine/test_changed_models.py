"""A model that changes between two sessions, or was changed before: nothing of the old one is used again."""

from __future__ import annotations

import pytest
import torch

from engine import destroy_cached_continuous_batching_manager, init_continuous_batching

PROMPT = list(range(1, 20))


def test_persistent_manager_after_weights_changed_in_place(tiny, generate_now, batch):
    """An optimizer step between two calls: nothing of the old weights' keys is used again."""
    model = tiny()
    try:
        batch(model, [PROMPT], persistent_manager=True)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.5 * torch.randn_like(p))
        again = batch(model, [PROMPT], persistent_manager=True)["req_0"]
        assert again.generated_tokens == generate_now(model, PROMPT), f"{again.cached_tokens} stale tokens reused"
    finally:
        destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("how", ["assign", "data", "module"])
def test_persistent_manager_after_weights_were_replaced(how, tiny, config, generate_now, batch):
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
        assert again.generated_tokens == generate_now(model, PROMPT)
    finally:
        destroy_cached_continuous_batching_manager(model)


def test_a_patched_forward_of_an_instance_is_not_fused_away(tiny, generate_now, batch):
    """accelerate, liger and many research scripts replace module.forward."""
    model = tiny()
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) * 2
    assert batch(model, [PROMPT])["req_0"].generated_tokens == generate_now(model, PROMPT)


def test_a_hook_added_between_two_sessions_is_noticed(tiny, config, generation):
    """The fused pass would not call it. (Added while the loop runs, it is not seen: docs/differences.md.)"""
    model = tiny()
    manager = init_continuous_batching(model, generation(), config())
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"has changed since the manager was made .*hooks"):
        manager.start()
    handle.remove()
    manager.start()
    manager.destroy()
