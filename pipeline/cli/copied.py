"""A copy of a run that is to go on: it is given an id of its own, unless the original is
active, which it would compute the same as."""

import contextlib
import re
import shlex
import sys
from pathlib import Path

from pipeline.cli.errors import will_change
from pipeline.orchestrate.independence import make_independent
from pipeline.run.directory import Run, load_run, shown
from pipeline.run.identity import RunError
from pipeline.run.lease import holder_of
from pipeline.run.originals import find_original
from pipeline.run.place import is_elsewhere, original_of
from slurm.commands import on_cluster


def as_own(run: Run) -> Run:
    """Return the run; a copy gets an id of its own first, with a message.

    Raises:
        RunError: it is a copy of an active run; names the ways out.
    """
    original = original_of(run)
    if original is None:
        check_is_the_only_one(run)
        return run
    if alive := _why_alive(original):
        raise RunError(_refusal(run.paths.root, original, alive))
    will_change("an id of the copy's own")
    own = make_independent(run)
    print(
        f"{shown(run.paths.root)} is a copy of {shown(original)}, and goes on as a run of its own, with id "
        f"{own.identity.id}; the original keeps its jobs and its run on W&B",
        file=sys.stderr,
    )
    return own


def check_is_the_only_one(run: Run) -> None:
    """Refuse a run of which another copy, somewhere else, goes on as it too: jobs that have its id were
    submitted from there. Raises RunError."""
    if not run.config.slurm:
        return
    from pipeline.executors.slurm.queue import look_at_queue
    from pipeline.run.submissions import Ledger

    live = {element.name: element.array_id for element in look_at_queue(run, patience=_PATIENCE).live}
    others = sorted(live.keys() - {one.name for one in Ledger(run.paths).named(live)})
    if not others:
        return
    there = _submitted_from(live[others[0]], run)
    if there is None and not is_elsewhere(run):  # its files of them are gone, or were moved aside
        return
    place = "another directory" if there is None else shown(there)
    raise RunError(
        f"{shown(run.paths.root)} has the id of a run whose jobs were submitted from {place} "
        f"({len(others)} of them are in the queue): one is a copy of the other, or both of a third\n"
        f"{_for_that(there, live[others[0]])}; to go on beside it: "
        f"slurm-ppo fork {shlex.quote(shown(run.paths.root))}@ITERATION NEW_RUN"
    )


def _submitted_from(job: str, run: Run) -> Path | None:
    """Return the directory of another run with the same id that a job was submitted from; None where there is
    none, or Slurm does not say."""
    from slurm.commands import SlurmError, SlurmMissing, run_command

    try:
        with on_cluster(run.cluster):
            text = run_command(["scontrol", "-o", "show", "job", job], timeout=_PATIENCE)
    except (SlurmError, SlurmMissing):
        return None
    script = Path(found[1]) if (found := _COMMAND.search(text)) else Path()
    if len(script.parents) < _DEPTH:
        return None
    with contextlib.suppress(OSError):
        return find_original(str(script.parents[_DEPTH - 1]), run.paths.root, run.identity.id)
    return None


_COMMAND = re.compile(r" Command=(/.*?) WorkDir=")
_DEPTH = 3
"""Folders of a batch script in a run: slurm/00007/rollout-1-0.sh."""


def _for_that(there: Path | None, job: str) -> str:
    if there is None:
        return f"to find the other: scontrol show job {job} (Command=)"
    return f"for that: slurm-ppo status {shlex.quote(shown(there))}"


def _refusal(copy: Path, original: Path, alive: str) -> str:
    there, here = shlex.quote(shown(original)), shlex.quote(shown(copy))
    return (
        f"{shown(copy)} is a copy of {shown(original)}, which is active ({alive}), and would do the same\n"
        f"to go on from the original beside it: slurm-ppo fork {there}@ITERATION NEW_RUN\n"
        f"to go on with the copy instead: slurm-ppo cancel {there}; then: slurm-ppo resume {here}"
    )


def _why_alive(original: Path) -> str:
    """Return in words why the original is taken to be active; empty where nothing says so."""
    try:
        run = load_run(original)
        if holder_of(run.paths.locks):
            return "a driver holds its lease"
    except (RunError, OSError):  # another user's, or damaged
        return ""
    if not run.config.slurm:
        return ""
    from pipeline.executors.slurm.queue import look_at_queue

    queue = look_at_queue(run, patience=_PATIENCE)
    if queue.unanswered is not None:
        raise RunError(f"whether the run that it is a copy of is active is not known: {queue.unanswered}")
    return f"{len(queue.live)} of its jobs are in the queue" if queue.live else ""


_PATIENCE = 4.0
"""Seconds to wait for squeue."""
