"""Text that a tokenizer turns into a given number of tokens.

Ids made at random, decoded and encoded again, do not keep their number: neighbours merge, and special tokens are added.
Where a server takes no ids, the end of the text is changed until the number is right; a shared beginning stays shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ROUNDS = 24
_UNITS = (" a", " the", "a", "x", " x", "1", ".", "\n")


def text_of(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """Text that ``tokenizer`` encodes to ``len(prompt_ids)`` ids, the special tokens it adds counted.

    Begins like ``prompt_ids`` decoded.

    Raises:
        ValueError: no such text was found.
    """
    wanted = len(prompt_ids)
    ids = list(prompt_ids)
    for _ in range(_ROUNDS):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found = _length(tokenizer, text)
        if found == wanted:
            return text
        if found > wanted:
            ids = ids[: -(found - wanted)]
        else:
            ids += [*prompt_ids, *prompt_ids][: wanted - found]
    return _filled_up(tokenizer, prompt_ids, wanted)


def _filled_up(tokenizer: Any, prompt_ids: Sequence[int], wanted: int) -> str:
    """Shorten the text, then add pieces of one token each until the number is right."""
    shorter = len(prompt_ids)
    while shorter >= 0:
        start = tokenizer.decode(list(prompt_ids[:shorter]), skip_special_tokens=True)
        for unit in _UNITS:
            missing = wanted - _length(tokenizer, start)
            # A piece may merge with its neighbours, so the number of pieces is searched, not computed.
            for pieces in range(max(0, missing), max(0, missing) + 4):
                text = start + unit * pieces
                if _length(tokenizer, text) == wanted:
                    return text
        shorter = shorter - max(1, shorter // 8) if shorter else -1
    raise ValueError(f"no text of {wanted} tokens was found for this tokenizer: use a server that takes token ids")


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])
