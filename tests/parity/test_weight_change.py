"""Requests that go on across a change of weights: their old keys and values stay, whatever is computed from there on is
of the new weights. The same is done with transformers' own cache, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine import ContinuousBatchingConfig, RequestStatus
from engine.bench.oracle import StepwiseEngine, Wish, what_a_change_finds, with_other_weights
from engine.bench.tiny_models import tiny_model


@torch.no_grad()
def continued(old: Any, new: Any, tokens: list[int], computed: int, until: int) -> list[int]:
    """Greedy tokens of ``new`` on a cache whose first positions are of ``old``."""
    cache = DynamicCache(config=new.config)
    if computed:
        old(torch.tensor([tokens[:computed]]), past_key_values=cache)
    tokens = list(tokens)
    while len(tokens) < until:
        logits = new(torch.tensor([tokens[computed:]]), past_key_values=cache).logits[0, -1]
        computed = len(tokens)
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-gemma2"])
def test_old_keys_stay_and_new_ones_are_new(name: str, ahead: bool, fused: bool | None) -> None:
    served, old = tiny_model(name), tiny_model(name)
    new = with_other_weights(old, 5)
    config = ContinuousBatchingConfig(
        page_size=4, num_blocks=120, max_batch_tokens=12, safety_margin=0.0, use_fused_forward=fused,
        per_request_processors=True, auto_switch_to_flash=False,
    )  # fmt: skip
    engine = StepwiseEngine(served, config, ahead)
    prompts = [(3, 1, 4), tuple(range(9)), tuple(range(5, 40)), (2, 7)]
    requests = [engine.add(str(i), Wish(prompt, max_new_tokens=12)) for i, prompt in enumerate(prompts)]
    for _ in range(3):
        engine.core.step()
    engine.core.drain()
    live, anew = what_a_change_finds(engine.core)
    states = [(list(r.tokens), 0 if r.request_id in anew else r.num_computed) for r in requests]
    assert any(0 < computed < len(p) for (_, computed), p in zip(states, prompts, strict=True)), "half a prompt"
    assert any(computed > len(p) for (_, computed), p in zip(states, prompts, strict=True)), "one decodes"
    assert anew
    assert all(not live[name] for name in anew)
    served.load_state_dict(new.state_dict())
    engine.core.runner.refuse_replaced_parameters()
    engine.core.forget_prefixes()
    engine.drain(200)
    assert engine.stats.preemptions == 0
    done = {o.request_id: o for o in engine.outputs if o.status is RequestStatus.FINISHED}
    changed = 0
    for i, (tokens, computed) in enumerate(states):
        until = len(prompts[i]) + 12
        expected = continued(old, new, tokens, computed, until)
        assert [*prompts[i], *done[str(i)].generated_tokens] == expected
        changed += expected != continued(old, old, tokens, computed, until)
    assert changed == len(prompts), "the weights differ in what they generate"
    engine.core.close()
