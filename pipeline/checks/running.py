"""Every check in a process of its own, with a limit: one that hangs in a dead filesystem is a finding."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from pipeline.checks.finding import Check, Finding, Grouped, Verdict, findings_of, problem, skipped
from pipeline.process import STOPPING, interrupt, joined_within, signal_session, uninterrupted

_CLEANING_SECONDS = 15.0
"""Seconds for a check that is stopped to cancel its jobs and remove its files."""
_KILL_SECONDS = 1.0
PREFIX = ".slurm-ppo-doctor-"
"""Beginning of the names of folders that checks write into: hidden, one for each, and gone afterwards."""


def run_checks(checks: Sequence[Check]) -> Iterator[Grouped]:
    """Carry checks out one after the other, and yield what they find as they find it."""
    closed: dict[str, str] = {}
    for check in checks:
        if why := closed.get(check.place) or closed.get(check.needs):
            yield check.group, skipped(check.title, why)
            continue
        found = run_check(check)
        if found is None:
            if check.place:
                closed[check.place] = f"{check.place} does not answer"
            where = f" from {check.place}" if check.place else ""
            advice = "it hangs: try the same by hand, and report it to the administrators"
            found = [problem(check.title, f"no answer{where} in {check.limit:g} s", advice)]
        if check.gate and any(finding.verdict is not Verdict.OK for finding in found):
            closed[check.gate] = f"needs {check.gate}, see above"
        yield from ((check.group, finding) for finding in found)


def run_check(check: Check) -> list[Finding] | None:
    """Return a check's findings, or None if it hung. Its process is gone afterwards, if it can be killed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(check, there), daemon=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a child that was started is also stopped
    try:
        process.start()
        there.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not here.poll(check.limit):
            return None
        found: list[Finding] = here.recv()
        process.join(_KILL_SECONDS)
        return found
    except EOFError:
        process.join(_KILL_SECONDS)
        return [problem(check.title, f"its process ended with code {process.exitcode}", "try it again")]
    finally:
        with uninterrupted():
            _stop(process)
            here.close()


def _look(check: Check, answer: Connection) -> None:
    """Make the check in the child, a session of its own: Ctrl-C is the parent's, its children go with it."""
    os.setsid()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(KeyboardInterrupt):  # we are stopped, and have cleaned up
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        answer.send(_findings(check))


def _findings(check: Check) -> list[Finding]:
    try:
        return list(findings_of(check.look))
    except Exception as error:  # whatever a check meets, the others are made, and this is a finding
        words = " ".join(str(error).split()) or "no message"
        advice = "fix what the message names, and run the command again"
        if isinstance(error, PermissionError):
            advice = "change the folder's permissions, or choose another one"
        return [problem(check.title, f"{type(error).__name__}: {words}", advice)]


def _stop(process: ForkProcess) -> None:
    """Ask it to clean up, then kill it and its children. One that hangs in the kernel is left behind."""
    if process.pid is None:
        return
    process.terminate()  # of one that has ended nothing comes
    process.join(_CLEANING_SECONDS)
    if process.is_alive():
        process.kill()
        signal_session(process.pid)
        joined_within(process, _KILL_SECONDS)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Make a new folder in ``folder`` for the block. Raises OSError where nothing can be made there."""
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getppid()}-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_leftovers(folder: Path, pid: int) -> None:
    """Remove the folders of checks that process ``pid`` had to kill."""
    for left in folder.glob(f"{PREFIX}{pid}-*"):
        shutil.rmtree(left, ignore_errors=True)
