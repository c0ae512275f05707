"""Defaults of earlier versions: a saved configuration means what it meant to the version that wrote it."""

from typing import Any


def as_it_was_meant(saved: Any) -> Any:
    """Return a run's saved configuration with the keys that it lacks, where their defaults are others now.

    A saved configuration has every key that its version knew. Jobs of runs on Slurm that know no
    ``linger`` do one task each, submitted ahead of time; such a run goes on in the way in which it was begun.
    """
    scheduler = saved.get("scheduler") if isinstance(saved, dict) else None
    if not isinstance(scheduler, dict) or scheduler.get("kind") != "slurm" or "workers" in scheduler:
        return saved
    rollout = scheduler.get("rollout")
    if isinstance(rollout, dict) and "linger" in rollout:
        return saved
    return saved | {"scheduler": scheduler | {"workers": False}}
