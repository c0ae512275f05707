"""Reports of why an attempt failed: in its log, in its exit code, and for the driver in its failure file."""

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from logging import ERROR, WARNING
from pathlib import Path

from pipeline.decide.device_faults import Diagnosis, diagnose
from pipeline.run.commits import CorruptData, NotCommitted, StaleData
from pipeline.run.durable import is_there, link_once, make_folder
from pipeline.run.failures import DISK_EXIT, FailureKind, is_of_disk
from pipeline.run.schemas import SchemaError
from pipeline.run.tasks import Task, task_key
from stages.attempts.arguments import Arguments
from stages.context import OtherRankFailed, Quoting, UserError
from stages.logs import log

EXIT_CODES = {
    FailureKind.CONFIG: 2,
    FailureKind.INPUTS: 4,
    FailureKind.TIMEOUT: 5,
    FailureKind.PAUSED: 5,
    FailureKind.DISK: DISK_EXIT,
}
_GIVE_WAY_SECONDS = 5.0


@dataclass(frozen=True)
class Why:
    """Why an attempt failed."""

    kind: FailureKind
    message: str
    suspect: Task | None = None
    """Input to examine."""
    is_explained: bool = False
    """Whether the message says all, so that a traceback would not help."""
    is_of_device: bool = False
    """Whether it was a fault of a GPU or its driver."""


def report(error: Exception, arguments: Arguments, started: float) -> Why:
    """Explain the failure in the log and, for the driver and the report's timeline, in the failure file;
    return why."""
    why = explain(error, arguments.task)
    level, outcome = (WARNING, "paused") if why.kind is FailureKind.PAUSED else (ERROR, "failed")
    with contextlib.suppress(OSError):  # a full disk takes no report either; the exit code says it
        if not why.is_explained:
            traceback.print_exception(error)
        log.log(level, f"{arguments.task} {outcome}: {why.message}")
        if arguments.failure_file:
            said: dict[str, object] = {"kind": why.kind, "message": why.message}
            said |= {"suspect": why.suspect and task_key(why.suspect), "started": started}
            said |= {"ended": time.time(), "host": socket.gethostname()}
            said |= {"node": os.environ.get("SLURMD_NODENAME", "")}
            if isinstance(error, OtherRankFailed):
                give_way(arguments.failure_file)
            make_folder(arguments.failure_file.parent, arguments.run_dir)
            link_once(arguments.failure_file, json.dumps(said) + "\n")  # of several ranks the first knows why
    return why


def give_way(failure_file: Path) -> None:
    """Wait a moment for the rank that failed to say so: it knows why, and its node is the one at fault."""
    until = time.monotonic() + _GIVE_WAY_SECONDS
    while not is_there(failure_file) and time.monotonic() < until:
        time.sleep(0.1)


def explain(error: Exception, task: Task) -> Why:
    """Say why an attempt at a task failed."""
    kind, suspect = classify(error)
    says_all = kind not in (FailureKind.ERROR, FailureKind.NUMERICS, FailureKind.MEMORY)
    is_explained = getattr(error, "is_explained", says_all)
    found = device_fault(error)
    if found is not None and not is_explained:
        return Why(found.kind(task.stage), found.in_words(task.stage), is_of_device=True)
    message = str(error) if is_explained else f"{type(error).__name__}: {error}"
    return Why(kind, message, suspect, is_explained, is_of_device=found is not None)


def device_fault(error: BaseException) -> Diagnosis | None:
    """Return the fault of a GPU or driver that an error, or what it came from, is about. One that quotes
    others (:class:`stages.context.Quoting`) says nothing of the GPUs here."""
    causes = list(_causes(error))
    if any(isinstance(one, Quoting) for one in causes):
        return None
    return diagnose("\n".join(f"{type(one).__name__}: {one}" for one in causes))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


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
