"""Passes over a run on Slurm. Driver jobs, a foreground ``run`` and people may all make them: each takes the
lease, makes a pass (:mod:`pipeline.orchestrate.driver`) and releases the lease.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from pipeline.executors.slurm.jobs import SlurmJobs
from pipeline.executors.slurm.submitter import Submitter
from pipeline.executors.slurm.worker_jobs import WorkerJobs
from pipeline.metrics.costs import Accountant
from pipeline.notify.events import pass_failed, tell, tell_if_stalled
from pipeline.orchestrate.driver import Driver, Outcome, Pass, Watcher, tell_of_pass
from pipeline.orchestrate.publish import Publisher
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.bookkeeping import ask_for_pass
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run, slurm_settings, upgrade
from pipeline.run.failures import Failure
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, hold
from pipeline.run.records import newest_commit_on_disk
from pipeline.run.submissions import read_limits_of
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble
from pipeline.tracking.tracker import NoTracker, is_behind, open_tracker
from pipeline.workers.looking import DRIVER_AGE, Look, look
from slurm.commands import SlurmError, SlurmTimeout
from slurm.limits import read_partitions
from slurm.submission import Refused

LEASE_PATIENCE = 300.0
"""Seconds to wait for another driver's pass; longer than a lost driver's lease lasts."""

SLURM_PATIENCE = 600.0
"""Seconds for which a pass is retried while Slurm's controller does not answer."""
FIRST_PATIENCE, _USUAL_PATIENCE = 10.0, 60.0
"""Seconds that squeue may take at first, and when it is asked again."""
_OLDEST_LOOK = 15.0
"""Age of a look in seconds from which on another is taken under the lease: older than any that is given."""
_RETRY_SECONDS = 10.0
_AGAIN_SECONDS = 3.0
_FIRST_ROWS = 2
"""Rows of a run that estimates change much with."""


def make_pass(run: Run, watcher: Watcher, max_age: float = DRIVER_AGE) -> Pass:
    """Observe the disk and the queue, submit what is due, repair what failed; then notify people. Idempotent.

    Args:
        max_age: seconds that a look at the queue may be old (:mod:`pipeline.workers.looking`).

    Raises:
        LeaseHeld: another driver has held the lease for five minutes.
        LeaseLost: another driver took over during the pass.
        Refused: Slurm does not take a job.
        SlurmTimeout: Slurm has not answered for ten minutes.
        SlurmError: Slurm's answer is not understood, or a command failed.
    """
    try:
        done = _patient_pass(run, watcher, max_age)
    except (LeaseHeld, LeaseLost):
        raise  # another driver is at it
    except Exception as error:  # whatever it is: the guards try again, and somebody should know
        _tell_of_failed_pass(run, error, watcher)
        raise
    note_recovery(run.paths, Trouble.PASS)
    # Outside the lease, as the user's notification command and W&B may be slow.
    tell_of_pass(run, done, read_control(run.paths).begun, watcher.note)
    if is_behind(run, journal.read(run.paths.metrics)):
        open_tracker(run, watcher.note).close(exit_code=0)
    return done


def _patient_pass(run: Run, watcher: Watcher, max_age: float) -> Pass:
    """Make a pass, and again for up to SLURM_PATIENCE seconds while Slurm does not answer. squeue is asked
    before the lease is taken: others may make passes while it takes its time."""
    until, patience = time.monotonic() + SLURM_PATIENCE, FIRST_PATIENCE
    while True:
        try:
            seen = None if read_control(run.paths).cancelled else look(run.paths, max_age, patience)
            with hold(run.paths.locks, LEASE_PATIENCE) as lease:
                return leased_pass(run, watcher, lease, _if_young(seen))
        except SlurmTimeout as error:
            patience = _USUAL_PATIENCE
            if time.monotonic() > until:
                raise
            watcher.note(f"{error}; asking again in {_RETRY_SECONDS:g} s")
            time.sleep(_RETRY_SECONDS)


def _if_young(seen: Look | None) -> Look | None:
    """Return a look unless it grew old while another driver held the lease."""
    return seen if seen and time.time() - seen.asked < _OLDEST_LOOK else None


def _tell_of_failed_pass(run: Run, error: Exception, watcher: Watcher) -> None:
    """Note a failed pass where status and doctor look, and notify people; of Slurm's own errors, which may
    pass, only once the run is stalled.
    """
    why = described(error)
    note_trouble(run.paths, Trouble.PASS, why)
    try:
        begun = read_control(run.paths).begun
        if isinstance(error, SlurmError | Refused):
            tell_if_stalled(run, newest_commit_on_disk(run), begun, watcher.note, why)
        else:
            tell(run, pass_failed(run, why, begun), watcher.note)
    except (OSError, ValueError) as second:  # what spoilt the pass may spoil this too
        watcher.note(f"nobody could be told: {described(second)}")


def leased_pass(run: Run, watcher: Watcher, lease: Lease, seen: Look | None = None) -> Pass:
    """Make a pass as the holder of the lease; more than one where another is due at once: to launch what was
    taken back, or because a job that may have been submitted (by a lost driver, say) is not in the queue yet.

    Args:
        seen: a look at the queue from before the lease was taken; None: the pass looks itself.
    """
    config = slurm_settings(run)
    if read_control(run.paths).cancelled:
        return Pass(Outcome.CANCELLED)
    run = upgrade(run)
    submitter = Submitter(run, config, longest_time, lease.beat)
    kind = WorkerJobs if config.has_workers else SlurmJobs
    jobs = kind(submitter, read_limits_of(run.paths), watcher.note, first_look=seen)
    books = Publisher(run, NoTracker(), Accountant(run, watcher.note, lambda: jobs.elements).facts_of)
    driver = Driver(run, jobs, watcher, books)
    jobs.needs_watchdogs, known = not driver.is_complete, books.newest
    while (actions := driver.one_pass()).needs_another_pass or jobs.table.is_unsure:
        if actions.give_up:
            jobs.withdraw()
        time.sleep(_AGAIN_SECONDS)
        lease.beat()
    if driver.is_complete and not driver.has_whole_chain():
        actions = driver.one_pass()
    done, newest = driver.result_of(actions), books.newest
    with driver.never_in_the_way():
        books.close(done.outcome is Outcome.COMPLETE)
    if done.outcome:
        if done.outcome is Outcome.FAILED:
            _note_failure(run, done.given_up)
        jobs.withdraw()
    elif jobs.refusal:
        raise jobs.refusal
    elif config.has_workers and known < newest <= run.plan.start + _FIRST_ROWS:
        # Workers start early by what rows say, and rows are written after they are submitted.
        with contextlib.suppress(OSError):  # else the next pass does
            ask_for_pass(run.paths, at_once=True)
    return replace(done, trouble=driver.trouble, is_watched=jobs.is_watched)


def _note_failure(run: Run, given_up: Sequence[Failure]) -> None:
    """Record that the run gave up, once for each invocation (``submit``, ``run`` or ``resume``)."""
    control = read_control(run.paths)
    if not control.has_failed:
        write_control(run.paths, replace(control, has_failed=True))
        tasks = [str(item.task) for item in given_up]
        journal.event(run.paths.events, "gave_up", tasks=tasks)


def longest_time(partitions: Sequence[str]) -> float | None:
    """Return the time limit in seconds that all of these partitions allow (the default one's if none is
    known); None if it is unlimited.
    """
    known = read_partitions()
    chosen = [known[name] for name in partitions if name in known]
    chosen = chosen or [partition for partition in known.values() if partition.default]
    return min((p.max_time for p in chosen if p.max_time is not None), default=None)


def follow(run: Run, watcher: Watcher, poll_seconds: float) -> Pass:
    """Make passes until the run has ended or is interrupted; its jobs then go on without this process."""
    with interruptible():
        while True:
            try:
                done = make_pass(run, watcher)
                if done.outcome is not None:
                    return done
                time.sleep(poll_seconds)
            except KeyboardInterrupt:
                return Pass(Outcome.INTERRUPTED)
