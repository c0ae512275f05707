"""What a worker is given by whoever starts it: its name, what it may ask Slurm, whom to wake. Stages know
nothing of Slurm but through this.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.run.attempts import new_attempt
from pipeline.run.directory import Run
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import is_driver_job
from pipeline.run.tasks import Task
from pipeline.workers.afterwards import Afterwards
from slurm.tasklist import ELIGIBLE, KNOWN, STARTED, attempt_id

_PATIENCE = 20.0
"""Seconds that an answer of Slurm may take."""


@dataclass(frozen=True)
class Queue:
    """What a worker needs to know of Slurm's queue."""

    ends: float | None = None
    """Unix time of the worker's own end; None if unknown or never."""
    lacking_room: frozenset[str] = frozenset()
    """Names of the user's jobs that wait for room, of this run and of others; without driver jobs, which ask
    for so little that nobody leaves for them."""


@dataclass(frozen=True)
class Outside:
    """What a worker is given by whoever starts it."""

    name: str
    """The worker's name (:mod:`pipeline.workers.beats`)."""
    new_attempt: Callable[[int], str]
    """Returns an attempt's id from its number."""
    queued_seconds: float | None = None
    nodes: str = ""
    """As beats have them (:attr:`pipeline.workers.beats.Beat.nodes`)."""
    known: int = 0
    """Number of the newest claim on its first task that the pass which gave it that knew of."""
    ask_queue: Callable[[], Queue | None] = lambda: None
    """Returns the queue; None where it cannot be asked."""
    committed: Callable[[Task], None] = lambda task: None
    """Is called after each commit: whoever waits for it may be woken, and the run's books be kept."""
    failed: Callable[[bool], None] = lambda stays: None
    """Is called after each attempt that failed, with whether this process goes on: what follows is for a pass
    to decide."""
    wanted: Callable[[], None] = lambda: None
    """Is called where a job may wait for the place of this process: one of another run, or of this one while
    there is nothing to do for who has just started. A pass finds who makes place."""
    waits: Callable[[], None] = lambda: None
    """Is called each second or so of a wait."""
    leaves: Callable[[bool], None] = lambda is_to_be_seen: None
    """Is called before its end, when its beat says that it leaves: with whether a pass has to see that."""


def started_at(environment: Mapping[str, str], now: float) -> float:
    """Return when this process's job started (unix time): if its script says so, before what that sets up."""
    said = environment.get(STARTED, "")
    return min(now, float(said)) if said.isdecimal() else now


def of_environment(run: Run, job_kind: str, environment: Mapping[str, str], started: float) -> Outside:
    """Return the surroundings of an array element, or where there is no Slurm those of a process.

    Args:
        started: unix time at which the job started.
    """
    if "SLURM_ARRAY_JOB_ID" not in environment:
        return Outside(f"{os.uname().nodename}-{os.getpid()}", new_attempt)
    job, index = environment["SLURM_ARRAY_JOB_ID"], environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    eligible = 0.0 if restarts else float(environment.get(ELIGIBLE, "0"))
    name = f"{job}_{index}r{restarts}"
    afterwards = Afterwards(run, name)
    return Outside(
        name,
        attempt_ids(job, index, restarts),
        queued_seconds=max(0.0, started - eligible) if eligible else None,
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
        known=int(environment.get(KNOWN, "0")),
        ask_queue=lambda: slurm_queue(run.paths, job, int(index)),
        committed=afterwards.committed,
        failed=afterwards.failed,
        wanted=afterwards.wanted,
        waits=afterwards.waits,
        leaves=afterwards.leaves,
    )


def attempt_ids(job: str, index: str, restarts: int) -> Callable[[int], str]:
    """Return a function that makes ids for the attempts of one worker from their numbers.

    A number counts attempts at one task, so attempts at two tasks may have the same: the position among the
    worker's own tells them apart.
    """
    positions = itertools.count()
    return lambda number: attempt_id(number, job, index, restarts, next(positions))


def slurm_queue(paths: RunPaths, array: str, index: int) -> Queue | None:
    """Look at Slurm's queue for a worker's own element, and for others that wait; None where nothing is known
    of it, as where there is no client and nobody else looks."""
    from pipeline.workers.looking import WORKER_AGE, look  # submitting jobs alone needs more of this
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.reasons import lacks_room
    from slurm.states import Phase, phase_of

    try:
        elements = look(paths, WORKER_AGE, _PATIENCE).elements
    except (SlurmError, SlurmMissing):
        return None
    own = next((e for e in elements if (e.array_id, e.index) == (array, index) and e.started), None)
    if own is None:  # it has started since
        return None
    pending = (e for e in elements if phase_of(e.state) is Phase.PENDING and not is_driver_job(e.name))
    full = (e for e in pending if lacks_room(e.reason))
    waiting = frozenset(f"{e.array_id}_{e.index}" for e in full)
    return Queue(own.started + own.time_limit if own.started and own.time_limit else None, waiting)
