"""Reading what workers say of themselves. What cannot be read is left out: an older or newer program may have
written it, and no view may fail because of it."""

import json
from dataclasses import fields
from typing import Any

from pipeline.config.conversion import converted
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Beat, Doing, Reason
from slurm.sharedfiles import names_in, read_newest

FOLDER, SUFFIX = "workers", ".json"
MOST_READ = 2000
"""Newest workers that a look reads: a run of thousands of iterations may have had a hundred thousand."""


class BeatReader:
    """Reader of a run's beats, which reads those of workers that have left only once."""

    def __init__(self, paths: RunPaths, most: int = MOST_READ) -> None:
        self._folder, self._most = paths.slurm / FOLDER, most
        self._left: dict[str, Beat] = {}

    def read(self) -> tuple[Beat, ...]:
        """Return the newest beat of each of the newest workers, oldest first."""
        names = sorted((n for n in names_in(self._folder) if n.endswith(SUFFIX) and n[0] != "."), key=_age)
        newest = names[-self._most :]
        self._left = {name: beat for name in newest if (beat := self._left.get(name))}
        return tuple(beat for name in newest if (beat := self._beat(name)))

    def _beat(self, name: str) -> Beat | None:
        if name not in self._left:
            try:
                beat = parse(json.loads(read_newest(self._folder / name)))
            except (OSError, ValueError):  # it is being replaced, or is no beat
                return None
            if beat is None or beat.doing is not Doing.LEAVING:
                return beat
            self._left[name] = beat
        return self._left[name]


def read_beats(paths: RunPaths) -> tuple[Beat, ...]:
    """Return the newest beat of each of a run's newest workers, oldest first."""
    return BeatReader(paths).read()


def _age(name: str) -> tuple[int, str]:
    """Return a sort key: the number of the array job, then the name."""
    number = name.partition("_")[0]
    return (int(number) if number.isdecimal() else 0), name


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
