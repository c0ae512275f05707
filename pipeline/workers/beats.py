"""What a worker says of itself, in a file of its own that it replaces: ``slurm/workers/4711_3r0.json``.

It is written when what it says changes, and at least every :data:`BEAT_SECONDS` while the worker lives.
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import link_once
from pipeline.run.paths import RunPaths
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import PASSING, make_folder, names_in, persistently

BEAT_SECONDS = 20.0
"""Seconds between two beats of a worker that has nothing new to say."""
SILENT_SECONDS = 5 * BEAT_SECONDS
"""Age of the last beat from which on a worker is taken for dead by the others: long enough for clocks that
differ by some seconds, and for a file server that is away for a minute."""
KEPT = 1000
"""Number of workers whose last words are kept: looking for the live ones lists the files of all."""
_GONE = ".gone"
_PASSING = PASSING | {errno.ENOENT}
_WAITS = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each further try to read a file that is replaced often, on a network filesystem. Of a worker
that was killed meanwhile it may stay unreadable, and nobody should wait long for that."""
_ELEMENT = re.compile(r"(\d+_\d+)r(\d+)")


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
    reason: Reason | None = None
    """Why it left."""
    iterations: tuple[int, int] = field(default=(0, 0))
    """First and last iteration that it has worked on."""
    queued_seconds: float | None = None
    """Seconds from the time at which it could have started, as far as the run is concerned, to its start."""
    process_space: str = ""
    """Where its process id counts: containers of one host may each have ids of their own."""


def file_of(paths: RunPaths, worker: str) -> Path:
    """Return the file of a worker's beats."""
    return _folder(paths) / f"{worker}.json"


def _folder(paths: RunPaths) -> Path:
    return paths.slurm / "workers"


def write_beat(paths: RunPaths, beat: Beat) -> None:
    """Replace a worker's file in one step. Not flushed to the disk: after a power cut no worker lives.

    Only one thread of the worker may be in here at a time.
    """
    path = file_of(paths, beat.worker)
    private = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.parent.is_dir():
        make_folder(path.parent)
    private.write_text(sealed(plain(beat)))
    private.replace(path)


def mark_gone(paths: RunPaths, worker: str) -> None:
    """Say that a worker is gone, as Slurm knows: others need not wait until its beats are too old."""
    make_folder(_folder(paths))
    link_once(_folder(paths) / f"{worker}{_GONE}", "")


def forget_old(paths: RunPaths, lives: Callable[[str], bool]) -> None:
    """Remove what all but the newest :data:`KEPT` workers have said; not of one that ``lives``."""
    workers = {name.partition(".")[0] for name in names_in(_folder(paths)) if name[0] != "."}
    for worker in sorted(workers, key=_age)[:-KEPT]:
        if not lives(worker):
            file_of(paths, worker).unlink(missing_ok=True)
            (_folder(paths) / f"{worker}{_GONE}").unlink(missing_ok=True)


def _age(worker: str) -> tuple[int, str]:
    """Return a sort key: the number of the array job, then the name."""
    number = worker.partition("_")[0]
    return (int(number) if number.isdecimal() else 0), worker


def read_beats(paths: RunPaths, wanted: Callable[[str], bool] = lambda worker: True) -> dict[str, Beat]:
    """Read the last beat of every worker whose name is ``wanted``, by name, in the order of names.

    One that is spoilt or just being replaced is left out: its worker is taken for dead until the next beat.
    """
    return _read(paths, (name for name in names_in(_folder(paths))), wanted)


def _read(paths: RunPaths, names: Iterable[str], wanted: Callable[[str], bool]) -> dict[str, Beat]:
    workers = (name.removesuffix(".json") for name in names if name.endswith(".json") and name[0] != ".")
    read = ((worker, _beat(file_of(paths, worker))) for worker in sorted(workers) if wanted(worker))
    return {worker: beat for worker, beat in read if beat is not None}


def _beat(path: Path) -> Beat | None:
    try:
        return converted(Beat, unsealed(persistently(path, path.read_bytes, _PASSING, _WAITS)))
    except (OSError, ValueError, TypeError):
        return None


@dataclass
class Crew:
    """The workers of a run, as files say. Those that have left are read once; of those that cannot be read
    now, what they last said counts."""

    paths: RunPaths
    left: dict[str, Beat] = field(default_factory=dict)
    known: dict[str, Beat] = field(default_factory=dict)

    def live(self, now: float) -> dict[str, Beat]:
        """Return the last beats of the workers that live, by name."""
        names = names_in(_folder(self.paths))
        beats = _read(self.paths, names, lambda worker: worker not in self.left)
        listed = {name.removesuffix(".json") for name in names}
        unread = {name: beat for name, beat in self.known.items() if name in listed}
        beats = self.known = {**unread, **beats}
        self.left |= {name: beat for name, beat in beats.items() if beat.doing is Doing.LEAVING}
        gone = {name.removesuffix(_GONE) for name in names if name.endswith(_GONE)}
        return living(beats, gone, now, is_dead_here)


def living(
    beats: Mapping[str, Beat], gone: Collection[str], now: float, is_dead: Callable[[Beat], bool]
) -> dict[str, Beat]:
    """Return the beats of those that live: that have not left, were not seen gone, are not older starts of an
    array element that runs again, and beat. Pure.

    Args:
        gone: names of workers that Slurm no longer has (:func:`mark_gone`).
        now: unix time.
        is_dead: whether a worker's process is known to be no more.
    """
    newest: dict[str, int] = {}
    for name in beats:
        if found := _ELEMENT.fullmatch(name):
            newest[found[1]] = max(int(found[2]), newest.get(found[1], 0))
    return {
        name: beat for name, beat in beats.items() if _lives(beat, newest, gone, now) and not is_dead(beat)
    }


def _lives(beat: Beat, newest: Mapping[str, int], gone: Collection[str], now: float) -> bool:
    found = _ELEMENT.fullmatch(beat.worker)
    is_old_start = found is not None and int(found[2]) < newest[found[1]]
    is_silent = now - beat.beat > SILENT_SECONDS
    return beat.doing is not Doing.LEAVING and beat.worker not in gone and not is_old_start and not is_silent


def process_space() -> str:
    """Return what tells apart the spaces in which process ids of one host count; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def is_dead_here(beat: Beat) -> bool:
    """Whether a worker ran on this machine and its process is no more. An id that another process has got
    meanwhile is found out by its silence."""
    is_here = beat.host == os.uname().nodename and beat.process_space == process_space() != ""
    return is_here and not _runs(beat.pid)


def _runs(pid: int) -> bool:
    """Whether there is a process of this id that is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
