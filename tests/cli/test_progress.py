"""Lines of a run in a log: something is said while nothing is finished, and not too often."""

import io
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

from pipeline.cli.queue import log_output
from pipeline.run.records import Frontier
from pipeline.run.tasks import Stage, Task
from pipeline.status.progress import Lines
from tests.support import ROOT
from tests.support.scripted import imagined_run


@dataclass
class Known:
    """Records at hand."""

    known: dict = field(default_factory=dict)


@pytest.fixture
def watch(monkeypatch):
    """A clock that stands still unless told."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_first_iteration_is_not_silent(watch):
    plan, said = imagined_run(iterations=4).plan, io.StringIO()
    lines, records = Lines(plan, said), Known()
    for _ in range(30):  # five minutes of passes
        watch[0] += 10
        lines.progress(Frontier(-1, 0), records, ())
    first = said.getvalue().splitlines()
    assert len(first) == 4
    assert first[0].endswith(
        f"iteration 1/4 so far: rollout 0/{plan.num_shards}, reward 0/{plan.num_shards}, update 0/1"
    )
    records.known[Task(1, Stage.ROLLOUT, 0)] = object()
    watch[0] += 100
    lines.progress(Frontier(0, 0), records, ())
    assert f"rollout 1/{plan.num_shards}" in said.getvalue().splitlines()[-1]


def test_later_ones_have_rows_that_say_it(watch):
    said = io.StringIO()
    lines = Lines(imagined_run(iterations=4).plan, said)
    lines.note("iteration 1/4")
    for _ in range(50):
        watch[0] += 10
        lines.progress(Frontier(1, 0), Known(), ())
    assert len(said.getvalue().splitlines()) == 1  # the note
    watch[0] += 200
    lines.progress(Frontier(1, 0), Known(), ())
    assert "iteration 2/4 so far" in said.getvalue()
    watch[0] += 10_000
    lines.progress(Frontier(4, 0), Known(), ())
    assert len(said.getvalue().splitlines()) == 2  # nothing is left to be done


def test_a_driver_jobs_log_has_time_and_level_before_each_line(tmp_path):
    command = [sys.executable, "-m", "pipeline", "advance", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR error: .* is not a run directory.*", line
    )
    assert done.returncode == 2


def test_each_line_of_what_is_printed_is_logged_and_a_full_disk_is_no_secret(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    stream = log_output()
    print("two\nlines", file=stream)
    print("100 % wrong", file=sys.stderr)
    levels = [line.split(" ", 3)[2:] for line in said.getvalue().splitlines()]
    assert levels == [["INFO", "two"], ["INFO", "lines"], ["ERROR", "100 % wrong"]]
    monkeypatch.setattr(said, "write", lambda text: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        print("not written", file=stream)
