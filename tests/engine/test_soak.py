"""The soak of `engine.bench.soak`, short, and that it notices what it is there to notice."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.bench import soak as command
from engine.bench.oracle import Deliveries, Oracle, Wish, cut
from engine.bench.soak import main, soak
from engine.bench.tiny_models import tiny_model
from engine.core import EngineCore
from engine.requests import GenerationOutput, RequestStatus


def test_sixty_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "60", "--blocks", "24"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("soak tiny-llama: 60 requests")
    assert ", 0 violations, " in line


def test_the_paths_are_taken() -> None:
    result = soak(tiny_model("tiny-gemma2"), "tiny-gemma2", requests=40, blocks=30, seed=2, hard_stops=1)
    assert result.weight_changes == 1
    assert result.violations == ()
    assert set(result.ended) == {"finished", "cancelled", "failed"}
    assert result.partial > 0
    assert result.counters["preemptions"] > 0
    assert result.counters["forks"] > 0


def test_a_wrong_token_is_a_violation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Oracle.tokens
    monkeypatch.setattr(Oracle, "tokens", lambda *a: [(t + 1) % 97 for t in tokens(*a)])
    assert main(["--requests", "3"]) == 1
    said = capsys.readouterr()
    assert " 0 violations" not in said.out
    assert "is not [" in said.err


def test_a_loop_that_dies_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    step = EngineCore.step

    def broken(core: EngineCore) -> None:
        if threading.current_thread() is not threading.main_thread() and core.stats.steps == 20:
            raise RuntimeError("a broken step")
        step(core)

    monkeypatch.setattr(EngineCore, "step", broken)
    result = soak(tiny_model("tiny-llama"), "tiny-llama", requests=40, blocks=24, hard_stops=0)
    assert any("requests are not over: " in v and "a broken step" in v for v in result.violations)


def test_lost_blocks_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_take_all", lambda manager, _: manager._core.cache.pool.allocate(2))
    result = soak(tiny_model("tiny-llama"), "tiny-llama", requests=3, blocks=24, hard_stops=0, weight_changes=0)
    assert result.violations == ("2 of 24 blocks are not free at the end",)


def test_deliveries_notice_repeats_gaps_and_second_ends(make_request: Any) -> None:
    oracle = Oracle(None)
    oracle.tokens = lambda wish, child=None: [7, 8, 9]  # type: ignore[method-assign]
    deliveries = Deliveries(oracle)
    wish = Wish((1, 2), max_new_tokens=3, streaming=True)
    request = make_request([1, 2], 3, request_id="a", streaming=True)
    deliveries.expect("a", wish)

    request.append(7, 0.0)
    deliveries.take(GenerationOutput(request))
    assert deliveries.violations == []
    deliveries.take(GenerationOutput(request))
    assert "streamed length 1 after 1" in deliveries.violations[-1]
    request.append(8, 0.0)
    request.append(9, 0.0)
    assert request.comes_to_its_end()
    request.end(RequestStatus.FINISHED)
    deliveries.take(GenerationOutput(request))
    assert "streamed length 3 after 1" in deliveries.violations[-1]
    assert deliveries.open == []
    deliveries.take(GenerationOutput(request))
    assert "came after its terminal output" in deliveries.violations[-1]
    assert len(deliveries.violations) == 3


def test_cut() -> None:
    assert cut([1, 2, 3, 4], eos=3, stop=()) == [1, 2, 3]
    assert cut([1, 2, 3, 4], eos=-1, stop=(2, 3)) == [1, 2, 3]
    assert cut([3, 1], eos=-1, stop=(2, 3)) == [3, 1], "a stop sequence does not begin in the prompt"


def test_a_change_of_weights_is_checked_for_what_it_promises(make_request: Any) -> None:
    """Old tokens stay; what holds no keys of the old weights has the tokens of the new ones, the others may have any
    up to their end."""
    old, new = Oracle(None), Oracle(None)
    old.tokens = lambda wish, child=None: [7, 8, 9, 10][: wish.max_new_tokens]  # type: ignore[method-assign]
    new.tokens = lambda wish, child=None: [len(wish.prompt)] * wish.max_new_tokens  # type: ignore[method-assign]
    endings = {
        ("queued", (2, 2, 2, 2)): "",
        ("queued", (7, 8, 9, 10)): "is not [2, 2, 2, 2]",
        ("preempted", (7, 3, 3, 3)): "",
        ("preempted", (7, 8, 9, 10)): "is not [7, 3, 3, 3]",
        ("running", (7, 1, 1, 1)): "",
        ("running", (8, 1, 1, 1)): "does not begin with (7,)",
        ("running", (7, 1)): "is not at its end",
        ("running", (7, 5, 1, 1)): "goes on behind its end",
    }
    for (state, tokens), objection in endings.items():
        deliveries = Deliveries(old)
        deliveries.expect("a", Wish((1, 2), max_new_tokens=4, eos=5))
        generated = [] if state == "queued" else [7]
        deliveries.change_weights(new, {"a": generated}, set() if state == "running" else {"a"})
        request = make_request([1, 2], 4, request_id="a")
        for token in tokens:
            request.append(token, None)
        request.end(RequestStatus.FINISHED)
        deliveries.take(GenerationOutput(request))
        said = [v for v in deliveries.violations if "finish_reason" not in v]
        assert len(said) == bool(objection), (state, tokens, said)
        assert objection in "".join(said)
    deliveries = Deliveries(old)
    deliveries.expect("a", Wish((1, 2), max_new_tokens=4))
    deliveries.change_weights(new, {"a": [6]}, set())
    assert "is no beginning of" in deliveries.violations[0]
