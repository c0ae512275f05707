"""What a worker says of itself, in a file of its own that it replaces: ``slurm/workers/4711_3r0.json``.

It is written when what it says changes, and at least every :data:`BEAT_SECONDS` while the worker lives.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import link_once
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import (
    PASSING,
    make_folder,
    names_in,
    persistently,
    read_plainly,
    sealed,
    unsealed,
    write_plainly,
)

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
    """It has left the loop: a pass may submit its successor."""


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
    """Slurm warned it: time limit, preemption, or a cancellation."""
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
    saving: str = ""
    """Key of the update whose state it writes beside what it does; empty where it writes none."""
    saving_attempt: str = ""
    """Id of the attempt that made that update."""
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


# --- reading ---------------------------------------------------------------------------------------------

# What cannot be read is left out: an older or newer program may have written it, and neither a worker nor a
# view may fail because of it.


SUFFIX, GONE = ".json", ".gone"
"""Ends of the names of files: what a worker says; a mark that Slurm no longer has it."""
_PASSING = PASSING | {errno.ENOENT}
_WAITS = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each further try to read a file that is replaced often, on a network filesystem. Of a worker
that was killed meanwhile it may stay unreadable, which is not to hold up others."""


@dataclass
class BeatReader:
    """Reader of a run's beats. Those of workers that have left are read once; where one cannot be read now,
    the one that was read last counts."""

    paths: RunPaths
    wanted: Callable[[str], bool] = lambda worker: True
    """Whether the beat of a worker of this name is of interest."""
    known: dict[str, Beat] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    """Names of workers that Slurm no longer had, as of the last look."""

    def read(self) -> dict[str, Beat]:
        """Return the newest beat of each worker by its name, those of the oldest array first."""
        names = names_in(folder_of(self.paths))
        workers = sorted(filter(self.wanted, _with_suffix(names, SUFFIX)), key=seniority)
        self.gone = frozenset(_with_suffix(names, GONE))
        self.known = {worker: beat for worker in workers if (beat := self._newest(worker))}
        return dict(self.known)

    def _newest(self, worker: str) -> Beat | None:
        known = self.known.get(worker)
        if known is not None and known.doing is Doing.LEAVING:
            return known
        return _read(folder_of(self.paths) / f"{worker}{SUFFIX}") or known


def read_beats(paths: RunPaths, wanted: Callable[[str], bool] = lambda worker: True) -> dict[str, Beat]:
    """Return the newest beat of each worker whose name is ``wanted``, by name, oldest array first."""
    return BeatReader(paths, wanted).read()


def _with_suffix(names: set[str], suffix: str) -> set[str]:
    return {name.removesuffix(suffix) for name in names if name.endswith(suffix) and name[0] != "."}


def seniority(worker: str) -> tuple[int, str]:
    """Return a sort key: the number of the array job, then the name."""
    number = worker.partition("_")[0]
    return (int(number) if number.isdecimal() else 0), worker


def _read(path: Path) -> Beat | None:
    try:
        return parse(unsealed(persistently(path, lambda: read_plainly(path), _PASSING, _WAITS)))
    except (OSError, ValueError):  # it is just being replaced, or is no beat
        return None


def parse(found: Any) -> Beat | None:
    """Make a beat of parsed JSON; None where it is none. Keys and reasons that are not known are left out.
    Pure."""
    if not isinstance(found, dict):
        return None
    known = {one.name: found[one.name] for one in fields(Beat) if one.name in found}
    if known.get("reason") not in list(Reason):
        known["reason"] = None
    try:
        return converted(Beat, known)
    except (TypeError, ValueError):
        return None


# --- who lives -------------------------------------------------------------------------------------------

# As beats and the marks of passes say; those of long ago are forgotten.


SILENT_SECONDS = 5 * BEAT_SECONDS
"""Seconds without a new beat after which a worker is taken for dead by another: long enough for a file server
that is away for a minute."""
KEPT = 1000
"""Number of workers whose last words are kept: looking for the live ones lists the files of all."""
_ELEMENT = re.compile(r"(\d+_\d+)r(\d+)")


@dataclass
class LiveWorkers:
    """The workers of a run, as files say. Whether they still beat shows in what changes from look to look:
    clocks of nodes may differ by minutes, and be set."""

    paths: RunPaths
    reader: BeatReader = field(init=False)
    _heard: dict[str, "_Heard"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = BeatReader(self.paths)

    @property
    def beats(self) -> Mapping[str, Beat]:
        """Newest beats of all workers by name, those that have left too, as of the last look."""
        return self.reader.known

    @property
    def ahead(self) -> Mapping[str, float]:
        """Seconds by which the clock of each worker is ahead of this machine's, as of the last look. It is
        more by what a beat is old when it is first seen: a beat's time at most."""
        return {name: heard.ahead for name, heard in self._heard.items()}

    def live(self, now: float) -> dict[str, Beat]:
        """Look, and return the newest beats of the workers that live, by name.

        Args:
            now: seconds, by the same clock at each call; best by one that is never set (``time.monotonic``).
        """
        beats = self.reader.read()
        self._heard = {name: self._heard_of(name, beat, now) for name, beat in beats.items()}
        silent = {name for name, heard in self._heard.items() if now - heard.since > SILENT_SECONDS}
        return living(beats, self.reader.gone | silent, is_dead_here)

    def _heard_of(self, name: str, beat: Beat, now: float) -> "_Heard":
        known = self._heard.get(name)
        return known if known and known.beat == beat.beat else _Heard(beat.beat, now, beat.beat - time.time())


@dataclass(frozen=True)
class _Heard:
    """Newest beat of a worker."""

    beat: float
    """Unix time, by the worker's clock."""
    since: float
    """When it was first seen, by the reader's clock."""
    ahead: float
    """Seconds by which it was of the future then."""


def mark_gone(paths: RunPaths, worker: str) -> None:
    """Say that a worker is gone, as Slurm knows: others need not wait until its beats are too old."""
    make_folder(folder_of(paths), paths.root)
    link_once(folder_of(paths) / f"{worker}{GONE}", "")


def forget_old(paths: RunPaths, lives: Callable[[str], bool], kept: int = KEPT) -> None:
    """Remove what all but the newest ``kept`` workers have said; not of one that ``lives``."""
    workers = {name.partition(".")[0] for name in names_in(folder_of(paths)) if name[0] != "."}
    for worker in sorted(workers, key=seniority)[:-kept]:
        if not lives(worker):
            file_of(paths, worker).unlink(missing_ok=True)
            (folder_of(paths) / f"{worker}{GONE}").unlink(missing_ok=True)


def read_living(reader: BeatReader) -> dict[str, Beat]:
    """Look, and return the newest beats of the workers that live as far as one look says."""
    return living(reader.read(), reader.gone, is_dead_here)


def living(
    beats: Mapping[str, Beat], gone: Collection[str], is_dead: Callable[[Beat], bool]
) -> dict[str, Beat]:
    """Return the beats of those that live: that have not left, are not gone, and are not older starts of an
    array element that runs again. Pure.

    Args:
        gone: names of workers that Slurm no longer has (:func:`mark_gone`), or that are silent.
        is_dead: whether a worker's process is known to be no more.
    """
    newest: dict[str, int] = {}
    for name in beats:
        if found := _ELEMENT.fullmatch(name):
            newest[found[1]] = max(int(found[2]), newest.get(found[1], 0))
    return {name: beat for name, beat in beats.items() if _lives(beat, newest, gone) and not is_dead(beat)}


def _lives(beat: Beat, newest: Mapping[str, int], gone: Collection[str]) -> bool:
    found = _ELEMENT.fullmatch(beat.worker)
    is_old_start = found is not None and int(found[2]) < newest[found[1]]
    return beat.doing is not Doing.LEAVING and beat.worker not in gone and not is_old_start


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
