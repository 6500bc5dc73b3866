"""What is kept by slot and how it travels: histories, keys of streams, packed arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests import Request
from engine.sampling import SamplingParams
from engine.sampling.history import IN_FLIGHT, HistoryTable, resolve_in_flight
from engine.sampling.packing import Pack
from engine.sampling.random import seed_key, stream_key, stream_keys
from engine.sampling.settings import SettingsGatherer

CPU = torch.device("cpu")


def windows(table: HistoryTable, rows: list[tuple[int, int, int]], pad: int = 99) -> list[list[int]]:
    slots, starts, ends = (np.array(column) for column in zip(*rows, strict=True))
    return table.windows(slots, starts, ends, pad).tolist()


def test_histories_grow_are_cut_and_padded() -> None:
    table = HistoryTable()
    table.restart(5)
    table.restart(0)
    table.follow(5, [1, 2, 3])
    table.follow(0, [7])
    assert windows(table, [(0, 0, 1), (5, 0, 3)]) == [[7, 99, 99], [1, 2, 3]]
    assert windows(table, [(5, 1, 3), (0, 0, 1)]) == [[2, 3], [7, 99]]
    assert windows(table, [(5, 0, 4), (0, 1, 2)]) == [[1, 2, 3, IN_FLIGHT], [IN_FLIGHT, 99, 99, 99]]
    assert windows(table, [(0, 1, 1)]) == [[99]], "nothing to look back at"
    table.follow(5, [1, 2, 3, 4])
    table.follow(5, list(range(1, 1001)))
    assert windows(table, [(5, 996, 1001)]) == [[997, 998, 999, 1000, IN_FLIGHT]]
    table.restart(5)
    table.follow(5, [8, 9])
    assert windows(table, [(5, 0, 2)]) == [[8, 9]]


def test_the_token_in_flight_is_the_rows_own() -> None:
    tokens = torch.tensor([[1, IN_FLIGHT, 99], [1, 2, 3]], dtype=torch.int32)
    assert resolve_in_flight(tokens, torch.tensor([7, 8], dtype=torch.int32)).tolist() == [[1, 7, 99], [1, 2, 3]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**64), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_keys_of_many_rows_are_those_of_each(pairs: list[tuple[int, int]]) -> None:
    keys = stream_keys(np.array([seed_key(s) for s, _ in pairs]), np.array([i for _, i in pairs]))
    assert keys.tolist() == [stream_key(s, i) for s, i in pairs]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["i8", "i4", "f4"]), st.integers(0, 5), st.integers(1, 3)), max_size=6))
def test_packed_arrays_arrive_as_they_were(shapes: list[Any]) -> None:
    pack = Pack()
    arrays = [np.arange(a * b).reshape(a, b).astype(kind) for kind, a, b in shapes]
    packed = [pack.add(array) for array in arrays]
    pack.upload(CPU)
    for array, item in zip(arrays, packed, strict=True):
        assert item().numpy().dtype == array.dtype
        np.testing.assert_array_equal(item().numpy(), array)


def test_one_copy_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows ask for, their settings go to the device at once."""
    uploads = []
    upload = Pack.upload

    def count(self: Pack, device: torch.device) -> None:
        uploads.append(device)
        upload(self, device)

    monkeypatch.setattr(Pack, "upload", count)
    gatherer, last = SettingsGatherer(CPU), torch.zeros(4, dtype=torch.int64)
    params = [
        SamplingParams(0.7, 5, 0.9, min_p=0.1),
        SamplingParams(repetition_penalty=1.2, no_repeat_ngram_size=2),
        SamplingParams(bad_words_ids=((1, 2), (3,)), min_new_tokens=2),
        SamplingParams(top_logprobs=3),
    ]
    requests = []
    for slot, p in enumerate(params):
        request = Request.create(str(slot), [1, 2, 3], 5, frozenset({4}), p)
        request.slot = slot
        requests.append(request)
    got = gatherer.gather(requests, [3, 3, 3, 3], 10, last)
    assert got is not None
    assert len(uploads) == 1
    assert got.processed is not None
    assert got.processed.tolist() == [0, 1, 2]
    assert (got.top_counts, got.top.tolist() if got.top is not None else None) == ((0, 0, 0, 3), [3])
    assert got.random is not None
    assert got.random.rows.tolist() == [0]
    assert got.history is not None
    assert got.history.rows.tolist() == [1, 2]
    assert got.history.tokens.tolist() == [[1, 2, 3], [3, 10, 10]], "no more than the rules look at"


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"repetition_penalty": 1.1}, [1, 2, 3, 4, 5]),
        ({"no_repeat_ngram_size": 3}, [1, 2, 3, 4, 5]),
        ({"presence_penalty": 1.0}, [4, 5]),
        ({"bad_words_ids": [[4, 5, 6]]}, [4, 5]),
        ({"bad_words_ids": [[3, 4, 5, 6]], "frequency_penalty": 1.0}, [3, 4, 5]),
        ({"sequence_bias": {(9,) * 30: 1.0}}, [1, 2, 3, 4, 5]),
    ],
)
def test_a_row_sends_what_its_rules_look_at(values: dict[str, Any], window: list[int]) -> None:
    request = Request.create("r", [1, 2, 3], 5, frozenset(), SamplingParams(**values))
    request.slot = 2
    request.tokens += [4]
    got = SettingsGatherer(CPU).gather([request], [5], 10, torch.full((3,), 5, dtype=torch.int32))
    assert got is not None
    assert got.history is not None
    assert got.history.tokens.tolist() == [window]
    assert got.history.generated_from.tolist() == [max(0, len(window) - 2)]
