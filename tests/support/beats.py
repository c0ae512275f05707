"""Beats of workers, written by hand."""

from dataclasses import asdict, replace

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Beat, Doing
from slurm.sharedfiles import sealed


def beat(worker: str, job_kind: str = "rollout", doing: Doing = Doing.BUSY, **more: object) -> Beat:
    """A worker that began at 0, started up for 10 s, and said this at 1000."""
    given = Beat(worker, job_kind, "gpu07", 40, 0.0, doing, since=900.0, beat=1000.0, startup_seconds=10.0)
    return replace(given, **more)


def write_beats(paths: RunPaths, *beats: Beat) -> None:
    folder = paths.slurm / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    for one in beats:
        (folder / f"{one.worker}.json").write_text(sealed(asdict(one)))
