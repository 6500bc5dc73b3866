"""A request with children from outside: names, order, refusal, cancellation and stops."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from engine import RequestStatus, generate_batch


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


def test_a_batch_returns_children_before_their_parent(m1: Any, c1: Any, reference: Any) -> None:
    """Names and order of transformers 5.24; a bad prompt fails with all its sequences."""
    prompts = [prompt(6, 1), [], prompt(5, 2)]
    generation = GenerationConfig(max_new_tokens=4, num_return_sequences=3, do_sample=True, top_k=1)
    outputs = generate_batch(m1, prompts, generation, c1())
    assert list(outputs) == [f"req_{i}{child}" for i in range(3) for child in ("__child#0", "__child#1", "")]
    for i in (0, 2):
        for child in ("__child#0", "__child#1", ""):
            assert outputs[f"req_{i}{child}"].generated_tokens == reference(m1, prompts[i], 4)
    assert {o.status for name, o in outputs.items() if "req_1" in name} == {RequestStatus.FAILED}
    assert all("empty" in o.error for name, o in outputs.items() if "req_1" in name)
    more = generate_batch(
        m1, prompts[:1], GenerationConfig(max_new_tokens=4, do_sample=True), c1(), num_return_sequences=2
    )
    assert list(more) == ["req_0__child#0", "req_0"]


@pytest.mark.parametrize(("wrong", "cause"), [(10**9, "is more than 16384"), (0, "must be an integer >= 1")])
def test_a_batch_of_impossibly_many_sequences_is_refused_before_their_names_are_made(
    m1: Any, c1: Any, wrong: int, cause: str
) -> None:
    with pytest.raises(ValueError, match=f"num_return_sequences.*{cause}"):
        generate_batch(
            m1, [[1, 2]], GenerationConfig(max_new_tokens=4, do_sample=True), c1(), num_return_sequences=wrong
        )


def test_an_id_of_a_child_may_not_be_taken(open_manager: Any) -> None:
    manager = open_manager(start=False)
    manager.add_request([1, 2], request_id="a", num_return_sequences=2)
    with pytest.raises(ValueError, match="'a__child#0' is in use"):
        manager.add_request([1], request_id="a__child#0")
    manager.add_request([1], request_id="b__child#0")
    with pytest.raises(ValueError, match="'b__child#0' is in use"):
        manager.add_request([1], request_id="b", num_return_sequences=2)
    manager.start()
    assert {o.request_id for o in manager} == {"a", "a__child#0", "b__child#0"}
    assert manager.add_request([1], num_return_sequences=3) is not None


def test_a_family_is_cancelled_one_by_one_and_stopped_together(
    open_manager: Any, m1: Any, reference: Any, gate: Any
) -> None:
    manager = open_manager(start=False, max_batch_tokens=4, num_blocks=60)
    hold = gate(after=1)
    ids = prompt(12, 4)
    manager.add_request(ids, request_id="a", num_return_sequences=4)
    manager.start()
    assert hold.reached.wait(10)
    manager.cancel_request("a")
    manager.cancel_request("a__child#1")
    hold.open()
    done = {o.request_id: o for o in manager}
    assert {n: o.status.name for n, o in done.items()} == {
        "a": "CANCELLED", "a__child#1": "CANCELLED", "a__child#0": "FINISHED", "a__child#2": "FINISHED",
    }  # fmt: skip
    assert done["a__child#2"].generated_tokens == reference(m1, ids, 8)
    manager.stop()
    for start in (False, True):
        manager = open_manager(start=start)
        manager.add_request(ids, request_id="a", num_return_sequences=3, max_new_tokens=100)
        manager.stop(hard_stop=True)
        assert {o.request_id: o.status for o in manager} == dict.fromkeys(
            ("a", "a__child#0", "a__child#1"), RequestStatus.FAILED
        )
