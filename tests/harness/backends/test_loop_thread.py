"""A backend's event loop: tasks of requests, and an end that leaves none of them open."""

from __future__ import annotations

import asyncio
import threading

import pytest

from harness.backends.loop_thread import LoopThread


def test_tasks_run_in_the_thread_and_stop_ends_those_that_are_open():
    loop, done, order = LoopThread("client"), threading.Event(), []

    async def short():
        order.append(threading.current_thread().name)
        done.set()

    async def endless():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            order.append("cancelled")

    async def close():
        order.append("closed")

    loop.begin("a", short)
    assert done.wait(10)
    loop.begin("b", endless)
    loop.stop(close)
    loop.stop(close)
    assert order == ["client", "cancelled", "closed"]
    assert not any(t.name == "client" for t in threading.enumerate())


def test_wait_returns_and_raises():
    loop = LoopThread("client")

    async def answer():
        return 3

    async def fail():
        raise KeyError("x")

    async def close():
        return None

    try:
        assert loop.wait(answer()) == 3
        with pytest.raises(KeyError, match="x"):
            loop.wait(fail())
    finally:
        loop.stop(close)
