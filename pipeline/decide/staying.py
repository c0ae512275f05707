"""How long a worker stays while it has nothing to do, and why it leaves. Pure.

Ski rental: waiting as long as coming back would cost, and leaving then, costs at most twice what it would
with the next input's time known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.config.types import Linger
from pipeline.decide import estimates
from pipeline.decide.crew import Worker
from pipeline.decide.estimates import Spread
from pipeline.workers.beats import Beat, Reason

FIRST_SECONDS = 600.0
"""Seconds that a worker which has started early waits for its first input, if it may wait so long at all."""
INPUT_SECONDS = 30.0
"""Seconds that a task waits for inputs that are not there: caches of network filesystems may be as old."""
ASK_SECONDS = 30.0
"""Seconds between two looks at the package, and between two estimates of when an input comes."""
QUEUE_SECONDS = 10.0
"""Seconds between two looks of a waiting worker at the queue: for that long it may keep a place that another
run of the same user waits for, before it requests the pass that finds so."""
PASS_SECONDS = 3.0
"""Seconds that coming back takes beside the queue and the start: until a pass has submitted a job, and Slurm
has looked at it."""
ALWAYS = 10**8
"""Seconds from which on it does not count how long a worker stays: three years."""
LEAST_FREE = 0.1
"""Share of the machine's memory that has to be free for a new worker beside idle ones."""
_MOST_ALLOWED = 3.0
FIRST_POLL, _FIRST_POLL_ON_NETWORK = 0.01, 0.03
_LONGEST_POLL, _LONGEST_POLL_ON_NETWORK = 1.0, 5.0
_SHARE = 0.02
_GROWTH, _GROWTH_BYTES = 1.5, 2**29
SETTLED = 3
"""Tasks after which a worker's memory is taken for what it needs."""
_TASK_FACTOR = 10
_LEAST_LIMIT = 60.0
"""Seconds that every task gets: what holds up a short one has nothing to do with its length."""


@dataclass(frozen=True)
class Wait:
    """A worker's wait for its next input. Times are seconds by one clock, best one that is never set: by one
    that is set back it would take so much longer."""

    began: float
    bound: float
    """Seconds that it may take, from :func:`bound`."""
    expected: float | None = None
    """When the input is expected; None if unknown."""
    allowance: float = 0.0
    """Seconds that it may take beyond the bound, from :func:`allowance`."""
    is_first: bool = False
    """Whether the worker has done nothing yet: its start would have been in vain."""
    coming_back: float = 0.0
    """Seconds after which it would be there again at the latest in most cases, had it left."""

    @property
    def until(self) -> float:
        return self.began + self.bound + self.allowance


def bound(linger: Linger, most: float, startup: float | None, queue: float | None) -> float:
    """Return the seconds that a worker waits at most.

    Args:
        linger: the setting.
        most: bound of an automatic one (``scheduler.linger_max``).
        startup: seconds that a start takes; None if unknown.
        queue: seconds that a job waits in the queue; None if unknown.
    """
    if linger != "auto":
        return float(linger)
    return min(most, (startup or 0.0) + (queue or 0.0) + PASS_SECONDS)


def allowance(linger: Linger, most: float, bound: float, others: Iterable[float | None]) -> float:
    """Return the seconds beyond its bound that a worker waits while others come back, who stay then too.

    Where every stage has left, the input of each is as far as the start-ups of all others: if none
    waited for them, all would leave in every iteration, however little there is to do in between.

    Args:
        linger, most: as for :func:`bound`.
        bound: what :func:`bound` returned.
        others: seconds that coming back takes workers of each other job kind; None if unknown. Not more than
            its own counts.
    """
    if linger != "auto":
        return 0.0
    total = sum(bound if cost is None else min(bound, cost) for cost in others)
    return max(0.0, min(total, _MOST_ALLOWED * bound, most - bound))


@dataclass(frozen=True)
class Terms:
    """What the settings say of how long workers of a stage stay."""

    linger: Linger
    most: float
    """Bound of an automatic one (``scheduler.linger_max``)."""
    starts_early: bool
    is_contended: bool = False
    """Whether other people's jobs hold places where it runs: see :func:`_in_queue`."""


def begin_wait(
    terms: Terms,
    began: float,
    is_first: bool,
    beats: Iterable[Beat],
    own: Beat,
    others: Iterable[float | None],
    leaving: float = 0.0,
) -> Wait:
    """Return the wait that a worker begins.

    Args:
        is_first: whether it has done nothing yet: then it was submitted to wait.
        beats: what workers have said.
        own: its own beat of now; what its first task has loaded is not in the others yet.
        others: as for :func:`allowance`.
        leaving: seconds that it takes to leave, which its successor waits for: to save what it alone has.
    """
    seen = list({beat.worker: beat for beat in (*beats, own)}.values())
    startup, queue = estimates.startup(seen, own.job_kind), estimates.queue_wait(seen, own.job_kind)
    start = max(startup.median if startup else 0.0, own.startup_seconds)
    longest = bound(terms.linger, terms.most, start, _in_queue(terms, queue) + leaving)
    if is_first:
        longest = max(longest, min(FIRST_SECONDS, terms.most) if terms.starts_early else INPUT_SECONDS)
    more = allowance(terms.linger, terms.most, longest, others)
    coming_back = own.startup_seconds + queue.late if queue else 0.0
    return Wait(began, longest, None, more, is_first, coming_back)


def _in_queue(terms: Terms, wait: Spread | None) -> float:
    """Return the seconds that a job is taken to wait in the queue.

    Where others may take the place that is left, few waits say little: that none was long so far may be luck,
    and one that takes hours costs more than all that was saved. So one more is imagined, as long as a worker
    stays at most: it weighs less the more often this stage has come back.
    """
    imagined = terms.most if terms.is_contended else None
    if wait is None:
        return imagined or 0.0
    return wait.mean if imagined is None else wait.mean_with(imagined)


def reason_to_leave(wait: Wait, now: float) -> Reason | None:
    """Return why a worker that waits leaves now, by time alone; None: it stays."""
    if now >= wait.until:
        return Reason.LONG
    if wait.expected is None or wait.is_first:
        return None
    return Reason.FAR if wait.expected > now + max(wait.bound, wait.coming_back) else None


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
    if len(sizes) <= SETTLED:
        return False
    settled = sizes[SETTLED - 1]
    return sizes[-1] > _GROWTH * settled and sizes[-1] - settled > _GROWTH_BYTES


def who_gives_memory(idle: Sequence[Worker], job_kind: str, free: float) -> str | None:
    """Return who makes place for a new worker of a job kind where memory is short: of those that wait, and of
    another kind, the first. None: it is not, or there is none.

    Args:
        idle: workers that wait, those first that have for longest.
        free: share of the machine's memory that is free.
    """
    others = (worker.name for worker in idle if worker.job_kind != job_kind)
    return next(others, None) if free < LEAST_FREE else None


def pause(waited: float, is_network: bool, ahead: float = 0.0) -> float:
    """Return the polling period of a worker that has waited for ``waited`` seconds.

    On a network filesystem each poll is work of a server: they are rare for what is not expected yet. A wrong
    expectation costs as long again as it has waited at most.

    Args:
        ahead: seconds until the input is expected at the earliest; 0 if unknown.
    """
    if not is_network:
        return min(_LONGEST_POLL, max(FIRST_POLL, _SHARE * waited))
    far = min(ahead / 2, waited)
    return min(_LONGEST_POLL_ON_NETWORK, max(_FIRST_POLL_ON_NETWORK, _SHARE * waited, far))
