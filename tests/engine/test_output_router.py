"""Outputs are taken once, in order, from whichever side asks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from engine import GenerationOutput, RequestStatus
from engine.output_router import OutputRouter
from engine.requests import Request

Make = Callable[..., Request]


def never() -> bool:
    return False


def output(make_request: Make, name: str, over: bool = True) -> GenerationOutput:
    request = make_request([1], request_id=name)
    request.status = RequestStatus.FINISHED if over else RequestStatus.DECODING
    return GenerationOutput(request)


def test_order_of_arrival(make_request: Make) -> None:
    router = OutputRouter()
    router.deliver([output(make_request, "a"), output(make_request, "b")])
    router.deliver([output(make_request, "c")])
    taken = [router.take(0, never) for _ in range(3)]
    assert [o.request_id for o in taken if o] == ["a", "b", "c"]
    assert router.is_empty
    assert router.take(0, never) is None


def test_one_requests_outputs_past_those_of_others(make_request: Make) -> None:
    router = OutputRouter()
    outputs = [output(make_request, n, over=False) for n in "abab"]
    router.deliver(outputs)
    assert router.take_of("b", 0, never) is outputs[1]
    assert router.take(0, never) is outputs[0]
    assert router.take(0, never) is outputs[2], "b's first is taken and not seen again"
    assert router.take_of("b", 0, never) is outputs[3]
    assert router.take_of("b", 0, never) is None
    assert router.is_empty


def test_the_head_only_if_it_is_the_one_asked_for(make_request: Make) -> None:
    """A-res-03."""
    router = OutputRouter()
    router.deliver([output(make_request, "a"), output(make_request, "b")])
    assert router.take_head("zz", None, never) is None
    assert router.take_head("b", None, never) is None
    assert router.take_head("a", None, never).request_id == "a"  # type: ignore[union-attr]
    assert router.take_head("b", None, never).request_id == "b"  # type: ignore[union-attr]


def test_a_timeout_is_kept(make_request: Make) -> None:
    started = time.monotonic()
    assert OutputRouter().take(0.05, never) is None
    assert time.monotonic() - started >= 0.05


def test_a_waiting_thread_gives_up_when_told(make_request: Make) -> None:
    router, over = OutputRouter(), threading.Event()
    thread = threading.Thread(target=router.take, args=(None, over.is_set), daemon=True)
    thread.start()
    over.set()
    router.wake()
    thread.join(5)
    assert not thread.is_alive()


def test_what_is_there_is_taken_before_giving_up(make_request: Make) -> None:
    router = OutputRouter()
    router.deliver([output(make_request, "a")])
    assert router.take(None, lambda: True) is not None
    assert router.take(None, lambda: True) is None


def test_callbacks_get_waiting_outputs_then_new_ones_and_nothing_is_queued(make_request: Make) -> None:
    router = OutputRouter()
    seen: list[GenerationOutput] = []
    first, second, last = (output(make_request, "a", over) for over in (False, False, True))

    async def main() -> None:
        router.deliver([first, output(make_request, "b")])
        router.handle("a", seen.append)
        thread = threading.Thread(target=lambda: router.deliver([second, last]))
        thread.start()
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        thread.join()

    asyncio.run(asyncio.wait_for(main(), 5))
    assert seen == [first, second, last]
    assert router.take(0, never).request_id == "b"  # type: ignore[union-attr]
    assert router.is_empty
    again = output(make_request, "a")
    router.deliver([again])  # the callback is dropped after the last output
    assert router.take(0, never) is again


def test_a_reader_that_comes_first_leaves_callbacks_their_order(make_request: Make) -> None:
    """Each delivery is sorted out by a thread that takes another request's output; the event loop is busy meanwhile."""
    router = OutputRouter()
    outputs = [output(make_request, "a", over) for over in (False, False, False, True)]
    seen: list[GenerationOutput] = []

    def deliver_and_take() -> None:
        for each in outputs[1:]:
            router.deliver([each, output(make_request, "b")])
            assert router.take(0, never).request_id == "b"  # type: ignore[union-attr]

    async def main() -> None:
        router.deliver(outputs[:1])
        router.handle("a", seen.append)
        thread = threading.Thread(target=deliver_and_take)
        thread.start()
        thread.join()
        assert seen == []
        while len(seen) < 4:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 5))
    assert seen == outputs
    assert router.is_empty


def test_dropping_what_waits_leaves_callbacks_theirs(make_request: Make) -> None:
    router = OutputRouter()
    seen: list[str] = []

    async def main() -> None:
        router.handle("a", lambda o: seen.append(o.request_id))
        router.deliver([output(make_request, "b"), output(make_request, "a"), output(make_request, "b")])
        assert router.clear() == 2
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 5))
    assert seen == ["a"]
    router.deliver([output(make_request, "b"), output(make_request, "c")])
    assert router.clear() == 2
    assert router.is_empty


def test_a_closed_event_loop_loses_its_own_only(make_request: Make, caplog: pytest.LogCaptureFixture) -> None:
    router = OutputRouter()

    async def leave() -> None:
        router.handle("a", print)
        router.handle("b", print)

    async def stay() -> list[str]:
        seen: list[str] = []
        router.handle("b", lambda o: seen.append(o.request_id))  # in the place of the one before
        router.deliver([output(make_request, name, over=False) for name in "ab"])
        router.deliver([output(make_request, name) for name in "ab"])
        router.deliver([output(make_request, "c")])
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        return seen

    asyncio.run(leave())
    assert asyncio.run(asyncio.wait_for(stay(), 5)) == ["b", "b"]
    assert caplog.text.count("1 outputs found their event loop closed") == 2
    assert router.take(0, never).request_id == "c"  # type: ignore[union-attr]
    assert router.is_empty


def test_a_callback_that_raises_takes_nothing_from_the_others(make_request: Make) -> None:
    router = OutputRouter()
    seen: list[str] = []
    errors: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        router.handle("a", lambda o: 1 // 0)
        router.handle("b", lambda o: seen.append(o.request_id))
        router.deliver([output(make_request, "a"), output(make_request, "b")])
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 5))
    assert seen == ["b"]
    assert [type(context["exception"]) for context in errors] == [ZeroDivisionError]


def test_a_callback_needs_an_event_loop(make_request: Make) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        OutputRouter().handle("a", print)


@pytest.mark.parametrize("by_handler", [False, True])
def test_an_output_that_nobody_takes_does_not_let_others_pile_up_behind_it(
    make_request: Make, by_handler: bool
) -> None:
    router = OutputRouter()
    router.deliver([output(make_request, "abandoned")])

    async def handled(name: str) -> None:
        router.handle(name, lambda _: None)

    for i in range(1000):
        router.deliver([output(make_request, f"r{i}")])
        if by_handler:
            asyncio.run(handled(f"r{i}"))
        else:
            assert router.take_of(f"r{i}", 0, never) is not None
        router.deliver([])
    assert len(router._queue) < 100
    last = router.take(0, never)
    assert last is not None
    assert last.request_id == "abandoned"
    assert router.is_empty
    router.deliver([output(make_request, "next")])
    assert router.take(0, never) is not None
    assert router.is_empty
