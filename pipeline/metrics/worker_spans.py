"""Spans of tasks that workers did: a job that stays does many, so its own times are those of none of them.
Pure but for the records that it asks for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.metrics.spans import Span, SpanEnd
from pipeline.run.commits import Record
from pipeline.run.plan import Plan
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat
from slurm import accounting

RecordOf = Callable[[Task], Record | None]


@dataclass(frozen=True)
class Staying:
    """Workers of a run, by the process that they are, and their jobs in accounting."""

    beats: Mapping[tuple[str, int], Sequence[Beat]]
    jobs: Mapping[str, accounting.Record]
    """Jobs by id, like ``4711_3``."""

    @staticmethod
    def of(beats: Iterable[Beat], jobs: Iterable[accounting.Record]) -> "Staying":
        found: dict[tuple[str, int], list[Beat]] = {}
        for beat in sorted(beats, key=lambda b: b.started):
            found.setdefault((beat.host, beat.pid), []).append(beat)
        return Staying(found, {job.job_id: job for job in jobs})

    def worker_of(self, record: Record) -> Beat | None:
        """Return the worker that made a commit; None for a job that does one task."""
        before = [b for b in self.beats.get((record.host, record.pid), ()) if b.started <= record.started]
        return before[-1] if before else None

    def job_of(self, worker: Beat) -> accounting.Record | None:
        return self.jobs.get(job_id(worker))


def job_id(worker: Beat) -> str:
    """Return the id of a worker's job, like ``4711_3``: its name without the restart."""
    return worker.worker.rpartition("r")[0]


def worker_spans(
    plan: Plan, iteration: int, record_of: RecordOf, staying: Staying, lane_of: Callable[[str], str]
) -> Iterator[tuple[Task, Span]]:
    """Yield the tasks of an iteration that workers did, and their spans.

    Args:
        lane_of: returns the partitions that a job kind asks for, where accounting does not say.
    """
    ended = ends_of(plan, iteration, record_of) if staying.beats else {}
    for task in plan.tasks(iteration) if staying.beats else ():
        record = record_of(task)
        worker = staying.worker_of(record) if record is not None else None
        if record is not None and worker is not None:
            ready = [r.ended for source in plan.inputs(task) if (r := record_of(source)) is not None]
            held = held_since(record, worker, ended[record.host, record.pid])
            span = span_of(record, worker, staying.job_of(worker), lane_of(task.job_kind))
            yield task, replace(span, ready=max(ready, default=None), held=held)


def ends_of(plan: Plan, iteration: int, record_of: RecordOf) -> dict[tuple[str, int], list[float]]:
    """Return when each process ended tasks of an iteration and of the one before."""
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(max(plan.start, iteration - 1), iteration + 1):
        for task in plan.tasks(number):
            if (record := record_of(task)) is not None:
                found.setdefault((record.host, record.pid), []).append(record.ended)
    return found


def held_since(record: Record, worker: Beat, ends: Sequence[float]) -> float:
    """Return the time from which a worker waited for a task: the end of its last one, or of its start-up."""
    before = [end for end in ends if end <= record.started]
    return min(record.started, max(before, default=worker.started + worker.startup_seconds))


def span_of(record: Record, worker: Beat, job: accounting.Record | None, lane: str) -> Span:
    """Return the span of a commit by a worker, with the task's own times."""
    computing = record.started + record.metrics.get("startup_seconds", 0.0)
    return Span(
        record.task.job_kind,
        record.task.shard,
        record.attempt,
        SpanEnd.COMMITTED,
        started=record.started,
        computing=computing,
        ended=max(record.ended, computing),
        compute=record.metrics.get("compute_seconds", 0.0),
        node=record.host,
        lane=job.partition if job else lane,
        job=job_id(worker),
        cpus=job.cpus if job else 0,
        gpus=job.gpus if job else 0,
    )
