"""Where a run stands: from the disk, and for a run on Slurm from one look at its queue.

Modules for Slurm are imported only for a run on Slurm, those for costs only where costs are asked for.
"""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.scheduler import SlurmConfig
from pipeline.metrics.advice import Advice, Evidence, advise, worst
from pipeline.run import journal
from pipeline.run.directory import Run, RunError
from pipeline.run.journal import ROWS_BYTES
from pipeline.run.lease import holder_of
from pipeline.run.records import Frontier, Records, find_frontier, newest_row
from pipeline.run.retention import in_words, kept_versions
from pipeline.run.tasks import parse_task
from pipeline.run.troubles import Trouble, outstanding
from pipeline.status.text import describe_slurm, wrapped
from pipeline.text import duration, printable

if TYPE_CHECKING:
    from pipeline.metrics.costs import Costs
    from pipeline.status.slurm import SlurmStatus


@dataclass(frozen=True)
class StageStatus:
    """Progress of one stage of the iteration at hand, or of one pool's scores (``score-big``)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Status:
    """Answer of ``slurm-ppo status``; ``--json`` prints exactly these keys."""

    schema: int
    run: str
    state: str
    """State: complete, running, failed (the last driver gave up) or incomplete (nobody is at work); of a run
    on Slurm: complete, running (jobs are in the queue), failed (a task was given up), cancelled, stopped
    (nothing is in the queue) or unknown (Slurm does not answer)."""
    iterations_done: int
    """Iterations that are done; of a fork including its parent's."""
    iterations: int
    evaluations_done: int
    evaluations: int
    current: tuple[StageStatus, ...]
    """Stages of the first iteration that is not done."""
    driver: str | None
    """Driver at work, in words."""
    stopped: str | None
    """End of the last driver, how and when; None while one is at work or when none was."""
    last_row: dict[str, Any] | None
    last_failure: dict[str, Any] | None
    slurm: "SlurmStatus | None" = None
    """State of the jobs; None for a run of this machine."""
    cost: "Costs | None" = None
    """Costs from accounting; None unless asked for."""
    forked_from: str | None = None
    """Parent and iteration like ``/runs/first@7``, if the run is a fork."""
    kept: tuple[int, ...] | None = None
    """Iterations whose policy, critic and trainer state are kept; None where all are."""
    advice: tuple[Advice, ...] = ()
    """Findings of the advice rules, worst first."""
    rows_missing: int = 0
    """Iterations that are done and have no row yet."""
    troubles: tuple[str, ...] = ()
    """Failures of drivers that are not overcome yet, in words."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"cost": self.cost.to_json() if self.cost else None}


def read_status(run: Run, with_cost: bool = False) -> Status:
    """Look at the current iterations' records, the lease, the ends of the journals, and Slurm's queue.

    Raises:
        RunError: costs are asked for, and there is no accounting that knows them.
    """
    plan, paths = run.plan, run.paths
    frontier = find_frontier(plan, paths)
    holder = holder_of(paths.locks)
    total_evaluations = len(plan.evaluations())
    rows = journal.read_tail(paths.metrics, ROWS_BYTES)
    newest = newest_row(rows, plan.start)
    is_complete = frontier.is_complete(plan, newest)
    events = journal.read_events(paths.events)
    failures = [e for e in events if e.get("event") == "failed"]
    state = machine_state(is_complete, holder, events)
    slurm, records = None, Records(paths)
    if isinstance(run.config.scheduler, SlurmConfig):
        from pipeline.status.slurm import read_slurm_status, read_state

        slurm = read_slurm_status(run, frontier, rows[-1] if rows else None, records)
        state = read_state(run, is_complete, slurm)
    return Status(
        schema=3,
        run=str(paths.root),
        state=state,
        iterations_done=max(frontier.updated, plan.start),
        iterations=plan.iterations,
        evaluations_done=frontier.evaluated,
        evaluations=total_evaluations,
        current=current_stages(run, frontier, records),
        driver=holder,
        stopped=None if holder else how_it_stopped(events),
        last_row=rows[-1] if rows else None,
        last_failure=failures[-1] if failures else None,
        forked_from=f"{parent.path}@{parent.iteration}" if (parent := run.identity.parent) else None,
        kept=tuple(kept_versions(paths)) if run.config.update.keep_last else None,
        slurm=slurm,
        cost=_all_costs(run) if with_cost else None,
        advice=tuple(advise(Evidence(rows, run.config))),
        rows_missing=max(0, frontier.updated - newest),
        troubles=tuple(troubles_in_words(events)),
    )


def is_complete(run: Run) -> bool:
    """Whether everything is committed and has its row."""
    frontier = find_frontier(run.plan, run.paths)
    rows = journal.read_tail(run.paths.metrics)
    return frontier.is_complete(run.plan, newest_row(rows, run.plan.start))


_FAILS = {
    Trouble.PACK: "old iterations cannot be packed, while training goes on",
    Trouble.PASS: "a driver's pass failed",
    Trouble.ROWS: "rows cannot be written, while training goes on",
}


def troubles_in_words(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield failures of drivers that are not overcome yet, in words."""
    for trouble, event in outstanding(events).items():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        yield f"{_FAILS[trouble]}, last {when}: {printable(event.get('message', ''))}"


def _all_costs(run: Run) -> "Costs":
    from pipeline.metrics.costs import read_costs
    from slurm.query import NoAccounting

    if not isinstance(run.config.scheduler, SlurmConfig):
        raise RunError("costs come from Slurm's accounting, and this run's tasks ran on this machine")
    try:
        return read_costs(run, range(run.plan.iterations + 1))
    except NoAccounting as error:
        raise RunError(f"accounting does not answer, so costs are not known: {error}") from None


def machine_state(is_complete: bool, holder: str | None, events: Sequence[Mapping[str, Any]]) -> str:
    """Return the state of a run of this machine. ``events`` are the journal's end."""
    if is_complete or holder:
        return "complete" if is_complete else "running"
    return "failed" if _last_end(events).get("outcome") == "failed" else "incomplete"


def how_it_stopped(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe from the journal's end the outcome that the last driver wrote, or that it wrote none."""
    if not events:
        return None
    end = _last_end(events)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((end or events[-1])["time"]))
    return f"{end.get('outcome', 'killed, or the machine went down, after')} {when}"


def _last_end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Find the event with which the last driver ended; empty without one, or if the run went back since."""
    moves = [e for e in events if e.get("event") in ("driver_started", "driver_ended", "went_back")]
    return moves[-1] if moves and moves[-1]["event"] == "driver_ended" else {}


def current_stages(run: Run, frontier: Frontier, records: Records) -> tuple[StageStatus, ...]:
    tasks = run.plan.tasks(min(frontier.updated + 1, run.plan.iterations))
    records.refresh(tasks)
    total = Counter(task.job_kind for task in tasks)
    done = Counter(task.job_kind for task in tasks if task in records.known)
    return tuple(StageStatus(stage, done[stage], total[stage]) for stage in total)


def describe(status: Status) -> str:
    """Describe a status for a person, ending in the next command."""
    lines = [_first_line(status)]
    if status.driver:
        lines.append(status.driver)
    elif status.stopped and not status.slurm and status.state != "complete":
        lines.append(f"last driver: {status.stopped}")
    if status.slurm:
        lines += describe_slurm(status.slurm, status.state)
    elif status.state != "complete":
        stages = ", ".join(f"{s.stage} {s.done}/{s.total}" for s in status.current)
        lines += wrapped(f"at hand: {stages}")
    if status.kept:
        lines.append(f"kept: iteration {in_words(status.kept)}, and the best policy")
    if status.rows_missing and status.iterations_done == status.iterations:
        lines += wrapped(f"every update is committed; rows not written yet: {status.rows_missing}")
    for trouble in status.troubles:
        lines += wrapped(trouble)
    lines += _last_lines(status)
    lines += [f"{advice.severity}: {advice.title} ({advice.rule})" for advice in worst(status.advice)]
    if status.cost:
        from pipeline.metrics.costs import describe_costs

        lines += ["", describe_costs(status.cost)]
    return "\n".join([*lines, *_next_commands(status)])


def _first_line(status: Status) -> str:
    line = f"{status.run}: {status.state}, {status.iterations_done}/{status.iterations} iterations"
    if status.evaluations:
        line += f", {status.evaluations_done}/{status.evaluations} evaluations"
    return f"{line}, forked from {status.forked_from}" if status.forked_from else line


def _last_lines(status: Status) -> Iterator[str]:
    """Yield the last row, and the last failure of a run that is not complete."""
    if row := status.last_row:
        told = (
            ("reward/mean", "reward {:+.4f}", float),
            ("seconds/elapsed", "{} elapsed", duration),
            ("seconds/remaining", "{} remaining", duration),
        )
        parts = [text.format(show(row[name])) for name, text, show in told if name in row]
        yield ", ".join([f"last row: iteration {row.get('iteration')}", *parts])
    if (failure := status.last_failure) and status.state != "complete":
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["time"]))
        place = " ".join(
            f"{name} {failure[key]}" for name, key in (("job", "job"), ("on", "node")) if failure.get(key)
        )
        attempt = f"attempt {failure['attempt']}" + (f" ({place})" if place else "")
        said = printable(failure["message"])
        yield f"last failure: {when} {parse_task(failure['task'])}, {attempt}: {said}"


_NEXT = {
    "complete": "report {run}",
    "incomplete": "resume {run}",
    "failed": "resume {run}",
    "cancelled": "resume {run}",
    "stopped": "resume {run}",
    "unknown": "status {run}",
}


def _next_commands(status: Status) -> Iterator[str]:
    run = shlex.quote(status.run)
    if status.state == "failed":
        yield f"why:  slurm-ppo logs {run} --failed"
    command = _NEXT.get(status.state) or ("logs {run} --follow" if status.slurm else "report {run}")
    yield f"next: slurm-ppo {command.format(run=run)}"
