"""Where a run stands: the reader of its status.

Modules for Slurm are imported only for a run on Slurm, those for costs only where costs are asked for.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.metrics.advice import advise
from pipeline.metrics.advice_input import Advice, AdviceInput
from pipeline.orchestrate.row_writer import differing_rows
from pipeline.run import journal
from pipeline.run.ages import aging
from pipeline.run.benchmarks import in_words, read_measured
from pipeline.run.changes import last_change, read_changes
from pipeline.run.commits import Record
from pipeline.run.directory import Run, resume_command, slurm_settings
from pipeline.run.endings import Endings, read_endings
from pipeline.run.identity import RunError
from pipeline.run.journal import ROWS_BYTES
from pipeline.run.lease import holder_of, is_spoilt
from pipeline.run.place import original_of
from pipeline.run.records import Frontier, Records, find_frontier, newest_row
from pipeline.run.retention import in_words as versions_in_words
from pipeline.run.retention import kept_versions, read_best
from pipeline.run.tasks import Task
from pipeline.status.budgets import SmallerBudget, smaller_budgets
from pipeline.status.journal_end import (
    how_it_stopped,
    machine_state,
    slurm_state,
    states_lost,
    troubles_in_words,
)
from pipeline.status.lanes import TaskState, lanes_of, local_task_states
from pipeline.status.remedies import after, ways_around
from pipeline.status.state import StageStatus, Status
from pipeline.status.trainer_state import Writer, missing_state, promising
from pipeline.text import printable
from pipeline.workers.beats import BeatReader, read_living
from pipeline.workers.summary import WorkersOf, workers_of
from slurm.sharedfiles import persistently

if TYPE_CHECKING:
    from pipeline.executors.slurm.queue import RunQueue
    from pipeline.metrics.costs import Costs
    from pipeline.status.obstacles import Permitted
    from slurm.query import Element

_TAKEN_BACK = ("retracted", "went_back")
"""Events after which a commit that was read before may be gone."""


def read_status(run: Run, with_cost: bool = False) -> Status:
    """Look at Slurm's queue, the current iterations' records, the lease, and the ends of the journals.

    Raises:
        RunError: costs are asked for, and there is no accounting that knows them.
    """
    queue = None
    if run.config.slurm:
        from pipeline.executors.slurm.queue import look_at_queue

        queue = look_at_queue(run)
    status = StatusReader(run).read(queue, queue.asked if queue else None)
    kept = tuple(kept_versions(run.paths)) if run.config.update.keep_last else None
    return replace(status, kept=kept, best=_best_of(run), cost=_all_costs(run) if with_cost else None)


def _best_of(run: Run) -> int | None:
    """Return the iteration of the best policy; None where there is none, or best.json is spoilt."""
    with contextlib.suppress(RunError):
        best = read_best(run.paths)
        return best.iteration if best else None
    return None


class Tail:
    """The rows at the end of a journal, read again only when it has changed."""

    def __init__(self, path: Path, read: Callable[[Path], list[dict[str, Any]]]) -> None:
        self.path, self.read = path, read
        self.rows: list[dict[str, Any]] = []
        self._seen: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Reload the rows if the file has changed. Returns whether it has."""
        try:
            status = persistently(self.path, self.path.stat)
            seen = (status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            seen = (0, 0)
        if seen == self._seen:
            return False
        self.rows, self._seen = self.read(self.path), seen
        return True


class StatusReader:
    """Reader of a run's status, which remembers what cannot have changed.

    A look costs the same however long the run is.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._records = Records(run.paths)
        self._rows = Tail(run.paths.metrics, lambda path: journal.read_tail(path, ROWS_BYTES))
        self._events = Tail(run.paths.events, journal.read_events)
        self._advised: tuple[tuple[WorkersOf, ...], tuple[Advice, ...]] | None = None
        self._troubles: tuple[str, ...] = ()
        self._differing: tuple[int, ...] | None = None
        self._taken_back = 0.0
        self._states_lost: tuple[int, ...] = ()
        self._frontier: Frontier | None = None
        self._beats = BeatReader(run.paths)
        self._permitted: Permitted | None = None

    def read(self, queue: "RunQueue | None" = None, answered: float | None = None) -> Status:
        """Read what is on disk now.

        Args:
            queue: what Slurm showed last; None: it has not been asked yet, or there is no Slurm.
            answered: when that was, unix time.
        """
        run, plan, now = self.run, self.run.plan, time.time()
        original, frontier = original_of(run), find_frontier(plan, run.paths)
        holder = None if original else holder_of(run.paths.locks)  # the original's lease was copied
        rows, events = self._refresh()
        tasks = frontier.window(plan, is_ahead=True)
        current = plan.tasks(min(frontier.updated + 1, plan.iterations))
        self._read_records(frontier, [*tasks, *current, *(i for task in tasks for i in plan.inputs(task))])
        newest = newest_row(rows, plan.start)
        status = Status(
            run=str(run.paths.root),
            state="complete" if frontier.is_complete(plan, newest) else "unknown",
            iterations_done=max(frontier.updated, plan.start),
            iterations=plan.iterations,
            evaluations_done=frontier.evaluated,
            evaluations=len(plan.evaluations()),
            **self._benchmarks(frontier),
            current=tuple(self._progress(current)),
            driver=holder,
            stopped=None if holder else how_it_stopped(events),
            last_row=rows[-1] if rows else None,
            **self._last_failure(events, holder),
            forked_from=f"{parent.path}@{parent.iteration}" if (parent := run.identity.parent) else None,
            settings_changed=last_change(read_changes(run.paths)),
            copy_of=str(original) if original else None,
            advice=() if run.config.slurm else self._advise(),
            rows_missing=max(0, frontier.updated - newest),
            troubles=tuple(self._told(frontier, newest)),
            time=now,
            created=run.identity.created,
            awaited=holder if holder and is_spoilt(run.paths.locks) else None,
            answered=answered,
            finish=finish_of(run.identity.created, rows),
            rows=tuple(rows),
            events=tuple(events),
        )
        with_jobs = self._with_jobs(status, frontier, tasks, queue)
        return replace(with_jobs, ways_on=self._ways_on(with_jobs, queue))

    def _with_jobs(
        self, status: Status, frontier: Frontier, tasks: Sequence[Task], queue: "RunQueue | None"
    ) -> Status:
        if self.run.config.slurm:
            return self._on_slurm(status, frontier, tasks, queue)
        return self._on_this_machine(status, frontier, tasks)

    def _ways_on(self, status: Status, queue: "RunQueue | None") -> tuple[str, ...]:
        """Return what to type against what is in the way of a run of this user's that is not complete, and of
        W&B."""
        ways = list(ways_around(self.run, status.events, status.state))
        is_over = status.state in ("complete", "cancelled", "paused")
        if queue is not None and not (is_over or queue.is_hidden or queue.unanswered or queue.elsewhere):
            from pipeline.status.obstacles import ways_to_start

            ways += ways_to_start(self.run, status.events, queue.live, self._ask_what_is_permitted)
        return tuple(map(printable, ways))

    def _ask_what_is_permitted(self) -> "Permitted":
        """Ask accounting, once for this reader: it is asked where jobs are refused."""
        if self._permitted is None:
            from pipeline.status.obstacles import read_permitted

            self._permitted = read_permitted()
        return self._permitted

    def _last_failure(self, events: Sequence[Mapping[str, Any]], holder: str | None) -> dict[str, Any]:
        """Return the newest failure, and what helps where no driver is running."""
        failed = next((event for event in reversed(events) if event["event"] == "failed"), None)
        return {"last_failure": failed, "remedy": after(self.run, failed) if failed and not holder else ""}

    def _benchmarks(self, frontier: Frontier) -> dict[str, Any]:
        """Return what a status says of the numbers of evaluate.command."""
        total, done = len(self.run.plan.benchmarks()), frontier.benchmarked
        if not total:
            return {}
        measured = read_measured(self.run.paths)
        return {
            "benchmarks_done": done,
            "benchmarks": total,
            "benchmarks_missing": tuple(one.policy_version for one in measured if one.missing),
            "benchmarks_told": printable(in_words(measured, done, total)),
        }

    def _refresh(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read what was written since. Returns all rows and events."""
        if self._events.refresh():
            self._troubles = tuple(troubles_in_words(self._events.rows))
            self._states_lost = tuple(states_lost(self._events.rows))
            taken_back = [event["time"] for event in self._events.rows if event["event"] in _TAKEN_BACK]
            if (newest := max(taken_back, default=0.0)) != self._taken_back:
                self._records, self._taken_back = Records(self.run.paths), newest
        if self._rows.refresh():
            self._advised = self._differing = None
        return self._rows.rows, self._events.rows

    def _told(self, frontier: Frontier, newest: int) -> Iterator[str]:
        """Yield what people should know of drivers and files. Rows of an active run its drivers compare."""
        yield from self._troubles
        yield from aging(self.run, frontier.updated)
        if not frontier.is_complete(self.run.plan, newest):
            return
        if self._differing is None:
            last = self.run.plan.iterations
            self._differing = tuple(differing_rows(self.run.paths, self._rows.rows, last))
        if self._differing:
            message = f"row {versions_in_words(self._differing)} of {self.run.paths.metrics.name}"
            yield f"{message} is not what was published: {resume_command(self.run)} writes it again"

    def _advise(self, workers: tuple[WorkersOf, ...] = ()) -> tuple[Advice, ...]:
        """Return what is noticed, found again only where rows or workers have changed."""
        if self._advised is None or self._advised[0] != workers:
            found = advise(AdviceInput(self._rows.rows, self.run.config, workers=workers))
            self._advised = (workers, tuple(found))
        return self._advised[1]

    def _read_records(self, frontier: Frontier, tasks: Sequence[Task]) -> None:
        """Read the records of these tasks, and forget all others when the run has moved on."""
        if frontier != self._frontier:
            self._records.keep_only(tasks)
            self._frontier = frontier
        self._records.refresh(tasks)

    def _progress(self, tasks: Sequence[Task]) -> Iterator[StageStatus]:
        done = Counter(task.job_kind for task in tasks if task in self._records.known)
        for job_kind, total in Counter(task.job_kind for task in tasks).items():
            yield StageStatus(job_kind, done[job_kind], total)

    def _on_slurm(
        self, status: Status, frontier: Frontier, tasks: Sequence[Task], queue: "RunQueue | None"
    ) -> Status:
        from pipeline.executors.slurm.by_hand import look_for_act
        from pipeline.executors.slurm.queue import RunQueue, is_pending
        from pipeline.run.control import read_control
        from pipeline.run.submissions import Ledger
        from pipeline.status import slurm as queued
        from pipeline.status.whose import whose

        run, control = self.run, read_control(self.run.paths)
        heard = {} if status.copy_of else self._beats.read()
        seen = (queue or RunQueue()).with_heard(heard)
        live, beats, iterations = seen.live, tuple(heard.values()), {task.iteration for task in tasks}
        endings = read_endings(run.paths, iterations)
        submissions = Ledger(run.paths).load(iterations | {0, max(0, frontier.updated)})
        crew = queued.JobsShown(submissions, seen, beats, endings, control.begun)
        is_unasked = queue is None or queue.unanswered or queue.is_hidden
        asked = None if is_unasked else status.answered or status.time
        found = list(queued.task_states(run.plan, tasks, crew, self._records.known, status.time))
        lanes, waiting = lanes_of(found, status.time), sum(map(is_pending, live))
        jobs = queued.SlurmStatus(
            unanswered=seen.unanswered,
            jobs_running=len(live) - waiting,
            jobs_waiting=waiting,
            stages=tuple(lane.progress for lane in lanes),
            drivers=tuple(queued.drivers_of(submissions, seen)),
            finish=status.finish if live else None,
        )
        state = slurm_state(status.state == "complete", control, queue.has_jobs if queue else None)
        if seen.elsewhere is not None:
            of = whose(seen.elsewhere, seen.is_hidden, self._records.known.values(), beats, status.time)
            is_at_work = state == "unknown" and of.lives(status.time)
            finish = status.finish if is_at_work else jobs.finish
            state, jobs = "running" if is_at_work else state, replace(jobs, whose=of, finish=finish)
        workers = workers_of(beats, status.time, None if asked is None else queued.running_workers(seen))
        status = replace(status, state=state, slurm=jobs, lanes=lanes, finish=jobs.finish)
        status = replace(status, workers=workers, advice=self._advise(workers))
        status = replace(status, smaller_budgets=self._budgets(tasks, endings))
        act = control.paused or look_for_act(Ledger(run.paths), seen.elements, control)
        if act and state in ("paused", "stopped"):
            status = replace(status, paused=act.in_words)
        if state == "running":
            status = replace(status, held_back=tuple(self._held_back(status, found, live)))
        return self._with_state(status, frontier, lambda update: queued.writer_of(update, crew, asked))

    def _held_back(
        self, status: Status, tasks: Sequence[TaskState], live: "Sequence[Element]"
    ) -> Iterator[str]:
        """Yield what is said of stages that are not in the queue though they could go on."""
        from pipeline.run.submissions import kept_limits
        from pipeline.status.slurm import held_back, ready_since, why_full

        run, known = self.run, self._records.known
        free = (t.task for t in tasks if not (t.record or t.is_running or t.is_waiting))
        ready = {task: since for task in free if (since := ready_since(run.plan, task, known)) is not None}
        why = why_full(slurm_settings(run), kept_limits(run.paths), live, status.events)
        return held_back(ready, live, status.workers, why, status.time)

    def _budgets(self, tasks: Sequence[Task], endings: Endings) -> tuple[SmallerBudget, ...]:
        return tuple(smaller_budgets(self.run.config, tasks, self._records.known, endings))

    def _with_state(
        self, status: Status, frontier: Frontier, writer_of: Callable[[Record], Writer]
    ) -> Status:
        """Add what became of the newest trainer's state, if it is not committed."""
        update = promising(self.run.plan, self._records, frontier)
        writer = writer_of(update) if update else Writer(None)
        missing = missing_state(update, writer, frontier.updated in self._states_lost)
        return replace(
            status,
            missing_state=missing,
            state_lost=missing.iteration if missing and missing.is_lost else None,
        )

    def _on_this_machine(self, status: Status, frontier: Frontier, tasks: Sequence[Task]) -> Status:
        state = machine_state(status.state == "complete", status.driver, status.events)
        live = read_living(self._beats).values() if status.driver else ()
        endings = read_endings(self.run.paths, {task.iteration for task in tasks})
        found = local_task_states(tasks, self._records.known, live, endings)
        finish = status.finish if state == "running" else None
        status = replace(status, state=state, lanes=lanes_of(found, status.time), finish=finish)
        status = replace(status, smaller_budgets=self._budgets(tasks, endings))
        # An attempt ends with its driver.
        return self._with_state(status, frontier, lambda update: Writer(status.driver is not None))


def finish_of(created: float, rows: Sequence[Mapping[str, float]]) -> float | None:
    """Extrapolate from the last row's pace, to unix time. A time in the past says that the run is late."""
    timed = (row for row in reversed(rows) if {"seconds/elapsed", "seconds/remaining"} <= row.keys())
    last = next(timed, None)
    return None if last is None else created + last["seconds/elapsed"] + last["seconds/remaining"]


def is_complete(run: Run) -> bool:
    """Whether everything is committed and has its row."""
    frontier = find_frontier(run.plan, run.paths)
    rows = journal.read_tail(run.paths.metrics)
    return frontier.is_complete(run.plan, newest_row(rows, run.plan.start))


def _all_costs(run: Run) -> "Costs":
    from pipeline.metrics.costs import read_costs
    from slurm.ended import NoAccounting

    if not run.config.slurm:
        raise RunError("costs come from Slurm's accounting, and this run's tasks ran on this machine")
    try:
        return read_costs(run, range(run.plan.iterations + 1))
    except NoAccounting as error:
        raise RunError(f"accounting does not answer, so costs are not known: {error}") from None
