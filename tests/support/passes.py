"""Passes over runs as workers' processes make them, in this process."""

import os
from collections.abc import Callable
from pathlib import Path

from pipeline.run.bookkeeping import read_last, take_turns
from pipeline.run.paths import RunPaths


def take_turn(paths: RunPaths, make_pass: Callable[[], object]) -> bool:
    """Make the passes that are asked for now. Returns whether there were any."""
    before = read_last(paths).began
    with Path(os.devnull).open() as orders:  # its end, from the start
        take_turns(paths, make_pass, orders.fileno())
    return read_last(paths).began != before
