"""Child interpreters import this harness: not what lies in the current folder, and wherever it was found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import interpreter

PROJECT = Path(__file__).resolve().parents[2]

SHOW = "import harness, random, os; print(harness.__file__); print(random.__file__)"


def test_nothing_in_the_current_folder_is_taken_for_a_module(tmp_path):
    for name in ("harness", "engine", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    done = subprocess.run(
        [*interpreter.COMMAND, "-c", SHOW],
        cwd=tmp_path, env=interpreter.environment({"PATH": os.environ["PATH"]}), capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(PROJECT / "harness/__init__.py"), sys.modules["random"].__file__]


def test_what_was_found_by_sys_path_alone_is_found_by_a_child(tmp_path):
    """In a folder that has an engine of its own."""
    (tmp_path / "harness.py").write_text("raise SystemExit('shadowed')")
    ask = (
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from harness.apart import ask, NoAnswer\n"
        "try: ask('no_such_oracle', 1)\n"
        "except NoAnswer as why: print(why)\n"
        "import subprocess, os\n"
        "from harness import interpreter\n"
        f"subprocess.run([*interpreter.COMMAND, '-c', {SHOW!r}], env=interpreter.environment(os.environ), check=True)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", ask], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no_such_oracle" in done.stdout
    assert f"{PROJECT / 'harness/__init__.py'}\n" in done.stdout


def test_the_folder_comes_first_and_once(monkeypatch):
    monkeypatch.setattr("site.getsitepackages", list)
    made = interpreter.environment({"PYTHONPATH": f"/a{os.pathsep}{PROJECT}", "X": "1"})
    assert made == {"PYTHONPATH": f"{PROJECT}{os.pathsep}/a", "X": "1"}


@pytest.mark.parametrize("base", [{}, {"PYTHONPATH": "/a"}])
def test_an_installed_harness_is_left_to_the_child(base, monkeypatch):
    monkeypatch.setattr("site.getsitepackages", lambda: [str(PROJECT)])
    assert interpreter.environment(base) == base
