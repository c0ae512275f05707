"""Submission of array jobs to Slurm, each at most once: noted on disk before sbatch is called, and after."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.executors.slurm.arrays import array_of, log_folder
from pipeline.executors.slurm.resources import Escalation
from pipeline.run import journal
from pipeline.run.directory import Run, make_slurm_log
from pipeline.run.lease import LeaseLost
from pipeline.run.submissions import Ledger, State, Submission, note_submitted
from slurm.commands import SlurmTimeout
from slurm.sharedfiles import is_there, make_folder
from slurm.submission import QueueFull, Refused, Unclear, render, submit_once


@dataclass(frozen=True)
class Submitter:
    """Submitter of array jobs for one pass of a driver."""

    run: Run
    config: SlurmConfig
    longest: Callable[[Sequence[str]], float | None]
    """Function that returns the seconds that partitions allow a job; called only where time is escalated."""
    beat: Callable[[], None]
    """Heartbeat of the lease, called before requests to Slurm; raises LeaseLost where it was taken over."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.paths)

    def submit(
        self,
        submission: Submission,
        escalation: Escalation,
        dependency: str = "",
        arrays: tuple[str, ...] = (),
        begin: float = 0.0,
    ) -> Submission:
        """Submit an array job. Returns the submission with its job id.

        Args:
            dependency: of a driver job, when it starts.
            arrays: ids of the arrays that its dependency names.
            begin: seconds before which it does not start.

        Raises:
            QueueFull, Refused: Slurm does not take it; nothing of it is left.
            Unclear: whether it was taken is unknown; the next pass looks for it by its name.
            SlurmTimeout: there was no time left to ask; nothing of it is left.
            LeaseLost: another driver is at work.
        """
        ledger = self.ledger
        self.beat()
        if not ledger.begin(submission):
            raise LeaseLost(f"{ledger.file(submission)} was taken by another driver")
        self._make_logs(submission)
        delay = math.ceil(max(begin, escalation.delay))
        try:
            job = self._hand_over(submission, escalation, dependency, f"now+{delay}" if delay else "")
        except Refused as error:
            ledger.forget(submission)
            journal.event(self.run.paths.events, "refused", array=submission.name, message=str(error))
            raise
        except Unclear:
            ledger.note(submission, State(None, arrays))
            raise
        except SlurmTimeout:
            ledger.forget(submission)
            raise
        note_submitted(self.run.paths, submission, job, dependency)
        return ledger.note(submission, State(job, arrays))

    def _make_logs(self, submission: Submission) -> None:
        """Make the folder of its log, and the file that Slurm opens where that is gone."""
        make_folder(log_folder(self.run, submission), self.run.paths.root)
        if not is_there(self.run.paths.slurm_log):
            make_slurm_log(self.run.paths)

    def _hand_over(self, submission: Submission, escalation: Escalation, dependency: str, begin: str) -> str:
        """Call sbatch and return the job id. A refused request is tried again without its escalation."""
        stage = submission.job_kind if submission.is_of_stage else DRIVER
        partitions = resources_of(self.config, stage).partition
        longest = self.longest(partitions) if escalation.time_factor > 1 else None
        array = array_of(self.run, self.config, submission, escalation, longest, dependency, begin)
        script = self.ledger.script(submission)
        script.write_text(render(array))
        try:
            return submit_once(script)
        except QueueFull:
            raise
        except Refused:
            if escalation == Escalation():
                raise
            return self._hand_over(submission, Escalation(), dependency, begin)
