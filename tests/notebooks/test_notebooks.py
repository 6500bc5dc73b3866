"""The notebooks run from top to bottom on the committed tables, and what is shown in them is what they give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra [notebooks] is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra [notebooks] is not installed")
pytest.importorskip("ipykernel", reason="the extra [notebooks] is not installed")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDED = {
    "01_first_sweep": ("5 runs of 5 configs", "hroughput follows the load"),
    "02_static_vs_continuous": ("tokens/s, static",),
    "03_capacity_plan": ("predicted and measured", "plan.html"),
    "04_reading_the_step_log": ("ms a thousand prompt tokens", "of the worst 1 %"),
}
AS_STORED = ("02_static_vs_continuous", "04_reading_the_step_log")
"""They measure nothing and search nothing: what is stored in them is what they give, word for word."""


def test_the_four_are_there():
    assert {path.stem for path in NOTEBOOKS} == set(NEEDED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_it_promises(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = said(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    texts = said(notebook)
    assert path.stem not in AS_STORED or texts == stored
    for part in NEEDED[path.stem]:
        assert part in texts
    assert not any(name in texts for name in ("Traceback", "Warning"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_holds_no_path_of_a_machine(path):
    stored = path.read_text(encoding="utf-8")
    assert len(stored) < 500_000
    assert not any(name in stored for name in (str(ROOT), "/home/", "/tmp/", os.path.expanduser("~/")))


def said(notebook) -> str:
    """All that its cells gave in words."""
    texts = [text(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(text for text in texts if not text.startswith("<Figure"))  # its size is the fonts' business


def text(output) -> str:
    return str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
