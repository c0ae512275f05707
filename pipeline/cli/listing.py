"""``slurm-ppo ls``: which runs there are, and how far."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from pipeline.status.listing import Entry, find_places, read_entries
from pipeline.status.listing_text import describe

_USUAL = Path("runs")
"""Folder where runs lie unless their settings say otherwise."""
SCHEMA = 1


def list_runs(folder: Path | None, as_json: bool) -> str:
    """Return the list of runs below a folder, as text or JSON. Raises UserError: there is no such folder."""
    folder = folder or (_USUAL if _USUAL.is_dir() else Path())
    entries = entries_of(folder)
    if as_json:
        content = {"schema": SCHEMA, "folder": str(folder), "runs": [asdict(entry) for entry in entries]}
        return json.dumps(content, indent=1)
    if not entries:
        return f"no runs in {folder.absolute()}; another folder: slurm-ppo ls DIR"
    return describe(entries, folder)


def entries_of(folder: Path) -> list[Entry]:
    """Read the runs below a folder, and ask Slurm for theirs."""
    return read_entries(find_places(folder), live_runs)


def live_runs(cluster: str) -> Collection[str] | None:
    """Ask Slurm for the ids of runs that have jobs in a cluster's queue; None where it does not answer."""
    from pipeline.executors.slurm.queue import live_run_ids

    return live_run_ids(cluster)
