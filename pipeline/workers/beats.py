"""What a worker says of itself, in a file of its own that it replaces: ``slurm/workers/4711_3r0.json``.

It is written when what it says changes, and at least every :data:`BEAT_SECONDS` while the worker lives.
"""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipeline.config.conversion import plain
from pipeline.run.paths import RunPaths
from slurm.sealing import sealed
from slurm.sharedfiles import make_folder, write_plainly

BEAT_SECONDS = 20.0
"""Seconds between two beats of a worker that has nothing new to say."""


class Doing(StrEnum):
    """What a worker does."""

    STARTING = "starting"
    """It imports and loads, and has not begun a task."""
    BUSY = "busy"
    """It does a task."""
    WAITING = "waiting"
    """It waits for the inputs of its next task."""
    LEAVING = "leaving"
    """It has left the loop: whoever makes a pass may submit its successor."""


class Reason(StrEnum):
    """Why a worker left."""

    DONE = "done"
    """No task of its stage is left in the run."""
    ONE = "one"
    """It has done its task, and each task of its stage has a job of its own."""
    FAR = "far"
    """The next input is further away than coming back costs."""
    LONG = "long"
    """It had waited as long as coming back costs, and nothing came."""
    NEEDED = "needed"
    """Another job of the same user could start in its place."""
    TIME = "time"
    """Its own time limit leaves no room for another task."""
    WARNED = "warned"
    """Slurm warned it: time limit, preemption, or somebody ended it."""
    CHANGED = "changed"
    """The package or the run's configuration is not what it began with."""
    GREW = "grew"
    """Its memory grew from task to task."""
    FAILED = "failed"
    """Its task failed in a way after which nothing of the process is trusted."""
    TURNED = "turned"
    """The run went back, was cancelled or gave up."""


@dataclass(frozen=True)
class Beat:
    """State of a worker."""

    worker: str
    """Its name: array job, element and restart, like ``4711_3r0``; on one machine ``HOST-PID``."""
    job_kind: str
    host: str
    pid: int
    started: float
    """Unix time."""
    doing: Doing = Doing.STARTING
    since: float = 0.0
    """Unix time at which it began to do that."""
    task: str = ""
    """Key of the task that it does, or waits for."""
    attempt: str = ""
    """Id of the attempt at the task that it does; empty while it does none."""
    until: float | None = None
    """Unix time at which it leaves if nothing comes; None where it does not wait."""
    beat: float = 0.0
    """Unix time of this beat."""
    tasks: int = 0
    """Tasks that it has committed."""
    startup_seconds: float = 0.0
    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Sums so far; with the time since :attr:`since` they add up to its life."""
    measured: int = 0
    """Evaluations among its tasks, where it is a worker of rollouts."""
    measuring_seconds: float = 0.0
    """Part of its busy seconds that it spent on them."""
    reason: Reason | None = None
    """Why it left."""
    iterations: tuple[int, int] = field(default=(0, 0))
    """First and last iteration that it has worked on."""
    queued_seconds: float | None = None
    """Seconds from the time at which it could have started, as far as the run is concerned, to its start."""
    process_space: str = ""
    """Where its process id counts (:func:`process_space`)."""
    nodes: str = ""
    """Slurm's names of its nodes, like ``gpu[01-02]``; empty where there is no Slurm."""


def file_of(paths: RunPaths, worker: str) -> Path:
    """Return the file of a worker's beats."""
    return folder_of(paths) / f"{worker}.json"


def folder_of(paths: RunPaths) -> Path:
    return paths.slurm / "workers"


def write_beat(paths: RunPaths, beat: Beat) -> None:
    """Replace a worker's file in one step. Not flushed to the disk: after a power cut no worker lives.

    Only one thread of the worker may be in here at a time.
    """
    path = file_of(paths, beat.worker)
    private = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.parent.is_dir():
        make_folder(path.parent, paths.root)
    write_plainly(private, sealed(plain(beat)).encode())
    private.replace(path)


def process_space() -> str:
    """Return what tells apart the spaces in which process ids count, of hosts and of their containers; empty
    if unknown. Two nodes may have one name, and the first space of each Linux has the same number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
