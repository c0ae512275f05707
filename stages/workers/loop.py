"""The worker's loop: task after task of one job kind in one process, which keeps what it has loaded.

Where tasks come from is a :class:`Source`'s: claims in the run directory, or the first of several ranks.
Results do not depend on which: a task sets up all that its result depends on.
"""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.decide.staying import SETTLED, has_grown
from pipeline.run.failures import FailureKind
from pipeline.workers.beats import Reason
from stages.attempts.arguments import Arguments
from stages.attempts.runner import AttemptEnd, run_attempt
from stages.process.preemption import warned
from stages.workers.kept_trainer import (
    bytes_of_state,
    finish_state,
    release_kept_trainer,
    save_kept_trainer,
)

_ENDS_PROCESS = frozenset({FailureKind.MEMORY, FailureKind.DISK})
"""Failures after which a process does nothing more."""
_NOTEWORTHY = 2**26
"""Bytes of garbage that are worth looking for."""


class Source(Protocol):
    """Where a worker gets its attempts from, one at a time."""

    def next(self) -> Arguments | None:
        """Return the next attempt, waiting for it as long as that pays. None: leave."""

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        """Note the end of an attempt."""

    def leave(self, reason: Reason) -> None:
        """Have :meth:`next` give nothing more: the process has to make place."""

    def left(self) -> None:
        """Take note that the worker has left, and has saved what it kept. May raise what made it leave."""


def work(source: Source) -> int:
    """Do what the source gives until it gives nothing. Returns the exit code of the process: the last
    attempt's."""
    sizes: list[int] = []
    exit_code, has_failed = 0, False
    try:
        while (arguments := source.next()) is not None:
            end = run_attempt(arguments)
            has_failed = end.failure is not None
            if not arguments.loads or _ranks() > 1:  # a task meets what failed to load, if there is one
                exit_code = end.exit_code
            if has_failed:
                drop_kept()
            source.ended(arguments, end.exit_code)
            if not arguments.loads:
                sizes.append(settled_size(sizes))
            if reason := why_leave(end, sizes):
                source.leave(reason)
        finish_state()
        if not has_failed:  # nothing is kept then, and other ranks may be in another collective
            save_kept_trainer()
        source.left()
    finally:
        drop_kept(ends=True)
    return exit_code


def why_leave(end: AttemptEnd, sizes: Sequence[int]) -> Reason | None:
    """Return why a process is to leave after an attempt; None: it may do another.

    Args:
        sizes: bytes that it held after each of its attempts.
    """
    if is_spoilt(end, _ranks()):
        return Reason.FAILED
    if warned():
        return Reason.WARNED
    return Reason.GREW if has_grown(sizes) else None


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def settled_size(earlier: Sequence[int]) -> int:
    """Return the memory that this process holds, in bytes, without what is only garbage. Looking for that
    takes a tenth of a second, so it is done only if there may be much, and after no task of which the size
    does not count (:func:`has_grown`): many workers leave before, and others wait for their place.

    Args:
        earlier: what was returned after earlier tasks.
    """
    size, counted = resident_bytes(), earlier[SETTLED - 1 :]
    if len(earlier) < SETTLED - 1 or (counted and size < min(counted) + _NOTEWORTHY):
        return size
    gc.collect()
    return resident_bytes()


def is_spoilt(end: AttemptEnd, ranks: int) -> bool:
    """Whether a process is of no further use after an attempt: memory that ran out may still be held by what
    failed, after other faults of a GPU each call of CUDA fails, ranks of which one failed may wait for each
    other, and that a disk took nothing may show in the exit code alone, which is that of the last attempt.
    """
    return end.failure is not None and (end.is_of_device or end.failure in _ENDS_PROCESS or ranks > 1)


def resident_bytes() -> int:
    """Return the memory that this process holds, without what it shares with files, and what a thread is
    writing, which is sometimes there and sometimes not."""
    written = int(bytes_of_state())  # looked at first: it may go meanwhile, never come
    pages = Path("/proc/self/statm").read_text().split()
    return max(0, (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") - written)


def drop_kept(ends: bool = False) -> None:
    """Drop all that tasks have kept for later ones. Errors of that are logged only.

    Args:
        ends: whether the process ends, and gives its memory back with that.
    """
    if not ends:
        release_kept_trainer()
    # Not imported for this: if it was not, nothing is kept.
    if engines := sys.modules.get("stages.engines"):
        engines.release_all(ends)
