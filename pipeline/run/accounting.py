"""When a run last asked Slurm's accounting, on disk: passes are many, and of several processes.

``<run>/slurm/accounting.json`` is written by passes that hold the lease.
"""

import contextlib
from dataclasses import dataclass

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import make_folder, read_newest, sealed, unsealed


@dataclass(frozen=True)
class Accounting:
    """What a run knows of the cluster's accounting."""

    invocation: int = -1
    """Number of the invocation of submit, run or resume in which it was asked."""
    asked: float = 0.0
    """Unix time of the last question; 0 for none."""
    answers: bool = False
    """Whether that was answered."""
    is_absent: bool = False
    """Whether the cluster has none."""
    used: float = 0.0
    """Unix time when something was last written by what it, or the queue, says of jobs."""


def read_accounting(paths: RunPaths, invocation: int) -> Accounting:
    """Return what was learned in this invocation; nothing, where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = converted(Accounting, unsealed(read_newest(paths.slurm / "accounting.json")))
        if found.invocation == invocation:
            return found
    return Accounting(invocation)


def note_accounting(paths: RunPaths, known: Accounting) -> None:
    make_folder(paths.slurm, paths.root)
    replace_durably(paths.slurm / "accounting.json", sealed(plain(known)))
