"""Whether the queue that is asked here would show the jobs of a run on Slurm.

squeue is asked for the jobs of who types the command, on the cluster that this machine belongs to: of a run
of somebody else, or on another cluster, it shows none, whatever works at it.
"""

import os
import pwd
import time

from pipeline.run.directory import Run, RunError
from pipeline.run.submissions import cluster_of
from pipeline.workers.living import SILENT_SECONDS, Crew
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, SlurmMissing
from slurm.limits import read_cluster_name
from slurm.sharedfiles import is_there


def check_is_seen_here(run: Run) -> None:
    """Refuse a run on Slurm whose jobs are not seen here, or may not be. Raises RunError."""
    _check_owner(run)
    _check_cluster(run)
    _check_beats(run)


def _check_owner(run: Run) -> None:
    """Check that who types this has submitted the run: the newest invocation has replaced control.json."""
    control = run.paths.control
    owner = (control if is_there(control) else run.paths.run_json).stat().st_uid
    if owner != os.getuid():
        name = _name_of(owner)
        raise RunError(
            f"{run.paths.root} was submitted by {name}, whose jobs are not seen from here; {name} may do this"
        )


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _check_cluster(run: Run) -> None:
    """Check that this machine asks the cluster that the run was submitted to, where both have a name."""
    there = cluster_of(run.paths)
    try:
        with on_cluster(run.cluster):
            here = read_cluster_name() if there else ""
    except (SlurmError, SlurmMissing) as error:
        raise RunError(f"whether jobs of {run.paths.root} live is not known: {error}") from None
    if there and here and here != there:
        raise RunError(
            f"{run.paths.root} was submitted to cluster {there}, and this machine asks {here}; type this "
            f"on a machine of {there}"
        )


def _check_beats(run: Run) -> None:
    """Check that no worker was heard of just now, whoever has submitted it, and wherever it is."""
    now = time.time()
    live = Crew(run.paths).live(now).values()  # at a first look also of workers that have long been silent
    if heard := [beat for beat in live if now - beat.beat <= SILENT_SECONDS]:
        beat = max(heard, key=lambda beat: beat.beat)
        raise RunError(
            f"worker {beat.worker} of {run.paths.root}, on {beat.host}, was heard of "
            f"{max(0.0, now - beat.beat):.0f} s ago; wait for the run; if its jobs were just ended, for "
            f"{SILENT_SECONDS:.0f} s"
        )
