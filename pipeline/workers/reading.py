"""Reading what workers say of themselves. What cannot be read is left out: an older or newer program may have
written it, and neither a worker nor a view may fail because of it."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.config.conversion import converted
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Beat, Doing, Reason, folder_of
from slurm.sealing import unsealed
from slurm.sharedfiles import PASSING, names_in, persistently, read_plainly

SUFFIX, GONE = ".json", ".gone"
"""Ends of the names of files: what a worker says; a mark that Slurm no longer has it."""
_PASSING = PASSING | {errno.ENOENT}
_WAITS = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each further try to read a file that is replaced often, on a network filesystem. Of a worker
that was killed meanwhile it may stay unreadable, and nobody should wait long for that."""


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
