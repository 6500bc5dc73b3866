from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.deliveries import Deliveries, DeliveryLog, TokenChunk

_IDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=3).map(tuple)
_DELIVERY = st.one_of(
    st.builds(lambda ids: TokenChunk(0, ids), _IDS),
    st.builds(lambda count: TokenChunk(0, None, count), st.one_of(st.none(), st.integers(1, 3))),
)


@given(st.lists(st.tuples(st.integers(0, 3), _DELIVERY), max_size=30))
def test_the_log_gives_each_request_its_own_deliveries(came):
    """Any order, any sizes; a request that mixes seen and hidden ids keeps its times and sizes and no ids."""
    log = DeliveryLog()
    expected: list[list[TokenChunk]] = [[], [], [], []]
    for t, (k, chunk) in enumerate(came):
        if chunk.token_ids is None:
            log.add_hidden(k, chunk.count, t)
        else:
            log.add(k, chunk.token_ids, t)
        expected[k].append(TokenChunk(t, chunk.token_ids, chunk.count))
    for own, chunks in zip(log.by_request(4), expected, strict=True):
        assert [c.time_ns for c in own] == [c.time_ns for c in chunks]
        assert [c.size for c in own] == [c.size for c in chunks]
        if any(c.token_ids is None for c in chunks):
            assert own.token_ids is None
        else:
            assert list(own) == chunks == list(Deliveries.of(chunks))
    assert log.tokens == sum(c.size or 0 for chunks in expected for c in chunks)


def test_columns_answer_like_a_list():
    chunks = [TokenChunk(5, (1, 2)), TokenChunk(9, (3,))]
    own = Deliveries.of(chunks)
    assert own == chunks
    assert own[1] == chunks[1]
    assert own[:1] == chunks[:1]
    assert own != chunks[:1]
    assert Deliveries.of(own) is own
    assert len(Deliveries.of([])) == 0
