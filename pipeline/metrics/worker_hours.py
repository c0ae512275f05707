"""GPU and CPU hours of workers: busy, starting up, waiting in our hands, lost with those that were killed.

Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from pipeline.workers.beats import Beat
from pipeline.workers.living import KEPT
from pipeline.workers.reading import seniority
from pipeline.workers.summary import spent_by
from slurm.accounting import Record

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class WorkerHours:
    """Hours of the workers of a job kind. The three parts and ``lost`` add up to ``held``."""

    held_gpu_hours: float = 0.0
    """GPU-hours of their jobs, as Slurm accounts for them."""
    busy_gpu_hours: float = 0.0
    startup_gpu_hours: float = 0.0
    waiting_gpu_hours: float = 0.0
    """GPU-hours in which they waited for inputs."""
    lost_gpu_hours: float = 0.0
    """GPU-hours that no worker has said anything of: before its first word, and after the last of one that
    was killed."""
    held_cpu_hours: float = 0.0
    waiting_cpu_hours: float = 0.0

    def plus(self, other: "WorkerHours") -> "WorkerHours":
        return WorkerHours(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def waiting_share(self) -> float:
        """Share of the GPU-hours held (CPU-hours if there were no GPUs) in which workers waited."""
        if self.held_gpu_hours:
            return self.waiting_gpu_hours / self.held_gpu_hours
        return self.waiting_cpu_hours / self.held_cpu_hours if self.held_cpu_hours else 0.0


def worker_hours(
    beats: Iterable[Beat], records: Sequence[Record], job_kinds: Mapping[str, str] | None = None
) -> dict[str, WorkerHours]:
    """Match workers with their jobs in accounting, and add up by job kind. What it lacks is left out.

    Args:
        job_kinds: job kinds of workers by the names of their jobs. Those that have never said anything are
            counted as lost: they were killed before they could.
    """
    jobs, found = dict(_by_worker(records)), dict[str, WorkerHours]()

    def add(job_kind: str, hours: WorkerHours) -> None:
        found[job_kind] = found.get(job_kind, WorkerHours()).plus(hours)

    newest = list(beats)
    for beat in newest:
        if (job := jobs.pop(beat.worker, None)) is not None:
            add(beat.job_kind, _hours(beat, job))
    oldest = min((seniority(beat.worker) for beat in newest), default=(0, ""))
    first = oldest if len(newest) >= KEPT else (0, "")
    for worker, job in jobs.items():
        job_kind = (job_kinds or {}).get(job.name)
        if job_kind is not None and seniority(worker) >= first:  # what older ones have said is forgotten
            add(job_kind, _silent(job))
    return found


def _by_worker(records: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Yield the run of a job of each worker, by its name: one that was requeued has several, in order."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        if record.started is not None:
            runs.setdefault(record.job_id, []).append(record)
    for job, of_job in runs.items():
        for restart, record in enumerate(sorted(of_job, key=lambda r: r.submitted or 0.0)):
            yield f"{job}r{restart}", record


def _silent(job: Record) -> WorkerHours:
    """Return the hours of a worker that has never said anything."""
    gpu_hours = job.gpus * job.elapsed / _SECONDS_PER_HOUR
    cpu_hours = job.cpus * job.elapsed / _SECONDS_PER_HOUR
    return WorkerHours(held_gpu_hours=gpu_hours, lost_gpu_hours=gpu_hours, held_cpu_hours=cpu_hours)


def _hours(beat: Beat, job: Record) -> WorkerHours:
    spent = spent_by(beat)
    # Both count to the second or so: what is said beyond what was held is nobody's.
    scale = min(1.0, job.elapsed / spent.total) if spent.total else 0.0
    gpus, cpus = job.gpus / _SECONDS_PER_HOUR, job.cpus / _SECONDS_PER_HOUR
    return WorkerHours(
        held_gpu_hours=gpus * job.elapsed,
        busy_gpu_hours=gpus * scale * spent.busy,
        startup_gpu_hours=gpus * scale * spent.startup,
        waiting_gpu_hours=gpus * scale * spent.waiting,
        lost_gpu_hours=gpus * max(0.0, job.elapsed - spent.total),
        held_cpu_hours=cpus * job.elapsed,
        waiting_cpu_hours=cpus * scale * spent.waiting,
    )


_HEADS = ("workers", "GPU hours", "busy", "start-up", "waiting", "lost")
_WIDTHS = (10, 10, 10, 10, 10)


def describe_workers(workers: Mapping[str, WorkerHours]) -> list[str]:
    """Return the lines of a table: GPU-hours by what they were spent on; without GPUs, shares of waiting."""
    held = {job_kind: hours for job_kind, hours in workers.items() if hours.held_gpu_hours}
    if not held:
        return [
            f"workers of {job_kind}: {100 * hours.waiting_share:.1f} % of their CPU hours waiting for inputs"
            for job_kind, hours in workers.items()
            if hours.held_cpu_hours
        ]
    rows = [_HEADS, *(_cells(job_kind, hours) for job_kind, hours in held.items())]
    width = max(9, *(len(name) for name, *_ in rows))
    lines = [
        f"{name:{width}} " + "".join(cell.rjust(w) for cell, w in zip(others, _WIDTHS, strict=True))
        for name, *others in rows
    ]
    return ["", *lines, "waiting: held by us, for inputs; lost: nothing said of it"]


def _cells(job_kind: str, hours: WorkerHours) -> tuple[str, ...]:
    numbers = (
        hours.held_gpu_hours,
        hours.busy_gpu_hours,
        hours.startup_gpu_hours,
        hours.waiting_gpu_hours,
        hours.lost_gpu_hours,
    )
    return (job_kind, *(f"{number:.2f}" for number in numbers))
