"""Processes that hang in the kernel, as where a GPU's driver hangs: no signal ends them, and none waits for
them. They are pretended by signals that are not sent."""

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline import process
from pipeline.executors import processes
from pipeline.executors.limits import Started
from pipeline.executors.processes import Team
from pipeline.process import joined_within, said_within
from pipeline.run.tasks import PREPARE
from tests.support import ROOT

_LONG = 300
EXITS = f"""
import multiprocessing, os, time
from pipeline.process import joined_within

def hang():
    os.closerange(1, 3)
    time.sleep({_LONG})

child = multiprocessing.get_context("fork").Process(target=hang, daemon={{daemon}})
child.start()
child.terminate = lambda: None
print(child.pid, joined_within(child, 0.1), flush=True)
"""


@pytest.fixture
def end_left():
    """Ends what a test has left behind."""
    known = {one.pid for one in psutil.Process().children()}
    yield
    for one in psutil.Process().children():
        if one.pid not in known and "forkserver" not in str(one.cmdline()):
            one.kill()
            one.wait(30)


@pytest.mark.parametrize("daemon", [False, True])
def test_a_process_does_not_wait_as_it_exits(daemon):
    command = [sys.executable, "-c", EXITS.format(daemon=daemon)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=_LONG / 2)
    pid, has_ended = done.stdout.split()
    child = psutil.Process(int(pid))
    assert child.is_running()
    child.kill()
    assert (done.returncode, has_ended) == (0, "False")


def test_one_that_ends_in_time_is_joined():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    child.start()
    assert joined_within(child, 60)


def test_a_command_that_no_signal_ends_is_given_up(monkeypatch, end_left):
    monkeypatch.setattr(process, "signal_session", lambda leader: None)
    monkeypatch.setattr(process, "_KILL_SECONDS", 0.1)
    assert said_within(["sleep", str(_LONG)], 0.1) is None
    assert any(one.name() == "sleep" for one in psutil.Process().children())


def test_a_command_says_what_it_wrote_and_how_it_ended():
    done = said_within(["sh", "-c", "echo one; echo error >&2; cat; exit 3"], 60)
    assert (done.exit_code, done.text) == (3, "one\n")
    with pytest.raises(OSError, match="no such program"):
        said_within(["no such program"], 60)


def test_a_worker_that_no_signal_ends_has_ended_for_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "signal_group", lambda process, number: None)
    monkeypatch.setattr(processes, "KILLED_SECONDS", 0.1)
    bell, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(_LONG,))
    child.start()
    there.close()
    team = Team(Started("worker", PREPARE, tmp_path / "log"), (), Path(tmp_path / "meeting"), [child], bell)
    assert team.end().exit_code == -signal.SIGKILL
    child.kill()
    child.join(60)
