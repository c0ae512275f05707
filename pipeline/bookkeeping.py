"""What the driver writes besides launching: metrics rows, the best policy, links to policies, trackers."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline import journal
from pipeline.attempts import Facts, attempts_of, last_written
from pipeline.commits import (
    CorruptData,
    NotCommitted,
    Record,
    replace_durably,
    require_record,
    thinned_folders,
)
from pipeline.costs import cost_metrics
from pipeline.metrics import Clock, iteration_row
from pipeline.observe import Frontier, Records, sweep
from pipeline.plan import policy_maker
from pipeline.runs import Run
from pipeline.spans import iteration_spans, share_metrics, to_line
from pipeline.tasks import PREPARE, Task
from pipeline.thinning import thin
from pipeline.tracking import Tracker

_PACE = 5
"""Iterations whose mean duration predicts the rest."""

Row = dict[str, float | int]


@dataclass
class Books:
    """Rows written so far, and where else they go."""

    run: Run
    rows: list[Row]
    tracker: Tracker
    facts: Callable[[int], Facts] = lambda iteration: Facts()
    """What the scheduler knows of the jobs of an iteration."""
    _thinned: tuple[int, int] | None = None
    """The newest iteration and the number of evaluations when thinning was done last."""

    @staticmethod
    def open(
        run: Run, tracker: Tracker, facts: Callable[[int], Facts] = lambda iteration: Facts()
    ) -> "Books":
        """Take up metrics.jsonl where it ends; rows of iterations that were taken back are gone from it."""
        rows = journal.read(run.paths.metrics)
        first = run.plan.start + 1
        kept = [row for number, row in enumerate(rows, first) if row.get("iteration") == number]
        if len(kept) != len(rows) or not _ends_in_newline(run):
            journal.rewrite(run.paths.metrics, kept)
        keep_best(run, kept)  # the driver before may have been killed between the row and this
        tracker.update()
        return Books(run, kept, tracker, facts)

    def close(self, is_complete: bool) -> None:
        keep_best(self.run, self.rows)
        self.tracker.close(0 if is_complete else 1)

    @property
    def newest(self) -> int:
        """The newest iteration that has a row; before the first the one that the run begins after."""
        return self.run.plan.start + len(self.rows)

    def wanted(self, frontier: Frontier) -> tuple[Task, ...]:
        """Tasks whose records a row still to be written is made from."""
        first = self.newest + 1
        plan = self.run.plan
        if first > plan.iterations or first > frontier.updated + 1:
            return (PREPARE,)
        before = (policy_maker(first - 1),)
        tasks = [task for i in range(first, frontier.updated + 1) for task in plan.tasks(i)]
        return (PREPARE, *before, *tasks)

    def write_rows(self, records: Records, frontier: Frontier) -> Iterator[Row]:
        """Rows of every iteration that is complete, its evaluation included. Yields each new one."""
        plan = self.run.plan
        records.refresh(self.wanted(frontier))
        self.link_policies(records, frontier)
        while (iteration := self.newest + 1) <= frontier.updated:
            tasks = plan.tasks(iteration)
            if any(records.readable(task) is None for task in (*tasks, policy_maker(iteration - 1))):
                return  # its evaluation is still running, or something is being made again
            row = iteration_row(iteration, group_by_purpose(records, tasks), self._clock(records, iteration))
            row |= self._note_spans(records, iteration)
            journal.append(self.run.paths.metrics, row)
            self.rows.append(row)
            self.tracker.update()
            keep_best(self.run, self.rows)
            sweep(self.run.paths, [record for task in tasks if (record := records.readable(task))])
            yield row

    def _note_spans(self, records: Records, iteration: int) -> Row:
        """Write the line of spans, before the row, which says that it is there. Returns its numbers."""
        facts = self.facts(iteration)
        found = attempts_of(self.run, iteration, records.readable, facts, last_written(self.run, iteration))
        spans = iteration_spans(iteration, found, time.time())
        journal.append(self.run.paths.spans, to_line(spans))
        costs = cost_metrics(facts, iteration)
        return costs | share_metrics(spans.stages) if costs else {}

    def thin(self, frontier: Frontier) -> Iterator[str]:
        """Remove old policies and trainer states that are not to be kept. Yields what went wrong.

        Iterations without a row are left alone, and so is every policy that is still to be evaluated: of a
        fork also its first, whose evaluation no row waits for.
        """
        seen = min(self.newest, frontier.updated), frontier.evaluated
        if seen != self._thinned:
            yield from thin(self.run, seen[0], self.run.plan.evaluations()[frontier.evaluated :])
            self._thinned = seen

    def _clock(self, records: Records, iteration: int) -> Clock:
        previous = records.readable(policy_maker(iteration - 1))
        assert previous is not None
        recent = [row["seconds/iteration"] for row in self.rows[-_PACE:]]
        return Clock(self.run.identity.created, previous.ended, self.run.plan.iterations, recent)

    def link_policies(self, records: Records, frontier: Frontier) -> None:
        """``policy/00007`` -> the winning attempt's folder: for people; readers go by the record."""
        record = records.known.get(policy_maker(frontier.updated)) if frontier.updated > 0 else None
        if record is not None:
            for parent in ("policy", "critic", "trainer"):
                _link(self.run, record, parent, f"{record.policy_version:05d}")


def keep_best(run: Run, rows: Sequence[Row]) -> None:
    """Point ``best.json`` and ``policy/best`` at the policy with the highest evaluation reward so far.

    Of those that are left: once the best was taken back, the second best may have been thinned out.
    """
    evaluated = [row for row in rows if "evaluate/reward" in row]
    for row in sorted(evaluated, key=lambda row: -row["evaluate/reward"]):
        task = policy_maker(int(row["policy_version"]))
        try:
            record, thinned = require_record(run.paths, task), thinned_folders(run.paths, task)
        except (NotCommitted, CorruptData):
            return  # it is being made again; the driver looks once more when it ends
        folder = _folder(record, "policy")
        if folder not in thinned:
            best = {"iteration": row["iteration"], "reward": row["evaluate/reward"], "policy": folder}
            _name_best(run, record, json.dumps(best) + "\n")
            return


def _name_best(run: Run, record: Record, text: str) -> None:
    if not run.paths.best.exists() or run.paths.best.read_text() != text:
        replace_durably(run.paths.best, text)
        _link(run, record, "policy", "best")


def group_by_purpose(records: Records, tasks: tuple[Task, ...]) -> dict[str, list[Record]]:
    grouped: dict[str, list[Record]] = {}
    for task in tasks:
        record = records.readable(task)
        assert record is not None, f"{task} has no record"
        grouped.setdefault(task.purpose, []).append(record)
    return grouped


def _folder(record: Record, parent: str) -> str | None:
    """The attempt's folder below policy/, critic/ or trainer/, relative to the run."""
    folders = (entry.folder for entry in record.outputs)
    return next((folder for folder in folders if folder.startswith(f"{parent}/")), None)


def _link(run: Run, record: Record, parent: str, name: str) -> None:
    folder = _folder(record, parent)
    if folder is None:
        return
    link = run.paths.root / parent / name
    target = folder.removeprefix(f"{parent}/")
    if link.is_symlink() and str(link.readlink()) == target:
        return
    private = link.with_name(f".{name}.{os.getpid()}")
    private.unlink(missing_ok=True)
    private.symlink_to(target)
    private.replace(link)


def _ends_in_newline(run: Run) -> bool:
    path = run.paths.metrics
    return not path.exists() or path.stat().st_size == 0 or path.read_bytes()[-1:] == b"\n"
