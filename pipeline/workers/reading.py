"""Reading what workers say of themselves. What cannot be read is left out: an older or newer program may have
written it, and no view may fail because of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

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
    """Make a beat of parsed JSON; None where it has no name, kind or time. Keys that are not known are left
    out, and so is what is none of the known words. Pure."""
    if not isinstance(found, dict):
        return None
    try:
        return Beat(**dict(_values(found)))
    except (TypeError, ValueError, KeyError):
        return None


def _values(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a beat's fields. Raises KeyError, TypeError or ValueError where one is unusable."""
    for one in fields(Beat):
        is_needed = one.default is MISSING and one.default_factory is MISSING
        if one.name not in found and not is_needed:
            continue
        value = found[one.name]
        if one.name in ("worker", "job_kind", "host", "task"):
            value = str(value)
        elif one.name in ("pid", "tasks"):
            value = int(value)
        elif one.name == "doing":
            value = Doing(value)
        elif one.name == "reason":
            value = _reason(value)
        elif one.name == "iterations":
            first, last = value
            value = int(first), int(last)
        elif value is not None or one.name != "until":
            value = float(value)
        yield one.name, value


def _reason(value: object) -> Reason | None:
    """Return why it left; None for a reason that this version does not know."""
    return next((reason for reason in Reason if reason == value), None)
