"""A run's workers: how they spent their time, and why they left."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.html import Head
from pipeline.text import duration
from pipeline.workers.beats import Beat
from pipeline.workers.summary import REASONS, WorkersOf, workers_of

HEADS = (
    Head("stage"),
    Head("workers", "jobs that stayed, or that waited for their first task"),
    Head("without a task", "that left without having done one"),
    Head("evicted", "that left because another job needed the place"),
    Head("tasks", "that they have committed"),
    Head("start-up", "before their first task"),
    Head("busy"),
    Head("waited", "for inputs, with their resources held"),
    Head("idle", "share of their time that they waited"),
)


@dataclass(frozen=True)
class WorkersTable:
    """What the newest workers said last."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    why: Sequence[tuple[str, str]]
    """By job kind, why its workers left, and how many."""
    is_cut: bool
    """Whether there may have been earlier ones, of which nothing is kept."""


def workers_table(beats: Sequence[Beat], now: float) -> WorkersTable | None:
    """Sum up by job kind; None where no job stayed."""
    if not beats:
        return None
    counted = workers_of(beats, now)
    return WorkersTable(HEADS, [_cells(one) for one in counted], list(_why(counted)), counted[0].is_cut)


def _cells(workers: WorkersOf) -> list[str]:
    spent = workers.spent
    counts = (workers.starts, workers.without_task, workers.evicted, workers.tasks)
    times = (spent.startup, spent.busy, spent.waiting)
    return [workers.job_kind, *map(str, counts), *map(duration, times), f"{100 * spent.idle_share:.1f} %"]


def _why(counted: Sequence[WorkersOf]) -> Iterator[tuple[str, str]]:
    for one in counted:
        if one.left:
            told = in_words(one.reasons)
            idle = f". Without a task: {in_words(one.without_task_reasons)}"
            yield one.job_kind, told + idle * bool(one.without_task)


def in_words(reasons: Mapping[str, int]) -> str:
    """Say why workers left, e.g. ``12: nothing was left to do; 3: its memory grew``."""
    known = {str(reason): words for reason, words in REASONS.items()}
    return "; ".join(f"{count}: {known.get(reason, 'did not say why')}" for reason, count in reasons.items())
