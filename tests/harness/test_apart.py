"""Questions to a process of its own: the answer, one line for what went wrong, and nothing else that was printed."""

from __future__ import annotations

import pytest

from harness.apart import NoAnswer, ask

SOURCE = """
import sys
from harness.apart import answer

def respond(question):
    print("a library talks", end="")
    print("and this", file=sys.stderr)
    if question == "raise":
        raise ValueError("it has\\ntwo lines")
    if question == "exit":
        sys.exit("gone")
    if question == "wait":
        import time
        time.sleep(60)
    return {"got": question}

raise SystemExit(answer(respond))
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "oracle.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_the_answer_comes_back_whatever_else_is_printed():
    assert ask("oracle", [1, None, "ü"]) == {"got": [1, None, "ü"]}


@pytest.mark.parametrize(
    "question, why",
    [("raise", "^it has two lines$"), ("exit", "^gone$")],
)
def test_why_there_is_none_is_one_line(question, why):
    with pytest.raises(NoAnswer, match=why):
        ask("oracle", question)


def test_a_module_that_does_not_exist():
    with pytest.raises(NoAnswer, match="no_such_oracle"):
        ask("no_such_oracle", 1)


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(NoAnswer, match=r"there was no answer within 0\.5 s"):
        ask("oracle", "wait", timeout_s=0.5)
