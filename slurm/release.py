"""Early release: arrays that wait for a task's result may start once it is committed, while its job goes on.

Slurm knows only the ends of jobs. So the element that runs the task clears the dependency of those who wait
for it, as soon as the task rings its bell. Where that fails, they start when its job has ended, as ever.
"""

import contextlib
import fnmatch
import os
import re
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm.sealing import unsealed
from slurm.sharedfiles import names_in, read_shared
from slurm.tasklist import BELL, COMMITTED

_JOIN_SECONDS = 10.0
"""Seconds that a job whose task has ended waits for a request to Slurm that is under way."""
_MOST_SAID = 64
_CONDITION = re.compile(r"(after\w*):(\d+)")

Groups = Sequence[Sequence[str]]
""":attr:`slurm.tasklist.TaskList.releases`."""


class Waiting(NamedTuple):
    """An array that waits for another one."""

    array: str
    has_others: bool
    """Whether it was told to wait for more arrays than that."""


@contextlib.contextmanager
def early_release(groups: Groups, job: str, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Give the task that runs in this block a bell, and release those who wait for it when it has committed.

    Args:
        groups: :attr:`slurm.tasklist.TaskList.releases`.
        job: Slurm's id of this array.
        environment: of the task; of several ranks under srun only the first gets a bell.
    """
    if environment.get("SLURM_PROCID", "0") != "0":
        yield
        return
    reader, writer = os.pipe()
    environment[BELL] = str(writer)
    listener = threading.Thread(target=_listen, args=(reader, groups, job), daemon=True)
    listener.start()
    try:
        yield
    finally:
        os.close(writer)
        listener.join(_JOIN_SECONDS)


def _listen(reader: int, groups: Groups, job: str) -> None:
    while said := os.read(reader, _MOST_SAID):
        if COMMITTED in said:
            release(groups, job)
            return


def release(groups: Groups, job: str) -> None:
    """Release the arrays that wait for array ``job``: of each group those of the first pattern that has any.
    Errors are printed."""
    for patterns in groups:
        for pattern in patterns:
            told = [_set_free(waiting, job) for waiting in waiting_for(pattern, job)]
            if any(told):
                break


def _set_free(waiting: Waiting, job: str) -> bool:
    """Let an array wait for ``job`` no longer. Returns whether Slurm was told."""
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.submission import update_dependency

    array, started = waiting.array, time.monotonic()
    try:
        rest = dependency_without(_dependency_of(array), job) if waiting.has_others else ""
        update_dependency(array, rest)
    except (SlurmError, SlurmMissing) as error:  # it has started, or starts once this job has ended
        _note(f"job {array} was not released early: {error}")
        return False
    left = f"; it still waits: {rest}" if rest else ""
    _note(f"job {array} need not wait any longer ({time.monotonic() - started:.2f} s){left}")
    return True


def _dependency_of(array: str) -> str:
    """Ask Slurm what an array still waits for. Raises SlurmError, SlurmMissing."""
    from slurm.commands import run_command

    return run_command(["squeue", "-a", "-h", "--states=PENDING", f"--jobs={array}", "--Format=Dependency:|"])


def dependency_without(shown: str, job: str) -> str:
    """Remove an array from a dependency. Pure.

    Args:
        shown: what squeue shows, like ``afterok:12_*(unfulfilled),afterok:15_*(unfulfilled)``, or with ``?``
            where one of them is enough; a line for each part of an array that waits for other jobs.

    Returns:
        The expression without it; empty where nothing is left to wait for.
    """
    if "?" in shown:
        return ""
    conditions = (f"{kind}:{array}" for kind, array in _CONDITION.findall(shown) if array != job)
    return ",".join(dict.fromkeys(conditions))


def waiting_for(pattern: str, job: str) -> Iterator[Waiting]:
    """Yield the arrays whose state files say that they wait for array ``job``."""
    folder, names = Path(pattern).parent, Path(pattern).name
    for name in sorted(fnmatch.filter(names_in(folder), names)):
        # One that is just being replaced, or spoilt, is of an array that starts when this job has ended.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = unsealed(read_shared(folder / name))
            if job in state["waits_for"] and state["job"] and not state.get("is_withdrawn"):
                yield Waiting(str(state["job"]), len(state["waits_for"]) > 1)


def _note(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk takes no line
        print(line, flush=True)
