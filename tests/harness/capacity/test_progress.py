"""A long computation is never silent."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from harness.capacity.progress import Progress, TimeToGo


def test_through_a_pipe_lines_come_from_time_to_time() -> None:
    out, said = io.StringIO(), threading.Event()
    console = Console(file=out, width=200)
    write = out.write

    def seen(text: str) -> int:
        if "half done" in text:
            said.set()
        return write(text)

    out.write = seen  # type: ignore[method-assign]
    with Progress("cb-plan", console, every_s=0.01) as say:
        say("half done")
        assert said.wait(30)  # without another call
    lines = out.getvalue().splitlines()
    assert any(line.startswith("cb-plan: half done, ") for line in lines)
    count = len(lines)
    assert not say._talker.is_alive()
    assert len(out.getvalue().splitlines()) == count


def test_in_a_terminal_the_line_is_replaced() -> None:
    out = io.StringIO()
    with Progress("cb-tune", Console(file=out, force_terminal=True, width=100), every_s=0.01) as say:
        say("trial [3] of 40")
    assert "trial [3] of 40" in out.getvalue()
    assert "\x1b[" in out.getvalue()  # drawn over


def test_time_to_go_by_hand() -> None:
    """100 requests took 10 s: 200, 300 after them and 500 later take 100."""
    said: list[str] = []
    clock = iter((0.0, 5.0, 15.0, 35.0))
    course = TimeToGo(said.append, lambda: next(clock))
    course.later = 500
    tell = course.within("capacity")
    tell("first", 100, 900)
    tell("second", 200, 300)
    course.later = 0
    course.begins("last", 50)
    assert said == ["capacity: first", "capacity: second, about 100 s to go", "last, some seconds to go"]


@pytest.mark.parametrize("command", ["harness.capacity.app", "harness.tune.app"])
def test_the_usage_needs_neither_torch_nor_pandas(command: str) -> None:
    loaded = "print(sorted({'torch', 'pandas', 'transformers'} & set(sys.modules)))"
    script = f"import sys; from {command} import main; main(['--help']); {loaded}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "RESULTS" in done.stdout


@pytest.mark.parametrize("command", ["harness.capacity.app", "harness.tune.app"])
def test_folders_without_a_result_are_told_before_the_engine_is_imported(command: str, tmp_path: Path) -> None:
    for sweep in ("one", "two"):
        (tmp_path / "sweeps" / sweep).mkdir(parents=True)
        (tmp_path / "sweeps" / sweep / "manifest.jsonl").touch()
    (tmp_path / "empty").mkdir()
    loaded = "print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    script = (
        f"import sys; from {command} import main\n"
        f"for folder in ('nowhere', 'empty', 'sweeps'): assert main(['slo=chat', folder]) == 2\n{loaded}"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    begun = [sys.executable, "-c", script]
    done = subprocess.run(begun, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    nowhere, empty, sweeps, modules = done.stderr.splitlines()
    assert "nowhere is not a directory" in nowhere
    assert "empty holds no results" in empty
    assert "is not one run or sweep but holds 2: name one of sweeps/one, sweeps/two" in sweeps
    assert modules == "set()"
