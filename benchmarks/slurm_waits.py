"""How long stages wait for Slurm: from the last input of a stage to its first computing."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pipeline.metrics.attempts import ready_time
from pipeline.run.commits import Record, require_record
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage


def computing(record: Record) -> tuple[float, float]:
    """Return when a task's models computed: from the first to as many seconds later as they computed in all.
    Reading between two models of a task is counted among them, as far as it is shorter than they are."""
    begin = record.started + record.metrics.get("startup_seconds", 0.0)
    return begin, begin + record.metrics.get("compute_seconds", 0.0)


def covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the length of the union of intervals, from ``begin`` to ``end``. Pure."""
    total, reached = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        total += max(0.0, last - first)
        reached = max(reached, last)
    return total


def waits_of(run: Run, records: Sequence[Record]) -> Iterator[tuple[str, float]]:
    """Yield the stages that an iteration is made of with the seconds from the first shard of which all inputs
    were there to the first computing."""
    for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE):
        of_stage = [record for record in records if record.task.stage is stage]
        ready = [ready_time(run, record.task, partial(require_record, run.paths)) for record in of_stage]
        yield stage, min(computing(one)[0] for one in of_stage) - min(time for time in ready if time)


def in_words(waits: Mapping[str, Sequence[float]]) -> str:
    """Say the median and the most of seconds, by stage."""
    told = (
        f"{stage} {statistics.median(some):.2f} s (at most {max(some):.2f})" for stage, some in waits.items()
    )
    return ", ".join(told)
