"""What a model is called in titles."""

from __future__ import annotations

from harness.report.model_names import model_labels


def test_paths_are_called_by_their_last_part_unless_two_end_alike() -> None:
    names = ["/long/path/to/mine/", "../other.gguf", "Qwen/Qwen3-4B", "smollm2", "/a/x", "/b/x"]
    assert model_labels(names) == {
        "/long/path/to/mine/": "mine",
        "../other.gguf": "other.gguf",
        "Qwen/Qwen3-4B": "Qwen/Qwen3-4B",
        "smollm2": "smollm2",
        "/a/x": "/a/x",
        "/b/x": "/b/x",
    }
