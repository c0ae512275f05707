"""Failure report of a run that cannot go on: task, place, Slurm's state, end of the log, how to continue."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pipeline.executors.slurm.queue import is_live, look_at_queue
from pipeline.run.directory import Run, resume_command
from pipeline.run.failures import FOR_PEOPLE, Failure
from pipeline.run.journal import tail
from pipeline.run.tasks import PREPARE
from pipeline.text import printable
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, SlurmMissing
from slurm.ended import NoAccounting, read_ended
from slurm.query import Element
from slurm.sharedfiles import is_there
from slurm.states import UnknownState, exit_in_words

TAIL_LINES = 20
_MOST_SHOWN = 3


def failure_block(run: Run, given_up: tuple[Failure, ...]) -> str:
    """Return the report: what failed, where, the end of its log, and the command to continue."""
    shown = given_up[:_MOST_SHOWN]
    endings = read_endings(run, [f.job for f in shown if f.job]) if run.config.slurm else {}
    return render_block(shown, endings, len(given_up) - len(shown), way_out(run, given_up))


def render_block(
    failures: Sequence[Failure], endings: Mapping[str, Element], num_more: int, way_out: str
) -> str:
    """Render the report. Reads the logs and nothing else."""
    lines = [line for failure in failures for line in describe_failure(failure, endings.get(failure.job))]
    more = [f"and {num_more} more tasks"] if num_more else []
    return "\n".join([*lines, *more, way_out])


def describe_failure(failure: Failure, ending: Element | None) -> list[str]:
    """Describe one task that was given up."""
    said = "\n".join(map(printable, failure.message.splitlines()))
    lines = [f"failed: {failure.task}, attempt {failure.attempt} ({failure.kind}): {said}"]
    if failure.job:
        lines.append(f"  {where(failure.job, failure.node, ending)}")
    log = Path(failure.log)
    if failure.log and is_there(log):
        lines += [f"  last lines of {log}:", *(f"  | {line}" for line in tail(log, TAIL_LINES))]
    elif failure.log:
        lines.append(f"  it left no log: {log}")
    return lines


def where(job: str, node: str, ending: Element | None) -> str:
    """Return a phrase like ``job 34_1 on node gpu07: FAILED, exit code 1``."""
    node = node or (ending.node if ending else "")
    place = f"job {job}" + (f" on node {node}" if node else "")
    return f"{place}: {state_in_words(ending)}" if ending else place


def state_in_words(ending: Element) -> str:
    """Return Slurm's state, with exit code or signal in words."""
    words = exit_in_words(ending.state, ending.exit_code or 0, ending.signal or 0)
    known = words.removesuffix(f"({ending.state})").strip()
    return str(ending.state) if known == str(ending.state).lower() else f"{ending.state}, {known}"


def read_endings(run: Run, jobs: Collection[str]) -> dict[str, Element]:
    """Look up ended array elements in squeue and sacct, by id like ``34_1``; none where Slurm is silent.

    Errors of Slurm are ignored: its view is the least of what the report says.
    """
    queue = look_at_queue(run, max_age=0.0)  # what it is asked for may have ended just now
    found = {f"{e.array_id}_{e.index}": e for e in queue.elements if not is_live(e)}
    missing = {job.partition("_")[0] for job in jobs if job not in found}
    with on_cluster(run.cluster), contextlib.suppress(SlurmError, SlurmMissing, NoAccounting, UnknownState):
        known = read_ended(missing) if missing and not queue.unanswered else {}
        found = {f"{array}_{index}": element for (array, index), element in known.items()} | found
    return {job: found[job] for job in jobs if job in found}


def way_out(run: Run, given_up: tuple[Failure, ...]) -> str:
    """Return the command to continue with, or what to mend first."""
    if not any(item.kind in FOR_PEOPLE for item in given_up):
        return f"nothing that was committed is lost; to continue: {resume_command(run)}"
    if not is_there(run.paths.task(PREPARE).record):
        return "nothing was committed: mend the settings and type the same command again"
    return (
        f"mend what the message names, then: {resume_command(run)} (settings are frozen; "
        "to change one, start a new run with another run_dir=...)"
    )
