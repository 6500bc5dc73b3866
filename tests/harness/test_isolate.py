"""The watcher, with a stand-in for the child: a Python program given by the test."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from harness import isolate
from harness.errors import RunFailed
from harness.interruption import by, interrupting
from harness.isolate import Limits, run_isolated


@pytest.fixture
def run(tmp_path, stand_in):
    def run(program, limits=None, on_message=lambda m: None, env=None):
        stand_in(program)
        run_isolated([tmp_path / "job.json"], tmp_path / "run.log", limits or Limits(20, 20), on_message, env)

    return run


def test_messages_arrive_in_order_and_output_goes_to_the_log(run, tmp_path):
    seen = []
    run(
        "print('hello'); send(phase='measuring'); send(sent=1, ended=0, total=2, tokens=0); send(phase='done')",
        on_message=seen.append,
    )
    assert [m.get("phase") for m in seen] == ["measuring", None, "done"]
    assert (tmp_path / "run.log").read_text() == "hello\n"


def test_an_error_of_the_child_is_its_cause(run):
    with pytest.raises(RunFailed, match="page_size 3") as failed:
        run("send(error='page_size 3 is too small', traceback='T', status='failed'); sys.exit(1)")
    assert (failed.value.detail, failed.value.status) == ("T", "failed")


def test_a_kill_names_the_signal_and_the_phase(run):
    with pytest.raises(RunFailed, match=r"SIGKILL while measuring \(out of memory"):
        run("send(phase='measuring'); os.kill(os.getpid(), signal.SIGKILL)")


def test_a_crash_keeps_the_end_of_the_log(run):
    with pytest.raises(RunFailed, match="exited with code 7 while starting") as failed:
        run("print('last words'); sys.exit(7)")
    assert failed.value.detail == "last words"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("sys.exit(7)", "code 7 while starting with engine.env.A_VARIABLE=1"),
        ("send(phase='measuring'); sys.exit(7)", "code 7 while measuring"),
    ],
)
def test_a_start_that_fails_names_the_environment_it_was_given(run, program, said):
    with pytest.raises(RunFailed) as failed:
        run(program, env={"A_VARIABLE": "1"})
    assert failed.value.cause.endswith(said)


def test_imports_that_fail_are_told_as_a_start_that_fails(run, stand_in):
    stand_in("", prepare="raise ImportError('libcuda is missing')")
    with pytest.raises(RunFailed, match=r"exited with code 1 while starting with engine\.env\.A_VARIABLE=1$") as failed:
        run("", env={"A_VARIABLE": "1"})
    assert failed.value.detail.endswith("ImportError: libcuda is missing")


def test_an_import_that_hangs_is_a_timeout_and_its_server_is_gone(run, stand_in, tmp_path):
    stand_in("", prepare="print(os.getpid(), flush=True); time.sleep(60)")
    with pytest.raises(RunFailed, match="still starting after 1 s"):
        run("", Limits(1.0, 60))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run.log").read_text()), 0)


def test_an_end_without_a_result_is_a_failure(run):
    with pytest.raises(RunFailed, match="stopped while measuring without saying why"):
        run("send(phase='measuring')")


def test_too_long_a_start_is_a_timeout_and_the_child_is_gone(run, tmp_path):
    began = time.monotonic()
    with pytest.raises(RunFailed, match="still loading after 1 s") as failed:
        run("print(os.getpid(), flush=True); send(phase='loading'); time.sleep(60)", Limits(1.0, 60))
    assert failed.value.status == "timeout"
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run.log").read_text()), 0)


def test_measuring_has_its_own_limit(run, monkeypatch):
    monkeypatch.setattr(isolate, "MEASURING_GRACE_S", 0.3)
    with pytest.raises(RunFailed, match=r"still measuring after 0\.5 s"):
        run("send(phase='measuring'); time.sleep(60)", Limits(60, 0.2))


def test_ctrl_c_ends_the_child(run, tmp_path):
    def interrupt(message):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        run("print(os.getpid(), flush=True); send(phase='warming up'); time.sleep(60)", on_message=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run.log").read_text()), 0)


def interrupt_when(phase, seen, sent=signal.SIGINT):
    def on_message(message):
        seen.append(message)
        if message.get("phase") == phase:
            os.kill(os.getpid(), sent)

    return on_message


def test_ctrl_c_lets_a_measuring_child_write_what_it_has(run):
    seen = []
    program = (
        "try:\n    send(phase='measuring'); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    send(phase='writing'); time.sleep(0.2)\n"
        "    send(error='interrupted', written=True); sys.exit(1)"
    )
    with pytest.raises(KeyboardInterrupt):
        run(program, on_message=interrupt_when("measuring", seen))
    assert [m.get("phase") or m.get("written") for m in seen] == ["measuring", "writing", True]


def test_a_child_that_ignores_ctrl_c_is_ended(run, tmp_path, monkeypatch):
    monkeypatch.setattr(isolate, "INTERRUPT_GRACE_S", 0.5)
    program = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN); print(os.getpid(), flush=True); send(phase='measuring'); "
        "time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(program, on_message=interrupt_when("measuring", []))
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run.log").read_text()), 0)


@pytest.mark.parametrize("came", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_knows_which_signal_interrupted_it_and_has_time_to_write(came, run, tmp_path):
    program = (
        "from harness.interruption import by, signal_of, take_relayed\n"
        "take_relayed()\n"
        "try:\n    send(phase='measuring'); time.sleep(60)\n"
        "except KeyboardInterrupt as interrupt:\n    time.sleep(0.2); print(by(signal_of(interrupt)), flush=True)"
    )
    with pytest.raises(KeyboardInterrupt), interrupting():
        run(program, on_message=interrupt_when("measuring", [], came))
    assert (tmp_path / "run.log").read_text() == f"{by(came)}\n"
