"""Costs of jobs from Slurm's accounting: time in the queue, CPU and GPU hours, and the share wasted."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurm.ended import ask_accounting, in_batches, split_accounting
from slurm.query import Element, count_gpus, count_resource, unix_time
from slurm.states import Phase, SlurmState, parse_state, phase_of

_FIELDS = (
    *("JobID", "State", "Submit", "Eligible", "Start", "ElapsedRaw", "AllocTRES", "NodeList", "Partition"),
    "JobName",
)
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Record:
    """One run of a job or array element; a requeued one has several. Times are unix seconds."""

    job_id: str
    """Job id as Slurm writes it, e.g. 12_3."""
    name: str
    state: SlurmState
    submitted: float | None
    eligible: float | None
    """Time from which only resources and priority kept it from starting."""
    started: float | None
    elapsed: float
    """Seconds it ran, without those in which it was suspended."""
    cpus: int
    gpus: int
    """Number of GPUs; 0 also where the cluster does not account for them (AccountingStorageTRES)."""
    nodes: str
    partition: str = ""
    """Partition; several, separated by commas, of a job that waits for any of them."""


@dataclass(frozen=True)
class Usage:
    """Sums over several runs of jobs."""

    attempts: int
    """Number of runs that started."""
    queue_seconds: float
    run_seconds: float
    cpu_hours: float
    gpu_hours: float
    wasted_cpu_hours: float
    """CPU hours of runs that are over and did not complete: failed, cancelled, preempted, requeued."""
    wasted_gpu_hours: float


def read_records(ids: Collection[str], timeout: float = 60.0) -> list[Record]:
    """Read every run of these jobs and arrays. Raises :class:`slurm.query.NoAccounting`.

    ``timeout``: seconds for each call of sacct; it is retried only if they are the usual 60 or more.
    """
    records: list[Record] = []
    for batch in in_batches(ids):
        options = ["-D", "-X", f"--format={','.join(_FIELDS)}", f"--jobs={','.join(batch)}"]
        records += parse_records(ask_accounting(options, timeout))
    return records


def shown_records(elements: Iterable[Element]) -> list[Record]:
    """Return the last runs of elements that have started, as accounting has them, by what the queue shows."""
    return [
        Record(
            job_id=f"{element.array_id}_{element.index}",
            name=element.name,
            state=element.state,
            submitted=element.submitted,
            eligible=element.eligible,
            started=element.started,
            elapsed=element.elapsed or 0.0,
            cpus=element.cpus or 0,
            gpus=element.gpus or 0,
            nodes=element.node,
            partition=element.partition,
        )
        for element in elements
        if element.started is not None
    ]


def parse_records(text: str) -> list[Record]:
    """Parse the runs in sacct's output."""
    return [_record(row) for row in split_accounting(text, len(_FIELDS))]


def _record(row: list[str]) -> Record:
    job_id, state, submitted, eligible, started, elapsed, resources, nodes, partition, name = row
    return Record(
        job_id=job_id,
        name=name,
        state=parse_state(state),
        submitted=unix_time(submitted),
        eligible=unix_time(eligible),
        started=unix_time(started),
        elapsed=float(elapsed or 0),
        cpus=count_resource(resources, "cpu"),
        gpus=count_gpus(resources),
        nodes="" if nodes == "None assigned" else nodes,
        partition=partition,
    )


def summarize(records: Iterable[Record]) -> Usage:
    """Add up runs; what runs now counts up to now and is not wasted."""
    started = [record for record in records if record.started is not None and record.cpus]
    wasted = [record for record in started if is_wasted(record)]
    return Usage(
        attempts=len(started),
        queue_seconds=sum(queued(record) for record in started),
        run_seconds=sum(record.elapsed for record in started),
        cpu_hours=_cpu_hours(started),
        gpu_hours=_gpu_hours(started),
        wasted_cpu_hours=_cpu_hours(wasted),
        wasted_gpu_hours=_gpu_hours(wasted),
    )


def is_wasted(record: Record) -> bool:
    """Whether this run of a job is over and did not complete."""
    # REQUEUED is no end of the job, but it is the end of this run of it.
    return record.state != SlurmState.COMPLETED and phase_of(record.state) != Phase.RUNNING


def queued(record: Record) -> float:
    """Return the seconds between when it could have started and when it did: waits for other jobs and requeue
    delays are left out.
    """
    since = record.eligible or record.submitted
    return max(0.0, record.started - since) if record.started and since else 0.0


def _cpu_hours(records: Iterable[Record]) -> float:
    return sum(record.cpus * record.elapsed for record in records) / _SECONDS_PER_HOUR


def _gpu_hours(records: Iterable[Record]) -> float:
    return sum(record.gpus * record.elapsed for record in records) / _SECONDS_PER_HOUR
