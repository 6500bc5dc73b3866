"""What is due when, where requests wait for each other: against times worked out by hand."""

from __future__ import annotations

from harness.agenda import Agenda
from workloads.workload import ScheduledRequest, Workload

S = 1_000_000_000


def request(name: str, due_s: float = 0.0, follows: str | None = None, think_s: float = 0.0) -> ScheduledRequest:
    return ScheduledRequest(name, due_s, (1, 2), 3, follows=follows, think_s=think_s)


def taken(agenda: Agenda) -> tuple[float, str]:
    due_ns, request = agenda.take()
    return due_ns / S, request.request_id


def test_an_open_loop_is_known_from_the_start():
    agenda = Agenda(Workload("w", (request("a", 0.5), request("b", 0.5), request("c", 2.0))))
    assert agenda.next_due_ns() == 500_000_000
    agenda.begin(10 * S)
    assert agenda.next_due_ns() == 10_500_000_000
    assert [taken(agenda) for _ in range(3)] == [(10.5, "a"), (10.5, "b"), (12.0, "c")]
    assert agenda.exhausted
    assert agenda.next_due_ns() is None
    assert agenda.ended("a", True, 99 * S) == []


def test_a_turn_is_due_its_think_time_after_the_end_before_it():
    w = Workload("w", (request("a1"), request("a2", follows="a1", think_s=2.5), request("b1", 4.0)))
    agenda = Agenda(w)
    assert taken(agenda) == (0.0, "a1")
    assert agenda.next_due_ns() == 4 * S
    assert agenda.ended("a1", True, 1 * S) == []
    assert taken(agenda) == (3.5, "a2")
    assert taken(agenda) == (4.0, "b1")
    assert agenda.exhausted


def test_a_turn_is_never_sent_before_its_own_time():
    agenda = Agenda(Workload("w", (request("a1"), request("a2", 5.0, "a1", 1.0))))
    agenda.take()
    agenda.ended("a1", True, 2 * S)
    assert taken(agenda) == (5.0, "a2")


def test_a_place_is_that_of_a_whole_session():
    w = Workload("w", (request("a1"), request("a2", follows="a1"), request("b1", think_s=1.0), request("c1")), 1)
    agenda = Agenda(w)
    assert taken(agenda) == (0.0, "a1")
    assert agenda.next_due_ns() is None
    assert not agenda.exhausted  # b1 and c1 wait for the place, a2 for the answer
    agenda.ended("a1", True, 3 * S)
    assert taken(agenda) == (3.0, "a2")
    assert agenda.next_due_ns() is None
    agenda.ended("a2", True, 5 * S)
    assert taken(agenda) == (6.0, "b1")  # its client thought
    agenda.ended("b1", True, 7 * S)
    assert taken(agenda) == (7.0, "c1")
    assert agenda.exhausted


def test_a_session_ends_with_a_turn_that_failed():
    chain = (request("a1"), request("a2", follows="a1"), request("a3", follows="a2"), request("b1"))
    agenda = Agenda(Workload("w", chain, 1))
    agenda.take()
    assert agenda.ended("a1", False, 2 * S) == ["a2", "a3"]
    assert taken(agenda) == (2.0, "b1")
    assert agenda.exhausted


def test_a_phase_is_due_its_pause_after_the_last_end_of_the_one_before():
    def burst(name: str, phase: int, think_s: float = 0.0) -> ScheduledRequest:
        return ScheduledRequest(name, 0.0, (1, 2), 3, think_s=think_s, phase=phase)

    w = Workload("w", (burst("a", 0), burst("b", 0), burst("c", 1, 0.5), burst("d", 1, 0.5), burst("e", 2)))
    agenda = Agenda(w)
    assert [taken(agenda) for _ in range(2)] == [(0.0, "a"), (0.0, "b")]
    agenda.ended("b", True, 1 * S)
    assert agenda.next_due_ns() is None
    agenda.ended("a", False, 3 * S)  # a failure is an end
    assert [taken(agenda) for _ in range(2)] == [(3.5, "c"), (3.5, "d")]
    agenda.ended("c", True, 4 * S)
    assert not agenda.exhausted
    agenda.ended("d", True, 5 * S)
    assert taken(agenda) == (5.0, "e")
    assert agenda.exhausted


def test_making_it_takes_time_in_proportion_to_the_requests():
    """An hour of a real trace has tens of thousands: looking at all of them for each would take minutes."""

    class Counted(tuple):
        looks = 0

        def __iter__(self):
            Counted.looks += 1
            return super().__iter__()

    w = Workload("w", Counted(request(f"r{k}", k / 10) for k in range(200)))
    assert len(Agenda(w)._due) == 200
    assert 0 < Counted.looks < 20
