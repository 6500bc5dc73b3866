"""How far a command is, and when that is said."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from harness import manifest
from harness.course import Course, duration, of_repeats, of_sweep
from harness.manifest import JobState
from harness.progress import JobDisplay


def note(folder, job, digest, state, second):
    stamp = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}+00:00"
    manifest.append(folder, JobState(job, digest, (), state, stamp))


def test_jobs_to_come_last_as_long_as_their_like(tmp_path):
    for job, digest in (("0", "slow"), ("1", "fast"), ("2", "slow"), ("3", "fast"), ("4", "new")):
        note(tmp_path, job, digest, "planned", 0)
    note(tmp_path, "0", "slow", "running", 0)
    first = of_sweep(tmp_path, "0", 7.0)
    assert first.during_this(7.0) == "run 1 of 5, time to go unknown until one has ended"
    assert first.after_this() == "1 of 5 runs, about 28 s to go"  # four as long as this one
    note(tmp_path, "0", "slow", "ok", 60)
    note(tmp_path, "1", "fast", "running", 60)
    note(tmp_path, "1", "fast", "ok", 80)
    note(tmp_path, "2", "slow", "running", 80)
    third = of_sweep(tmp_path, "2", 15.0)
    assert third == Course(ended=2, total=5, at_once=1, this_s=60.0, others_s=20.0 + 40.0)
    assert third.during_this(15.0) == "run 3 of 5, about 1.8 min to go"
    assert third.during_this(500.0) == "run 3 of 5, about 60 s to go"  # longer than its like: its rest is unknown
    note(tmp_path, "3", "fast", "running", 81)  # beside it
    assert of_sweep(tmp_path, "2", 15.0).during_this(15.0) == "run 3 of 5, about 52 s to go"


def test_a_failed_run_is_over_but_no_measure(tmp_path):
    for job in ("0", "1"):
        note(tmp_path, job, "h", "planned", 0)
    note(tmp_path, "0", "h", "running", 0)
    note(tmp_path, "0", "h", "failed", 1)
    note(tmp_path, "1", "h", "running", 1)
    assert of_sweep(tmp_path, "1", 2.0).during_this(2.0) == "run 2 of 2, time to go unknown until one has ended"
    assert of_sweep(tmp_path, "1", 2.0).after_this() == "2 of 2 runs"


def test_after_a_failed_first_run_no_time_is_named_that_the_next_one_would_not_know(tmp_path):
    for job in ("0", "1", "2"):
        note(tmp_path, job, "h", "planned", 0)
    note(tmp_path, "0", "h", "running", 0)
    first = of_sweep(tmp_path, "0", 7.0)
    assert first.after_this(well=False) == "1 of 3 runs"
    assert first.after_this(well=True) == "1 of 3 runs, about 14 s to go"


def test_while_a_process_ends_its_run_stays_ended():
    """The manifest knows of a run's end later than its line: until then the display does not go back."""
    out, asked = io.StringIO(), []

    def where():
        asked.append(1)
        return Course(ended=0, total=5, others_s=40.0)

    with JobDisplay("#0", where, Console(file=out, width=200), every_s=0.02) as display:
        display.note("6/6 requests ok")
        deadline = time.monotonic() + 20
        while out.getvalue().count("\n") < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        display.begin("#1")
        display.note("6/6 requests ok", last=False)
    _, first, *ticks, last = out.getvalue().splitlines()
    assert first == "#0: 6/6 requests ok · 1 of 5 runs, about 40 s to go"
    after = [line for line in ticks if line.startswith("#0")]
    assert len(after) >= 2
    assert all(line.endswith(" · 1 of 5 runs, about 40 s to go") for line in after)
    # another run of the same job follows in the process: the job is not over
    assert last.startswith("#1: 6/6 requests ok · run 1 of 5, ")


def test_repeats_of_one_run():
    assert of_repeats((), 1, 5.0).during_this(5.0) == ""
    assert of_repeats((), 1, 5.0).after_this() == ""
    assert of_repeats((10.0, 20.0), 4, 5.0).during_this(5.0) == "run 3 of 4, about 25 s to go"
    assert of_repeats((10.0, 20.0), 4, 5.0).after_this() == "3 of 4 runs, about 15 s to go"


@pytest.mark.parametrize("seconds, words", [(0.4, "0 s"), (89, "89 s"), (90, "1.5 min"), (7200, "2.0 h")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def shown(terminal, ticks):
    """What a run prints that takes ``ticks`` intervals of a display, in lines."""
    out, asked = io.StringIO(), []

    def where():
        asked.append(1)
        return Course(ended=1, total=4, this_s=30.0, others_s=60.0)

    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    with JobDisplay("#1 engine=static", where, console, every_s=0.02) as display:
        display.update({"phase": "measuring"})
        display.update({"ended": 3, "total": 24, "sent": 24, "tokens": 50})
        deadline = time.monotonic() + 20
        while len(asked) < ticks and time.monotonic() < deadline:
            time.sleep(0.005)
        display.finish("24/24 requests ok")
    assert len(asked) >= ticks
    return out.getvalue()


def test_a_pipe_hears_from_a_long_run():
    *ticks, last = shown(terminal=False, ticks=3).splitlines()
    assert len(ticks) >= 2
    for line in ticks:
        assert line.startswith("#1 engine=static: measuring, 3/24 requests, 21 in flight, ")
        assert line.endswith((" · run 2 of 4, about 90 s to go", "1.5 min to go"))
    assert last == "#1 engine=static: 24/24 requests ok · 2 of 4 runs, about 60 s to go"


def test_the_first_run_of_a_command_is_told_as_it_begins():
    out = io.StringIO()
    with JobDisplay("#0", lambda: Course(ended=0, total=4), Console(file=out, width=200)) as display:
        assert out.getvalue() == "#0: starting, 0 s · run 1 of 4, time to go unknown until one has ended\n"
        display.finish("24/24 requests ok")


def test_a_terminal_has_one_live_line_and_the_last_one():
    text = shown(terminal=True, ticks=3)
    assert "run 2 of 4" in text
    assert text.count("24/24 requests ok") == 1


def test_an_interrupted_run_promises_nothing():
    out = io.StringIO()
    course = Course(ended=1, total=4, this_s=30.0, others_s=60.0)
    with JobDisplay("#1", lambda: course, Console(file=out, width=200)) as display:
        display.finish("interrupted after 3 requests", goes_on=False)
    assert out.getvalue() == "#1: interrupted after 3 requests\n"
