"""Passes over a run on Slurm. Driver jobs, a foreground ``run`` and people may all make them: each takes the
lease, makes a pass (:mod:`pipeline.orchestrate.driver`) and releases the lease.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.executors.slurm.array_workers import ArrayWorkers
from pipeline.executors.slurm.arrays import Submitter
from pipeline.executors.slurm.by_hand import Paused
from pipeline.executors.slurm.exit_reasons import Accounts, Unanswered
from pipeline.executors.slurm.job_table import QueueReader
from pipeline.executors.slurm.queue import is_pending
from pipeline.metrics.costs import Accountant
from pipeline.notify.events import pass_failed, tell, tell_if_stalled
from pipeline.orchestrate.driver import Driver, Outcome, Pass, Watcher, tell_of_pass
from pipeline.orchestrate.jobs import Jobs
from pipeline.orchestrate.publish import Publisher
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.control import ByHand, mend_control, read_control, write_control
from pipeline.run.directory import Run, slurm_settings
from pipeline.run.failures import Failure
from pipeline.run.identity import RunError
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, free_number, hold
from pipeline.run.owner import owner_of_job
from pipeline.run.pass_requests import request_pass
from pipeline.run.place import settle
from pipeline.run.records import newest_commit_on_disk
from pipeline.run.submissions import is_driver_job, read_limits_of
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble
from pipeline.tracking.tracker import Trackers, behind, open_trackers
from pipeline.workers.looking import PASS_AGE, Look, look
from slurm.commands import SlurmError, SlurmTimeout, on_cluster, within
from slurm.limits import read_partitions
from slurm.signals import Errands
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
_POLL_SECONDS = 10.0
"""Seconds between two passes while a person watches."""
_PAUSES = (1.0, 2.0, 5.0)
"""The same after the first of passes in which Slurm does not answer: a lost answer may be the only one."""
_AGAIN_SECONDS = 3.0
PASS_SECONDS = 7.0
"""Seconds that a pass waits for answers of Slurm's commands while it holds the lease, all together. What
is not done then is done by the next."""
_FIRST_ROWS = 2
"""Rows of a run that estimates change much with."""


def make_pass(run: Run, watcher: Watcher, max_age: float = 0.0) -> Pass:
    """Observe the disk and the queue, submit what is due, repair what failed; then notify people. Idempotent.

    Args:
        max_age: seconds that a look at the queue may be old (:mod:`pipeline.workers.looking`). That of a
            driver job is from after its start: jobs that end start it, and one that took itself or the one
            before for one that waits would leave none behind.

    Raises:
        LeaseHeld: another driver has held the lease for five minutes.
        LeaseLost: another driver took over during the pass.
        Refused: Slurm does not take a job.
        SlurmTimeout: Slurm has not answered for ten minutes.
        SlurmError: Slurm's answer is not understood, or a command failed.
        TakenOver: the run belongs to another driver now.
    """
    check_is_not_taken_over(run)
    run = run.with_newest_settings()
    try:
        with on_cluster(run.cluster):
            done = _patient_pass(run, watcher, max_age)
    except (LeaseHeld, LeaseLost, TakenOver):
        raise  # another driver is at it
    except Exception as error:  # whatever it is: the watchdogs try again, and people should know
        _tell_of_failed_pass(run, error, watcher)
        raise
    note_recovery(run.paths, Trouble.PASS)
    # Outside the lease, as the user's notification command and trackers may be slow.
    tell_of_pass(run, done, read_control(run.paths).begun, watcher.note)
    open_trackers(run, behind(run), watcher.note).close(exit_code=0)
    return done


class TakenOver(RunError):
    """The run was taken over from the driver that makes the pass, whose jobs do nothing more for it."""


def check_is_not_taken_over(run: Run) -> None:
    """Check that the run still belongs to this driver. Raises TakenOver."""
    control = read_control(run.paths)
    if not control.former:  # else who follows a run without a job of it asks Slurm where he is
        return
    own = owner_of_job(os.environ) or run.who_acts()
    if control.is_taken_over_from(own):
        raise TakenOver(
            f"{run.paths.root} was taken over by {control.owner}: jobs of {own.user} do no more for it"
        )


def _patient_pass(run: Run, watcher: Watcher, max_age: float) -> Pass:
    """Make a pass, and again while another is due at once or Slurm does not answer. What has to be waited for
    is waited for between them, without the lease: squeue's answer is, too."""
    patience, had_no_time = FIRST_PATIENCE, False

    def make(accounts: Accounts) -> Pass:
        nonlocal patience, had_no_time
        # Once in each invocation: a pass needs them, but need not ask for them.
        read_limits_of(run.paths, slurm_settings(run).qos_named)
        errands, given, patience = Errands(watcher.note), patience, _USUAL_PATIENCE
        try:
            age, had_no_time = 0.0 if had_no_time else max_age, False
            before = free_number(run.paths.locks) if age == 0.0 else None
            seen = None if read_control(run.paths).cancelled else look(run.paths, age, given)
            with hold(run.paths.locks, LEASE_PATIENCE) as lease:
                is_alone = before is not None and lease.number == before + 1
                done = leased_pass(run, watcher, lease, errands, accounts, _if_young(seen), is_alone)
        except SlurmTimeout:  # perhaps of the second look, for which there is little time under the lease
            had_no_time = True
            raise
        finally:
            failed = errands.finish()
        if done.outcome and failed:  # what is left of a run that is over no other pass would see
            raise failed[0]
        return done

    return until_settled(make, watcher.note)


def until_settled(make: Callable[[Accounts], Pass], note: Callable[[str], None]) -> Pass:
    """Make a pass, and others until none is due at once. While Slurm does not answer they are made for up to
    SLURM_PATIENCE seconds.

    Args:
        make: makes a pass, with what accounting has said before it.
    """
    until, accounts, pauses = time.monotonic() + SLURM_PATIENCE, Accounts(), iter(_PAUSES)
    while True:
        try:
            done = make(accounts)
            if not done.is_unsettled:
                return done
            accounts, pause = Accounts(), _AGAIN_SECONDS
        except Unanswered:
            accounts.ask()
            continue
        except SlurmTimeout as error:
            if time.monotonic() > until:
                raise
            pause = next(pauses, _RETRY_SECONDS)
            note(f"{error}; asking again in {pause:g} s")
        time.sleep(pause)


def _if_young(seen: Look | None) -> Look | None:
    """Return a look unless it grew old while another driver held the lease, or shows this driver job as
    waiting: it is from before the end of what has started it, which clocks of other nodes may not show."""
    if seen is None or time.time() - seen.asked >= _OLDEST_LOOK:
        return None
    if not is_driver_job(os.environ.get("SLURM_JOB_NAME", "")):
        return seen
    own = tuple(os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return None if any(is_pending(e) and (e.array_id, str(e.index)) == own for e in seen.elements) else seen


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
    except (OSError, ValueError) as second:  # what broke the pass may break this too
        watcher.note(f"no notification was sent: {described(second)}")


def leased_pass(
    run: Run,
    watcher: Watcher,
    lease: Lease,
    errands: Errands,
    accounts: Accounts,
    seen: Look | None = None,
    is_alone: bool = False,
) -> Pass:
    """Make a pass as the holder of the lease. Another is due at once (``is_unsettled``) to launch what was
    taken back, or where a job may have been submitted (by a lost driver, say) that is not in the queue yet.

    Args:
        errands: what is left to run beside it, and for the caller to finish once the lease is released.
        accounts: what accounting has said of jobs before.
        seen: a look at the queue from before the lease was taken; None: the pass looks itself.
        is_alone: whether no other has held the lease since it was asked for: it is as one that is taken under
            the lease, for which squeue has little time.

    Raises:
        Unanswered: accounting is to be asked, and the pass made again.
        SlurmTimeout: Slurm does not answer, or has been waited for long enough; the next pass goes on.
    """
    run = run.with_newest_settings()
    config = slurm_settings(run)
    if spoilt := mend_control(run.paths):
        watcher.note(f"{spoilt}; it was written again from what the other says")
    check_is_not_taken_over(run)
    if (control := read_control(run.paths)).cancelled:
        return Pass(Outcome.PAUSED if control.paused else Outcome.CANCELLED)
    run = settle(run)
    submitter = Submitter(run, config, longest_time, lease.beat)
    limits, reader = read_limits_of(run.paths, config.qos_named), QueueReader(run, seen, is_alone)
    workers = ArrayWorkers(submitter, limits, watcher.note, errands, reader, accounts)
    facts = Accountant(run, watcher.note, lambda: workers.elements).facts_of
    publisher = Publisher(run, Trackers(), facts, lambda: workers.table.files_in_use())
    with within(PASS_SECONDS):
        try:
            jobs = Jobs(run, workers, watcher.note)
            return _act(Driver(run, jobs, watcher, publisher), workers)
        except Paused as found:
            return _pause(run, workers, found.by_hand)


def _pause(run: Run, workers: ArrayWorkers, act: ByHand) -> Pass:
    """Pause the run, as a person has cancelled its jobs: the rest of them ends too, with what was submitted
    since, until a person goes on."""
    control = read_control(run.paths)
    write_control(run.paths, replace(control, cancelled=True, emptied=control.invocation, paused=act))
    journal.event(run.paths.events, "paused", cancelled=act.cancelled, jobs=act.jobs)
    workers.end_all()
    return Pass(Outcome.PAUSED)


def _act(driver: Driver, workers: ArrayWorkers) -> Pass:
    run, publisher = driver.run, driver.publisher
    workers.needs_watchdogs, known = not driver.is_complete, publisher.newest
    actions = driver.one_pass()
    done = driver.result_of(actions)
    is_unsettled = actions.needs_another_pass or workers.table.is_unsure
    if is_unsettled or (driver.is_complete and not driver.has_whole_chain()):
        done = replace(done, outcome=None, is_unsettled=True)
    newest = publisher.newest
    with driver.never_in_the_way():
        publisher.close(done.outcome is Outcome.COMPLETE)
    if done.outcome is Outcome.FAILED:
        _note_failure(run, done.given_up)
    if done.outcome or actions.give_up:
        workers.withdraw()
    elif workers.refusal and not done.is_unsettled:
        raise workers.refusal
    elif known < newest <= run.plan.start + _FIRST_ROWS:
        # Workers start early by what rows say, and rows are written after they are submitted.
        with contextlib.suppress(OSError):  # else the next pass does
            request_pass(run.paths, at_once=True)
    return replace(done, trouble=driver.trouble, is_watched=workers.is_watched)


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


def follow(run: Run, watcher: Watcher) -> Pass:
    """Make passes until the run has ended or is interrupted; its jobs then go on without this process."""
    with interruptible():
        while True:
            try:
                done = make_pass(run, watcher, PASS_AGE)
                if done.outcome is not None:
                    return done
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                return Pass(Outcome.INTERRUPTED)
