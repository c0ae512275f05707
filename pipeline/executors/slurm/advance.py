"""A run on Slurm: one pass of its driver, and the loop of a foreground ``run``.

Driver jobs, a foreground ``run`` and people may all make passes: each takes the lease, observes, acts and
releases it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.executors.slurm.jobs import SlurmJobs
from pipeline.executors.slurm.submitter import Submitter
from pipeline.metrics.costs import Accountant
from pipeline.notify.events import completion, failure, pass_failed, rows_unwritten, tell, tell_if_stalled
from pipeline.orchestrate.driver import Driver, Outcome, Watcher, advance, has_whole_chain, never_in_the_way
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.reconcile import Actions
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run, slurm_settings
from pipeline.run.failures import GiveUp
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, hold_patiently
from pipeline.run.records import newest_commit, newest_commit_on_disk
from pipeline.run.submissions import read_limits_of
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble
from pipeline.tracking.tracker import NoTracker, is_behind, open_tracker
from slurm.commands import SlurmError, SlurmTimeout
from slurm.limits import read_partitions
from slurm.submission import Refused

LEASE_PATIENCE = 300.0
"""Seconds to wait for another driver's pass; longer than a lost driver's lease lasts."""

SLURM_PATIENCE = 600.0
"""Seconds for which a pass is retried while Slurm's controller does not answer."""
_RETRY_SECONDS = 10.0
_AGAIN_SECONDS = 3.0


@dataclass(frozen=True)
class Pass:
    """Result of one pass."""

    outcome: Outcome | None
    """Outcome of the run; None while it goes on by itself."""
    given_up: tuple[GiveUp, ...] = ()
    is_watched: bool = True
    """Whether a driver job waits in the queue; false where the queue is full."""
    newest: float = 0.0
    """Unix time of the newest commit that the pass saw; 0 for none."""
    trouble: str = ""
    """Reason why rows could not be written; empty if they could."""


def advance_run(run: Run, watcher: Watcher) -> Pass:
    """Observe the disk and the queue, submit what is due, repair what failed. Idempotent.

    Raises:
        LeaseHeld: another driver has held the lease for five minutes.
        LeaseLost: another driver took over during the pass.
        Refused: Slurm does not take a job.
        SlurmTimeout: Slurm has not answered for ten minutes.
        SlurmError: Slurm's answer is not understood, or a command failed.
    """
    try:
        done = pass_patiently(run, watcher)
    except (LeaseHeld, LeaseLost):
        raise  # another driver is at it
    except Exception as error:  # whatever it is: the guards try again, and somebody should know
        tell_of_failed_pass(run, error, watcher)
        raise
    note_recovery(run.paths, Trouble.PASS)
    tell_of_pass(run, done, watcher)
    mirror(run, watcher)
    return done


def pass_patiently(run: Run, watcher: Watcher) -> Pass:
    """Make a pass, and again for up to SLURM_PATIENCE seconds while Slurm does not answer."""
    until = time.monotonic() + SLURM_PATIENCE
    while True:
        try:
            with hold_patiently(run.paths.locks, LEASE_PATIENCE) as lease:
                return one_pass(run, watcher, lease)
        except SlurmTimeout as error:
            if time.monotonic() > until:
                raise
            watcher.note(f"{error}; asking again in {_RETRY_SECONDS:g} s")
            time.sleep(_RETRY_SECONDS)


def tell_of_failed_pass(run: Run, error: Exception, watcher: Watcher) -> None:
    """Note a failed pass where status and doctor look, and notify people; of Slurm's own errors, which may
    pass, only once the run is stalled.
    """
    why = described(error)
    note_trouble(run.paths, Trouble.PASS, why)
    try:
        invocation = call_begun(run)
        if isinstance(error, SlurmError | Refused):
            tell_if_stalled(run, newest_commit_on_disk(run), invocation, watcher.note, why)
        else:
            tell(run, pass_failed(run, why, invocation), watcher.note)
    except (OSError, ValueError) as second:  # what spoilt the pass may spoil this too
        watcher.note(f"nobody could be told: {described(second)}")


def tell_of_pass(run: Run, done: Pass, watcher: Watcher) -> None:
    """Notify people of what a pass found. Outside the lease, as their notification command may be slow."""
    if done.outcome is Outcome.COMPLETE:
        tell(run, completion(run), watcher.note)
    elif done.outcome is Outcome.FAILED:
        tell(run, failure(run, done.given_up, call_begun(run)), watcher.note)
    elif done.outcome is None:
        tell_if_stalled(run, done.newest, call_begun(run), watcher.note)
    if done.trouble:
        tell(run, rows_unwritten(run, done.trouble, call_begun(run)), watcher.note)


def call_begun(run: Run) -> float:
    return read_control(run.paths).begun


def one_pass(run: Run, watcher: Watcher, lease: Lease) -> Pass:
    """Make a pass as the holder of the lease."""
    config = slurm_settings(run)
    if read_control(run.paths).cancelled:
        return Pass(Outcome.CANCELLED)
    submitter = Submitter(run, config, longest_time, lease.beat)
    jobs = SlurmJobs(submitter, read_limits_of(run.paths), watcher.note)
    books = Publisher(run, NoTracker(), Accountant(run, watcher.note).facts_of)
    driver = Driver.of(run, jobs, watcher, books)
    jobs.needs_watchdogs = not driver.is_complete
    while must_look_again(jobs, actions := advance(driver)):
        time.sleep(_AGAIN_SECONDS)
        lease.beat()
    if driver.is_complete and not has_whole_chain(driver):
        actions = advance(driver)
    is_complete = driver.is_complete
    with never_in_the_way(driver):
        books.close(is_complete)
    if is_complete:
        jobs.withdraw()
        return Pass(Outcome.COMPLETE)
    if actions.give_up:
        note_failure(run, actions.give_up)
        jobs.withdraw()
        return Pass(Outcome.FAILED, actions.give_up)
    if jobs.refusal:
        raise jobs.refusal
    newest = newest_commit(driver.records)
    return Pass(None, is_watched=jobs.is_watched, newest=newest, trouble=driver.trouble)


def must_look_again(jobs: SlurmJobs, actions: Actions) -> bool:
    """Whether another pass is due at once: to launch what was taken back, or because a job that may have been
    submitted (by a lost driver, say) is not in the queue yet.
    """
    return bool(actions.retract) or jobs.table.is_unsure


def note_failure(run: Run, given_up: Sequence[GiveUp]) -> None:
    """Record that the run gave up, once for each call (``submit``, ``run`` or ``resume``)."""
    control = read_control(run.paths)
    if not control.has_failed:
        write_control(run.paths, control.as_failed())
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


def mirror(run: Run, watcher: Watcher) -> None:
    """Bring W&B up to date. Outside the lease, as it may be slow."""
    if is_behind(run, journal.read(run.paths.metrics)):
        open_tracker(run, watcher.note).close(exit_code=0)


def follow(run: Run, watcher: Watcher, poll_seconds: float) -> Pass:
    """Advance until the run has ended or is interrupted; its jobs then go on without this process."""
    with interruptible():
        while True:
            try:
                done = advance_run(run, watcher)
                if done.outcome is not None:
                    return done
                time.sleep(poll_seconds)
            except KeyboardInterrupt:
                return Pass(Outcome.INTERRUPTED)
