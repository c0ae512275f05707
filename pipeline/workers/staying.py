"""How long a worker stays while it has nothing to do, and why it leaves. Pure.

Ski rental: who waits as long as coming back would cost, and then leaves, never pays more than twice what it
would have paid had it known when its next input comes.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.config.types import Linger
from pipeline.run.tasks import Stage
from pipeline.workers.beats import Beat, Doing, Reason

FIRST_POLL = 0.01
_SHARE = 0.02
_LONGEST_POLL, _LONGEST_POLL_ON_NETWORK = 1.0, 5.0
_GROWTH, _GROWTH_BYTES = 1.5, 2**29
_SETTLED = 3
"""Tasks after which a worker's memory is taken for what it needs."""
_TASK_FACTOR = 10
_LEAST_LIMIT = 60.0
"""Seconds that every task gets: what holds up a short one has nothing to do with its length."""
_WAITS_FOR_ROOM = frozenset(
    {"resources", "priority", "associationjoblimit", "associationresourcelimit", "qosjoblimit"}
    | {"qosresourcelimit", "assocmaxjobslimit", "accountingpolicy", "licenses"}
)
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)\w+|Max\w+PerAccount")
_NEVER_FREED = re.compile(r"Wall|Submit|Minutes|Max\w+PerJob")
"""Limits that a worker's end frees nothing of."""


@dataclass(frozen=True)
class Pending:
    """A job of this user that waits in Slurm's queue."""

    name: str
    partition: str
    """Partition, or several with commas between them."""
    reason: str
    """Why it waits, in Slurm's word."""


@dataclass(frozen=True)
class Wait:
    """A worker's wait for its next input. Times are unix seconds."""

    began: float
    bound: float
    """Seconds that it may take, from :func:`bound`."""
    most: float = math.inf
    """Seconds that it may take whatever others do."""
    expected: float | None = None
    """When the input is expected; None if unknown."""
    excused: float = 0.0
    """Seconds in which those before it were starting up: not held against it, as who leaves for that makes
    others wait in turn, for its own start-up."""

    looked: float = 0.0
    """When the others were last looked at."""

    @property
    def until(self) -> float:
        return self.began + min(self.most, self.bound + self.excused)


def bound(linger: Linger, most: float, startup: float | None, queue: float | None) -> float:
    """Return the seconds that a worker waits at most.

    Args:
        linger: the setting.
        most: bound of an automatic one (``scheduler.linger_max``).
        startup: seconds that a start takes; None if unknown.
        queue: seconds that a job waits in the queue; None if unknown.
    """
    return min(most, (startup or 0.0) + (queue or 0.0)) if linger == "auto" else float(linger)


def excused(wait: Wait, others: Iterable[Beat], job_kind: str, now: float) -> Wait:
    """Return a wait after a look at the run's workers: the time since the last look is not held against it if
    one of another stage was starting up.

    Args:
        others: beats of the workers that live.
        job_kind: that of the worker that waits.
    """
    kinds = {beat.job_kind for beat in others if beat.doing is Doing.STARTING}
    is_excused = bool(kinds - {job_kind, Stage.EVALUATE})
    seconds = max(0.0, now - wait.looked) if is_excused else 0.0
    return replace(wait, looked=now, excused=wait.excused + seconds)


def reason_to_leave(wait: Wait, now: float) -> Reason | None:
    """Return why a worker that waits leaves now, by time alone; None: it stays."""
    if now >= wait.until:
        return Reason.LONG
    if wait.expected is not None and wait.expected > wait.until:
        return Reason.FAR
    return None


def is_in_the_way(
    pending: Iterable[Pending],
    partitions: Collection[str] | None,
    is_peer: Callable[[str], bool] = lambda name: False,
) -> bool:
    """Whether a job of the same user waits that could start in this worker's place.

    Args:
        partitions: partitions that the worker's nodes belong to; None if unknown: any.
        is_peer: whether the job of a name is of the same stage of the same run. This worker can do its task
            as well.
    """
    return any(_wants_place(job, partitions) for job in pending if not is_peer(job.name))


def _wants_place(job: Pending, partitions: Collection[str] | None) -> bool:
    reason = job.reason.strip("()").split(",")[0]
    if _LIMIT.fullmatch(reason):  # which counts for all partitions
        return not _NEVER_FREED.search(reason)
    is_near = partitions is None or not set(partitions).isdisjoint(job.partition.split(","))
    return is_near and reason.replace("_", "").lower() in _WAITS_FOR_ROOM


def task_limit(task_time: float | None, median: float | None, startup: float | None = None) -> float | None:
    """Return the seconds that a task may take inside a worker: as set, else ten times the median, and a
    minute at least; None: as long as the worker may run.

    Args:
        startup: seconds that loading takes, where the task begins with that: ten times that more.
    """
    if task_time is not None or median is None:
        return task_time
    return max(_LEAST_LIMIT, _TASK_FACTOR * median) + _TASK_FACTOR * (startup or 0.0)


def has_time(now: float, ends: float | None, limit: float | None, warning: float = 0.0) -> bool:
    """Whether a task that takes as long as it may ends before the worker's own limit warns it.

    Args:
        ends: unix time of the worker's end; None: never, or unknown.
        limit: from :func:`task_limit`.
        warning: seconds before its end at which Slurm warns a worker.
    """
    return ends is None or limit is None or now + limit <= ends - warning


def has_grown(sizes: Sequence[int]) -> bool:
    """Whether a worker's memory after its last task is half as much again as after the third, and 0.5 GiB
    more.

    Args:
        sizes: bytes that were resident after each task.
    """
    if len(sizes) <= _SETTLED:
        return False
    settled = sizes[_SETTLED - 1]
    return sizes[-1] > _GROWTH * settled and sizes[-1] - settled > _GROWTH_BYTES


def pause(waited: float, is_network: bool) -> float:
    """Return the seconds until the next look at the disk of one who has waited for ``waited`` seconds."""
    longest = _LONGEST_POLL_ON_NETWORK if is_network else _LONGEST_POLL
    return min(longest, max(FIRST_POLL, _SHARE * waited))
