"""Backends with a known schedule for the tests of driver and recorder; made-up runs for those of simulation."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import forked, isolate
from harness.backends.base import TokenSink
from harness.record import Outcome
from workloads.workload import ScheduledRequest, Workload


def workload(due_s: Sequence[float], concurrency: int | None = None, tokens: int = 2) -> Workload:
    requests = tuple(ScheduledRequest(f"r{k}", t, (k + 1, k + 2, k + 3), tokens) for k, t in enumerate(due_s))
    return Workload("fake", requests, concurrency)


class InstantBackend:
    """Answers each request at once, in ``submit``, with ``max_new_tokens`` tokens stamped by ``now``."""

    name = "instant"

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.input_closed = False
        self.submitted: list[str] = []

    def start(self, sink: TokenSink) -> None:
        self.sink = sink

    def submit(self, request: ScheduledRequest) -> None:
        self.submitted.append(request.request_id)
        self.answer(request)

    def answer(self, request: ScheduledRequest) -> None:
        self.sink.on_admit(request.request_id, self.now())
        for token in range(request.max_new_tokens):
            self.sink.on_tokens(request.request_id, [token], self.now())
        self.sink.on_end(request.request_id, Outcome.OK_LENGTH, self.now())

    def close_input(self) -> None:
        self.input_closed = True


class PacedBackend(InstantBackend):
    """Answers only when the test calls :meth:`release`; counts how many requests are open at once."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__(now)
        self.open: list[ScheduledRequest] = []
        self.most_open = 0
        self.changed = threading.Condition()

    def submit(self, request: ScheduledRequest) -> None:
        with self.changed:
            self.submitted.append(request.request_id)
            self.open.append(request)
            self.most_open = max(self.most_open, len(self.open))
            self.changed.notify_all()

    def release(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.open, timeout=5)
            request = self.open.pop(0)
        self.answer(request)


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    return SimpleNamespace(workload=workload, InstantBackend=InstantBackend, PacedBackend=PacedBackend)


@pytest.fixture(scope="session")
def by_hand() -> SimpleNamespace:
    """What ``made_runs.py`` beside this file makes; loaded only by the tests that ask for it."""
    spec = importlib.util.spec_from_file_location("made_runs", Path(__file__).with_name("made_runs.py"))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return SimpleNamespace(
        setup=made.make_setup,
        model=made.make_model,
        workload=made.make_workload,
        true_model=made.TRUE,
        measured_folder=made.measured_folder,
    )


@pytest.fixture(scope="session")
def make_measured(by_hand: SimpleNamespace) -> Callable[..., Path]:
    """Writes a folder of runs at the given rates: simulated ones in the clothes of measured ones."""
    make: Callable[..., Path] = by_hand.measured_folder
    return make


@pytest.fixture(scope="session")
def measured_dir(make_measured: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_measured(tmp_path_factory.mktemp("results") / "sweep")


STAND_IN = """\
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).parent

def prepare():
    exec((HERE / "prepare.txt").read_text(), globals())

def main(argv):
    def send(**message):
        os.write(int(argv[0]), json.dumps(message).encode() + b"\\n")
    exec((HERE / "program.txt").read_text(), globals() | {"send": send, "argv": argv})
    return 0
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """In place of the measured process a program, which has ``send(**message)`` and ``argv``; and what its server does
    first. The servers of the test are its own."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "stand_in.py").write_text(STAND_IN)
    (modules / "prepare.txt").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), str(Path(__file__).resolve().parents[2])]))
    monkeypatch.setattr(isolate, "CHILD", "stand_in")

    def give(program: str, prepare: str | None = None) -> None:
        (modules / "program.txt").write_text(program)
        if prepare is not None:
            (modules / "prepare.txt").write_text(prepare)

    forked.end_servers()
    yield give
    forked.end_servers()
