"""Commit records on disk, read for the current iterations, and how far a run has come."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.run import journal
from pipeline.run.commits import CorruptData, Record, check_sizes, read_record, verify_outputs
from pipeline.run.directory import Run
from pipeline.run.packed import BadArchive, packed_below
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from slurm.sharedfiles import is_there, names_in

_TAIL_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl, which hold more than its last row."""
_MOST_UNWRITTEN = 100
"""Finished iterations without a row that are looked at: more there are only where rows cannot be written."""
_RECENT = 3
"""Evaluations that are looked at: more are not made between two looks."""
_SEARCH_SECONDS = 10.0
"""Seconds for which what was committed a moment ago is taken to be followed by its next iterations alone."""


class Committed(Protocol):
    """Part of a commit record that decisions need: fingerprints of the commit, and of its inputs as read."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, str]: ...


def stale_because(task: Task, inputs: Sequence[Task], committed: Mapping[Task, Committed]) -> str | None:
    """Return why a commit is stale, or None.

    Inputs that were not observed, or are being computed again, count as unchanged: if the repetition gives
    the same bytes, nothing that was made from them needs repeating.
    """
    known = committed[task].inputs
    for source in inputs if known else ():
        read = known.get(task_key(source))
        now = committed.get(source)
        if read is not None and now is not None and now.fingerprint != read:
            return f"its input {source} has changed since"
    return None


@dataclass
class Records:
    """Commit records read so far. A record never changes once published; only retracting removes it."""

    paths: RunPaths
    known: dict[Task, Record] = field(default_factory=dict)
    corrupt: dict[Task, str] = field(default_factory=dict)
    damaged: dict[Task, Record] = field(default_factory=dict)
    """Records of corrupt tasks that can be read themselves, although what they name cannot."""

    def refresh(self, tasks: Iterable[Task]) -> None:
        """Read the records of ``tasks`` that are not known yet, with one listing per folder."""
        unknown = (task for task in tasks if task not in self.known and task not in self.corrupt)
        for task in recorded(self.paths, dict.fromkeys(unknown)):
            self._read(task)

    def get(self, task: Task) -> Record | None:
        self.refresh([task])
        return self.known.get(task)

    def published(self, tasks: Collection[Task]) -> set[Task]:
        """Return those of ``tasks`` that have a record, valid or corrupt."""
        self.refresh(tasks)
        return {task for task in tasks if task in self.known or task in self.corrupt}

    def readable(self, task: Task) -> Record | None:
        """Return the record, whether or not its data are still there: enough for what it says itself."""
        self.refresh([task])
        return self.known.get(task) or self.damaged.get(task)

    def verify(self, task: Task) -> None:
        """Read and hash everything that a suspected task committed, whose record may be gone by now."""
        record = self.get(task)
        if record is None:
            return
        if any(recorded(self.paths, [task])):
            self._check(record, verify_outputs)
        else:
            self.damaged[task] = self.known.pop(task)
            self.corrupt[task] = f"{task} has no commit record any more"

    def forget(self, task: Task) -> None:
        for found in (self.known, self.corrupt, self.damaged):
            found.pop(task, None)

    def keep_only(self, tasks: Iterable[Task]) -> None:
        """Drop the records of all other tasks, so that memory does not grow with the run."""
        wanted = set(tasks)
        self.known = {task: record for task, record in self.known.items() if task in wanted}
        self.damaged = {task: record for task, record in self.damaged.items() if task in wanted}

    def _read(self, task: Task) -> None:
        try:
            record = read_record(self.paths, task)
        except CorruptData as error:
            self.corrupt[task] = str(error)
            return
        if record is not None:
            self.known[task] = record
            self._check(record, check_sizes)

    def _check(self, record: Record, check: Callable[[RunPaths, Record], None]) -> None:
        try:
            check(self.paths, record)
        except CorruptData as error:
            self.damaged[record.task] = self.known.pop(record.task)
            self.corrupt[record.task] = str(error)


def recorded(paths: RunPaths, tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield those of ``tasks`` that have a commit record, as a file or packed, listing every folder once."""
    wanted: dict[tuple[int, str], list[Task]] = {}
    for task in tasks:
        wanted.setdefault((task.iteration, task.job_kind), []).append(task)
    for group in wanted.values():
        names = names_of_stage(paths.task(group[0]).folder)
        if group[0].stage.is_sharded and any(task.record_name not in names for task in group):
            names |= _names_packed(paths, group)
        yield from (task for task in group if names and task.record_name in names)


def names_of_stage(folder: Path) -> set[str]:
    """Return the names in a stage's folder; none if another machine moved it away when the run went back."""
    return names_in(folder) if is_there(folder) else set()


def is_committed(paths: RunPaths, task: Task) -> bool:
    """Whether the task's record is a file (not packed), as the file server has it."""
    return task.record_name in names_of_stage(paths.task(task).folder)


def _names_packed(paths: RunPaths, tasks: Sequence[Task]) -> set[str]:
    """Return the names of files of one folder's ``tasks`` that were packed."""
    try:
        return packed_below(paths, tasks[0].iteration, paths.task(tasks[0]).folder)
    except BadArchive:  # the archive exists: reading a record raises what is wrong
        return {task.record_name for task in tasks}


@dataclass(frozen=True)
class Frontier:
    """Progress of a run."""

    updated: int
    """Newest iteration whose update is committed; -1 before prepare is."""
    evaluated: int
    """Number of the plan's evaluations that are committed."""
    benchmarked: int = 0
    """Number of the plan's benchmarks that are committed, those without numbers too."""

    def is_committed(self, plan: Plan) -> bool:
        """Whether everything is committed."""
        is_evaluated = self.evaluated == len(plan.evaluations())
        return self.updated >= plan.iterations and is_evaluated and self.benchmarked == len(plan.benchmarks())

    def window(self, plan: Plan, is_ahead: bool = False) -> tuple[Task, ...]:
        """Return the tasks that matter now (:meth:`Plan.window`)."""
        return plan.window(self.updated, self.evaluated, self.benchmarked, is_ahead)

    def passed(self, plan: Plan, tasks: Iterable[Task]) -> frozenset[Task]:
        """Return the evaluations and benchmarks that come before some tasks and are counted: they are
        not read again, and their records may be gone."""
        counted = {
            Stage.EVALUATE: plan.evaluations()[: self.evaluated][-1:],
            Stage.BENCHMARK: plan.benchmarks()[: self.benchmarked][-1:],
        }
        earlier = {one for task in tasks if (one := plan.earlier(task))}
        return frozenset(one for one in earlier if one.iteration <= max(counted[one.stage], default=-1))

    def is_complete(self, plan: Plan, newest_row: int) -> bool:
        """Whether everything is committed, and every iteration up to the last has its row."""
        return self.is_committed(plan) and newest_row >= plan.iterations


def find_frontier(plan: Plan, paths: RunPaths) -> Frontier:
    """Find how far a run has come by binary search, so that nothing scans the run: commits are contiguous.

    Old records may be gone, by a purge: what has a row was committed. Two exceptions: an evaluation that
    lags behind may have found its policy corrupt, and so may a rollout that reads an older one than the
    newest (rollout.staleness). Then the run goes on from before that policy, and passes over the later ones,
    which are committed, once it is there again.
    """
    if not is_committed(paths, PREPARE):
        return Frontier(-1, 0)
    iterations = range(plan.start + 1, plan.iterations + 1)
    updated, row = plan.start + _count_committed(paths, Stage.UPDATE, iterations), _last_row(plan, paths)
    if row is not None:
        updated = _before_gap(plan, paths, _after_lost(plan, paths, updated, row), row)
    updated = _before_lost_source(plan, paths, updated)
    evaluations = plan.evaluations()
    evaluated = _count_evaluated(plan, paths, evaluations, row)
    if evaluated < len(evaluations):
        lagging = evaluations[evaluated]
        if plan.start < lagging <= updated and not is_committed(paths, Task(lagging, Stage.UPDATE)):
            updated = lagging - 1
    # of a policy that is made again: whether it is the one that was evaluated is seen when it is there
    evaluated = min(evaluated, bisect_right(evaluations, updated))
    return Frontier(updated, evaluated, _count_committed(paths, Stage.BENCHMARK, plan.benchmarks()))


def is_measured(plan: Plan, paths: RunPaths) -> bool:
    """Whether evaluate.command has nothing left to measure: the last policy was measured, or left out."""
    last = Task(plan.iterations, Stage.BENCHMARK)
    return not plan.benchmark_every or is_committed(paths, last)


def without_stale(plan: Plan, records: Records, frontier: Frontier) -> Frontier:
    """Return how far a run has come up to the first of its last evaluations that is of another policy than
    there is now: an update that was taken back may be made again, and such an evaluation committed, between
    two looks."""
    counted = plan.evaluation_tasks()[: frontier.evaluated]
    for number, task in list(enumerate(counted))[-_RECENT:]:
        inputs = plan.inputs(task)
        known = {one: found for one in (task, *inputs) if (found := records.readable(one)) is not None}
        if task in known and stale_because(task, inputs, known):
            return replace(frontier, evaluated=number)
    return frontier


@dataclass
class FrontierFinder:
    """Finds how far a run has come, again and again: for a moment from where it was, else by a search."""

    plan: Plan
    paths: RunPaths
    known: Frontier | None = None
    searched: float = float("-inf")
    """When it was last searched for (monotonic)."""

    def find(self) -> Frontier:
        now = time.monotonic()
        if self.known is None or now - self.searched > _SEARCH_SECONDS:
            self.known, self.searched = None, now
        nearby = None if self.known is None else next_frontier(self.plan, self.paths, self.known)
        self.known = nearby or find_frontier(self.plan, self.paths)
        return self.known


def next_frontier(plan: Plan, paths: RunPaths, known: Frontier) -> Frontier | None:
    """Return how far a run has come that was at ``known`` a moment ago, if that is an iteration further at
    most; None: search for it."""
    updated, evaluated, benchmarked = known.updated, known.evaluated, known.benchmarked
    if updated < plan.start or (
        updated > plan.start and not is_committed(paths, Task(updated, Stage.UPDATE))
    ):
        return None
    following = range(updated + 1, min(updated + 2, plan.iterations) + 1)
    updated += _count_committed(paths, Stage.UPDATE, following)
    evaluated += _count_committed(paths, Stage.EVALUATE, plan.evaluations()[evaluated : evaluated + 2])
    benchmarked += _count_committed(paths, Stage.BENCHMARK, plan.benchmarks()[benchmarked : benchmarked + 2])
    is_near = updated < known.updated + 2 and evaluated < known.evaluated + 2
    is_near = is_near and benchmarked < known.benchmarked + 2
    return Frontier(updated, evaluated, benchmarked) if is_near else None


def _count_evaluated(plan: Plan, paths: RunPaths, evaluations: Sequence[int], row: int | None) -> int:
    """Count the evaluations that are committed, or were: their numbers are in rows. What was taken back, by
    the journal, is measured again."""
    count = _count_committed(paths, Stage.EVALUATE, evaluations)
    by_rows = _evaluated_by_rows(plan, evaluations, row)
    tasks = [Task(version, Stage.EVALUATE) for version in evaluations[count:by_rows]]
    lacking = {task for task in tasks if not is_committed(paths, task)}
    events = journal.read_named(paths.events, ["retracted"]) if lacking else ()
    again = {str(event.get("task")) for event in events}
    due = (t for t in tasks if t in lacking and again & {task_key(t), task_key(policy_maker(t.iteration))})
    return evaluations.index(first.iteration) if (first := next(due, None)) else max(count, by_rows)


def _evaluated_by_rows(plan: Plan, evaluations: Sequence[int], row: int | None) -> int:
    """Return how many evaluations must have been committed: an iteration's row came after its own, and that
    after all before it. No row waits for that of the policy which the run begins with."""
    count = bisect_right(evaluations, row) if row is not None else 0
    return count if count and evaluations[count - 1] > plan.start else 0


def _last_row(plan: Plan, paths: RunPaths) -> int | None:
    """Return the iteration of the last row; None where it cannot be read, which never stops what trains."""
    try:
        return newest_row(journal.read_last(paths.metrics, _TAIL_BYTES), plan.start)
    except OSError:
        return None


def _after_lost(plan: Plan, paths: RunPaths, updated: int, row: int) -> int:
    """Return the newest iteration that is committed, where records of older ones are gone; ``updated`` if
    none of those with a row, up to ``row``, is."""
    for iteration in range(min(row, plan.iterations), updated, -1):
        if is_committed(paths, Task(iteration, Stage.UPDATE)):
            later = range(iteration + 1, plan.iterations + 1)
            return iteration + _count_committed(paths, Stage.UPDATE, later)
    return updated


def _before_gap(plan: Plan, paths: RunPaths, updated: int, row: int) -> int:
    """Return the newest iteration before one with neither update nor row; ``updated`` if there is none such.

    Binary search may pass over such a gap. What follows it was made from what was taken back; where there is
    a row the update was there, and only its record was lost since.
    """
    for iteration in range(row + 1, updated):
        if not is_committed(paths, Task(iteration, Stage.UPDATE)):
            return iteration - 1
    return updated


def _before_lost_source(plan: Plan, paths: RunPaths, updated: int) -> int:
    """Return the newest iteration before a policy whose record is gone and that responses may still be of;
    ``updated`` if there is none such, or all that is left is to measure the last."""
    if updated < plan.iterations:
        for version in range(max(plan.start + 1, updated - plan.staleness), updated):
            if not is_committed(paths, Task(version, Stage.UPDATE)):
                return version - 1
    return updated


def newest_row(rows: Sequence[Mapping[str, Any]], start: int) -> int:
    """Return the iteration of the last row; without any the one that the run begins after (``start``)."""
    numbers = [row["iteration"] for row in rows[-1:] if isinstance(row.get("iteration"), int)]
    return max(numbers, default=start)


def unwritten_tasks(plan: Plan, paths: RunPaths, newest: Task | None) -> list[Task]:
    """Return the tasks of the last finished iterations that have no row yet, and those before the first
    iteration. What was tried at them and failed is listed before their rows are written, with which the
    claims go.

    Args:
        newest: the newest committed update; None: there is none.
    """
    last = newest.iteration if newest else 0
    try:
        first = newest_row(journal.read_tail(paths.metrics, _TAIL_BYTES), plan.start) + 1
    except OSError:  # rows that cannot be read never stop what trains
        return []
    finished = range(max(first, last - _MOST_UNWRITTEN), last + 1)
    return [task for iteration in (plan.start, *finished) for task in plan.tasks(iteration)]


def _count_committed(paths: RunPaths, stage: Stage, iterations: Sequence[int]) -> int:
    """Count the iterations of which ``stage`` is committed by binary search, given that these come first."""
    return bisect_left(iterations, True, key=lambda i: not is_committed(paths, Task(i, stage)))


def newest_commit(records: Records) -> float:
    """Return the unix time of the newest commit among those at hand, 0 for none."""
    return max((record.ended for record in records.known.values()), default=0.0)


def newest_commit_on_disk(run: Run) -> float:
    """Return the unix time of the newest commit of the current window, read from disk, 0 for none."""
    frontier = find_frontier(run.plan, run.paths)
    records = Records(run.paths)
    tasks = frontier.window(run.plan)
    records.refresh([*tasks, policy_maker(max(frontier.updated, 0))])
    return newest_commit(records)
