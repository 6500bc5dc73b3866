"""Start, stop and cancel of a manager, from several threads and at the wrong moment."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from engine import init_continuous_batching


def test_system_exit_in_forward_ends_every_request(tiny, config, generation):
    """Whatever ends the loop ends its requests."""
    model = tiny("tiny-gpt2")
    manager = init_continuous_batching(model, generation(), config())

    def leave(*args):
        raise SystemExit(3)

    model.transformer.h[0].mlp.register_forward_hook(leave)
    manager.start()
    try:
        manager.add_request([1, 2, 3], request_id="a")
        assert [o.request_id for o in manager] == ["a"]
        assert not manager._intake.live
    finally:
        manager.destroy()


def test_stop_from_several_threads(tiny, config, generation):
    manager = init_continuous_batching(tiny(), generation(), config())
    manager.start()
    manager.add_request([1, 2, 3], max_new_tokens=200)
    errors = []

    def stop():
        try:
            manager.stop()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=stop) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    manager.destroy()
    assert not errors


def test_start_from_several_threads_runs_one_loop(tiny, config, generation):
    most = 0
    for _ in range(10):
        manager = init_continuous_batching(tiny(), generation(), config())
        threads = [threading.Thread(target=manager.start) for _ in range(6)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        most = max(most, sum(t.name == "continuous-batching" and t.is_alive() for t in threading.enumerate()))
        manager.destroy()
    assert most <= 1


def test_a_failed_warm_up_is_not_taken_for_done(monkeypatch, tiny, config, generation):
    from engine.core import EngineCore

    manager = init_continuous_batching(tiny(), generation(), config())

    def fail(self):
        raise RuntimeError("capture failed")

    monkeypatch.setattr(EngineCore, "warm_up", fail)
    with pytest.raises(RuntimeError):
        manager.start()
    try:
        assert not manager.warmed_up
    finally:
        manager.destroy()


def test_a_request_cancelled_before_the_start_is_cancelled(tiny, config, generation):
    manager = init_continuous_batching(tiny(), generation(), config())
    manager.add_request([1, 2, 3], request_id="a")
    manager.cancel_request("a")
    manager.destroy()
    assert Counter(o.status.name for o in manager) == {"CANCELLED": 1}
