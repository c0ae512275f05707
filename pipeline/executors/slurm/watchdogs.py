"""Driver jobs in the queue: one that starts when an iteration needs a pass; watchdogs that always start."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.config.job_kinds import DRIVERS, GUARD
from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.arrays import driver_submission
from pipeline.executors.slurm.dependencies import Watch, watch_expression, watches
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.resources import Escalation
from pipeline.executors.slurm.submitter import Submitter
from pipeline.run.directory import Run
from pipeline.run.submissions import Submission
from slurm.commands import SlurmError
from slurm.submission import QueueFull, update_dependency

WATCHDOGS = 2
_WATCHDOGS_KEPT = 4


@dataclass(frozen=True)
class Watchdogs:
    """Keeps driver jobs in the queue, so that somebody makes the next pass whatever happens."""

    run: Run
    config: SlurmConfig
    submitter: Submitter
    table: JobTable
    note: Callable[[str], None]
    submitted: list[str] = field(default_factory=list)
    """Ids of driver jobs that this pass submitted."""

    def ensure(self) -> None:
        """Have watchdogs wait, before anything else is tried: a pass that fails must not be the last.

        Two of them, one behind the other, so that one that is lost does not end the run either.
        """
        try:
            for waiting in range(self.table.count_pending(GUARD), WATCHDOGS):
                begin = f"now+{60 * self.config.check_minutes * (waiting + 1)}"
                self._submit(0, GUARD, "", (), begin)
        except QueueFull as error:
            self.note(f"the queue takes no guard now ({error})")
        self._forget_old()

    def watch(self) -> None:
        """Have a driver job wait for the arrays of each iteration."""
        try:
            for watch in watches((task, live.carrier.array) for task, live in self.table.live.items()):
                self._ensure_driver(watch)
        except QueueFull as error:
            self.note(f"the queue takes no driver job now; the guard does its work ({error})")

    @property
    def is_watched(self) -> bool:
        """Whether a driver job waits that will make the next pass."""
        return bool(self.submitted) or any(map(self.table.count_pending, DRIVERS))

    def _ensure_driver(self, watch: Watch) -> None:
        """One driver job waits for just these arrays."""
        expression = watch_expression(watch.last, watch.earlier)
        existing = self.table.pending_driver(watch.iteration, watch.job_kind)
        if existing is None:
            self._submit(watch.iteration, watch.job_kind, expression, watch.arrays)
        elif set(existing.state.waits_for) != set(watch.arrays):
            self._redirect(existing, expression, watch.arrays)

    def _redirect(self, driver: Submission, expression: str, watched: tuple[str, ...]) -> None:
        assert driver.state.job is not None
        try:
            update_dependency(driver.state.job, expression)
        except SlurmError:  # it has started since it was seen: another one has to watch
            self._submit(driver.iteration, driver.job_kind, expression, watched)
            return
        self.table.note(driver, waits_for=watched)

    def _forget_old(self) -> None:
        """There is one every few minutes: what is kept of them must not grow with the run."""
        old = [s for s in self.table.submissions if s.job_kind == GUARD]
        for watchdog in old[:-_WATCHDOGS_KEPT]:
            self.table.ledger.forget(watchdog)

    def _submit(
        self, iteration: int, job_kind: str, dependency: str, arrays: tuple[str, ...], begin: str = ""
    ) -> None:
        number = self.table.ledger.next_number(iteration, job_kind)
        new = driver_submission(self.run, self.table.control.invocation, iteration, job_kind, number)
        submission = self.submitter.submit(new, Escalation(), dependency, arrays, begin)
        self.table.enter(submission)
        self.submitted.append(submission.state.job or "")
