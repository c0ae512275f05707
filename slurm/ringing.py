"""Waking workers that wait: a signal says that something was committed. The record is the truth, and a
worker that missed the signal finds it by polling.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from slurm.requests import find_requests, request_ring
from slurm.signals import signal_elements

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


def elements_to_ring(waiting: Mapping[str, str], readers: Collection[str]) -> tuple[str, ...]:
    """Return the elements, like ``4711_3``, whose workers wait for one of some tasks. Pure.

    Args:
        waiting: key of the task that each worker waits to begin, by the worker's name.
        readers: keys of the tasks that read what was committed.
    """
    woken = (parse_worker(name) for name, task in waiting.items() if task in readers)
    return elements_of(worker for worker in woken if worker is not None)


def elements_of(workers: Iterable[WorkerName]) -> tuple[str, ...]:
    """Return the elements of some workers in the order of their numbers, without repeats. Pure."""
    numbers = sorted({(int(worker.array), worker.index) for worker in workers})
    return tuple(f"{array}_{index}" for array, index in numbers)


def ring(elements: Iterable[str]) -> str:
    """Wake the workers of some elements, here or outside of the container. Returns what went wrong; empty if
    nothing did.

    One that still starts up ignores the signal, and one that waits in the queue does not get it. Only those
    that run are to be named: for others scancel tries again and again (:mod:`slurm.signals`).
    """
    named = list(elements)
    if (fifo := find_requests()) is not None:
        return request_ring(fifo, named)
    return signal_elements("USR1", named)
