"""Array jobs from tasks: names, task lists, log patterns, sbatch options. Pure, except for time stamps."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.config.schema import NO_NAME
from pipeline.executors.slurm.resources import Escalation, command_words, python_words, sbatch_options
from pipeline.run.bookkeeping import passes_log
from pipeline.run.directory import Run
from pipeline.run.invocation import common_arguments, own_arguments
from pipeline.run.submissions import Ledger, Submission, chunks_of, job_name
from pipeline.run.tasks import Stage, Task
from slurm.commands import REMEMBER_BEFORE
from slurm.requests import attending
from slurm.setup_lines import checked
from slurm.submission import Array, literal
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
                *(invocation, tasks[0].iteration, tasks[0].job_kind, number, chunk),
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
        *(invocation, 0, job_kind, number, 0),
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
    # Runs that were given no name of their own are told apart by their folders.
    given = run.identity.name
    known = run.paths.root.name if given == NO_NAME else given
    name = job_name(known, run.identity.id, iteration, job_kind, number, chunk)
    return Submission(
        name, iteration, job_kind, number, chunk, invocation=invocation, created=time.time(), **content
    )


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
            # A driver job goes on: a run that none advances has nobody to tell what went wrong.
            *checked(given.setup or (), ends_job=submission.is_of_stage),
            *(attending_to(run, config, given) if submission.is_of_stage else ()),
        ),
        environment=given.environment,
        dependency=dependency,
        begin=begin,
    )


_OF_WORKERS = (REMEMBER_BEFORE, "trap '' USR1", f"export {STARTED}=$(date +%s)")
"""Shell lines of workers, before anything else. What is set up for them is not for jobs of other stages,
which the passes that they make submit. Whoever commits rings the arrays that wait for it: a signal
that would end an element which starts up. And what is set up is part of what a start takes."""


def attending_to(run: Run, config: SlurmConfig, given: ResourcesConfig) -> list[str]:
    """Return shell lines that make passes and ring for workers which cannot do so: in a container, or with
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
