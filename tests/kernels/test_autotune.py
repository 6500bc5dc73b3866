"""Choosing by measurement, and the choices kept on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.kernels.autotune import FINAL, FINALISTS, SCREENING, Choice, GraphTimer, choose
from engine.kernels.autotune_cache import ChoiceCache, cache_folder

KEY = {"operation": "linear", "device": "NVIDIA H200", "cublaslt": 130100, "rows": 8, "biased": False}
CHOICE = Choice("cublaslt:00ff", 1.25e-05, 1.5e-05)


class Stopwatch:
    """Times by name, and the rounds it was asked for."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.rounds = seconds, []

    def __call__(self, names: Sequence[str], repeats: int) -> list[float]:
        self.rounds.append((tuple(names), repeats))
        return [self.seconds[name] for name in names]


def test_the_fastest_wins_if_it_saves_more_than_two_percent() -> None:
    watch = Stopwatch(torch=10.0, a=9.9, b=9.7, c=12.0)
    assert choose("torch", ["a", "b", "c"], watch) == Choice("b", 9.7, 10.0)
    assert watch.rounds == [(("torch", "a", "b", "c"), FINAL)]
    assert choose("torch", ["a", "c"], watch) == Choice("torch", 10.0, 10.0)
    assert choose("torch", [], watch) == Choice("torch", 10.0, 10.0)


def test_many_are_screened_and_the_best_meet_the_baseline_again() -> None:
    names = [f"n{i}" for i in range(10)]
    watch = Stopwatch(torch=5.0, **{name: 10.0 - i for i, name in enumerate(names)})
    assert choose("torch", names, watch) == Choice("n9", 1.0, 5.0)
    assert watch.rounds == [(tuple(names), SCREENING), (("torch", "n9", "n8", "n7", "n6"), FINAL)]
    assert FINALISTS == 4


def test_the_final_round_decides_over_the_screening() -> None:
    def measure(names: Sequence[str], repeats: int) -> list[float]:
        times = {name: float(index) for index, name in enumerate(names)}
        return [times[name] if repeats == SCREENING else {"torch": 9.0, "b": 1.0}.get(name, 5.0) for name in names]

    assert choose("torch", ["a", "b", "c", "d", "e"], measure).candidate == "b"


class Device:
    """Stands for ``torch.cuda``: a clock that goes on by what replayed graphs take, and the order of replays."""

    def __init__(self) -> None:
        self.now, self.recording, self.pools, self.replayed = 0.0, None, 0, []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        device = self

        class Graph:
            def capture_begin(self, pool: int | None, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                device.pools += pool is None
                self.shared = device.pools if pool is None else pool
                self.seconds, device.recording = [], self

            def capture_end(self) -> None:
                device.recording = None

            def pool(self) -> int:
                return self.shared

            def replay(self) -> None:
                device.replayed.append(self)
                device.now += sum(self.seconds)

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        stream = SimpleNamespace(synchronize=lambda: None)
        for name, value in {
            "Stream": lambda device: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda device: None,
            "CUDAGraph": Graph,
            "Event": Event,
        }.items():
            patch.setattr(torch.cuda, name, value)

    def call(self, seconds: float) -> None:
        assert self.recording is not None, "timed calls run in a graph only"
        self.recording.seconds.append(seconds)


def test_the_timer_replays_candidates_in_turn_and_keeps_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.install(monkeypatch)
    timer = GraphTimer(torch.device("cuda"))
    slow, fast = [lambda: device.call(3.0)] * 4, [lambda: device.call(1.0), lambda: device.call(2.0)]
    assert timer.seconds_per_call([slow, fast], 3) == pytest.approx([3.0, 1.5])
    first, second, *rest = device.replayed
    assert rest == [first, second] * 3  # once each unmeasured, then in turn
    assert timer.seconds_per_call([fast], 1) == pytest.approx([1.5])
    assert device.pools == 1
    timer.close()
    timer.seconds_per_call([fast], 1)
    assert device.pools == 2


def test_a_call_that_fails_while_it_is_recorded_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.install(monkeypatch)

    def fail() -> None:
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        GraphTimer(torch.device("cuda")).seconds_per_call([[fail]], 1)
    assert device.recording is None


def test_a_choice_is_found_again_under_its_key_only(tmp_path: Path) -> None:
    cache = ChoiceCache(tmp_path / "deep" / "folder")
    assert cache.load(KEY) is None
    cache.store(KEY, CHOICE)
    assert ChoiceCache(tmp_path / "deep" / "folder").load(KEY) == CHOICE
    assert cache.load(dict(reversed(KEY.items()))) == CHOICE
    for name, other in (("rows", 16), ("device", "NVIDIA H100"), ("cublaslt", 130200), ("biased", True)):
        assert cache.load(KEY | {name: other}) is None
    cache.store(KEY, Choice("torch", 1.0, 1.0))
    assert cache.load(KEY) == Choice("torch", 1.0, 1.0)
    assert len(list((tmp_path / "deep" / "folder").iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": 1}', '{"key": KEY, "choice": {"candidate": "a"}}', '{"key": KEY, "choice": 7}'],
)
def test_a_file_that_cannot_be_read_is_said_and_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ChoiceCache(tmp_path)
    cache.store(KEY, CHOICE)
    (path,) = tmp_path.iterdir()
    path.write_text(text.replace("KEY", json.dumps(KEY)))
    assert cache.load(KEY) is None
    if text != '{"key": 1}':  # of another problem, as far as one can tell
        assert str(path) in caplog.text
    cache.store(KEY, CHOICE)
    assert cache.load(KEY) == CHOICE


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = ChoiceCache(tmp_path / "file" / "tuning")
    with caplog.at_level(logging.WARNING):
        cache.store(KEY, CHOICE)
        cache.store(KEY | {"rows": 9}, CHOICE)
    assert caplog.text.count("are not kept") == 1
    assert cache.load(KEY) is None


def test_without_a_folder_nothing_is_kept() -> None:
    cache = ChoiceCache(None)
    cache.store(KEY, CHOICE)
    assert cache.load(KEY) is None


def _write_many(folder: Path, writer: int) -> None:
    cache = ChoiceCache(folder)
    for turn in range(100):
        cache.store(KEY, Choice("x" * (1 + 997 * writer), float(turn), 1.0))
        cache.store(KEY | {"rows": 1000 * writer + turn}, CHOICE)


def test_writers_at_the_same_time_leave_whole_files_and_all_choices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_many, args=(tmp_path, writer)) for writer in (1, 2)
    ]
    for process in writers:
        process.start()
    cache, seen, running = ChoiceCache(tmp_path), 0, True
    while running:
        running = any(process.is_alive() for process in writers)
        choice = cache.load(KEY)
        if choice is not None:
            assert len(choice.candidate) in (998, 1995)
            seen += 1
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert seen > 0
    assert caplog.text == ""
    assert all(cache.load(KEY | {"rows": 1000 * w + turn}) == CHOICE for w in (1, 2) for turn in range(100))
    assert not list(tmp_path.glob("*.part"))


def test_threads_store_too(tmp_path: Path) -> None:
    threads = [threading.Thread(target=_write_many, args=(tmp_path, w)) for w in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 201


def test_where_choices_are_kept() -> None:
    home = Path(os.path.expanduser("~"))
    assert cache_folder({}) == home / ".cache" / "cb-bench" / "tuning"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/cb-bench/tuning")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "ENGINE_CACHE_DIR": "/y"}) == Path("/y/tuning")
    assert cache_folder({"ENGINE_CACHE_DIR": "~/z"}) == home / "z" / "tuning"
    assert cache_folder({"ENGINE_CACHE_DIR": ""}) is None
