"""The worker's loop: task after task of one stage in one process, which keeps what it has loaded.

Where tasks come from is a :class:`Source`'s: a pipe from the local scheduler, or claims on the shared
filesystem (Slurm). Results do not depend on which: a task sets up all that its result depends on.
"""

from typing import Protocol

from stages.runner import Arguments


class Source(Protocol):
    """Where a worker gets its attempts from, one at a time."""

    def next(self) -> Arguments | None:
        """Return the next attempt, waiting for it as long as that pays. None: leave."""

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        """Note the end of an attempt."""


def work(source: Source) -> int:
    """Do what the source gives until it gives nothing. Returns the exit code of the process."""
    raise NotImplementedError
