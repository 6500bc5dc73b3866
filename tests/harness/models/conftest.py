"""A GGUF file small enough to be made in each test session: a two-layer Llama with a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 32, 4, 2, 64, 2
TOKENS = ["<s>", "</s>", *(chr(c) for c in range(ord("!"), ord("~") + 1)), "Ġ", "th", "the"]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0.0, 0.3, shape).astype(np.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    tensor("token_embd.weight", len(TOKENS), HIDDEN)
    tensor("output.weight", len(TOKENS), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ):
            tensor(f"blk.{layer}.{name}.weight", rows, columns)
        tensor(f"blk.{layer}.attn_norm.weight", HIDDEN)
        tensor(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
