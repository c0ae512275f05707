"""Runs on Slurm that need no machine: with every path given, so that what is rendered stays the same."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.compose import from_mapping
from pipeline.executors.slurm.dry_run import scripts
from pipeline.run.directory import Run
from pipeline.run.identity import Identity
from pipeline.run.paths import RunPaths
from tests.support import ROOT

GOLDEN = ROOT / "tests/golden/scripts"
ID = "0123456789ab"


def imagined_run(
    root: Path | str = "/runs/r1",
    scheduler: Mapping[str, Any] | None = None,
    folder: str = "/home/u",
    **more: Any,
) -> Run:
    """Not on disk."""
    config = {
        "name": "r1",
        "run_dir": str(root),
        "iterations": 4,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "heldout": "/heldout", "prompts_per_iteration": 8},
        "rollout": {"num_shards": 4},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "evaluate": {"every": 2},
        "scheduler": {"kind": "slurm", "python": "/env/bin/python", **(scheduler or {})},
        **more,
    }
    return Run(RunPaths(Path(root)), from_mapping(config), Identity(ID, "r1", 0.0, "", "1", folder))


def rendered(run: Run) -> dict[str, str]:
    """The scripts of a dry run, by their files' names."""
    found = re.split(r"^### (.*)\n", scripts(run), flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {"-".join(Path(name).parts[-2:]): text.split("\nThis was a dry run")[0] for name, text in pairs}


def pinned(kind: str, found: Mapping[str, str]) -> dict[str, str]:
    """The scripts of a kind of run that were pinned, by their files' names; with PIN=1 pins these first."""
    folder = GOLDEN / kind
    if os.environ.get("PIN"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in found.items():
            (folder / name).write_text(text)
    return {path.name: path.read_text() for path in folder.iterdir()}
