from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from harness import journal as journals
from harness.journal import FILE, Journal, Known, discard, recover
from harness.record import ConfigValue, Outcome
from harness.recorder import Recorder
from harness.ticker import Ticker

KNOWN = Known(
    {"run_id": "r", "engine": "ours"}, 1.5, None, [ConfigValue("page_size", 16, "user")], {"a": [1]}, {"tokens": 3}
)


def observe(recorder, step):
    """The step-th of six looks at three requests."""
    t = 1000 + step
    if step == 0:
        recorder.started(1000)
    if step % 2 == 0:
        recorder.sent(f"r{step // 2}", t, t)
    recorder.on_tokens(f"r{step // 2}", [step, step + 1], t)
    if step == 3:
        recorder.on_end("r1", Outcome("http_503"), t, "no", output_tokens=4)


def test_what_was_written_is_what_is_read(fakes, tmp_path):
    recorder = Recorder(fakes.workload([0.0] * 3))
    journal = Journal(tmp_path, KNOWN, recorder.records())
    for step in range(6):
        observe(recorder, step)
        journal.add(recorder.take_changes(), recorder.t_start_ns, [(1000 + step, {"rss_bytes": step})])
    record = recover(tmp_path)
    assert record.requests == recorder.records()
    assert record.requests[1].outcome is Outcome("http_503")
    assert (record.t_start_ns, record.t_end_ns) == (1000, 1005)
    assert record.config == [ConfigValue("page_size", 16, "user")]
    assert (record.load_s, record.warmup_s, record.environment, record.calibration) == (
        1.5,
        None,
        {"a": [1]},
        {"tokens": 3},
    )
    assert [s["rss_bytes"] for s in record.telemetry] == list(range(6))
    assert np.allclose([s["t_s"] for s in record.telemetry], np.arange(6) / 1e9)
    discard(tmp_path)
    discard(tmp_path)
    assert recover(tmp_path) is None


def test_cut_off_anywhere_what_came_before_is_whole(fakes, tmp_path):
    """At every length of the file: the requests are as they were at one of the looks, in order."""
    recorder = Recorder(fakes.workload([0.0] * 3))
    journal = Journal(tmp_path, KNOWN, recorder.records())
    looks = [recorder.records()]
    for step in range(6):
        observe(recorder, step)
        journal.add(recorder.take_changes(), recorder.t_start_ns, [])
        looks.append(recorder.records())
    data = (tmp_path / FILE).read_bytes()
    seen = []
    for length in range(0, len(data) + 1, 7):
        (tmp_path / FILE).write_bytes(data[:length])
        record = recover(tmp_path)
        if record is not None:
            seen.append(looks.index(record.requests))
    (tmp_path / FILE).write_bytes(data)
    seen.append(looks.index(recover(tmp_path).requests))
    assert seen == sorted(seen)
    assert set(seen) == set(range(7))


class Samples:
    def since(self, n):
        return []


def test_the_ticker_keeps_what_came_last(fakes, tmp_path, monkeypatch):
    recorder, sent = Recorder(fakes.workload([0.0])), threading.Event()
    ticker = Ticker(lambda **counts: sent.set(), recorder, Journal(tmp_path, KNOWN, recorder.records()), Samples())
    ticker.start()
    assert sent.wait(10)
    observe(recorder, 0)
    ticker.stop()
    ticker.stop()
    assert recover(tmp_path).requests == recorder.records()
    assert len(recover(tmp_path).requests[0].chunks) == 1


def test_a_full_disk_ends_the_journal_and_not_the_measurement(fakes, tmp_path, capsys):
    recorder = Recorder(fakes.workload([0.0]))
    calls = []

    def full(*args):
        calls.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    broken = SimpleNamespace(add=full, close=lambda: None)
    ticker = Ticker(lambda **counts: None, recorder, broken, Samples())
    ticker.start()
    ticker.stop()
    ticker.stop()
    assert len(calls) == 1
    assert "the run's journal ends here: OSError: [Errno 28]" in capsys.readouterr().out


def test_a_journal_replaces_an_earlier_one(fakes, tmp_path):
    (tmp_path / journals.FILE).write_bytes(b"x" * 100)
    recorder = Recorder(fakes.workload([0.0]))
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere", KNOWN, recorder.records())
    Journal(tmp_path, KNOWN, recorder.records())
    assert recover(tmp_path).requests == recorder.records()


def test_a_write_that_a_full_disk_cuts_short_is_an_error(fakes, tmp_path, monkeypatch):
    """A raw file writes what fits and says how much; a frame written behind the torn one would be read as its rest."""
    recorder = Recorder(fakes.workload([0.0] * 3))
    journal = Journal(tmp_path, KNOWN, recorder.records())
    observe(recorder, 0)
    journal.add(recorder.take_changes(), recorder.t_start_ns, [])
    whole = recover(tmp_path).requests
    file = journal._file
    monkeypatch.setattr(journal, "_file", SimpleNamespace(write=lambda data: file.write(data[:20]), close=file.close))
    observe(recorder, 1)
    with pytest.raises(OSError, match=r"No space left"):
        journal.add(recorder.take_changes(), recorder.t_start_ns, [])
    journal.close()
    assert recover(tmp_path).requests == whole
