"""A run on Slurm: one pass, made by whoever comes by, and the loop of somebody who watches.

Driver jobs, a foreground ``run`` and people may all call it: a pass takes the lease, looks, acts and lets go.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline import journal
from pipeline.bookkeeping import Books
from pipeline.costs import Accountant
from pipeline.driver import Driver, Outcome, Watcher, advance, interruptible
from pipeline.lease import Lease, LeaseHeld, hold, hold_patiently
from pipeline.reconcile import Actions, GiveUp
from pipeline.runs import Run
from pipeline.schedulerconfig import SlurmConfig
from pipeline.slurmjobs import SlurmJobs
from pipeline.submissions import read_control, read_limits_of, write_control
from pipeline.submitting import Submitter
from pipeline.tracking import NoTracker, is_behind, open_tracker
from slurm.commands import SlurmTimeout
from slurm.limits import read_partitions

LEASE_PATIENCE = 300.0
"""Seconds to wait for another driver's pass; longer than a lost driver's lease lasts."""

SLURM_PATIENCE = 600.0
"""Seconds for which a controller that does not answer is asked again."""
_RETRY_SECONDS = 10.0
_AGAIN_SECONDS = 3.0


@dataclass(frozen=True)
class Pass:
    """How a pass ended."""

    outcome: Outcome | None
    """None: the run goes on by itself."""
    given_up: tuple[GiveUp, ...] = ()
    is_watched: bool = True
    """Whether a driver job waits in the queue; not where the queue is full."""


def advance_run(run: Run, watcher: Watcher) -> Pass:
    """Observe the disk and the queue, submit what is due, repair what failed. Idempotent.

    Raises:
        LeaseHeld: another driver has been at it for five minutes.
        Refused: Slurm does not take a job.
        SlurmTimeout: Slurm has not answered for ten minutes.
        SlurmError: Slurm answers nonsense.
    """
    until = time.monotonic() + SLURM_PATIENCE
    while True:
        try:
            with hold_patiently(run.paths.locks, LEASE_PATIENCE) as lease:
                done = one_pass(run, watcher, lease)
            break
        except SlurmTimeout as error:
            if time.monotonic() > until:
                raise
            watcher.note(f"{error}; asking again in {_RETRY_SECONDS:g} s")
            time.sleep(_RETRY_SECONDS)
    mirror(run, watcher)
    return done


def one_pass(run: Run, watcher: Watcher, lease: Lease) -> Pass:
    """A pass, by the holder of the lease."""
    config = run.config.scheduler
    assert isinstance(config, SlurmConfig)
    if read_control(run.paths).cancelled:
        return Pass(Outcome.CANCELLED)
    jobs = SlurmJobs(
        run, config, read_limits_of(run.paths), Submitter(run, config, longest_time, lease.beat), watcher.note
    )
    books = Books.open(run, NoTracker(), Accountant(run, watcher.note).row_of)
    driver = Driver.of(run, jobs, watcher, books)
    if not driver.is_complete:
        jobs.arm()
    while must_look_again(jobs, actions := advance(driver)):
        time.sleep(_AGAIN_SECONDS)
        lease.beat()
    driver.books.close(driver.is_complete)
    if driver.is_complete:
        jobs.withdraw()
        return Pass(Outcome.COMPLETE)
    if actions.give_up:
        note_failure(run, actions.give_up)
        jobs.withdraw()
        return Pass(Outcome.FAILED, actions.give_up)
    if jobs.refusal:
        raise jobs.refusal
    return Pass(None, is_watched=jobs.is_watched)


def must_look_again(jobs: SlurmJobs, actions: Actions) -> bool:
    """What was taken back is launched once it is seen to be gone; what a lost driver submitted shows soon."""
    return bool(actions.retract) or jobs.is_unsure


def note_failure(run: Run, given_up: Sequence[GiveUp]) -> None:
    """Once in each call."""
    control = read_control(run.paths)
    if not control.has_failed:
        write_control(run.paths, control.as_failed())
        tasks = [str(item.task) for item in given_up]
        journal.event(run.paths.events, "gave_up", tasks=tasks)


def longest_time(partitions: Sequence[str]) -> float | None:
    """The most seconds that every one of these partitions allows; by default, that the default one does."""
    known = read_partitions()
    chosen = [known[name] for name in partitions if name in known]
    chosen = chosen or [partition for partition in known.values() if partition.default]
    return min((p.max_time for p in chosen if p.max_time is not None), default=None)


def mirror(run: Run, watcher: Watcher) -> None:
    """Bring W&B up to date, outside the lease: it may be slow. One writer at a time."""
    rows = journal.read(run.paths.metrics)
    if not is_behind(run, rows):
        return
    try:
        with hold(run.paths.locks / "tracking"):
            tracker = open_tracker(run, watcher.note)
            tracker.replay(rows)
            tracker.finish(0)
    except LeaseHeld:
        return  # whoever writes now, or the next pass, sends these rows too


def follow(run: Run, watcher: Watcher, poll_seconds: float) -> Pass:
    """Advance until the run has ended or the person has seen enough; the jobs go on without us."""
    with interruptible():
        while True:
            try:
                done = advance_run(run, watcher)
                if done.outcome is not None:
                    return done
                time.sleep(poll_seconds)
            except KeyboardInterrupt:
                return Pass(Outcome.INTERRUPTED)
