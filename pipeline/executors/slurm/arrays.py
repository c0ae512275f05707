"""Array jobs from tasks: names, task lists, log patterns, sbatch options, pure except for time stamps; and
their submission."""

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.config.schema import NO_NAME
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.resources import command_words, python_words, sbatch_options
from pipeline.run import journal
from pipeline.run.directory import Run, make_slurm_log
from pipeline.run.invocation import common_arguments, own_arguments
from pipeline.run.lease import LeaseLost
from pipeline.run.pass_requests import passes_log
from pipeline.run.submissions import Ledger, State, Submission, chunks_of, job_name, note_submitted
from pipeline.run.tasks import Stage, Task
from slurm.commands import REMEMBER_BEFORE, SlurmTimeout
from slurm.requests import attending
from slurm.setup_lines import checked
from slurm.sharedfiles import is_there, make_folder
from slurm.submission import Array, QueueFull, Refused, Unclear, literal, render, submit_once
from slurm.tasklist import ATTEMPT, STARTED

_MAX_RESTARTS = 20
"""Number of times that Slurm may restart a job before it counts as failed."""
_DRIVER_RESTARTS = 10_000
INPUT_SECONDS = "30"
"""Seconds that a task waits for inputs that are not there: caches of network filesystems may be as old."""


def stage_submissions(
    run: Run,
    invocation: int,
    number: int,
    tasks: Sequence[Task],
    chunk_size: int,
    begins: float | None = None,
    known: Mapping[Task, int] | None = None,
) -> list[Submission]:
    """Make an array for tasks of one job kind and iteration; several where arrays are too short.

    Args:
        begins: unix time before which they do not start.
        known: number of the newest claim on each task that has any.
    """
    made, known = [], known or {}
    for chunk, indices in chunks_of([task.shard for task in tasks], chunk_size).items():
        mine = {index: tasks[0]._replace(shard=index + chunk * chunk_size) for index in indices}
        made.append(
            _submission(
                run,
                invocation=invocation,
                iteration=tasks[0].iteration,
                job_kind=tasks[0].job_kind,
                number=number,
                chunk=chunk,
                chunk_size=chunk_size,
                module="stages.workers",
                arguments=(*common_arguments(run, tasks[0], ATTEMPT), "--patience", INPUT_SECONDS),
                elements={str(index): own_arguments(run, task, number) for index, task in mine.items()},
                max_restarts=_MAX_RESTARTS,
                begins=begins,
                known={str(index): known[task] for index, task in mine.items() if task in known},
            )
        )
    return made


def driver_submission(run: Run, invocation: int, job_kind: str, number: int) -> Submission:
    """Make the submission of a driver job, which advances the run."""
    return _submission(
        run,
        invocation=invocation,
        iteration=0,
        job_kind=job_kind,
        number=number,
        chunk=0,
        chunk_size=1,
        module="pipeline",
        arguments=("advance", str(run.paths.root)),
        elements={"0": ()},
        # It requeues itself, where its pass failed or the queue is full, as often as it takes.
        max_restarts=_DRIVER_RESTARTS,
    )


def _submission(
    run: Run, invocation: int, iteration: int, job_kind: str, number: int, chunk: int, **content: Any
) -> Submission:
    # Runs without a name of their own differ by their folders.
    given = run.identity.name
    known = run.paths.root.name if given == NO_NAME else given
    name = job_name(known, run.identity.id, iteration, job_kind, number, chunk)
    content |= {"created": time.time(), "settings": len(run.changes)}
    return Submission(name, iteration, job_kind, number, chunk, invocation=invocation, **content)


def array_of(
    run: Run,
    config: SlurmConfig,
    submission: Submission,
    escalation: Escalation,
    longest: float | None,
    dependency: str = "",
    begin: str = "",
) -> Array:
    """Build the array job of a submission, ready to be rendered."""
    given = resources_of(config, submission.job_kind if submission.is_of_stage else DRIVER)
    return Array(
        name=submission.name,
        indices=submission.indices,
        command=command_words(given, str(Ledger(run.paths).file(submission))),
        output=literal(run.paths.slurm_log) if submission.is_of_stage else os.devnull,
        folder=Path(run.identity.folder or run.paths.root),
        options=sbatch_options(given, escalation, longest),
        parallelism=given.array_parallelism,
        setup=(
            *(_OF_WORKERS if submission.is_of_stage else ()),
            *into_log(run, submission),
            # A driver job goes on: only it can report what went wrong.
            *checked(given.setup or (), ends_job=submission.is_of_stage),
            *(attending_to(run, config, given) if submission.is_of_stage else ()),
        ),
        environment=given.environment,
        dependency=dependency,
        begin=begin,
    )


_OF_WORKERS = (REMEMBER_BEFORE, "trap '' USR1", f"export {STARTED}=$(date +%s)")
"""Shell lines of workers, before anything else. What is set up for them is not for jobs of other stages,
which the passes that they make submit. A commit notifies the arrays that wait for it: a signal
that would end an element which starts up. And what is set up is part of what a start takes."""


def attending_to(run: Run, config: SlurmConfig, given: ResourcesConfig) -> list[str]:
    """Return shell lines that make passes and notify for workers which cannot do so: in a container, or with
    another Python than driver jobs have, which may be an image's."""
    driver = resources_of(config, DRIVER)
    if not given.container and given.python == driver.python:
        return []
    command = python_words(driver, "pipeline", "advance", str(run.paths.root), "--asked")
    return attending(passes_log(run.paths), command, driver.setup or (), driver.environment)


def into_log(run: Run, submission: Submission) -> list[str]:
    """Return shell lines that send a job's output to its log.

    Slurm's own ``--output`` is not used for that: Slurm does not start a job whose output it cannot open, on
    a full disk say, or where the node does not see a new folder yet. So it opens a file that is as old as the
    run, which takes the output of a job that cannot write its log. Of driver jobs, which nothing may keep
    from starting, it opens nothing.
    """
    folder = log_folder(run, submission)
    folders = shlex.join(["mkdir", str(folder.parent), str(folder)])
    return [
        *([] if submission.is_of_stage else [f"log={shlex.quote(str(run.paths.slurm_log))}", _INTO_LOG]),
        f"{folders} 2>/dev/null || :; log={shlex.quote(str(folder))}/{_log_name(submission)}",
        _INTO_LOG,
    ]


_INTO_LOG = 'if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi'


def _log_name(submission: Submission) -> str:
    """Return the name of the log of an element, as a word for a shell that knows its array index."""
    if not submission.is_of_stage:
        return f"{submission.job_kind}.log"
    if submission.job_kind == Stage.PREPARE:
        return f"{submission.task(0).file_stem}.log"
    first = submission.chunk * submission.chunk_size
    return f'shard-"$(printf %05d $((${{SLURM_ARRAY_TASK_ID-0}} + {first})))".log'


def log_folder(run: Run, submission: Submission) -> Path:
    if submission.job_kind == GUARD:  # one every few minutes, so all write to one log
        return run.paths.log_root / GUARD
    return submission.log_folder(run.paths)


# --- submitting ------------------------------------------------------------------------------------------

# Each array at most once: noted on disk before sbatch is called, and after.


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
            LeaseLost: another driver is running.
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
