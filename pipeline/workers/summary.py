"""What a run's workers do, by job kind, and how they have spent their time. Pure."""

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from pipeline.run.tasks import Stage, parse_task
from pipeline.workers.beats import KEPT, Beat, Doing, Reason

SILENT_SECONDS = 300.0
"""Seconds without a beat after which a worker is not counted as alive."""
_CLAIM_SECONDS = 1.0
"""Seconds at tasks up to which a worker that committed none did none: a claim that another one got first
takes no longer."""

REASONS: Mapping[Reason, str] = {
    Reason.DONE: "nothing was left to do",
    Reason.ONE: "each task has a job of its own",
    Reason.FAR: "the next input was further away than coming back",
    Reason.LONG: "waited as long as coming back takes",
    Reason.NEEDED: "another job needed the place",
    Reason.TIME: "no time left for another task",
    Reason.WARNED: "warned by Slurm, or cancelled",
    Reason.CHANGED: "the package or the configuration changed",
    Reason.GREW: "its memory grew",
    Reason.FAILED: "its task failed",
    Reason.TURNED: "the run went back, was cancelled or gave up",
}
"""Why a worker left, in words."""


@dataclass(frozen=True)
class Spent:
    """Seconds of workers, by what they were spent on."""

    startup: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    """Waiting for inputs, resources held."""

    @property
    def total(self) -> float:
        return self.startup + self.busy + self.waiting

    @property
    def idle_share(self) -> float:
        """Share of the time spent waiting; 0 for no time."""
        return self.waiting / self.total if self.total else 0.0

    def plus(self, other: "Spent") -> "Spent":
        return Spent(self.startup + other.startup, self.busy + other.busy, self.waiting + other.waiting)


@dataclass(frozen=True)
class WorkersOf:
    """Workers of one job kind."""

    job_kind: str
    starting: int = 0
    busy: int = 0
    waiting: int = 0
    silent: int = 0
    """Workers that neither left nor said anything for five minutes; they may be gone."""
    left: int = 0
    waits_for: str = ""
    """What most of the waiting ones wait for, in words."""
    until: float | None = None
    """Unix time at which the first of those leaves if nothing comes."""
    tasks: int = 0
    """Tasks that all of them have committed, those that left included."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """How many left why."""
    without_task: int = 0
    """Starts that did no task, and never will: they left or are silent, and were at none."""
    without_task_reasons: Mapping[str, int] = field(default_factory=dict)
    """How many of those left why."""
    spent: Spent = field(default_factory=Spent)
    """Seconds of all of them."""
    is_cut: bool = False
    """Whether there may have been earlier ones, whose last words are no longer kept."""

    @property
    def live(self) -> int:
        return self.starting + self.busy + self.waiting

    @property
    def starts(self) -> int:
        return self.live + self.silent + self.left

    @property
    def evicted(self) -> int:
        """How many left because another job needed the place."""
        return self.reasons.get(Reason.NEEDED, 0)


def workers_of(
    beats: Iterable[Beat], now: float, running: Collection[str] | None = None
) -> tuple[WorkersOf, ...]:
    """Count workers by job kind, in the order of an iteration.

    Args:
        running: names of the workers whose jobs run, by Slurm; None where that is not known. Those that it
            lacks, and that have not said that they leave, were killed: they have left for unknown reasons.
    """
    kinds: dict[str, list[Beat]] = {}
    for beat in beats:
        kinds.setdefault(beat.job_kind, []).append(beat)
    is_cut = sum(map(len, kinds.values())) >= KEPT
    found = (_workers(kind, kinds[kind], now, running) for kind in sorted(kinds, key=_place))
    return tuple(replace(one, is_cut=is_cut) for one in found)


def _workers(job_kind: str, beats: Sequence[Beat], now: float, running: Collection[str] | None) -> WorkersOf:
    here = [b for b in beats if b.doing is not Doing.LEAVING and (running is None or b.worker in running)]
    fresh = [b for b in here if now - b.beat <= SILENT_SECONDS]
    doing = Counter(beat.doing for beat in fresh)
    waiting = [beat for beat in fresh if beat.doing is Doing.WAITING]
    awaited = Counter(awaited_by(beat.task) for beat in waiting).most_common(1)
    waits_for = awaited[0][0] if awaited else ""
    ends = [b.until for b in waiting if b.until is not None and awaited_by(b.task) == waits_for]
    staying, speaking = ({beat.worker for beat in some} for some in (here, fresh))
    gone = [beat for beat in beats if beat.worker not in staying]
    idle = [beat for beat in beats if beat.worker not in speaking and not has_worked(beat)]
    return WorkersOf(
        job_kind,
        starting=doing[Doing.STARTING],
        busy=doing[Doing.BUSY],
        waiting=doing[Doing.WAITING],
        silent=len(here) - len(fresh),
        left=len(gone),
        waits_for=waits_for,
        until=min(ends, default=None),
        tasks=sum(beat.tasks for beat in beats),
        reasons=reasons_of(gone),
        without_task=len(idle),
        without_task_reasons=reasons_of(idle),
        spent=functools.reduce(Spent.plus, map(spent_by, beats)),
    )


def has_worked(beat: Beat) -> bool:
    """Whether a worker has done a task, is at one, or failed at one."""
    return beat.tasks > 0 or beat.doing is Doing.BUSY or beat.busy_seconds > _CLAIM_SECONDS


def _place(job_kind: str) -> tuple[int, str]:
    """Return a sort key: place in the iteration, then the name; what is no stage comes last."""
    names = [str(stage) for stage in Stage]
    stage = job_kind.partition("-")[0]
    return (names.index(stage) if stage in names else len(names)), job_kind


def reasons_of(beats: Iterable[Beat]) -> dict[str, int]:
    """Count why workers that are gone left, most frequent first; of one that did not say so: ``unsaid``."""
    is_said = attrgetter("reason")
    return dict(Counter(str(is_said(beat) or "unsaid") for beat in beats).most_common())


def awaited_by(task: str) -> str:
    """Return in words what a worker waits for that is to do ``task``, by its key; empty if unknown."""
    try:
        found = parse_task(task)
    except ValueError:
        return ""
    if found.stage in (Stage.ROLLOUT, Stage.EVALUATE, Stage.BENCHMARK):
        policy = found.iteration - (found.stage is Stage.ROLLOUT)
        return f"policy {policy}" if policy else "the prompts"
    if found.stage.scores:
        return f"responses of iteration {found.iteration}"
    if found.stage is Stage.UPDATE:
        return f"scores of iteration {found.iteration}"
    return ""


def spent_by(beat: Beat) -> Spent:
    """Return how a worker has spent its time, up to its last beat."""
    since = max(0.0, beat.beat - beat.since) if beat.since else 0.0
    now = {
        Doing.STARTING: Spent(startup=since),
        Doing.BUSY: Spent(busy=since),
        Doing.WAITING: Spent(waiting=since),
    }
    said = Spent(beat.startup_seconds, beat.busy_seconds, beat.waiting_seconds)
    return said.plus(now.get(beat.doing, Spent()))


def spent_by_job_kind(beats: Iterable[Beat]) -> dict[str, Spent]:
    """Add up how workers have spent their time, by job kind."""
    found: dict[str, Spent] = {}
    for beat in beats:
        found[beat.job_kind] = found.get(beat.job_kind, Spent()).plus(spent_by(beat))
    return found


def worked_on(beats: Iterable[Beat], iteration: int) -> list[Beat]:
    """Return the beats of the workers that have worked on an iteration."""
    return [beat for beat in beats if beat.iterations[0] <= iteration <= beat.iterations[1]]
