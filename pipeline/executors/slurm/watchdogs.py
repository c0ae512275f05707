"""Driver jobs in the queue: one that starts when a worker's job has ended; watchdogs that always start."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import Submitter, driver_submission
from pipeline.executors.slurm.job_table import JobTable, Snapshot
from pipeline.run.submissions import Submission
from slurm.commands import SlurmError
from slurm.submission import QueueFull, Refused, update_dependency

WATCHDOGS = 2
_KEPT = 4


def watch_expression(arrays: Sequence[str]) -> str:
    """Return the dependency of a driver job that starts once any of these arrays has ended, in success or
    failure."""
    return "?".join(f"afterany:{array}" for array in arrays)


@dataclass(frozen=True)
class Watchdogs:
    """Keeps driver jobs in the queue, so that there is a next pass whatever happens."""

    submitter: Submitter
    note: Callable[[str], None]
    submitted: list[str] = field(default_factory=list)
    """Ids of driver jobs that this pass submitted."""

    def ensure(self, seen: Snapshot) -> None:
        """Have watchdogs wait, before anything else is tried: a pass that fails must not be the last.

        Two of them, one behind the other, so that one that is lost does not end the run either.
        """
        try:
            for waiting in range(seen.count_pending(GUARD), WATCHDOGS):
                begin = 60.0 * self.submitter.config.check_minutes * (waiting + 1)
                self._submit(seen, GUARD, (), begin)
        except QueueFull as error:
            self.note(f"the queue takes no guard now ({error})")
        # There is one every few minutes: what is kept of them must not grow with the run.
        self._forget_old(GUARD, seen)

    def watch_workers(self, table: JobTable, arrays: Sequence[str]) -> None:
        """Have a driver job wait for the end of any of these arrays: of workers that died before they could
        make a pass, say."""
        try:
            if arrays:
                self._ensure_driver(table, tuple(arrays))
        except QueueFull as error:
            self.note(f"the queue takes no driver job now; the guard does its work ({error})")
        self._forget_old(DRIVER, table.seen)

    def renew(self, table: JobTable, outdated: Iterable[Submission]) -> Iterator[str]:
        """Submit again driver jobs that wait and were submitted with other settings than the run has. Yields
        the ids of these, to be cancelled: there is never none that waits."""
        guards = 0
        try:
            for old in outdated:
                guards += old.job_kind == GUARD
                begin = 60.0 * self.submitter.config.check_minutes * guards if old.job_kind == GUARD else 0.0
                self._submit(table.seen, old.job_kind, old.state.waits_for, begin)
                table.note(old, is_withdrawn=True)
                yield old.state.job or ""
        except Refused as error:
            self.note(f"driver jobs that wait keep the settings that they were submitted with ({error})")

    def _forget_old(self, job_kind: str, seen: Snapshot) -> None:
        """Forget all but the newest driver jobs of a kind that is submitted again and again in a run, but
        none that waits or runs: one that is started again, as its node has died, needs its files."""
        old = [s for s in self.submitter.ledger.load({0}) if s.job_kind == job_kind]
        for submission in old[:-_KEPT]:
            if not seen.live_elements(submission):
                self.submitter.ledger.forget(submission)

    def _ensure_driver(self, table: JobTable, arrays: tuple[str, ...]) -> None:
        """One driver job waits for just these arrays: one that waits already, redirected, or a new one."""
        driver = table.pending_driver()
        if driver is not None and set(driver.state.waits_for) == set(arrays):
            return
        if driver is not None:
            assert driver.state.job is not None
            with contextlib.suppress(SlurmError):  # it has started since it was seen: another has to watch
                update_dependency(driver.state.job, watch_expression(arrays))
                table.note(driver, waits_for=arrays)
                return
        self._submit(table.seen, DRIVER, arrays)

    def _submit(self, seen: Snapshot, job_kind: str, arrays: tuple[str, ...], begin: float = 0.0) -> None:
        number = self.submitter.ledger.next_number(0, job_kind)
        new = driver_submission(self.submitter.run, seen.control.invocation, job_kind, number)
        submission = self.submitter.submit(new, Escalation(), watch_expression(arrays), arrays, begin)
        self.submitted.append(submission.state.job or "")
