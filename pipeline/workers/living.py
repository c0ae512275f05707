"""Which workers live, as their beats and the marks of passes say; and forgetting those of long ago."""

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.run.durable import link_once
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import BEAT_SECONDS, Beat, Doing, file_of, folder_of, process_space
from pipeline.workers.reading import GONE, BeatReader, seniority
from slurm.sharedfiles import make_folder, names_in

SILENT_SECONDS = 5 * BEAT_SECONDS
"""Seconds without a new beat after which a worker is taken for dead by another: long enough for a file server
that is away for a minute."""
KEPT = 1000
"""Number of workers whose last words are kept: looking for the live ones lists the files of all."""
_ELEMENT = re.compile(r"(\d+_\d+)r(\d+)")


@dataclass
class Crew:
    """The workers of a run, as files say. Whether they still beat is told by what changes from look to look:
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
    """When it was first seen, by the clock of whoever looks."""
    ahead: float
    """Seconds by which it was of the future then."""


def mark_gone(paths: RunPaths, worker: str) -> None:
    """Say that a worker is gone, as Slurm knows: others need not wait until its beats are too old."""
    make_folder(folder_of(paths), paths.root)
    link_once(folder_of(paths) / f"{worker}{GONE}", "")


def forget_old(paths: RunPaths, lives: Callable[[str], bool]) -> None:
    """Remove what all but the newest :data:`KEPT` workers have said; not of one that ``lives``."""
    workers = {name.partition(".")[0] for name in names_in(folder_of(paths)) if name[0] != "."}
    for worker in sorted(workers, key=seniority)[:-KEPT]:
        if not lives(worker):
            file_of(paths, worker).unlink(missing_ok=True)
            (folder_of(paths) / f"{worker}{GONE}").unlink(missing_ok=True)


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
