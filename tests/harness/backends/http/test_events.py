from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from harness.backends.http.events import EventParser, ServerEvent

STREAM = (
    b': keep-alive\r\n\r\ndata: {"a": 1}\r\n\r\nevent: error\ndata: first\ndata: second\nid: 7\n\n'
    b'data:{"t":"\xc3\xa9"}\n\n\n\ndata: [DONE]'
)
EVENTS = [
    ServerEvent("", '{"a": 1}'),
    ServerEvent("error", "first\nsecond"),
    ServerEvent("", '{"t":"é"}'),
    ServerEvent("", "[DONE]"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_however_the_bytes_are_cut_the_events_are_the_same(cuts):
    parser, found = EventParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:end])
    assert found + parser.close() == EVENTS


def test_an_event_is_there_with_its_blank_line_and_not_before():
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [ServerEvent("", "x")]
    assert parser.close() == []
