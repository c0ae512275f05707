"""A run that is mirrored to W&B, its mirror and driver as processes, and what arrived."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.tracking.tracker import enabled, open_trackers
from tests.support import ROOT

WANDB = Path(sys.executable).with_name("wandb")


def row(iteration: int) -> dict[str, float | int]:
    return {"iteration": iteration, "reward/mean": iteration / 2, "policy/loss": 0.1, "seconds/update": 3.0}


def follow(run: Run) -> list[str]:
    """What one undisturbed driver does: take up the rows there are, and close. Returns what it noted."""
    notes: list[str] = []
    tracker = open_trackers(run, enabled(run), notes.append)
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
tracker = tracking.open_trackers(run, tracking.enabled(run), print)
for line in sys.stdin:
    tracker.update()
"""


@contextmanager
def driver(run: Run) -> Iterator[subprocess.Popen[str]]:
    """Another process that drives the run, which reads a line when metrics.jsonl has grown."""
    command = [sys.executable, "-c", DRIVER, run.paths.root]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def children(pid: int) -> list[int]:
    """None of a process that has gone meanwhile."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def family(pid: int) -> list[int]:
    """A process and all that come from it: what Slurm signals when a job is cancelled."""
    return [pid, *(grandchild for child in children(pid) for grandchild in family(child))]


def kill_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
