"""What starts, queues and tasks take, by what workers have said. Pure.

Medians of the newest, and None where nothing is known. Nothing here decides about results; a wrong estimate
costs time.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pipeline.run.tasks import Stage
from pipeline.workers.beats import Beat, Doing

_RECENT = 16
"""Workers of which a median is taken: enough for a steady one, few enough to follow a change."""
_ENOUGH = 3
"""Workers of a kind whose waits in the queue say enough: a first one may have found a place by luck."""
_LATE = 0.8
"""Quantile that stands for a long wait."""


@dataclass(frozen=True)
class Spread:
    """Seconds that something took."""

    median: float
    late: float
    """Longer than in four of five cases."""
    least: float
    mean: float
    """What counts where few cases take very long, as in a queue behind others."""
    number: int = 1
    """Number of cases."""

    def mean_with(self, seconds: float) -> float:
        """Return what the mean would be, had one more case taken so long."""
        return (self.mean * self.number + seconds) / (self.number + 1)


def startup(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind take from their start until they can begin with a task: of those
    that started up alone on their machine, if any, as several slow each other down. One that left without
    having done a task does not count."""
    known = list(beats)
    mine = _started_up(known, job_kind)
    near: dict[str, list[Beat]] = {beat.host: [] for beat in mine}
    since = min((beat.started for beat in mine), default=0.0)
    for beat in known:
        if beat.started + beat.startup_seconds > since and beat.host in near:
            near[beat.host].append(beat)
    alone = [beat for beat in mine if not _has_company(beat, near[beat.host])]
    return _spread(beat.startup_seconds for beat in alone or mine)


def startup_together(beats: Iterable[Beat], job_kind: str) -> float | None:
    """Return how long workers of a kind took to start up, beside whom they did: those that are submitted
    together do so again."""
    spread = _spread(beat.startup_seconds for beat in _started_up(beats, job_kind))
    return None if spread is None else spread.median


def _started_up(beats: Iterable[Beat], job_kind: str) -> list[Beat]:
    return _newest((beat for beat in beats if beat.startup_seconds and not _left_in_vain(beat)), job_kind)


def _left_in_vain(beat: Beat) -> bool:
    return beat.doing is Doing.LEAVING and not beat.tasks


def _has_company(one: Beat, near: Iterable[Beat]) -> bool:
    """Whether any of those on its machine started up at the same time."""
    begun, ended, name = one.started, one.started + one.startup_seconds, one.worker
    for other in near:
        if other.started < ended and begun < other.started + other.startup_seconds and other.worker != name:
            return True
    return False


def queue_wait(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind wait in the queue; while few of them are known, how long those of all
    kinds do, which stand in the same queue or in one like it."""
    known = [beat for beat in beats if beat.queued_seconds is not None]
    mine = _newest(known, job_kind)
    return _spread(beat.queued_seconds for beat in (mine if len(mine) >= _ENOUGH else _latest(known)))


def coming_back(beats: Sequence[Beat], job_kind: str) -> float | None:
    """Return how long it takes until a worker of a kind is there that is not: in the queue, and to start.
    None if none has started up yet."""
    loading, queue = startup(beats, job_kind), queue_wait(beats, job_kind)
    if loading is None:
        return None
    return loading.median + (queue.mean if queue else 0.0)


def task_seconds(beats: Iterable[Beat], job_kind: str) -> float | None:
    """Return how long a task of a kind takes, by the median worker that has done some."""
    newest = _latest(beat for beat in beats if _work_of(beat, job_kind)[0])
    means = _spread(seconds / tasks for tasks, seconds in (_work_of(beat, job_kind) for beat in newest))
    return None if means is None else means.median


def _work_of(beat: Beat, job_kind: str) -> tuple[int, float]:
    """Return how many tasks of a kind a worker has done, and the seconds that it was at them."""
    if beat.job_kind == job_kind:
        return beat.tasks - beat.measured, beat.busy_seconds - beat.measuring_seconds
    return (beat.measured, beat.measuring_seconds) if job_kind == Stage.EVALUATE else (0, 0.0)


def _newest(beats: Iterable[Beat], job_kind: str) -> list[Beat]:
    """Return the newest beats of a kind, of those that say what is asked: one that has just started up
    says nothing of tasks yet."""
    return _latest(beat for beat in beats if beat.job_kind == job_kind)


def _latest(beats: Iterable[Beat]) -> list[Beat]:
    return sorted(beats, key=attrgetter("started"))[-_RECENT:]


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    late = known[min(int(_LATE * len(known)), len(known) - 1)]
    return Spread(statistics.median(known), late, known[0], statistics.fmean(known), len(known))
