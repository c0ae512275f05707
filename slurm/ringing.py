"""Waking workers that wait: a signal says that something was committed. The record is the truth, and whoever
missed the signal finds it by looking now and then.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from slurm.requests import find_requests, request_ring

_WORKER = re.compile(r"(?P<array>\d+)_(?P<index>\d+)r(?P<restart>\d+)")


@dataclass(frozen=True)
class WorkerName:
    """Parts of a worker's name, like ``4711_3r0``."""

    array: str
    index: int
    restart: int

    @property
    def element(self) -> str:
        return f"{self.array}_{self.index}"

    def __str__(self) -> str:
        return f"{self.element}r{self.restart}"


def parse_worker(name: str) -> WorkerName | None:
    """Parse a worker's name; None where it is no array element's."""
    found = _WORKER.fullmatch(name)
    return WorkerName(found["array"], int(found["index"]), int(found["restart"])) if found else None


def arrays_to_ring(waiting: Mapping[str, str], readers: Collection[str]) -> tuple[str, ...]:
    """Return the ids of the arrays with a worker that waits for one of some tasks. Pure.

    Args:
        waiting: key of the task that each worker waits to begin, by the worker's name.
        readers: keys of the tasks that read what was committed.
    """
    woken = (parse_worker(name) for name, task in waiting.items() if task in readers)
    return tuple(sorted({worker.array for worker in woken if worker is not None}, key=int))


def ring(arrays: Iterable[str]) -> str:
    """Wake the workers of some arrays, by one call of scancel, here or outside of the container. Returns what
    went wrong; empty if nothing did.

    An element that still starts up ignores the signal, and one that waits in the queue does not get it.
    """
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.submission import signal_batch

    jobs = list(arrays)
    if (fifo := find_requests()) is not None:
        return request_ring(fifo, jobs)
    try:
        if jobs:
            signal_batch("USR1", jobs)
    except (SlurmError, SlurmMissing) as error:
        return str(error)
    return ""
