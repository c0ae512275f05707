"""Whether the queue that is asked here would show the jobs of a run on Slurm.

squeue is asked for the jobs of who types the command, on the cluster that this machine belongs to: of a run
of somebody else, or on another cluster, it shows none, whatever works at it.
"""

import time

from pipeline.run.directory import Run
from pipeline.run.identity import RunError
from pipeline.run.standpoint import check_is_ours
from pipeline.run.submissions import cluster_of
from pipeline.workers.living import SILENT_SECONDS, Crew
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, SlurmMissing
from slurm.limits import read_cluster_name


def check_is_seen_here(run: Run) -> None:
    """Refuse a run on Slurm whose jobs are not seen here, or may not be. Raises RunError."""
    _check_cluster_is_known(run)
    check_is_ours(run.paths, run.who_acts)
    _check_beats(run)


def _check_cluster_is_known(run: Run) -> None:
    """Check that Slurm says which cluster is asked here, where the run's has a name."""
    try:
        with on_cluster(run.cluster):
            if cluster_of(run.paths):
                read_cluster_name()
    except (SlurmError, SlurmMissing) as error:
        raise RunError(f"whether jobs of {run.paths.root} live is not known: {error}") from None


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
