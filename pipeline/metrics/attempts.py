"""Every attempt at an iteration's tasks, as spans.

Sources are commit records, endings, submissions, and Slurm's accounting where it answers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import resources_of
from pipeline.metrics.spans import Span, SpanEnd
from pipeline.run import journal
from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.endings import Endings, read_endings
from pipeline.run.held import held_by
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.workers.beats import Beat
from slurm.query import Element
from slurm.states import Phase, SlurmState, phase_of
from slurm.tasklist import attempt_id

_TAIL_BYTES = 1 << 20
"""Bytes at the end of spans.jsonl that hold its last line, of some hundred bytes for each of its attempts."""

_LOOK_BACK = 50
"""Iterations in which the task before is looked for."""
RecordOf = Callable[[Task], Record | None]
TaskAttempt = tuple[Task, int]
"""The task, and which attempt at it."""


@dataclass(frozen=True)
class Facts:
    """The scheduler's knowledge of an iteration's jobs; empty for runs on one machine."""

    submissions: Sequence[Submission] = ()
    jobs: Sequence[Element] = ()
    """Runs of jobs; empty where accounting does not answer."""
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
    jobs: Sequence[Element]
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
    endings = read_endings(run.paths, [iteration])
    gathering = _Gathering(run, iteration, record_of, by_name, endings, facts.jobs)
    staying = WorkerSpans.of(facts.beats, facts.jobs)
    spans = [*_from_workers(gathering, staying)]
    spans += _from_accounting(gathering, {beat.worker for beat in facts.beats}, since)
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


# --- accounting ------------------------------------------------------------------------------------------


def _from_accounting(gathering: _Gathering, workers: Collection[str], since: float) -> Iterator[Span]:
    """Yield spans of the runs of jobs, but for those of workers."""
    jobs = [job for job in gathering.jobs if job.name in gathering.submissions and job.run_id not in workers]
    last = {(job.name, job.job_id): job.restarts for job in sorted(jobs, key=lambda job: job.restarts or 0)}
    for job in jobs:
        submission = gathering.submissions[job.name]
        if not submission.is_of_stage:
            yield from _driver_span(submission, job, since)
        elif submission.iteration == gathering.iteration:
            yield from _task_spans(gathering, submission, job, job.restarts == last[job.name, job.job_id])


def _driver_span(submission: Submission, job: Element, since: float) -> Iterator[Span]:
    """Yield the span of a driver job that ended after ``since``; the job that writes this line still runs."""
    span = job_span(DRIVER, job)
    is_over = phase_of(job.state) is Phase.ENDED or job.state is SlurmState.REQUEUED
    if is_over and span.started is not None and (span.ended or span.started) > since:
        end = SpanEnd.FAILED if span.end is SpanEnd.FAILED else SpanEnd.ENDED
        name = f"{submission.job_kind}-{submission.iteration}-{submission.number}"
        yield replace(span, shard=0, attempt=name, end=end)


def _task_spans(gathering: _Gathering, submission: Submission, job: Element, is_last: bool) -> Iterator[Span]:
    if str(job.index) not in submission.elements:
        return
    task, restart = submission.task(job.index), job.restarts or 0
    record = gathering.record_of(task)
    is_winner = record is not None and _is_of(record, submission.number, job.array_id, restart, is_last)
    ending = gathering.endings.of_element(submission, job.index) if is_last else None
    is_ours = submission.state.is_withdrawn or (ending is not None and not ending.is_failure)
    if job.started is None and phase_of(job.state) is Phase.ENDED:
        return  # cancelled before it had started
    gathering.seen.add((task, submission.number))
    span = job_span(task.job_kind, job)
    ready = job.eligible or ready_time(gathering.run, task, gathering.record_of)
    attempt = attempt_id(submission.number, job.array_id, str(job.index), restart)
    span = replace(span, shard=task.shard, attempt=attempt, end=_end(job, is_winner, is_ours), ready=ready)
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


def _end(job: Element, is_winner: bool, is_ours: bool) -> SpanEnd:
    """Return how a run of a job ended. ``is_ours``: slurm-ppo cancelled it, which is no failure."""
    if is_winner:
        return SpanEnd.COMMITTED
    if job.state is SlurmState.COMPLETED or (is_ours and job.state is SlurmState.CANCELLED):
        return SpanEnd.ENDED
    return job_span("", job).end


def job_span(job_kind: str, job: Element) -> Span:
    """Return a run of a job as the attempt that it is, without what its task knows: when, where and on how
    many CPUs and GPUs it ran, and whether it completed."""
    # REQUEUED is no end of the job, but it is the end of this run of it.
    is_open = phase_of(job.state) is not Phase.ENDED and job.state is not SlurmState.REQUEUED
    end = SpanEnd.OPEN if is_open else SpanEnd.FAILED
    return Span(
        job_kind,
        job.index,
        job.run_id,
        SpanEnd.COMMITTED if job.state is SlurmState.COMPLETED else end,
        ready=job.eligible or job.submitted,
        started=job.started,
        ended=_end_of(job),
        node=job.node,
        lane=job.partition,
        job=job.job_id,
        cpus=job.cpus or 0,
        gpus=job.gpus or 0,
    )


def _end_of(job: Element) -> float | None:
    return job.started + job.elapsed if job.started is not None and job.elapsed else None


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
    cpus, gpus = held_by(gathering.run.config, task.job_kind)
    return Span(
        task.job_kind, task.shard, str(number), end, ready=ready, lane=lane, job=job, cpus=cpus, gpus=gpus
    )


def _with_record(span: Span, record: Record) -> Span:
    """Add what the task itself recorded of its compute; accounting's start and node take precedence."""
    computing = record.started + record.metrics.get("startup_seconds", 0.0)
    return replace(
        span,
        computing=computing,
        compute=record.metrics.get("compute_seconds", 0.0),
        started=record.started if span.started is None else span.started,
        ended=max(record.ended if span.ended is None else span.ended, computing),
        node=span.node or record.host,
    )


def _from_endings(gathering: _Gathering) -> Iterator[Span]:
    """Yield spans of failed attempts whose jobs accounting did not report, or that workers made."""
    jobs = {job.run_id: job for job in gathering.jobs}
    for ending in gathering.endings.values():
        key = task, number = parse_task(ending.task), ending.number
        if ending.is_failure and key not in gathering.seen:
            gathering.seen.add(key)
            span = _plain(gathering, task, number, SpanEnd.FAILED)
            span = replace(span, started=ending.started, ended=ending.time or None, node=ending.node)
            if job := jobs.get(run_of(ending.attempt)):
                ended = min(filter(None, (span.ended, _end_of(job))), default=None)
                span = replace(span, ended=ended, cpus=job.cpus or 0, gpus=job.gpus or 0)
            # A worker that took no task has no attempt's id.
            attempt = ending.attempt if AttemptId.parse(ending.attempt).number == number else span.attempt
            yield replace(span, attempt=attempt, job=ending.job or span.job, note=ending.message)


def run_of(attempt: str) -> str:
    """Return the run of a job, like ``4711_3r0``, that made an attempt; anything else for none of Slurm's."""
    return attempt.rpartition("-")[2].partition(".")[0]


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


# --- workers: a job that stays does many tasks, so its own times are those of none of them ---------------


@dataclass(frozen=True)
class WorkerSpans:
    """Workers of a run, by the process that they are, and their jobs in accounting."""

    beats: Mapping[tuple[str, int], Sequence[Beat]]
    jobs: Mapping[str, Element]
    """Runs of jobs by the workers that they are, like ``4711_3r0``."""

    @staticmethod
    def of(beats: Iterable[Beat], jobs: Iterable[Element]) -> "WorkerSpans":
        found: dict[tuple[str, int], list[Beat]] = {}
        for beat in sorted(beats, key=lambda b: b.started):
            found.setdefault((beat.host, beat.pid), []).append(beat)
        return WorkerSpans(found, {job.run_id: job for job in jobs})

    def worker_of(self, record: Record) -> Beat | None:
        """Return the worker that made a commit; None for a job that does one task."""
        before = [b for b in self.beats.get((record.host, record.pid), ()) if b.started <= record.started]
        return before[-1] if before else None


def _from_workers(gathering: _Gathering, staying: WorkerSpans) -> Iterator[Span]:
    """Yield spans of commits by workers."""
    run, record_of = gathering.run, gathering.record_of
    found = worker_spans(run.plan, gathering.iteration, record_of, staying, lambda kind: lane_of(run, kind))
    for task, span in found:
        gathering.seen.add((task, span.number))
        yield span


def worker_spans(
    plan: Plan, iteration: int, record_of: RecordOf, staying: WorkerSpans, lane_of: Callable[[str], str]
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
            job = staying.jobs.get(worker.worker)
            span = span_of(record, worker, job, lane_of(task.job_kind))
            before = [
                end for end in ended[record.host, record.pid] if worker.started <= end <= record.started
            ]
            is_first = worker.iterations[0] >= iteration and not before
            before = before or _ends_before(plan, record, worker, record_of)
            if before:
                span = replace(span, held=max(before))
            elif is_first:
                span = _first(span, worker, job)
            yield task, replace(span, ready=max(ready, default=None))


def ends_of(plan: Plan, iteration: int, record_of: RecordOf) -> dict[tuple[str, int], list[float]]:
    """Return when each process ended tasks of an iteration, of the one before and of the one after, whose
    rollouts come before late evaluations."""
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(max(plan.start, iteration - 1), min(plan.iterations, iteration + 1) + 1):
        for task in plan.tasks(number):
            if (record := record_of(task)) is not None:
                found.setdefault((record.host, record.pid), []).append(record.ended)
    return found


def _ends_before(plan: Plan, record: Record, worker: Beat, record_of: RecordOf) -> list[float]:
    """Return when a worker ended its tasks of the iteration before the last, or of an earlier one: not every
    iteration is evaluated."""
    kinds = (worker.job_kind, Stage.EVALUATE)
    first = max(plan.start, worker.iterations[0], record.task.iteration - _LOOK_BACK)
    for number in range(record.task.iteration - 2, first - 1, -1):
        done = (record_of(task) for task in plan.tasks(number) if task.job_kind in kinds)
        found = [one.ended for one in done if one and (one.host, one.pid) == (record.host, record.pid)]
        if found:
            return found
    return []


def _first(span: Span, worker: Beat, job: Element | None) -> Span:
    """Add from when a worker waited for its first task, and its start-up, which counts for that."""
    assert span.started is not None
    held = min(span.started, worker.started + worker.startup_seconds)
    since = job.started if job and job.started is not None else worker.started
    return replace(span, held=held, begun=max(0.0, held - since))


def span_of(record: Record, worker: Beat, job: Element | None, lane: str) -> Span:
    """Return the span of a commit by a worker, with the task's own times."""
    name = worker.worker.rpartition("r")[0]  # like 4711_3: without the restart
    span = Span(
        record.task.job_kind, record.task.shard, record.attempt, SpanEnd.COMMITTED, lane=lane, job=name
    )
    if job:
        span = replace(span, lane=job.partition, cpus=job.cpus or 0, gpus=job.gpus or 0)
    return _with_record(span, record)
