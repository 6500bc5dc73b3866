from __future__ import annotations

from pathlib import Path

import pytest

from workloads import Workload, build_workload
from workloads.config import PromptsFileWorkload
from workloads.traces import TraceError


class Letters:
    """A tokenizer of one id a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]


def build(
    path: Path, text: str, arrival: str = "burst", tokenizer: Letters | None = None, n: int | None = None
) -> Workload:
    path.write_text(text, encoding="utf-8")
    cfg = PromptsFileWorkload(path=str(path), max_new_tokens=9, max_requests=n)
    return build_workload(cfg, {"kind": arrival}, vocab_size=26, seed=0, tokenizer=tokenizer)


def test_text_ids_and_optional_keys(tmp_path: Path) -> None:
    built = build(
        tmp_path / "p.jsonl",
        '{"prompt": "abc"}\n\n{"prompt_ids": [5, 6], "max_new_tokens": 3, "due_s": 1.5}\n',
        tokenizer=Letters(),
    )
    assert [(r.prompt_ids, r.max_new_tokens) for r in built.requests] == [((0, 1, 2), 9), ((5, 6), 3)]


def test_due_times_order_the_requests(tmp_path: Path) -> None:
    text = '{"prompt_ids": [1], "due_s": 2}\n{"prompt_ids": [2], "due_s": 0.25}\n{"prompt_ids": [3], "due_s": 9}\n'
    built = build(tmp_path / "p.jsonl", text, "as_recorded", n=2)
    assert [(r.due_s, r.prompt_ids) for r in built.requests] == [(0.25, (2,)), (2.0, (1,))]
    assert len(built.spec["trace_sha256"]) == 64


def test_as_recorded_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every line has due_s"):
        build(tmp_path / "p.jsonl", '{"prompt_ids": [1], "due_s": 2}\n{"prompt_ids": [2]}\n', "as_recorded")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "prompt_ids": [1]}', r":1: column 'prompt': expected either"),
        ("{}", r":1: column 'prompt': expected either"),
        ('{"prompt": "a"}', r":1: column 'prompt': .*no tokenizer"),
        ('{"prompt_ids": []}', r":1: column 'prompt_ids': expected at least one"),
        ('{"prompt_ids": [1, 26]}', r":1: column 'prompt_ids': expected token ids from 0 to 25, got 26"),
        ('{"prompt_ids": [1], "max_new_tokens": 0}', r":1: column 'max_new_tokens'"),
        ('{"prompt_ids": [1], "due_s": -1}', r":1: column 'due_s'"),
        ('{"prompt_ids": [1], "due_s": 1e308}', r":1: column 'due_s': expected seconds from 0 to 1e\+09"),
        ('{"prompt_ids": [1], "due_s": 1' + "0" * 400 + "}", r":1: column 'due_s'"),
        ('{"prompt_ids": [1], "due_s": NaN}', r":1: column 'due_s'"),
        ('{"prompt_ids": [1], "due_s": 1' + "0" * 5000 + "}", r":1: column 1"),
        ('{"prompt_ids": [1], "max_new_tokens": 1' + "0" * 400 + "}", r":1: column 'max_new_tokens'"),
        ('{"prompt_ids": [1], "max_tokens": 4}', r":1: column 'max_tokens': expected only the keys"),
        ("prompt", r":1: column 1"),
        ("", "no prompts"),
    ],
)
def test_malformed_lines(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        build(tmp_path / "p.jsonl", line + "\n")
