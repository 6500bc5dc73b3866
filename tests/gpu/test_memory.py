"""What the ledger says is what the allocator gives out."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine import ContinuousBatchingConfig, ContinuousBatchingManager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MiB = 2**20


def on_device(ledger: dict[str, int]) -> int:
    """Sum of the lines that are no part of another one and not in host memory."""
    return sum(size for name, size in ledger.items() if not name.startswith(("of_", "host_", "pinned_")))


def account(manager: ContinuousBatchingManager, empty: int) -> str:
    """All that is known of the memory, for a message: ledger, allocator, pools, live blocks of a MiB and more."""
    ledger, sources, planned = manager.ledger(), manager.ledger_sources(), manager.resolved_config.ledger.as_dict()
    lines = ["", f"{'ledger':34}{'bytes':>15}  source     planned"]
    lines += [f"{name:34}{size:15,}  {sources[name]:9}  {planned.get(name, 0):,}" for name, size in ledger.items()]
    lines.append(f"{'sum on the device':34}{on_device(ledger):15,}")
    lines.append(f"{'without what the pool reuses':34}{_owned(ledger):15,}")
    found = {
        "allocated before the model": empty,
        "allocated since": torch.cuda.memory_allocated() - empty,
        "at most since the last reset": torch.cuda.max_memory_allocated() - empty,
        "reserved": torch.cuda.memory_reserved(),
    }
    lines += [f"{name:34}{size:15,}" for name, size in found.items()]
    segments = torch.cuda.memory_snapshot()
    for pool in sorted({tuple(s["segment_pool_id"]) for s in segments}):
        own = [s for s in segments if tuple(s["segment_pool_id"]) == pool]
        reserved, allocated = (sum(s[key] for s in own) for key in ("total_size", "allocated_size"))
        lines.append(f"pool {pool}: {len(own)} segments, {reserved:,} reserved, {allocated:,} allocated")
        blocks = Counter(
            (block["size"], segment["stream"])
            for segment in own
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block["size"] >= MiB
        )
        lines += [f"    {n:4} x {size:15,} of stream {s}" for (size, s), n in sorted(blocks.items(), reverse=True)]
    return "\n".join(lines)


def _owned(ledger: dict[str, int]) -> int:
    return on_device(ledger) - ledger.get("of_graph_pool_reused_bytes", 0)


@pytest.mark.parametrize("captured", [False, True])
def test_the_ledger_agrees_with_the_allocator_to_two_percent(captured: bool) -> None:
    """B22: weights before the engine (fused in place: no second copy), what is held once it is warmed up, and the whole
    at the peak of full steps, replayed and launched."""
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.config._attn_implementation = "triton"
    weights = torch.cuda.memory_allocated() - empty
    settings = ContinuousBatchingConfig(
        page_size=16, num_blocks=16_000, max_batch_tokens=1024, max_requests_per_batch=16, auto_switch_to_flash=False,
        use_cuda_graph=captured, use_async_batching=captured,
    )  # fmt: skip
    manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=8), settings)
    try:
        planned = manager.ledger()
        manager.warmup()
        ledger, found = manager.ledger(), account(manager, empty)
        print(found)
        assert ledger["kv_cache_bytes"] > 2**30
        assert weights == pytest.approx(ledger["weights_bytes"], rel=0.02), found
        held = torch.cuda.memory_allocated() - empty
        transient = ledger["activations_bytes"] + ledger["step_buffers_bytes"]
        assert held == pytest.approx(_owned(ledger) - transient, rel=0.02), found
        measured = {name for name, source in manager.ledger_sources().items() if source == "measured"}
        pool = {"graph_pool_bytes", "of_graph_pool_reused_bytes"} if captured else set()
        assert measured == {"activations_bytes", "workspaces_bytes", *pool}
        # By hand: gate, up and their product are alive at once; a workspace of 32 MiB by thread and stream, and tables.
        assert 1024 * 3 * 5632 * 2 < ledger["activations_bytes"] <= planned["activations_bytes"], found
        assert 0 < ledger["workspaces_bytes"] <= planned["workspaces_bytes"] + 32 * MiB, found
        if captured:
            assert 0 < ledger["of_graph_pool_reused_bytes"] < ledger["graph_pool_bytes"], found
        torch.cuda.reset_peak_memory_stats()
        # Full steps: of prompts that a captured step's block tables hold, and of longer ones.
        for length in (500, 1000):
            for i in range(16):
                manager.add_request([(7 * length + 13 * i + j) % 32_000 for j in range(length)])
        manager.start()
        assert len(list(manager)) == 32
        full = {step.graph for step in manager.step_log if step.prefill_tokens > 1000}
        assert full == ({True, False} if captured else {False})
        peak = torch.cuda.max_memory_allocated() - empty
        found = account(manager, empty)
        print(found)
        assert peak == pytest.approx(_owned(ledger), rel=0.02), found
    finally:
        manager.destroy()
