"""Costs of a run on Slurm: GPU and CPU hours, waiting and running time, of every attempt."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pipeline.config.job_kinds import DRIVER, parts_of
from pipeline.metrics.attempts import Facts
from pipeline.metrics.worker_hours import WorkerHours, describe_workers, worker_hours
from pipeline.run import journal
from pipeline.run.accounting import Accounting, note_accounting, read_accounting
from pipeline.run.control import read_control
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import WORK_STAGES
from pipeline.text import duration, shortened
from pipeline.workers.beats import Beat
from pipeline.workers.reading import BeatReader, read_beats
from pipeline.workers.summary import spent_by_job_kind, worked_on
from slurm.accounting import Record, Usage, read_records, shown_records, summarize
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, within
from slurm.ended import NoAccounting
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
class Costs:
    """Costs of a run's jobs, driver jobs included."""

    usage: Mapping[Key, Usage]
    workers: Mapping[str, WorkerHours] = field(default_factory=dict)
    """Hours of workers by job kind; none of a run whose jobs do not stay."""

    def of_stage(self, stage: str) -> Usage:
        return total(usage for (_, name), usage in self.usage.items() if name == stage)

    def of_iteration(self, iteration: int) -> dict[str, Usage]:
        """Return the iteration's usage by stage."""
        return {stage: usage for (number, stage), usage in self.usage.items() if number == iteration}

    @property
    def stages(self) -> list[str]:
        """Stages of which anything ran, in the order of the pipeline."""
        return sorted({stage for _, stage in self.usage}, key=_rank)

    def to_json(self) -> dict[str, Any]:
        iterations: dict[str, dict[str, Any]] = {}
        for (iteration, stage), usage in self.usage.items():
            iterations.setdefault(str(iteration), {})[stage] = asdict(usage)
        return {
            "stages": {stage: asdict(self.of_stage(stage)) for stage in self.stages},
            "iterations": iterations,
            "total": asdict(total(self.usage.values())),
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
        records = read_records({s.state.job for s in submissions if s.state.job}, timeout)
    staying = {s.name: s.job_kind for s in submissions if s.is_of_stage}
    hours = worker_hours(read_beats(run.paths).values(), records, staying)
    return replace(costs_of(submissions, records), workers=hours)


def costs_of(submissions: Sequence[Submission], records: Iterable[Record]) -> Costs:
    """Sum records by iteration and stage; a record belongs to the submission of its job's name. Pure."""
    keys = {s.name: (s.iteration, s.job_kind if s.is_of_stage else DRIVER) for s in submissions}
    grouped: dict[Key, list[Record]] = {}
    for record in records:
        if record.name in keys:  # a controller that lost its state reuses job ids: others' jobs
            grouped.setdefault(keys[record.name], []).append(record)
    ordered = sorted(grouped, key=lambda key: (key[0], _rank(key[1])))
    return Costs({key: summarize(grouped[key]) for key in ordered})


def total(usages: Iterable[Usage]) -> Usage:
    """Add up usages."""
    found = list(usages)
    return Usage(*(sum(getattr(usage, part.name) for usage in found) for part in fields(Usage)))


def wasted_share(usage: Usage) -> float:
    """Return the share of GPU-hours (CPU-hours if there were no GPUs) of attempts that left no result."""
    if usage.gpu_hours:
        return usage.wasted_gpu_hours / usage.gpu_hours
    return usage.wasted_cpu_hours / usage.cpu_hours if usage.cpu_hours else 0.0


def metrics_of(stages: Mapping[str, Usage]) -> Row:
    """Return the ``slurm/*`` numbers of an iteration's row from its stages' usage. Pure."""
    names = ("gpu_hours", "cpu_hours", "queue_seconds", "run_seconds", "attempts")
    row = {f"slurm/{name}/{stage}": getattr(u, name) for stage, u in stages.items() for name in names}
    if stages:
        row["slurm/wasted_share"] = wasted_share(total(stages.values()))
    return row


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
    _records: Sequence[Record] = ()

    def __post_init__(self) -> None:
        self._beats = BeatReader(self.run.paths)

    def facts_of(self, iteration: int) -> Facts:
        """Return jobs of the iteration, driver jobs of the one before, and guards."""
        ours = self._submissions(iteration)
        facts = Facts(ours, beats=list(self._beats.read().values()))
        jobs = self._jobs_of(ours, iteration)
        return facts if jobs is None else replace(facts, jobs=jobs)

    def _submissions(self, iteration: int) -> list[Submission]:
        submissions = Ledger(self.run.paths).load({0, max(0, iteration - 1), iteration})
        return [s for s in submissions if s.iteration == iteration or not s.is_of_stage]

    def _jobs_of(self, ours: Sequence[Submission], iteration: int) -> list[Record] | None:
        """Return every run of some jobs; None where that is not known."""
        ids, now = _ids(ours), time.time()
        if not self._asked:
            known = read_accounting(self.run.paths, read_control(self.run.paths).invocation)
            if known.is_absent:
                return None
            is_dense = known.answers and 0 <= now - known.used < _DENSE_SECONDS
            if is_dense and (shown := whole_runs(ours, self.shown())) is not None:
                note_accounting(self.run.paths, replace(known, used=now))
                return shown
            if 0 <= now - known.asked < ASK_SECONDS:
                return None
        if not ids <= self._asked:
            self._ask(ids.union(*map(_ids, self._later(iteration))), now)
        mine = {s.name for s in ours}
        return [record for record in self._records if record.name in mine] if ids <= self._asked else None

    def _later(self, iteration: int) -> Iterator[list[Submission]]:
        """Yield the submissions of the iterations after one, as far as anything was submitted for them."""
        while (self.run.paths.submissions(iteration := iteration + 1)).is_dir():
            yield self._submissions(iteration)

    def _ask(self, ids: frozenset[str], now: float) -> None:
        """Ask accounting for some arrays, and note how that went."""
        invocation, is_absent = read_control(self.run.paths).invocation, False
        answers = False
        try:
            with within(_PASS_PATIENCE):
                self._records, answers = read_records(ids, _PASS_PATIENCE), True
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


def _ids(submissions: Iterable[Submission]) -> frozenset[str]:
    return frozenset(s.state.job for s in submissions if s.state.job)


def whole_runs(submissions: Iterable[Submission], shown: Iterable[Element]) -> list[Record] | None:
    """Return every run of some jobs by what the queue shows; None where it does not show all: an element of a
    stage is missing, as it ended long ago, or has run before and was put back. Pure."""
    elements: dict[str, list[Element]] = {}
    for element in shown:
        elements.setdefault(element.name, []).append(element)
    found: list[Element] = []
    for submission in (s for s in submissions if s.state.job):
        mine = elements.get(submission.name, [])
        are_whole = {e.index for e in mine} >= set(submission.indices) and not any(e.restarts for e in mine)
        if submission.is_of_stage and not are_whole:
            return None
        found += mine
    return shown_records(found)


def cost_metrics(facts: Facts, iteration: int) -> Row:
    """Return the part of an iteration's row that comes from accounting. Pure."""
    return metrics_of(costs_of(facts.submissions, facts.jobs).of_iteration(iteration))


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
    width = max(9, *(len(name) for name, *_ in rows))
    lines = [
        f"{name:{width}} " + "".join(cell.rjust(w) for cell, w in zip(others, _WIDTHS, strict=True))
        for name, *others in rows
    ]
    lines.append("waited and ran: sums over all attempts; wasted: share of attempts without a result")
    return "\n".join([*lines, *describe_workers(costs.workers)])


def _cells(name: str, usage: Usage) -> tuple[str, ...]:
    return (
        shortened(name, _MOST_LETTERS),
        str(usage.attempts),
        f"{usage.gpu_hours:.2f}",
        f"{usage.cpu_hours:.2f}",
        duration(usage.queue_seconds),
        duration(usage.run_seconds),
        f"{100 * wasted_share(usage):.1f} %",
    )
