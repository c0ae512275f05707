"""Shared by tests: inputs, stand-ins for services, helpers. No test imports another test."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the checkout."""
ALONE = tuple(
    f"scheduler.{stage}.{word}"
    for stage in ("rollout", "reward", "update", "evaluate")
    for word in ("linger=0", "start_early=false")
)
"""Words of a run on Slurm whose tasks have a job each."""
