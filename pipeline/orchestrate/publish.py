"""What follows from commits: metrics rows, spans, best policy, links, trackers, pruning, packing."""

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.metrics.attempts import Facts, attempts_of, last_written
from pipeline.metrics.costs import idle_shares, metrics_of
from pipeline.metrics.row import Clock, iteration_row
from pipeline.metrics.spans import iteration_spans, to_line
from pipeline.metrics.staleness import staleness_metrics
from pipeline.orchestrate.lost_states import note_replay
from pipeline.orchestrate.rewind import trim_rows
from pipeline.orchestrate.row_writer import RowWriter
from pipeline.orchestrate.tidying import Tidying
from pipeline.run import journal
from pipeline.run.benchmarks import measured_of, note_measured, read_measured
from pipeline.run.commits import CorruptData, Record, read_record
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.packing import pack_logs, pack_old
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Frontier, Records
from pipeline.run.retention import keep_best, link_folder, thin
from pipeline.run.states import remove_unfinished
from pipeline.run.superseded import fresh_folder, remove_losers
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble
from pipeline.tracking.tracker import Trackers
from slurm.sharedfiles import names_in

_MOST_SHOWN = 4
"""Most numbers of a benchmark that a line names."""
_PACE = 5
"""Number of recent iterations whose mean duration predicts the time left."""


_LEARNED = ("policy/", "value/", "objective/")
"""Beginnings of the names of metrics that follow from what an update read, and not from where it ran."""


def tells_otherwise(row: Row, metrics: Mapping[str, float]) -> bool:
    """Whether a row has other numbers of an update than its commit record. Pure."""
    learned = {
        name: value for name, value in metrics.items() if name.startswith(_LEARNED) and math.isfinite(value)
    }
    return any(row.get(name) not in (None, value) for name, value in learned.items())


@dataclass
class Publisher:
    """Writer of everything that follows from commits: rows, and the places they are shown in."""

    run: Run
    tracker: Trackers
    facts: Callable[[int], Facts] = lambda iteration: Facts()
    """Lookup of the scheduler's facts about the jobs of an iteration, by its number."""
    in_use: Callable[[], Collection[str]] = lambda: ()
    """Lookup of the files, by paths relative to the run, that jobs may still read or write."""
    tidying: Tidying = field(default_factory=Tidying)
    _book: RowWriter | None = None
    """Writer of metrics.jsonl; None until it could be opened, as a failing disk must not stop training."""
    _packed: int | None = None
    """Newest iteration with a row when packing was done last."""
    _tidied: tuple[int, int, int, frozenset[str]] | None = None
    """Newest iteration with a row, numbers of evaluations and benchmarks, and names of states when what is
    old was removed last."""
    _measured: frozenset[int] | None = None
    """Policies that evaluations.jsonl has a line of; None until it was read."""

    def open(self) -> None:
        """Open metrics.jsonl and continue where it ends, unless that was done."""
        if self._book is None:
            self._book = RowWriter.open(self.run.paths, self.run.plan.start + 1)
            note_mended(self.run, self._book.mended)
            keep_best(self.run, self.rows)  # the driver before may have been killed between the row and this
            self.tracker.update()

    def close(self, is_complete: bool) -> None:
        """End with the invocation or pass.

        Args:
            is_complete: whether the run is, and no attempt writes a state any more.
        """
        self.tidying.finish()
        try:
            for version in range(max(self.run.plan.start, self.run.plan.iterations - 2) + 1, self.newest + 1):
                if is_complete:
                    remove_unfinished(self.run.paths, version)
            if self._book is not None:
                keep_best(self.run, self.rows)
                self.close_rows()
        finally:
            self.tracker.close(0 if is_complete else 1)

    def close_rows(self) -> None:
        """Close metrics.jsonl; the next :meth:`open` loads it again."""
        if self._book is not None:
            self._book.close()
            self._book = None

    @property
    def rows(self) -> Sequence[Row]:
        return self._book.rows if self._book else ()

    @property
    def newest(self) -> int:
        """Newest iteration that has a row; before the first row, the iteration that the run begins after."""
        return self._book.newest if self._book else self.run.plan.start

    def wanted(self, frontier: Frontier) -> tuple[Task, ...]:
        """Return the tasks whose records are needed for rows that are still to be written."""
        first = self.newest + 1
        plan = self.run.plan
        if self._book is None or first > plan.iterations or first > frontier.updated + 1:
            return (PREPARE,)
        before = (policy_maker(first - 1),)
        tasks = [task for i in range(first, frontier.updated + 1) for task in plan.tasks(i)]
        return (PREPARE, *before, *tasks)

    def _take_back_what_is_untrue(self, records: Records, note: Callable[[str], None]) -> None:
        """Take rows back from the first on whose update was made again since, and came out otherwise: of the
        newest, and with staleness of those before it whose policies responses may still be of."""
        for row in self.rows[-1 - self.run.plan.staleness :]:
            iteration = int(row["iteration"])
            made = records.known.get(policy_maker(iteration))
            if made is not None and tells_otherwise(row, made.metrics):
                self.close_rows()
                folder = fresh_folder(self.run.paths.superseded, f"row-{iteration}")
                trim_rows(self.run, iteration, folder)
                note(f"policy {iteration} was made again and is another one: its row is written again")
                self.open()
                return

    def write_rows(
        self,
        records: Records,
        frontier: Frontier,
        note: Callable[[str], None],
        saving: Collection[Task] = (),
    ) -> Iterator[Row]:
        """Write the row of every iteration that is complete, its evaluation included. Yields each new row.

        Nothing makes a record again that is lost once its iteration is over: the row is written without
        it, and says so (``records_lost``).

        Args:
            saving: updates whose attempts may still write a state.
        """
        self.open()
        records.refresh(self.wanted(frontier))
        self._take_back_what_is_untrue(records, note)
        assert self._book
        self.link_policies(records, frontier)
        while (iteration := self.newest + 1) <= frontier.updated:
            tasks = self.run.plan.tasks(iteration)
            lost = [task for task in tasks if records.readable(task) is None]
            # Once the update is there, only evaluations may still come.
            if lost and not set(lost).isdisjoint(self.run.plan.evaluation_tasks()[frontier.evaluated :]):
                return
            row = self._row(records, iteration, lost) | self._note_spans(records, iteration)
            if lost:
                note(self._note_lost(records, iteration, lost))
            note_replay(self.run, records.readable(policy_maker(iteration)), note)
            row = self._book.add(row)
            self.tracker.update()
            keep_best(self.run, self.rows)
            remove_losers(self.run.paths, [r for task in tasks if (r := records.readable(task))], spared=lost)
            old = iteration - 2  # of the one after it the state may be written beside this iteration's update
            if old > self.run.plan.start and policy_maker(old) not in saving:
                remove_unfinished(self.run.paths, old)
            yield row

    def note_benchmarks(self, frontier: Frontier) -> Iterator[str]:
        """Write the line of every benchmark that has one to come, and choose the best policy again. Yields
        lines for people."""
        done, paths = self.run.plan.benchmarks()[: frontier.benchmarked], self.run.paths
        if not done:
            return
        if self._measured is None:
            self._measured = frozenset(one.policy_version for one in read_measured(paths))
        new = []
        for version in (version for version in done if version not in self._measured):
            record = self._benchmark_record(version)
            new.append(measured_of(paths, record, version))
            if record is not None:
                remove_losers(paths, [record])
        if new:
            note_measured(paths, new, self.newest)
            self._measured |= {one.policy_version for one in new}
            self.tracker.update()
            keep_best(self.run, self.rows)
        for one in (one for one in new if one.numbers):
            shown = ", ".join(
                f"{name} {value:.4g}" for name, value in list(one.numbers.items())[:_MOST_SHOWN]
            )
            yield f"policy {one.policy_version} measured: {shown}"

    def _benchmark_record(self, version: int) -> Record | None:
        try:
            return read_record(self.run.paths, Task(version, Stage.BENCHMARK))
        except CorruptData:
            return None

    def _row(self, records: Records, iteration: int, lost: Sequence[Task]) -> Row:
        tasks = [task for task in self.run.plan.tasks(iteration) if task not in lost]
        grouped: dict[str, list[Record]] = {}
        for task in tasks:
            record = records.readable(task)
            assert record is not None, f"{task} has no record"
            grouped.setdefault(task.job_kind, []).append(record)
        clock, has_lag = self._clock(records, iteration), self.run.plan.staleness > 0
        row = iteration_row(iteration, grouped, clock, has_lag)
        row |= staleness_metrics(row, self.rows)
        return row | ({"records_lost": len(lost)} if lost else {})

    def _note_lost(self, records: Records, iteration: int, lost: Sequence[Task]) -> str:
        """Write into the journal which records a row lacks. Returns it in words."""
        why = records.corrupt.get(lost[0], f"{lost[0]} has no commit record any more")
        names = [task_key(task) for task in lost]
        journal.event(self.run.paths.events, "row_without", iteration=iteration, tasks=names, message=why)
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"row {iteration} is written without what a lost record knew: {why}{more}"

    def _note_spans(self, records: Records, iteration: int) -> Row:
        """Write the line of spans, before the row whose existence implies it. Returns its numbers."""
        facts = self.facts(iteration)
        found = attempts_of(self.run, iteration, records.readable, facts, last_written(self.run, iteration))
        spans = iteration_spans(iteration, found, time.time())
        journal.append(self.run.paths.spans, to_line(spans))
        accounted = metrics_of(spans.stages) if facts.jobs else {}
        return accounted | idle_shares(facts.beats, iteration)

    def tidy(self, frontier: Frontier) -> Iterator[str]:
        """Remove what is not to be kept, and pack old iterations. Yields what that said since the last call,
        which may have begun it."""
        newest = min(self.newest, frontier.updated)
        # The newest state may come later than its iteration's row, and with it the oldest may go.
        states = frozenset(names_in(self.run.paths.states))
        seen = newest, frontier.evaluated, frontier.benchmarked, states
        if seen != self._tidied:
            self.tidying.begin(lambda: (*self.thin(newest, frontier), *self.pack(newest)))
            self._tidied = seen
        try:
            yield from self.tidying.said()
        except Exception:
            self._tidied = None  # tried again
            raise

    def thin(self, newest: int, frontier: Frontier) -> Iterator[str]:
        """Apply retention: remove policies and trainers' states not to be kept. Yields errors.

        Iterations without a row are left alone, and so is every policy that is still to be evaluated, a
        fork's first one included, whose evaluation no row waits for.
        """
        plan = self.run.plan
        awaited = {*plan.evaluations()[frontier.evaluated :], *plan.benchmarks()[frontier.benchmarked :]}
        yield from thin(self.run, newest, awaited)

    def pack(self, newest: int) -> Iterator[str]:
        """Pack the logs and the iterations that are due into archives. Errors are noted, yielded, and the
        packing is tried again by the next driver or with the next row.
        """
        if newest == self._packed:
            return
        self._packed, paths = newest, self.run.paths
        try:
            in_use = functools.cache(self.in_use)
            found = [*pack_logs(self.run, newest, in_use), *pack_old(self.run, newest, in_use)]
        except OSError as error:
            found = [f"old iterations cannot be packed: {described(error)}; training goes on"]
        if found:
            note_trouble(paths, Trouble.PACK, found[0])
        else:
            note_recovery(paths, Trouble.PACK)
        yield from found

    def _clock(self, records: Records, iteration: int) -> Clock:
        previous = records.readable(policy_maker(iteration - 1))
        recent = [row["seconds/iteration"] for row in self.rows[-_PACE:] if "seconds/iteration" in row]
        previous_end = previous.ended if previous else 0.0
        return Clock(self.run.identity.created, previous_end, self.run.plan.iterations, recent)

    def link_policies(self, records: Records, frontier: Frontier) -> None:
        """Link ``policy/00007`` to the winning attempt's folder, and ``state/00007`` once it is committed: of
        all iterations without a row, as workers may do several between two passes, and of the one before
        them, whose state may be committed later than the next policy.

        The links are for people; stages go by the record.
        """
        first = max(1, min(self.newest + 1, frontier.updated) - 1)
        for iteration in range(first, frontier.updated + 1):
            record = records.known.get(policy_maker(iteration))
            if record is None:
                continue
            for parent in ("policy", "critic", "trainer", "reference"):
                link_folder(self.run, record, parent, f"{record.policy_version:05d}")
            if record.promises_state and (state := records.get(state_of(iteration))):
                link_folder(self.run, state, "state", f"{state.policy_version:05d}")


def note_mended(run: Run, iteration: int | None) -> None:
    """Note in the journal the first row whose line differed from what was published, and was fixed."""
    if iteration is not None:
        journal.event(run.paths.events, "rows_mended", iteration=iteration)
