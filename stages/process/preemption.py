"""Warnings: signals that the process will soon be ended, noted when they come and checked when it suits.

Imports nothing heavy, so that a process can listen before it has imported anything else.
"""

import signal
from types import FrameType

from pipeline.run.failures import FailureKind

_noted = False


class StoppedOnWarning(Exception):
    """The task was warned and stopped before it was done.

    ``found``, ``saved`` and ``total`` count responses: saved by earlier attempts, saved by now, all.
    """

    def __init__(self, found: int, saved: int, total: int) -> None:
        if saved > found:
            what = f"with {saved} of {total} responses saved"
        elif found:
            what = f"before another response was finished; {found} of {total} are saved"
        else:
            what = "before any response was finished"
        super().__init__(f"stopped on a warning {what}")
        self.failure_kind = FailureKind.PAUSED if saved > found else FailureKind.TIMEOUT


def listen(can_save: bool, stays: bool = False) -> None:
    """Handle SIGUSR2 and SIGTERM: a task that can save notes them, and :func:`warned` reports it.

    Any other task goes on at SIGUSR2, since what it has done would be lost, and ends at SIGTERM. A process
    that stays notes SIGUSR2 in every task: Slurm sends it once, and it is to begin no other. The handlers
    stay until the process ends: a warning that comes after the task's end must not kill it. One that was
    noted holds for every later task of the process.

    Args:
        can_save: whether the task asks for warnings, and saves what it has.
        stays: whether the process may do another task.
    """
    signal.signal(signal.SIGUSR2, _note if can_save or stays else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note if can_save else signal.SIG_DFL)


def warned() -> bool:
    """Whether a warning has come to this process since it first listened."""
    return _noted


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
