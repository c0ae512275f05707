"""Shared by tests: inputs, stand-ins for services, helpers. No test imports another test."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the checkout."""
COLD = ("scheduler.workers=false",)
"""Words of a run on Slurm whose tasks have a job each, submitted ahead of time with dependencies."""
