"""Early release: arrays that wait for a task's result may start once it is committed, while its job goes on.

Slurm knows only the ends of jobs. So the element that runs the task clears the dependency of those who wait
for it, as soon as the task rings its bell. Where that fails, they start when its job has ended, as ever.
"""

import contextlib
import fnmatch
import os
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path

from slurm.sealing import unsealed
from slurm.sharedfiles import names_in, read_shared
from slurm.tasklist import BELL, COMMITTED

_JOIN_SECONDS = 10.0
"""Seconds that a job whose task has ended waits for a request to Slurm that is under way."""
_MOST_SAID = 64


@contextlib.contextmanager
def early_release(patterns: Sequence[str], job: str, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Give the task that runs in this block a bell, and release those who wait for it when it has committed.

    Args:
        patterns: :attr:`slurm.tasklist.TaskList.releases`.
        job: Slurm's id of this array.
        environment: of the task; of several ranks under srun only the first gets a bell.
    """
    if environment.get("SLURM_PROCID", "0") != "0":
        yield
        return
    reader, writer = os.pipe()
    environment[BELL] = str(writer)
    listener = threading.Thread(target=_listen, args=(reader, patterns, job), daemon=True)
    listener.start()
    try:
        yield
    finally:
        os.close(writer)
        listener.join(_JOIN_SECONDS)


def _listen(reader: int, patterns: Sequence[str], job: str) -> None:
    while said := os.read(reader, _MOST_SAID):
        if COMMITTED in said:
            release(patterns, job)
            return


def release(patterns: Iterable[str], job: str) -> None:
    """Let every array start that waits for array ``job`` by its dependency. Errors are printed."""
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.submission import update_dependency

    for array in waiting_for(patterns, job):
        started = time.monotonic()
        try:
            update_dependency(array, "")
            _note(f"job {array} need not wait any longer ({time.monotonic() - started:.2f} s)")
        except (SlurmError, SlurmMissing) as error:  # it has started, or starts once this job has ended
            _note(f"job {array} was not released early: {error}")


def waiting_for(patterns: Iterable[str], job: str) -> Iterator[str]:
    """Yield the ids of arrays whose state files say that they wait for array ``job``."""
    for pattern in map(Path, patterns):
        for name in sorted(fnmatch.filter(names_in(pattern.parent), pattern.name)):
            # One that is just being replaced, or spoilt, is of an array that starts when this job has ended.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                state = unsealed(read_shared(pattern.parent / name))
                if job in state["waits_for"] and state["job"] and not state.get("is_withdrawn"):
                    yield str(state["job"])


def _note(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk takes no line
        print(line, flush=True)
