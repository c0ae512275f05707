"""Reports of why an attempt failed: in its log, in its exit code, and for the driver in its failure file."""

import contextlib
import json
import socket
import time
import traceback
from logging import ERROR, WARNING

from pipeline.run.commits import CorruptData, NotCommitted, StaleData
from pipeline.run.durable import link_once, make_folder
from pipeline.run.failures import DISK_EXIT, FailureKind, is_of_disk
from pipeline.run.schemas import SchemaError
from pipeline.run.tasks import Task, task_key
from stages.attempts.arguments import Arguments
from stages.context import UserError
from stages.logs import log

EXIT_CODES = {
    FailureKind.CONFIG: 2,
    FailureKind.INPUTS: 4,
    FailureKind.TIMEOUT: 5,
    FailureKind.PAUSED: 5,
    FailureKind.DISK: DISK_EXIT,
}


def report(error: Exception, arguments: Arguments, started: float) -> FailureKind:
    """Explain the failure in the log and, for the driver and the report's timeline, in the failure file;
    return its kind."""
    kind, suspect = classify(error)
    says_all = kind not in (FailureKind.ERROR, FailureKind.NUMERICS, FailureKind.MEMORY)
    is_explained = getattr(error, "is_explained", says_all)
    message = str(error) if is_explained else f"{type(error).__name__}: {error}"
    level, outcome = (WARNING, "paused") if kind is FailureKind.PAUSED else (ERROR, "failed")
    with contextlib.suppress(OSError):  # a full disk takes no report either; the exit code says it
        if not is_explained:
            traceback.print_exception(error)
        log.log(level, f"{arguments.task} {outcome}: {message}")
        if arguments.failure_file:
            said: dict[str, object] = {"kind": kind, "message": message}
            said |= {"suspect": suspect and task_key(suspect), "started": started}
            said |= {"ended": time.time(), "host": socket.gethostname()}
            make_folder(arguments.failure_file.parent, arguments.run_dir)
            link_once(arguments.failure_file, json.dumps(said) + "\n")  # of several ranks the first knows why
    return kind


def exit_code(kind: FailureKind) -> int:
    """Return the exit code of an attempt that failed."""
    return EXIT_CODES.get(kind, 1)


def classify(error: Exception) -> tuple[FailureKind, Task | None]:
    """Return the kind of failure, and the input to examine, if an input was at fault."""
    if isinstance(error, NotCommitted | CorruptData | StaleData):
        return FailureKind.INPUTS, error.task
    if is_of_disk(error):
        return FailureKind.DISK, None
    if isinstance(error, UserError | SchemaError):
        return FailureKind.CONFIG, None
    return getattr(error, "failure_kind", FailureKind.ERROR), None
