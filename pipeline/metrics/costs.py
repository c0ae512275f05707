"""Costs of a run on Slurm: GPU and CPU hours, waiting and running time, of every attempt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pipeline.config.job_kinds import DRIVER, parts_of
from pipeline.metrics.attempts import Facts
from pipeline.metrics.worker_hours import WorkerHours, describe_workers, worker_hours
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import WORK_STAGES
from pipeline.text import duration, shortened
from pipeline.workers.beats import Beat
from pipeline.workers.reading import BeatReader, read_beats
from pipeline.workers.summary import spent_by_job_kind, worked_on
from slurm.accounting import Record, Usage, read_records, summarize
from slurm.commands import SlurmError, within
from slurm.query import NoAccounting

Key = tuple[int, str]
"""Iteration, and a job kind: a stage, a pool's scores (``score-big``) or "driver"."""

_PASS_PATIENCE = 5.0
"""Seconds that a pass, which holds the lease, waits for sacct, for all of its rows; a row without these
numbers is acceptable."""
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
    records = read_records({s.state.job for s in submissions if s.state.job}, timeout)
    staying = {s.name: s.job_kind for s in submissions if s.stays}
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
    """Source of :class:`Facts` for the iterations whose rows a pass writes. Accounting is asked for each,
    until it does not answer."""

    run: Run
    note: Callable[[str], None]
    is_away: bool = field(default=False, init=False)
    _left: float = field(default=_PASS_PATIENCE, init=False)
    """Seconds that it may still wait for accounting."""
    _beats: BeatReader = field(init=False)

    def __post_init__(self) -> None:
        self._beats = BeatReader(self.run.paths)

    def facts_of(self, iteration: int) -> Facts:
        """Return jobs of the iteration, driver jobs of the one before, and guards."""
        submissions = Ledger(self.run.paths).load({0, max(0, iteration - 1), iteration})
        ours = [s for s in submissions if s.iteration == iteration or not s.is_of_stage]
        facts = Facts(ours, beats=list(self._beats.read().values()))
        if self.is_away:
            return facts
        try:
            with within(self._left) as patience:
                jobs = read_records({s.state.job for s in ours if s.state.job}, _PASS_PATIENCE)
            self._left = patience.left
            return replace(facts, jobs=jobs)
        except (NoAccounting, SlurmError) as error:
            self.is_away = True
            self._note_once(f"rows are written without what accounting knows: {error}")
            return facts

    def _note_once(self, text: str) -> None:
        """Note it once per call of submit, run or resume: without accounting every pass would."""
        call = read_control(self.run.paths).invocation
        noted = (e for e in journal.read_tail(self.run.paths.events) if e.get("event") == "no_accounting")
        if all(event.get("call") != call for event in noted):
            self.note(text)
            journal.event(self.run.paths.events, "no_accounting", call=call)


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
