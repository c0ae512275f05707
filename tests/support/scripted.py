"""Runs on Slurm that need no machine: with every path given, so that what is rendered stays the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.compose import from_mapping
from pipeline.run.directory import Identity, Run
from pipeline.run.paths import RunPaths

ID = "0123456789ab"


def imagined_run(
    root: Path | str = "/runs/r1",
    scheduler: Mapping[str, Any] | None = None,
    folder: str = "/home/u",
    **more: Any,
) -> Run:
    """Not on disk. Unless ``scheduler`` says otherwise, each task has a job of its own."""
    config = {
        "name": "r1",
        "run_dir": str(root),
        "iterations": 4,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "heldout": "/heldout", "prompts_per_iteration": 8},
        "rollout": {"num_shards": 4},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "evaluate": {"every": 2},
        "scheduler": {"kind": "slurm", "workers": False, "python": "/env/bin/python", **(scheduler or {})},
        **more,
    }
    return Run(RunPaths(Path(root)), from_mapping(config), Identity(ID, "r1", 0.0, "", "1", folder))
