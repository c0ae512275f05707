"""Runs on Slurm: submit, follow and cancel them, and make a pass as a driver job."""

import contextlib
import errno
import io
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pipeline.cli.copied import check_is_the_only_one
from pipeline.cli.errors import will_change
from pipeline.cli.summary import announce, next_commands, pause_in_words, say_how_it_ended
from pipeline.cli.take_over import check_may_cancel, with_way_out
from pipeline.executors.slurm.passes import LEASE_PATIENCE, TakenOver, follow, make_pass
from pipeline.executors.slurm.queue import cancel_all, wait_until_gone
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.run import journal
from pipeline.run.control import begin_invocation, read_control, write_control
from pipeline.run.directory import Run, load_run, resume_command, slurm_settings
from pipeline.run.identity import RunError
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, hold, is_spoilt
from pipeline.run.pass_requests import serve_requests
from pipeline.run.place import check_is_no_copy
from pipeline.run.plan import policy_maker
from pipeline.run.records import recorded
from pipeline.run.standpoint import check_is_ours, check_may_write
from pipeline.status.progress import Bars, Lines, watcher_for
from pipeline.workers.looking import FROM_NOW, PASS_AGE
from slurm.commands import SlurmError
from slurm.elsewhere import requeue_elsewhere
from slurm.errors import UnfinishedError
from slurm.submission import Refused

_GONE_PATIENCE = 60.0
"""Seconds for jobs that were cancelled to end: Slurm gives them 30 to do so by themselves."""


def submit_run(run: Run) -> int:
    """Enqueue what is due, and return: the run goes on by its driver jobs. Returns the exit code."""
    done = _in_invocation(run, lambda watcher: make_pass(run, watcher))
    if done.outcome is None and done.is_watched:
        print(next_commands(run))
        return 0
    later = f"slurm-ppo submit {run.paths.root}"
    return say_how_it_ended(run, done, f"the queue is full: nothing of the run waits in it. Later: {later}")


def follow_run(run: Run) -> int:
    """Enqueue what is due and watch until the run has ended. Returns the exit code."""
    done = _in_invocation(run, lambda watcher: follow(run, watcher))
    stop = f"slurm-ppo cancel {shlex.quote(str(run.paths.root))}"
    left = f"no longer watching; the jobs go on without this command. To stop them: {stop}"
    return say_how_it_ended(run, done, left)


def _in_invocation(run: Run, act: Callable[[Lines | Bars], Pass]) -> Pass:
    """Begin an invocation of a person's, with a new budget of attempts, and show progress during it."""
    owner = run.who_acts()
    with patient_hold(run):
        check_is_ours(run.paths, lambda: owner)  # others may have been faster
        will_change("a new invocation")
        begin_invocation(run.paths, owner)
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    try:
        return act(watcher)
    except Refused as error:
        raise with_way_out(run, error) from None
    finally:
        watcher.close()


def patient_hold(run: Run) -> AbstractContextManager[Lease]:
    """Hold the run's lease; a note says what is waited for."""
    return hold(run.paths.locks, LEASE_PATIENCE, lambda text: print(text, file=sys.stderr, flush=True))


def cancel_run(run: Run) -> str:
    """Cancel every job of the run. Returns what to say."""
    from pipeline.status.snapshot import is_complete

    if not run.config.slurm:
        raise RunError("the run's tasks are processes of the command that started it: end that with Ctrl-C")
    check_is_no_copy(run, "cancel")
    check_is_the_only_one(run)
    check_may_cancel(run)
    # Until a corrupt lease is free takes minutes, in which jobs would go on.
    count = _end_jobs(run) if is_spoilt(run.paths.locks) else 0
    with patient_hold(run):
        has_ended = is_complete(run)
        count = max(count, _end_jobs(run))  # under the lease: else the jobs of who submits just now go too
    journal.event(run.paths.events, "cancelled", arrays=count)
    if has_ended:
        left = f"cancelled {count} jobs that were left" if count else "there is nothing to cancel"
        report = f"slurm-ppo report {shlex.quote(str(run.paths.root))}"
        return f"the run is complete; {left}; its results: {report}"
    return f"cancelled {count} jobs; nothing that was committed is lost; to continue: {resume_command(run)}"


def _end_jobs(run: Run) -> int:
    """Let no driver go on, and cancel every job of the run. Returns how many arrays that were."""
    will_change("the queue")
    control = read_control(run.paths)
    write_control(run.paths, replace(control, cancelled=True, emptied=control.invocation, paused=None))
    try:
        return cancel_all(run)
    except SlurmError as error:
        raise UnfinishedError(
            "the run is cancelled: nothing more is submitted, and workers exit after their tasks; but Slurm "
            f"does not answer ({error}), so its jobs stay in the queue until they start and exit; to cancel "
            f"them, retry later: slurm-ppo cancel {shlex.quote(str(run.paths.root))}"
        ) from None


def clear_queue(run: Run) -> None:
    """Cancel jobs that would compute what is being taken back.

    What is left on a node that is cut off commits to the history that was taken back, whenever it ends.
    """
    cancel_run(run)
    if left := wait_until_gone(run, _GONE_PATIENCE):
        print(f"{left} cancelled jobs have not ended; what they still make is moved aside", file=sys.stderr)


def driver_job(root: Path) -> int:
    """Make one pass over the run in a directory, as a driver job. Returns the exit code.

    A job whose pass fails asks Slurm to start it again later: that needs no file of ours, so that a disk
    which is full for hours, or folders that cannot be written, do not empty the queue.
    """
    job = os.environ.get("SLURM_JOB_ID", "")  # none where a person types the command
    stream = log_output() if job else sys.stderr
    run = _run_on_slurm(root)
    if not job:
        check_is_ours(run.paths, run.who_acts)
        check_may_write(run.paths)
    watcher = Lines(run.plan, stream, is_timed=not job)
    try:
        # Who shares answers rests before it asks, where much was asked; but people wait for the last pass.
        may_rest = bool(job) and not any(recorded(run.paths, [policy_maker(run.plan.iterations)]))
        done = make_pass(run, watcher, FROM_NOW if may_rest else 0.0)
    except (LeaseHeld, LeaseLost, RunError):
        raise  # another driver is at it, or a person has to act
    except Exception as error:  # whatever it is, this job must not be the last that advances the run
        if not job:
            raise
        with contextlib.suppress(OSError):  # its log may be on the disk that is full
            traceback.print_exc()
        why = "this job waits in the queue once more, and tries again"
        _wait_once_more(job, why, watcher, is_at_fault=_may_be_of_this_node(error))
        return 1
    if done.outcome:
        return _say_outcome(run, done, watcher)
    watcher.note("done; the run goes on")
    if not done.is_watched:
        _wait_once_more(job, "the queue is full, so this job waits in it once more", watcher)
    return 0


def _run_on_slurm(root: Path) -> Run:
    """Return the run. Raises RunError also for one of this machine, which has no driver jobs."""
    run = load_run(root)
    slurm_settings(run)
    check_is_no_copy(run, "resume")
    return run


def _say_outcome(run: Run, done: Pass, watcher: Lines) -> int:
    """Say in a pass's log how the run has ended. Returns the exit code."""
    if done.outcome is Outcome.FAILED:
        return say_how_it_ended(run, done)
    if done.outcome is Outcome.PAUSED:
        watcher.note(pause_in_words(run))
        return 0
    watcher.note(f"the run is {done.outcome}")
    return 0


def asked_passes(root: Path) -> int:
    """Make the passes that workers ask for, until standard input says otherwise, unless another process does.
    Returns the exit code.

    A failed pass is not requeued, which would requeue the worker. The request is left, unless Slurm has
    refused a job and there are watchdogs.

    Raises:
        RunError: there is no run on Slurm.
    """
    found = _run_on_slurm(root)
    paths = found.paths
    if "SLURM_JOB_ID" not in os.environ:
        check_is_ours(paths, found.who_acts)

    def make() -> None:
        run = load_run(root)  # settings may have changed since the last
        watcher = Lines(run.plan, sys.stderr, is_timed=True)
        try:
            done = make_pass(run, watcher, PASS_AGE)
        except Refused as error:  # to ask again at once would not help; later passes do
            watcher.note(str(error))
        else:
            if done.outcome:  # no driver job may come after it that says so
                _say_outcome(run, done, watcher)

    try:
        serve_requests(paths, make, sys.stdin.fileno())
    except (LeaseLost, TakenOver):
        return 0  # another driver is at it, or the run is another user's
    except Exception:  # printed, and the request is left: the worker must not end by this
        traceback.print_exc()
        return 1
    return 0


def _may_be_of_this_node(error: Exception) -> bool:
    """Whether another node may be able to do what this one was refused: write the run's folder, say. A disk
    that is full is so everywhere."""
    return isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT)


def _wait_once_more(job: str, why: str, watcher: Lines, is_at_fault: bool = False) -> None:
    """Put this job back into the queue; outside of one, where a person types, do nothing.

    Args:
        is_at_fault: whether this node may be, so that it is to start on another.
    """
    if job:
        with contextlib.suppress(OSError):
            watcher.note(why)
        requeue_elsewhere(job, os.environ.get("SLURMD_NODENAME", "") if is_at_fault else "")


# --- log of a driver job ---


def log_output() -> TextIO:
    """Log whatever this process prints from now on, for the rest of its life: errors what it prints to
    standard error, information the rest.

    Returns:
        The stream of information.
    """
    logger, handler = logging.Logger("driver"), _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    sys.stdout, sys.stderr = _LineStream(logger.info), _LineStream(logger.error)
    return sys.stdout


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that raises what writing raises, for the caller to decide on: a full disk, for example."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this while it handles the error


class _LineStream(io.TextIOBase, TextIO):
    """Text stream that makes a record of each line."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._begun = log, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log(line)
        return len(text)
