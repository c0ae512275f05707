"""A job step as a process of this machine: it starts srun, passes on what it is told, and ends like the step.

So the executor of this machine (:mod:`pipeline.executors.processes`) carries out steps on other nodes too.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipeline.executors.orders import Orders
from pipeline.run.environment import BELL, COMMITTED
from slurm.commands import clean_environment
from slurm.sharedfiles import is_there

NODES = "{nodes}"
"""Word of a command that stands for the names of the step's nodes."""
NODES_VARIABLE = "STEP_NODES"
"""Variable with these names."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks for the commit of the step's task."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def serve(orders: Orders) -> int:
    """Do one order, whose arguments are the path of the task's commit record and the command. Returns the
    step's exit code."""
    order = orders.next()
    if order is None:
        return 0
    orders.begin(order)
    record, *command = order.arguments
    return run_step(Path(record), command)


def run_step(record: Path, command: Sequence[str]) -> int:
    """Run a step to its end, and ring the bell when its task is committed. A step that a signal ended ends
    this process by the same."""
    nodes = os.environ[NODES_VARIABLE]
    words = [word.replace(NODES, nodes) for word in command]
    bell = int(os.environ.get(BELL, "-1"))
    with subprocess.Popen(
        words,
        env=clean_environment(os.environ),
        start_new_session=True,  # srun would take SIGTERM for the wish to kill the step
        preexec_fn=_end_with_parent,
    ) as step:
        _pass_warnings_on(step)
        code = _wait(step, record, bell)
    if code > 128:
        _die_of(code - 128)
    return code if code >= 0 else 1


def _wait(step: "subprocess.Popen[bytes]", record: Path, bell: int) -> int:
    is_committed = False
    while True:
        try:
            return step.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            if not is_committed and is_there(record):
                is_committed = True
                if bell >= 0:
                    os.write(bell, COMMITTED)


def _pass_warnings_on(step: "subprocess.Popen[bytes]") -> None:
    """Warn the step's processes when this one is told to end: srun passes SIGUSR2 on, and SIGTERM not."""

    def warn(number: int, frame: FrameType | None) -> None:
        step.send_signal(signal.SIGUSR2)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, warn)


def _end_with_parent() -> None:
    """Have srun end its step when the process that started it is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _die_of(number: int) -> None:
    """End as the step did, so that it is seen which signal it was."""
    sys.stdout.flush()
    if number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(os.getpid(), number)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
