"""A run of another user's, or of another cluster's: what is refused, and how it is taken over."""

import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from pipeline.cli.errors import will_change
from pipeline.config.issue import ConfigError
from pipeline.executors.slurm.passes import LEASE_PATIENCE
from pipeline.executors.slurm.queue import RunQueue, cancel_jobs, look_at_queue
from pipeline.run import journal
from pipeline.run.control import take_over as note_take_over
from pipeline.run.directory import Run, slurm_settings
from pipeline.run.lease import hold
from pipeline.run.owner import Owner
from pipeline.run.standpoint import Elsewhere, NotOurs, check_may_write, standpoint, way_on
from pipeline.run.submissions import is_job_of
from pipeline.status.obstacles import read_permitted
from pipeline.workers.beats import SILENT_SECONDS, Beat, Doing, LiveWorkers
from slurm.commands import SlurmError, on_cluster
from slurm.query import Element, read_queue
from slurm.states import UnknownState
from slurm.submission import Refused

TAKEN_OVER = "taken_over"
"""Name of the event of a take-over in the journal."""
_PATIENCE = 30.0
"""Seconds for the former owner's workers that wait to see that the run was taken over."""
_LOOK_SECONDS = 0.5
_NOT_MINE = re.compile(r"invalid account|invalid qos|not permitted|not allowed|access.*denied", re.IGNORECASE)
"""Words by which sbatch refuses an account, a QOS or a partition that is not the user's."""


def check_may_cancel(run: Run) -> None:
    """Refuse to cancel a run of another user's, or of another cluster's: this user can end none of its jobs,
    and it would go on while it is marked as cancelled. Raises NotOurs."""
    if (found := standpoint(run.paths, run.who_acts)) is not None:
        left = jobs_left(look_at_queue(run), found)
        raise NotOurs(
            f"{run.paths.root} {found.reason}; {left}: {found.as_owner}, or {way_on(run.paths.root)}"
        )


def jobs_left(queue: RunQueue, found: Elsewhere) -> str:
    """Say how many jobs of the owner's are left, and who can end them. Pure."""
    if queue.is_hidden or queue.unanswered is not None:
        return "its jobs are not seen from here"
    if not queue.live:
        return "none of its jobs is in the queue"
    return f"jobs of it that {found.owner.user} or an operator of Slurm can end: {len(queue.live)}"


def take_over(run: Run) -> None:
    """Make a run this user's, on this cluster: its owner's jobs are ended where Slurm lets this user do that,
    and do nothing more where it does not. Recorded in control.json and in the journal.

    Raises:
        RunError: it is no run on Slurm, or this user may not write all of it.
        ConfigError: jobs with the run's settings are not this user's to submit.
    """
    slurm_settings(run)
    if (found := standpoint(run.paths, run.who_acts)) is None:
        print(
            "no other user or cluster has submitted the run: there is nothing to take over", file=sys.stderr
        )
        return
    check_may_write(run.paths)
    check_jobs_are_taken(run)
    with hold(run.paths.locks, LEASE_PATIENCE, lambda text: print(text, file=sys.stderr, flush=True)):
        found = standpoint(run.paths, run.who_acts) or found
        will_change("whose the run is")
        note_take_over(run.paths, found.me, found.owner)
        record = {"by": asdict(found.me), "former": asdict(found.owner)}
        journal.event(run.paths.events, TAKEN_OVER, **record)
    print(f"taken over from {found.owner}", file=sys.stderr)
    for line in _end_jobs(run, found):
        print(line, file=sys.stderr, flush=True)


def check_jobs_are_taken(run: Run) -> None:
    """Check that Slurm takes jobs with the run's settings from this user. Raises ConfigError, with the
    command that goes on with others."""
    from pipeline.checks.cluster import check_cluster
    from pipeline.checks.finding import refuse

    try:
        refuse(check_cluster(run.config))
    except ConfigError as error:
        raise ConfigError(f"{error}\n{with_other_settings(run)}") from None


def with_way_out(run: Run, error: Refused) -> Refused:
    """Return a refusal of sbatch's with the way on, where an account or the like is not this user's."""
    if not _NOT_MINE.search(str(error)):
        return error
    return type(error)(f"{error}\n{with_other_settings(run)}")


def with_other_settings(run: Run) -> str:
    """Return the command that goes on with an account of one's own: the first that accounting names."""
    place = shlex.quote(str(run.paths.root))
    is_other = standpoint(run.paths, run.who_acts) is not None
    mine = read_permitted().accounts
    account = next((one for one in sorted(mine) if one != slurm_settings(run).account), "ACCOUNT")
    return (
        f"to go on with your own: slurm-ppo resume {place}{' --take-over' * is_other} "
        f"scheduler.account={account}"
    )


def _end_jobs(run: Run, found: Elsewhere) -> Iterator[str]:
    """End the former owner's jobs as far as Slurm lets this user, and wait for workers that are idle to end
    by themselves. Yields what is left of them."""
    former = found.owner.user
    try:
        with on_cluster(run.cluster):
            elements = [] if found.is_on_another_cluster else _elements_of(run, found.owner)
            cancel_jobs([elements], only_pending=False)
    except (SlurmError, UnknownState) as error:
        yield (
            f"jobs of {former} cannot be ended from here ({error}); they exit by themselves: waiting "
            "ones when they start, running ones after their task"
        )
    until, crew = time.monotonic() + _PATIENCE, LiveWorkers(run.paths)
    while any(beat.doing is not Doing.BUSY for beat in _heard(crew)) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    if left := len(_heard(crew)):
        yield f"workers of {former} that have not ended yet: {left}; what they still commit counts"


def _elements_of(run: Run, owner: Owner) -> list[Element]:
    return read_queue(lambda name: is_job_of(run.identity.id, name), user=owner.uid)


def _heard(crew: LiveWorkers) -> list[Beat]:
    """Return the newest beats of workers that were heard of just now."""
    now = time.time()
    return [beat for beat in crew.live(now).values() if now - beat.beat <= SILENT_SECONDS]
