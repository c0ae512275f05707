"""A thread writes beside tasks: one job at a time, nothing is lost in silence, and who leaves waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.run.tasks import Stage, Task
from stages.attempts.execution import goes_on
from stages.context import Context
from stages.process import background
from tests.support.ranks import said
from tests.support.scripted import imagined_run


def label(iteration: int = 1, patience: float = 60.0) -> background.Label:
    return background.Label(Path("/run"), iteration, f"{iteration}/update/0", "1-aa", 8.0, patience)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    background.wait()
    background.take_seconds()


def test_the_next_job_waits_for_the_last():
    gate, order = threading.Event(), []

    def slow() -> None:
        gate.wait()
        order.append("first")

    background.begin(label(1), slow)
    assert background.at_work() == label(1)
    assert not background.wait(0.01)
    threading.Timer(0.05, gate.set).start()
    background.begin(label(2), lambda: order.append("second"))
    assert background.wait()
    assert order == ["first", "second"]
    assert background.at_work() is None
    assert background.newest(Path("/run")) == 2
    assert background.newest(Path("/other")) == 0


def test_an_error_is_logged_with_its_cause_and_the_state_does_not_count():
    def full() -> None:
        raise OSError(28, "No space left on device")

    ended = []
    background.hear_of_end(lambda: ended.append(background.at_work()))
    with said() as lines:
        background.begin(label(3), full)
        background.wait()
    background.hear_of_end(lambda: None)
    assert lines == [
        "ERROR: iteration 3: the trainer's state was not saved; the next one is written before its attempt "
        "ends:"
    ]
    assert background.has_failed()
    assert background.newest(Path("/run")) == 0
    assert ended == [None], "who hears of the end sees that nothing is at work"
    background.begin(label(4), lambda: None)
    background.wait()
    assert not background.has_failed()
    assert background.take_seconds().keys() == {background.WRITE}


def test_who_leaves_waits_as_long_as_the_job_says_and_says_so():
    gate = threading.Event()
    background.begin(label(5, patience=0.05), gate.wait)
    with said() as lines:
        background.leave()
    gate.set()
    assert lines == [
        "INFO: the trainer's state of iteration 5 is being written: the process waits for it, for up to 0 s",
        "ERROR: the trainer's state of iteration 5 was not written within 0 s: the process leaves, and the "
        "next update learns it again",
    ]


def test_a_disk_that_hangs_is_waited_for_no_longer_than_the_label_says():
    gate = threading.Event()
    background.begin(label(6, patience=0.05), gate.wait)
    with pytest.raises(TimeoutError, match="state of iteration 6 was not written within 0 s"):
        background.begin(label(7), lambda: None)
    gate.set()
    assert background.wait()
    assert background.newest(Path("/run")) == 6


TERMINATED = """
import sys, time
from pathlib import Path
from stages.process import background

def write():
    time.sleep(1)
    Path(sys.argv[1]).write_text("whole")

background.begin(background.Label(Path("/run"), 1, "1/update/0", "1-aa", 8.0, 60.0), write)
with background.before_termination():
    print("computing", flush=True)
    time.sleep(60)
"""


def test_sigterm_while_the_next_update_computes_ends_the_process_when_the_state_is_written(tmp_path):
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout.readline() == b"computing\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
    assert (tmp_path / "state").read_text() == "whole"
    assert time.monotonic() - began < 30, "not as long as the update"


@pytest.mark.parametrize(
    ("iteration", "stays", "update", "expected"),
    [
        (1, True, {}, True),
        (4, True, {}, False),
        (1, False, {}, False),
        (1, True, {"linger": 0, "start_early": False}, False),
        (1, True, {"linger": 0, "start_early": True}, True),
    ],
)
def test_a_state_is_copied_only_where_the_process_does_the_next_update(iteration, stays, update, expected):
    run = imagined_run(scheduler={"update": update})
    context = Context(run.paths, run.config, Task(iteration, Stage.UPDATE), "1-aa", stays=stays)
    assert goes_on(context) is expected
