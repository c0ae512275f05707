"""The protocol around a stage: check, compute, commit; or write to a file why that failed.

Exit codes: 0 committed (by this attempt or another), 1 failed, 2 the user's input cannot work,
4 an input is not committed, corrupt or stale, 5 stopped on a warning, 6 the disk takes nothing.

An attempt at a task that is committed ends here. The computing is in
:mod:`stages.attempts.execution`, the explaining of failures in :mod:`stages.attempts.failures`; importing
them takes longer than all of this.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import forget_folders, read_record
from pipeline.run.control import SpoiltControl, read_control
from pipeline.run.durable import is_there
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.failures import FailureKind
from pipeline.run.owner import owner_of_job
from pipeline.run.paths import RunPaths
from stages.attempts.arguments import Arguments, parse
from stages.logs import log, set_up_log
from stages.process.preemption import listen


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended."""

    exit_code: int
    failure: FailureKind | None = None
    """Kind of the failure, if it failed."""
    is_of_device: bool = False
    """Whether the failure was a fault of a GPU or its driver."""


def main(argv: Sequence[str]) -> int:
    """Run one attempt at a task in a process of its own; return the exit code."""
    set_up_log()
    arguments = parse(argv)
    if is_taken_over(arguments.run_dir):
        log.info(f"{arguments.run_dir} was taken over from the user who submitted this job; nothing is done")
        return 0
    return run_attempt(arguments).exit_code


def is_taken_over(run_dir: Path) -> bool:
    """Whether the run of a job on Slurm no longer belongs to the job's owner."""
    own = owner_of_job(os.environ)
    with contextlib.suppress(OSError, SpoiltControl):  # the task itself will meet what is wrong
        return own is not None and read_control(RunPaths(run_dir)).is_taken_over_from(own)
    return False


def run_attempt(arguments: Arguments) -> AttemptEnd:
    """Run one attempt at a task, in a process that may have run others of its job kind. The log is set up."""
    started = time.time()
    listen(arguments.task.stage.heeds_warnings, arguments.stays)  # before anything that takes time
    os.environ.update(TASK_ENVIRONMENT)  # no hub and no telemetry: compute nodes have no network
    forget_folders()
    if arguments.loads:
        return load_ahead(arguments)
    if arguments.failure_file and os.environ.get("RANK", "0") == "0":
        arguments.failure_file.unlink(missing_ok=True)  # of an earlier start of this same attempt
    try:
        if is_committed(arguments):
            log.info(f"{arguments.task} is committed already; nothing to do")
            return AttemptEnd(0)
        from stages.attempts.execution import execute  # what follows takes a while to import

        execute(arguments, started)
        return AttemptEnd(0)
    except Exception as error:  # the attempt ends here: whatever happened is reported, none is swallowed
        from stages.attempts.failures import exit_code, report

        why = report(error, arguments, started)
        return AttemptEnd(exit_code(why.kind), why.kind, why.is_of_device)


def load_ahead(arguments: Arguments) -> AttemptEnd:
    """Load what a task will compute with. A failure is only logged: the task will meet it, and report it. Of
    several ranks one that failed ends, and by its exit code the others: there is no task then."""
    try:
        from stages.attempts.execution import load

        load(arguments)
        return AttemptEnd(0)
    except Exception:  # whatever a model or a user's engine raises: the task itself will meet and report it
        log.exception(f"{arguments.task}: loading ahead failed; the task will load again:")
        return AttemptEnd(1, FailureKind.ERROR)


def is_committed(arguments: Arguments) -> bool:
    """Whether the task was done before this attempt began, in the history that it began in."""
    paths = RunPaths(arguments.run_dir)
    return is_there(paths.task(arguments.task).folder) and read_record(paths, arguments.task) is not None
