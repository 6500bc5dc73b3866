"""docs/spec-coverage.md says what is there: its counts are its rows', its modules and tests exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "spec-coverage.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| [AM]-", line)
]
STATES = ("done", "partly", "not yet")


def test_every_row_has_an_id_of_its_own_and_a_state() -> None:
    ids = [row[0] for row in ROWS]
    assert len(ids) == len(set(ids)) > 100
    assert {len(row) for row in ROWS} == {6}
    assert {row[4] for row in ROWS} <= set(STATES)
    for name, _, _, tests, state, missing in ROWS:
        assert state != "done" or tests or name.startswith("M-"), f"{name} is done without a test"
        assert state != "partly" or missing, f"{name} does not say what is missing"


@pytest.mark.parametrize(("title", "letter"), [("API guide", "A"), ("measurement plan", "M")])
def test_the_head_counts_the_rows(title: str, letter: str) -> None:
    head = re.search(rf"^\| {title} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert head is not None
    counts = Counter(row[4] for row in ROWS if row[0].startswith(letter))
    assert [int(n) for n in head.groups()] == [*(counts[state] for state in STATES), counts.total()]


def test_every_test_named_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([\w/]+\.py(?:::\w+)?)`", row[3])}
    assert len(named) > 100
    missing = []
    for name in sorted(named):
        file, _, function = name.partition("::")
        path = ROOT / "tests" / file
        if not path.exists() or (function and f"def {function}(" not in path.read_text(encoding="utf-8")):
            missing.append(name)
    assert missing == []


def test_every_module_named_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"`((?:engine|harness|workloads|sweeps)/[^`*]+)`", row[2])}
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
