"""The server of measured processes and its client, with a stand-in for the measured process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import psutil
import pytest

from harness import forked, isolate
from harness.errors import RunFailed
from harness.isolate import Limits, run_isolated

TELL = "send(pid=os.getpid(), ppid=os.getppid(), sid=os.getsid(0)); send(phase='done')"


@pytest.fixture
def run(tmp_path, stand_in):
    """Run a program and return its messages as one, without the phases."""

    def run(program=None, log="run.log", env=None, on_message=lambda m: None):
        told = {}
        if program is not None:
            stand_in(program)

        def take(message):
            told.update(message)
            on_message(message)

        run_isolated([tmp_path / "job.json"], tmp_path / log, Limits(20, 20), take, env)
        return told

    return run


def gone(pid, within_s=10.0):
    give_up = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def test_each_run_is_a_process_and_a_session_of_its_own_from_one_server(run):
    first, second = run(TELL), run(TELL)
    assert first["ppid"] == second["ppid"] != os.getpid()
    assert psutil.Process(first["ppid"]).ppid() == os.getpid()
    assert len({first["pid"], second["pid"], first["ppid"]}) == 3
    assert all(told["sid"] == told["pid"] and gone(told["pid"]) for told in (first, second))
    forked.end_servers()
    assert gone(first["ppid"])


def test_what_is_prepared_is_prepared_once(run, stand_in):
    stand_in("", prepare="prepared_by = os.getpid()")
    program = "send(prepared_by=prepared_by, ppid=os.getppid()); send(phase='done')"
    told = [run(program), run(program)]
    assert {t["prepared_by"] for t in told} == {t["ppid"] for t in told} == {told[0]["ppid"]}


def test_another_environment_is_another_server_and_the_latest_two_stay(run):
    program = "send(value=os.environ.get('ENGINE_X'), ppid=os.getppid()); send(phase='done')"
    plain, one, again, two = (run(program, env=env) for env in ({}, {"ENGINE_X": "1"}, {}, {"ENGINE_X": "2"}))
    assert [told["value"] for told in (plain, one, again, two)] == [None, "1", None, "2"]
    assert plain["ppid"] == again["ppid"]
    assert len({told["ppid"] for told in (plain, one, two)}) == 3
    assert gone(one["ppid"])  # the one used longest ago
    assert run(program)["ppid"] == plain["ppid"]


def test_another_folder_is_another_server(run, tmp_path, monkeypatch):
    program = "send(cwd=os.getcwd(), ppid=os.getppid()); send(phase='done')"
    folder, before = os.getcwd(), run(program)
    monkeypatch.chdir(tmp_path)
    after = run(program)
    assert (before["cwd"], after["cwd"]) == (folder, str(tmp_path))
    assert before["ppid"] != after["ppid"]


def test_a_killed_run_takes_only_itself(run):
    with pytest.raises(RunFailed, match="the measured process was ended by SIGKILL while measuring"):
        run("send(ppid=os.getppid(), phase='measuring'); os.kill(os.getpid(), signal.SIGKILL)")
    (server,) = forked._servers
    assert run(TELL)["ppid"] == server._process.pid


def test_a_killed_server_fails_the_run_at_once_and_the_next_gets_another(run):
    seen = {}

    def kill_the_server(message):
        seen.update(message)
        os.kill(message["ppid"], signal.SIGKILL)

    program = "send(pid=os.getpid(), ppid=os.getppid(), phase='measuring'); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(RunFailed, match="the server of measured processes was ended by SIGKILL while measuring"):
        run(program, on_message=kill_the_server)
    assert time.monotonic() - began < 20
    assert gone(seen["pid"])
    assert run(TELL)["ppid"] != seen["ppid"]


@pytest.mark.parametrize("end", ["send(phase='done')", "send(error='it broke', status='failed')"])
def test_a_server_that_stops_answering_changes_no_outcome_and_is_replaced(run, monkeypatch, end):
    monkeypatch.setattr(isolate, "EXIT_LIMIT_S", 0.5)
    monkeypatch.setattr(forked, "END_PATIENCE_S", (0.1, 0.1))
    seen = {}

    def stop_the_server(message):
        seen.update(message)
        if "ppid" in message:
            os.kill(message["ppid"], signal.SIGSTOP)

    expected = pytest.raises(RunFailed, match=r"^it broke$") if "error" in end else nullcontext()
    with expected:
        run(f"send(ppid=os.getppid(), phase='measuring'); time.sleep(0.5); {end}", on_message=stop_the_server)
    assert gone(seen["ppid"])
    assert run(TELL)["ppid"] != seen["ppid"]


def test_a_server_killed_between_two_runs_is_replaced(run):
    first = run(TELL)
    os.kill(first["ppid"], signal.SIGKILL)
    assert gone(first["ppid"])
    assert run(TELL)["ppid"] != first["ppid"]


def test_two_runs_at_once_from_one_server(run, stand_in, tmp_path):
    """Each waits for the other, so neither would end if the server made them take turns."""
    stand_in(
        "mine, other = HERE / argv[1].rsplit('/')[-1], HERE / ('b' if argv[1].endswith('a') else 'a')\n"
        "mine.touch()\nsend(phase='measuring')\n"
        "while not other.exists(): time.sleep(0.01)\n" + TELL
    )
    told = {"a": {}, "b": {}}

    def one(name):
        run_isolated([tmp_path / name], tmp_path / f"{name}.log", Limits(20, 20), told[name].update)

    threads = [threading.Thread(target=one, args=(name,)) for name in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t["phase"] for t in told.values()] == ["done", "done"]
    assert told["a"]["ppid"] == told["b"]["ppid"]
    assert told["a"]["pid"] != told["b"]["pid"]


def test_nothing_of_the_server_or_of_another_run_is_inherited(run):
    program = (
        "import gc, random\n"
        "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2 "
        "and os.path.lexists(f'/proc/self/fd/{fd}')]\n"
        "send(links=[link for link in links if link.startswith(('pipe:', 'socket:'))], number=random.random(), "
        "wakeup=signal.set_wakeup_fd(-1), child=signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, "
        "frozen=gc.get_freeze_count(), threads=threading.active_count(), cpu=time.process_time())\n"
        "send(code=subprocess.run(['false']).returncode, phase='done')"
    )
    first, second = run(program), run(program)
    for told in (first, second):
        assert len(told["links"]) == 1  # the pipe of its messages
        assert (told["wakeup"], told["child"], told["threads"], told["code"]) == (-1, True, 1, 1)
        assert told["frozen"] > 0
    assert first["number"] != second["number"]


def test_the_server_keeps_neither_pipe_nor_log(run, tmp_path):
    program = (
        "fds = f'/proc/{os.getppid()}/fd'\n"
        "links = [os.readlink(f'{fds}/{fd}') for fd in os.listdir(fds)]\n"
        "send(ppid=os.getppid(), held=[link for link in links if link.startswith('pipe:') or 'run' in link])\n"
        "send(phase='done')"
    )
    assert run(program)["held"] == run(program)["held"] == []


def test_memory_peaks_of_one_run_are_not_the_next_ones(run):
    measure = (
        "status = Path('/proc/self/status').read_text()\n"
        "import resource\n"
        "send(peak_mib=int(status.split('VmHWM:')[1].split()[0]) / 1024, "
        "max_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024); send(phase='done')"
    )
    large, small = run("held = b'x' * (300 * 2**20)\n" + measure), run(measure)
    assert large["peak_mib"] > 300
    assert small["peak_mib"] < 150
    assert small["max_mib"] < 150


def test_each_run_has_its_own_log_with_the_stack_of_its_crash(run, tmp_path):
    run("print('one', flush=True); print('two', file=sys.stderr); os.system('echo three'); send(phase='done')", "a.log")
    with pytest.raises(RunFailed, match="ended by SIGSEGV while starting") as failed:
        run("def crash_here():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncrash_here()", "b.log")
    assert (tmp_path / "a.log").read_text() == "one\ntwo\nthree\n"
    assert "Segmentation fault" in (tmp_path / "b.log").read_text()
    assert "crash_here" in failed.value.detail


def test_what_is_left_for_the_exit_is_done(run, tmp_path):
    run(
        "import atexit\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nsend(phase='done')"
    )
    assert (tmp_path / "run.log").read_text() == "thread\nat exit\n"


CLIENT = """\
import os, sys, time
from pathlib import Path
from harness import isolate
isolate.CHILD = "stand_in"
take = lambda m: print(m["pid"], m["ppid"], flush=True) if "pid" in m else None
isolate.run_isolated([Path("job.json")], Path("run.log"), isolate.Limits(20, 20), take)
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_no_process_outlives_the_command(stand_in, tmp_path, how):
    wait = "" if how == "ends" else "while True: time.sleep(0.05); send(sent=0)\n"
    stand_in("send(pid=os.getpid(), ppid=os.getppid())\n" + wait + "send(phase='done')")
    command = [sys.executable, "-c", CLIENT]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
        run, server = map(int, client.stdout.readline().split())
        if how == "is killed":
            assert psutil.pid_exists(server)
            client.kill()
        client.wait(20)
    assert gone(server)
    assert gone(run)


def test_a_fork_of_the_client_does_not_end_its_servers(run):
    server = run(TELL)["ppid"]
    pid = os.fork()
    if pid == 0:
        forked.end_servers()
        os._exit(len(forked._servers))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(TELL)["ppid"] == server


def test_a_server_that_cannot_fork_says_why(run, stand_in):
    refuse = "def refuse():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = refuse"
    stand_in("", prepare=refuse)
    with pytest.raises(RunFailed, match=r"no process could be made for the run: .*temporarily unavailable"):
        run(TELL)
