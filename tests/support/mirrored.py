"""A run that is mirrored to W&B, its mirror and driver as processes, and what arrived."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.tracking.tracker import open_tracker
from tests.support import ROOT

WANDB = Path(sys.executable).with_name("wandb")


def row(iteration: int) -> dict[str, float | int]:
    return {"iteration": iteration, "reward/mean": iteration / 2, "policy/loss": 0.1, "seconds/update": 3.0}


def segments(run: Run) -> list[list[dict]]:
    """What W&B has on disk, as its own reader says; a list of records per opening of the run."""
    found = []
    for folder in sorted(run.paths.wandb.glob("offline-run-*")):
        done = subprocess.run([WANDB, "leet", "inspect", "--json", folder], capture_output=True, text=True)
        found.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
    return found


def logged(run: Run) -> list[int]:
    """Iterations in the order in which they arrived."""
    iterations = []
    for records in segments(run):
        for record in records:
            if record["type"] == "history":
                items = record["history"]["item"]
                assert items["reward/mean"] == items["iteration"] / 2
                iterations.append(items["iteration"])
    return iterations


def follow(run: Run) -> list[str]:
    """What one undisturbed driver does: take up the rows there are, and close. Returns what it noted."""
    notes: list[str] = []
    tracker = open_tracker(run, notes.append)
    tracker.update()
    tracker.close(0)
    return notes


def append(run: Run, *iterations: int) -> None:
    journal.append(run.paths.metrics, *map(row, iterations))


DRIVER = """
import sys, time
from pathlib import Path
from pipeline.run import journal
from pipeline.tracking import tracker as tracking
from pipeline.run.directory import load_run
run = load_run(Path(sys.argv[1]))
tracker = tracking.open_tracker(run, print)
for line in sys.stdin:
    tracker.update()
"""


@contextmanager
def driver(run: Run) -> Iterator[subprocess.Popen[str]]:
    """Another process that drives the run, and is told by a line when metrics.jsonl has grown."""
    command = [sys.executable, "-c", DRIVER, run.paths.root]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def mirror_of(process: subprocess.Popen[str]) -> int:
    """The process id of a driver's mirror."""
    (found,) = wait_for(lambda: children(process.pid), "the driver's mirror process")
    return found


def children(pid: int) -> list[int]:
    """None of a process that has gone meanwhile."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def family(pid: int) -> list[int]:
    """A process and all that come from it: what Slurm signals when a job is cancelled."""
    return [pid, *(grandchild for child in children(pid) for grandchild in family(child))]


def wait_for(look: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, f"{what} did not come within {seconds:g} s"
        time.sleep(0.05)
    return found


def kill_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
