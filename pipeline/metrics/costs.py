"""Costs of a run on Slurm: GPU and CPU hours, waiting and running time, of every attempt."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pipeline.config.job_kinds import DRIVER, parts_of
from pipeline.metrics.attempts import Facts, job_span
from pipeline.metrics.spans import Span, StageTime, stage_time, total
from pipeline.run import journal
from pipeline.run.accounting import Accounting, note_accounting, read_accounting
from pipeline.run.control import read_control
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import WORK_STAGES
from pipeline.text import duration, shortened
from pipeline.workers.beats import KEPT, Beat, BeatReader, read_beats, seniority
from pipeline.workers.summary import Spent, spent_by, spent_by_job_kind, worked_on
from slurm.commands import SlurmError, on_cluster, within
from slurm.ended import NoAccounting, read_runs
from slurm.query import Element

Key = tuple[int, str]
"""Iteration, and a job kind: a stage, a pool's scores (``score-big``) or "driver"."""

_PASS_PATIENCE = 5.0
"""Seconds that a pass, which holds the lease, waits for sacct, for all of its rows; a row without these
numbers is acceptable."""
ASK_SECONDS = 30.0
"""Least seconds between two calls of sacct for a run's rows."""
_DENSE_SECONDS = 120.0
"""Seconds between two rows up to which the queue, which remembers ended jobs for longer (MinJobAge, five
minutes by default), still shows the driver jobs that have ended in between."""
_ORDER: tuple[str, ...] = (*WORK_STAGES, DRIVER)


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
        added = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return WorkerHours(**added)

    @property
    def waiting_share(self) -> float:
        """Share of the GPU-hours held (CPU-hours if there were no GPUs) in which workers waited."""
        if self.held_gpu_hours:
            return self.waiting_gpu_hours / self.held_gpu_hours
        return self.waiting_cpu_hours / self.held_cpu_hours if self.held_cpu_hours else 0.0


def worker_hours(
    beats: Iterable[Beat], records: Sequence[Element], job_kinds: Mapping[str, str] | None = None
) -> dict[str, WorkerHours]:
    """Match workers with their jobs in accounting, and add up by job kind. What it lacks is left out.

    Args:
        job_kinds: job kinds of workers by the names of their jobs. Those that have never said anything are
            counted as lost: they were killed before they could.
    """
    jobs = {job.run_id: job for job in records if job.started is not None}
    found: dict[str, WorkerHours] = {}

    def add(job_kind: str, hours: WorkerHours) -> None:
        found[job_kind] = found.get(job_kind, WorkerHours()).plus(hours)

    newest = list(beats)
    for beat in newest:
        if (job := jobs.pop(beat.worker, None)) is not None:
            add(beat.job_kind, _hours(spent_by(beat), job))
    oldest = min((seniority(beat.worker) for beat in newest), default=(0, ""))
    first = oldest if len(newest) >= KEPT else (0, "")
    for worker, job in jobs.items():
        job_kind = (job_kinds or {}).get(job.name)
        if job_kind is not None and seniority(worker) >= first:  # what older ones have said is forgotten
            add(job_kind, _hours(Spent(), job))
    return found


def _hours(spent: Spent, job: Element) -> WorkerHours:
    """Split what a job held by what its worker said; all of it is lost if that said nothing.

    Both count to the second or so: what goes beyond what was held is left out.
    """
    elapsed = job.elapsed or 0.0
    gpu_hours, cpu_hours = (number * elapsed / 3600 for number in (job.gpus or 0, job.cpus or 0))
    whole = max(elapsed, spent.total) or 1.0
    return WorkerHours(
        held_gpu_hours=gpu_hours,
        busy_gpu_hours=gpu_hours * spent.busy / whole,
        startup_gpu_hours=gpu_hours * spent.startup / whole,
        waiting_gpu_hours=gpu_hours * spent.waiting / whole,
        lost_gpu_hours=gpu_hours * max(0.0, elapsed - spent.total) / whole,
        held_cpu_hours=cpu_hours,
        waiting_cpu_hours=cpu_hours * spent.waiting / whole,
    )


@dataclass(frozen=True)
class Costs:
    """Costs of a run's jobs, driver jobs included."""

    usage: Mapping[Key, StageTime]
    workers: Mapping[str, WorkerHours] = field(default_factory=dict)
    """Hours of workers by job kind; none of a run whose jobs do not stay."""

    def of_stage(self, stage: str) -> StageTime:
        return total(usage for (_, name), usage in self.usage.items() if name == stage)

    @property
    def stages(self) -> list[str]:
        """Stages of which anything ran, in the order of the pipeline."""
        return sorted({stage for _, stage in self.usage}, key=_rank)

    def to_json(self) -> dict[str, Any]:
        iterations: dict[str, dict[str, Any]] = {}
        for (iteration, stage), usage in self.usage.items():
            iterations.setdefault(str(iteration), {})[stage] = numbers_of(usage)
        return {
            "stages": {stage: numbers_of(self.of_stage(stage)) for stage in self.stages},
            "iterations": iterations,
            "total": numbers_of(total(self.usage.values())),
            "workers": {job_kind: asdict(hours) for job_kind, hours in self.workers.items()},
        }


def _rank(stage: str) -> tuple[int, str]:
    """Return a sort key: place in the pipeline, then the pool's name."""
    name, pool = parts_of(stage)
    return _ORDER.index(name), pool


def read_costs(run: Run, iterations: Iterable[int], timeout: float = 60.0) -> Costs:
    """Ask accounting for every attempt of these iterations; iteration 0 holds prepare and guard jobs.

    Calls sacct once per thousand arrays.

    Raises:
        NoAccounting: sacct cannot be asked.
        SlurmError: sacct fails otherwise.
    """
    submissions = Ledger(run.paths).load(iterations)
    with on_cluster(run.cluster):
        records = read_runs({s.state.job for s in submissions if s.state.job}, timeout)
    staying = {s.name: s.job_kind for s in submissions if s.is_of_stage}
    hours = worker_hours(read_beats(run.paths).values(), records, staying)
    return replace(costs_of(submissions, records), workers=hours)


def costs_of(submissions: Sequence[Submission], jobs: Iterable[Element]) -> Costs:
    """Sum runs of jobs by iteration and stage; a job belongs to the submission of its name. Pure."""
    keys = {s.name: (s.iteration, s.job_kind if s.is_of_stage else DRIVER) for s in submissions}
    grouped: dict[Key, list[Span]] = {}
    for job in jobs:
        # A controller that lost its state reuses job ids, for jobs of others. What holds nothing never began.
        if job.name in keys and job.started is not None and job.cpus:
            key = keys[job.name]
            grouped.setdefault(key, []).append(job_span(key[1], job))
    ordered = sorted(grouped, key=lambda key: (key[0], _rank(key[1])))
    return Costs({key: stage_time(grouped[key]) for key in ordered})


def wasted_share(stage: StageTime) -> float:
    """Return the share of GPU-hours (CPU-hours if there were no GPUs) of attempts that left no result."""
    if stage.gpu_hours:
        return stage.wasted_gpu_hours / stage.gpu_hours
    return stage.wasted_cpu_hours / stage.cpu_hours if stage.cpu_hours else 0.0


def numbers_of(stage: StageTime) -> dict[str, float]:
    """Return what a stage took, by the names that rows and ``status --json`` have for it."""
    return {
        "attempts": stage.attempts,
        "queue_seconds": stage.queue,
        "run_seconds": stage.run,
        "cpu_hours": stage.cpu_hours,
        "gpu_hours": stage.gpu_hours,
        "wasted_cpu_hours": stage.wasted_cpu_hours,
        "wasted_gpu_hours": stage.wasted_gpu_hours,
    }


def metrics_of(stages: Mapping[str, StageTime]) -> Row:
    """Return the ``slurm/*`` numbers of an iteration's row from its line of spans. Pure."""
    began = {job_kind: stage for job_kind, stage in stages.items() if stage.attempts}
    row: Row = {
        f"slurm/{name}/{job_kind}": number
        for job_kind, stage in began.items()
        for name, number in numbers_of(stage).items()
        if not name.startswith("wasted")
    }
    for job_kind, stage in began.items():
        if stage.run and job_kind != DRIVER:
            row[f"slurm/startup_share/{job_kind}"] = stage.startup / stage.run
            row[f"slurm/idle_share/{job_kind}"] = stage.idle / stage.run
    return row | ({"slurm/wasted_share": wasted_share(total(began.values()))} if began else {})


@dataclass
class Accountant:
    """Source of :class:`Facts` for the iterations whose rows a pass writes.

    Accounting is asked once in an invocation, to know whether there is any, and then where the queue does not
    show all runs of an iteration's jobs: at most once in ASK_SECONDS, for all rows that are due. Where there
    is none rows are written without what it knows, whatever the queue shows.
    """

    run: Run
    note: Callable[[str], None]
    shown: Callable[[], Iterable[Element]] = lambda: ()
    """Returns the elements that the queue shows."""
    _beats: BeatReader = field(init=False)
    _asked: frozenset[str] = frozenset()
    """Ids of the arrays that this pass has asked for."""
    _records: Sequence[Element] = ()

    def __post_init__(self) -> None:
        self._beats = BeatReader(self.run.paths)

    def facts_of(self, iteration: int) -> Facts:
        """Return jobs of the iteration, of workers that worked on it, driver jobs of the one before, and
        guards."""
        ours, beats = self._submissions(iteration), list(self._beats.read().values())
        facts = Facts(ours, beats=beats)
        jobs = self._jobs_of(ours, beats, iteration)
        return facts if jobs is None else replace(facts, jobs=jobs)

    def _submissions(self, iteration: int) -> list[Submission]:
        submissions = Ledger(self.run.paths).load({0, max(0, iteration - 1), iteration})
        return [s for s in submissions if s.iteration == iteration or not s.is_of_stage]

    def _jobs_of(
        self, ours: Sequence[Submission], beats: Sequence[Beat], iteration: int
    ) -> list[Element] | None:
        """Return every run of some jobs, and those of an iteration's workers; None if unknown."""
        names = workers_on(beats, iteration)
        ids, now = _ids(ours, names), time.time()
        if not self._asked:
            known = read_accounting(self.run.paths, read_control(self.run.paths).invocation)
            if known.is_absent:
                return None
            is_dense = known.answers and 0 <= now - known.used < _DENSE_SECONDS
            if is_dense and (shown := whole_runs(ours, self.shown(), names)) is not None:
                note_accounting(self.run.paths, replace(known, used=now))
                return shown
            if 0 <= now - known.asked < ASK_SECONDS:
                return None
        if not ids <= self._asked:
            later = ids
            while self.run.paths.submissions(iteration := iteration + 1).is_dir():
                later |= _ids(self._submissions(iteration), workers_on(beats, iteration))
            self._ask(later, now)
        mine = {s.name for s in ours}
        jobs = [job for job in self._records if job.name in mine or job.run_id in names]
        return jobs if ids <= self._asked else None

    def _ask(self, ids: frozenset[str], now: float) -> None:
        """Ask accounting for some arrays, and note how that went."""
        invocation, is_absent = read_control(self.run.paths).invocation, False
        answers = False
        try:
            with within(_PASS_PATIENCE):
                self._records, answers = read_runs(ids, _PASS_PATIENCE), True
        except (NoAccounting, SlurmError) as error:
            is_absent = isinstance(error, NoAccounting) and error.is_absent
            self._note_once(f"rows are written without what accounting knows: {error}")
        self._asked = ids if answers else frozenset()
        note_accounting(self.run.paths, Accounting(invocation, now, answers, is_absent, now))

    def _note_once(self, text: str) -> None:
        """Note it once per call of submit, run or resume: without accounting every pass would."""
        call = read_control(self.run.paths).invocation
        noted = (e for e in journal.read_tail(self.run.paths.events) if e.get("event") == "no_accounting")
        if all(event.get("call") != call for event in noted):
            self.note(text)
            journal.event(self.run.paths.events, "no_accounting", call=call)


def workers_on(beats: Iterable[Beat], iteration: int) -> frozenset[str]:
    """Return the names of Slurm's workers that worked on an iteration, like ``4711_3r0``."""
    names = (beat.worker for beat in worked_on(beats, iteration))
    return frozenset(name for name in names if name.partition("_")[0].isdecimal())


def _ids(submissions: Iterable[Submission], workers: Iterable[str]) -> frozenset[str]:
    """Return the ids of the arrays of some submissions and workers."""
    arrays = {name.partition("_")[0] for name in workers}
    return frozenset(arrays.union(s.state.job for s in submissions if s.state.job))


def whole_runs(
    submissions: Iterable[Submission], shown: Iterable[Element], workers: Collection[str] = ()
) -> list[Element] | None:
    """Return every run of some jobs, and those of some workers, by what the queue shows. Pure.

    None where it does not show all: one is missing, as it ended long ago, or an element has run before.
    """
    elements: dict[str, list[Element]] = {}
    runs: dict[str, Element] = {}
    for element in shown:
        elements.setdefault(element.name, []).append(element)
        runs[element.run_id] = element
    if not runs.keys() >= set(workers):
        return None
    found: list[Element] = []
    for submission in (s for s in submissions if s.state.job):
        mine = elements.get(submission.name, [])
        are_whole = {e.index for e in mine} >= set(submission.indices) and not any(e.restarts for e in mine)
        if submission.is_of_stage and not are_whole:
            return None
        found += mine
    every = {element.run_id: element for element in (*found, *(runs[name] for name in workers))}
    return [element for element in every.values() if element.started is not None]


def idle_shares(beats: Sequence[Beat], iteration: int) -> Row:
    """Return the share of their time that the workers of an iteration have waited so far, by job kind."""
    spent = spent_by_job_kind(worked_on(beats, iteration))
    return {
        f"slurm/worker_idle_share/{kind}": found.idle_share for kind, found in spent.items() if found.total
    }


_HEADS = ("stage", "attempts", "GPU hours", "CPU hours", "waited", "ran", "wasted")
_WIDTHS = (9, 10, 10, 14, 14, 8)
_MOST_LETTERS = 14
"""Most letters of a stage's name; more would not fit into 80 columns."""


def describe_costs(costs: Costs) -> str:
    """Format a table of stages and the total."""
    if not costs.usage:
        return "accounting knows no job of this run"
    found = [(stage, costs.of_stage(stage)) for stage in costs.stages]
    rows = [_HEADS, *(_cells(*item) for item in (*found, ("total", total(costs.usage.values()))))]
    lines = aligned(rows, _WIDTHS)
    lines.append("waited and ran: sums over all attempts; wasted: share of attempts without a result")
    return "\n".join([*lines, *describe_workers(costs.workers)])


def _cells(name: str, usage: StageTime) -> tuple[str, ...]:
    return (
        shortened(name, _MOST_LETTERS),
        str(usage.attempts),
        f"{usage.gpu_hours:.2f}",
        f"{usage.cpu_hours:.2f}",
        duration(usage.queue),
        duration(usage.run),
        f"{100 * wasted_share(usage):.1f} %",
    )


_WORKER_HEADS = ("workers", "GPU hours", "busy", "start-up", "waiting", "lost")
_WORKER_WIDTHS = (10, 10, 10, 10, 10)


def describe_workers(workers: Mapping[str, WorkerHours]) -> list[str]:
    """Return the lines of a table: GPU-hours by what they were spent on; without GPUs, shares of waiting."""
    held = {job_kind: hours for job_kind, hours in workers.items() if hours.held_gpu_hours}
    if not held:
        return [
            f"workers of {job_kind}: {100 * hours.waiting_share:.1f} % of their CPU hours waiting for inputs"
            for job_kind, hours in workers.items()
            if hours.held_cpu_hours
        ]
    parts = [f"{part}_gpu_hours" for part in ("held", "busy", "startup", "waiting", "lost")]
    rows = [(kind, *(f"{getattr(hours, part):.2f}" for part in parts)) for kind, hours in held.items()]
    lines = aligned([_WORKER_HEADS, *rows], _WORKER_WIDTHS)
    return ["", *lines, "waiting: held by us, for inputs; lost: nothing said of it"]


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Format rows as a table: names to the left, in nine letters or more, and numbers to the right."""
    width = max(9, *(len(name) for name, *_ in rows))
    return [
        f"{name:{width}} " + "".join(cell.rjust(w) for cell, w in zip(others, widths, strict=True))
        for name, *others in rows
    ]
