"""A run's workers: how they spent their time, and why they left."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.html import Head
from pipeline.text import duration
from pipeline.workers.beats import Beat, Doing
from pipeline.workers.summary import REASONS, Spent, reasons_of, spent_by_job_kind, workers_of

HEADS = (
    Head("stage"),
    Head("workers", "jobs that stayed, or that waited for their first task"),
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


def workers_table(beats: Sequence[Beat], now: float) -> WorkersTable | None:
    """Sum up by job kind; None where no job stayed."""
    if not beats:
        return None
    spent = spent_by_job_kind(beats)
    counted = workers_of(beats, now)
    rows = [_cells(one.job_kind, one.left + one.live + one.silent, one.tasks, spent) for one in counted]
    gone = {one.job_kind: [b for b in beats if b.job_kind == one.job_kind and _is_gone(b)] for one in counted}
    why = [(job_kind, in_words(left)) for job_kind, left in gone.items() if left]
    return WorkersTable(HEADS, rows, why)


def _is_gone(beat: Beat) -> bool:
    return beat.doing is Doing.LEAVING


def _cells(job_kind: str, count: int, tasks: int, spent: dict[str, Spent]) -> list[str]:
    found = spent[job_kind]
    times = (found.startup, found.busy, found.waiting)
    return [job_kind, str(count), str(tasks), *map(duration, times), f"{100 * found.idle_share:.1f} %"]


def in_words(left: Sequence[Beat]) -> str:
    """Say why workers left, e.g. ``12: nothing was left to do; 3: its memory grew``."""
    known = {str(reason): words for reason, words in REASONS.items()}
    return "; ".join(
        f"{count}: {known.get(reason, 'did not say why')}" for reason, count in reasons_of(left).items()
    )
