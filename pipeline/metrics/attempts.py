"""Every attempt at an iteration's tasks, as spans.

Sources are commit records, endings, submissions, and Slurm's accounting where it answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import resources_of
from pipeline.metrics.spans import Span, SpanEnd
from pipeline.metrics.worker_spans import Staying, job_id, worker_spans
from pipeline.run import journal
from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.endings import Endings, read_endings
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task, parse_task
from pipeline.workers.beats import Beat
from slurm import accounting
from slurm.states import Phase, SlurmState, phase_of
from slurm.tasklist import attempt_id

_TAIL_BYTES = 1 << 20
"""Bytes at the end of spans.jsonl that hold its last line, of some hundred bytes for each of its attempts."""

RecordOf = Callable[[Task], Record | None]
TaskAttempt = tuple[Task, int]
"""The task, and which attempt at it."""


@dataclass(frozen=True)
class Facts:
    """The scheduler's knowledge of an iteration's jobs; empty for runs on one machine."""

    submissions: Sequence[Submission] = ()
    jobs: Sequence[accounting.Record] = ()
    """Empty where accounting does not answer."""
    beats: Sequence[Beat] = ()
    """What workers say of themselves."""


@dataclass
class _Gathering:
    """Sources of spans, and which attempts have one already."""

    run: Run
    iteration: int
    record_of: RecordOf
    submissions: Mapping[str, Submission]
    endings: Endings
    seen: set[TaskAttempt] = field(default_factory=set)
    """Attempts that have a span."""
    submission_of: Mapping[TaskAttempt, tuple[Submission, int]] = field(init=False)
    """Attempt -> its submission and array index."""

    def __post_init__(self) -> None:
        of_stages = (s for s in self.submissions.values() if s.iteration == self.iteration)
        self.submission_of = {(t, s.number): (s, index) for s in of_stages for index, t in s.tasks()}


def attempts_of(run: Run, iteration: int, record_of: RecordOf, facts: Facts, since: float) -> list[Span]:
    """Return spans of every attempt at the tasks of an iteration, and of driver jobs.

    Args:
        record_of: returns the commit record of a task, or None.
        since: driver jobs that ended later than this unix time have no span yet.
    """
    by_name = {s.name: s for s in facts.submissions}
    gathering = _Gathering(run, iteration, record_of, by_name, read_endings(run.paths, [iteration]))
    staying = Staying.of(facts.beats, facts.jobs)
    spans = [*_from_workers(gathering, staying)]
    workers = {job_id(beat) for beats in staying.beats.values() for beat in beats}
    jobs = [job for job in facts.jobs if job.job_id not in workers]
    spans += _from_accounting(gathering, jobs, since)
    spans += [*_from_records(gathering), *_from_endings(gathering), *_open(gathering)]
    return _in_turn(spans)


def last_written(run: Run, iteration: int) -> float:
    """Return when the previous iteration's line was written, or if it has none, when the run was created."""
    lines = journal.read_tail(run.paths.spans, _TAIL_BYTES)
    times = [line["written"] for line in lines if line.get("iteration") == iteration - 1]
    return float(times[-1]) if times else run.identity.created


def ready_time(run: Run, task: Task, record_of: RecordOf) -> float | None:
    """Return when the last of a task's inputs was committed; None while one is missing, or without inputs."""
    records = [record_of(source) for source in run.plan.inputs(task)]
    ended = [record.ended for record in records if record is not None]
    return max(ended, default=None) if len(ended) == len(records) else None


def _from_workers(gathering: _Gathering, staying: Staying) -> Iterator[Span]:
    """Yield spans of commits by workers."""
    run, record_of = gathering.run, gathering.record_of
    found = worker_spans(run.plan, gathering.iteration, record_of, staying, lambda kind: lane_of(run, kind))
    for task, span in found:
        gathering.seen.add((task, span.number))
        yield span


# --- accounting ------------------------------------------------------------------------------------------


def _from_accounting(
    gathering: _Gathering, jobs: Sequence[accounting.Record], since: float
) -> Iterator[Span]:
    runs: dict[tuple[str, str], list[accounting.Record]] = {}
    for job in jobs:
        if job.name in gathering.submissions:
            runs.setdefault((job.name, job.job_id), []).append(job)
    for (name, _), of_job in runs.items():
        submission = gathering.submissions[name]
        for restart, job in enumerate(sorted(of_job, key=lambda job: job.submitted or 0.0)):
            if not submission.is_of_stage:
                yield from _driver_span(submission, job, since)
            elif submission.iteration == gathering.iteration:
                yield from _task_spans(gathering, submission, job, restart, restart == len(of_job) - 1)


def _driver_span(submission: Submission, job: accounting.Record, since: float) -> Iterator[Span]:
    """Yield the span of a driver job that ended after ``since``; the job that writes this line still runs."""
    is_over = phase_of(job.state) is Phase.ENDED or job.state is SlurmState.REQUEUED
    if job.started is None or not is_over or job.started + job.elapsed <= since:
        return
    end = SpanEnd.FAILED if accounting.is_wasted(job) else SpanEnd.ENDED
    name = f"{submission.job_kind}-{submission.iteration}-{submission.number}"
    yield _accounted(job, Span(DRIVER, 0, name, end, ready=job.eligible))


def _task_spans(
    gathering: _Gathering, submission: Submission, job: accounting.Record, restart: int, is_last: bool
) -> Iterator[Span]:
    index = job.job_id.partition("_")[2]
    if not index.isdecimal() or index not in submission.elements:
        return  # the pending part of an array, which sacct shows as one line
    task = submission.task(int(index))
    array = job.job_id.partition("_")[0]
    attempt = attempt_id(submission.number, array, index, restart)
    record = gathering.record_of(task)
    is_winner = record is not None and _is_of(record, submission.number, array, restart, is_last)
    ready = job.eligible or ready_time(gathering.run, task, gathering.record_of)
    ending = gathering.endings.of_element(submission, int(index)) if is_last else None
    is_ours = submission.state.is_withdrawn or (ending is not None and not ending.is_failure)
    span = Span(task.job_kind, task.shard, attempt, _end(job, is_winner, is_ours), ready=ready)
    if job.started is None and phase_of(job.state) is Phase.ENDED:
        return  # cancelled before it had started
    gathering.seen.add((task, submission.number))
    span = _accounted(job, span)
    if record is not None and is_winner:
        span = replace(_with_record(span, record), attempt=record.attempt)
    if span.end is SpanEnd.FAILED:
        span = replace(span, note=ending.message if ending else str(job.state))
    yield span


def _is_of(record: Record, number: int, array: str, restart: int, is_last: bool) -> bool:
    """Whether this run of a job made the commit. A restart that accounting lacks counts as the last run."""
    found = AttemptId.parse(record.attempt)
    if (found.number, found.job) != (number, array):
        return False
    return found.restart == restart or (is_last and found.restart > restart)


def _end(job: accounting.Record, is_winner: bool, is_ours: bool) -> SpanEnd:
    """Return how a run of a job ended. ``is_ours``: slurm-ppo cancelled it, which is no failure."""
    if is_winner:
        return SpanEnd.COMMITTED
    if is_ours and job.state is SlurmState.CANCELLED:
        return SpanEnd.ENDED
    is_wasted = accounting.is_wasted(job) and phase_of(job.state) is not Phase.PENDING
    if is_wasted or job.state is SlurmState.REQUEUED:
        return SpanEnd.FAILED
    return SpanEnd.ENDED if job.state is SlurmState.COMPLETED else SpanEnd.OPEN


def _accounted(job: accounting.Record, span: Span) -> Span:
    """Add what accounting knows: when, where and on how many CPUs and GPUs it ran."""
    ended = job.started + job.elapsed if job.started is not None and job.elapsed else None
    span = replace(span, started=job.started, ended=ended, cpus=job.cpus, gpus=job.gpus)
    return replace(span, node=job.nodes, lane=job.partition, job=job.job_id)


# --- records, endings, and what is open -----------------------------------------------------------------


def _from_records(gathering: _Gathering) -> Iterator[Span]:
    """Yield spans of commits whose jobs accounting did not report."""
    run = gathering.run
    for task in run.plan.tasks(gathering.iteration):
        record = gathering.record_of(task)
        if record is None:
            continue
        number = AttemptId.parse(record.attempt).number
        if (task, number) not in gathering.seen:
            gathering.seen.add((task, number))
            span = replace(_plain(gathering, task, number, SpanEnd.COMMITTED), attempt=record.attempt)
            yield _with_record(replace(span, job=span.job or record.job_id), record)


def _plain(gathering: _Gathering, task: Task, number: int, end: SpanEnd) -> Span:
    """Return a span with what is known of any attempt: when it could have started, its lane and its job."""
    ready, job = ready_time(gathering.run, task, gathering.record_of), ""
    if found := gathering.submission_of.get((task, number)):
        submission, index = found
        ready = None if ready is None else max(ready, submission.created)
        job = f"{submission.state.job}_{index}" if submission.state.job else ""
    lane = lane_of(gathering.run, task.job_kind)
    return Span(task.job_kind, task.shard, str(number), end, ready=ready, lane=lane, job=job)


def _with_record(span: Span, record: Record) -> Span:
    """Add what the task itself recorded of its compute; accounting's start and node take precedence."""
    computing = record.started + record.metrics.get("startup_seconds", 0.0)
    return replace(
        span,
        computing=computing,
        compute=record.metrics.get("compute_seconds", 0.0),
        started=record.started if span.started is None else span.started,
        ended=record.ended if span.ended is None else max(span.ended, computing),
        node=span.node or record.host,
    )


def _from_endings(gathering: _Gathering) -> Iterator[Span]:
    for ending in gathering.endings.values():
        key = task, number = parse_task(ending.task), ending.number
        if ending.is_failure and key not in gathering.seen:
            gathering.seen.add(key)
            span = _plain(gathering, task, number, SpanEnd.FAILED)
            span = replace(span, started=ending.started, ended=ending.time or None, node=ending.node)
            # A worker that took no task has no attempt's id.
            attempt = ending.attempt if AttemptId.parse(ending.attempt).number == number else span.attempt
            yield replace(span, attempt=attempt, job=ending.job or span.job, note=ending.message)


def _open(gathering: _Gathering) -> Iterator[Span]:
    """Yield spans of submitted attempts of which nothing more is known."""
    for (task, number), (submission, index) in gathering.submission_of.items():
        is_judged = gathering.endings.of_element(submission, index) is not None
        is_over = submission.state.is_withdrawn or index in submission.state.withdrawn or is_judged
        is_known = (task, number) in gathering.seen or gathering.record_of(task) is not None
        if not is_over and not is_known:
            yield _plain(gathering, task, number, SpanEnd.OPEN)


def lane_of(run: Run, job_kind: str) -> str:
    """Return the partitions that a job kind asks for; for runs on one machine, the job kind."""
    if not run.config.slurm:
        return job_kind
    return ",".join(resources_of(run.config.slurm, job_kind).partition) or "default partition"


def _in_turn(spans: Sequence[Span]) -> list[Span]:
    """Sort spans by end; an attempt after another at the same task was ready when that one had ended."""
    found: list[Span] = []
    last: dict[tuple[str, int], float] = {}
    for span in sorted(spans, key=lambda s: (s.ended or s.started or float("inf"), s.number)):
        before = last.get((span.job_kind, span.shard))
        if span.job_kind != DRIVER and before is not None and span.ready is not None:
            span = replace(span, ready=max(span.ready, before))
        if span.ended is not None:
            last[span.job_kind, span.shard] = span.ended
        found.append(span)
    return found
