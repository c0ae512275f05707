"""The command that forks a run: from its newest version that can be forked, into a folder that is free."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.run.commits import require_record
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier
from pipeline.run.retention import kept_versions
from pipeline.run.states import can_fork
from pipeline.run.versions import Version

_OF_A_FORK = ("policy", "critic", "trainer")


def nearest_parent(run: Run, iterations: int) -> Version | None:
    """Return the newest version that a fork of so many iterations can begin with, None where there is
    none."""
    updated = min(find_frontier(run.plan, run.paths).updated, iterations - 1)
    there = [one for one in kept_versions(run.paths, _OF_A_FORK) if one <= updated]
    number = next((one for one in reversed(there) if can_fork(run.paths, one)), None)
    return None if number is None else Version(run, require_record(run.paths, policy_maker(number)))


def fork_command(root: Path, parent: int, words: Sequence[str]) -> str:
    """Return the command that forks a version of a run, with settings."""
    return shlex.join(["slurm-ppo", "fork", f"{root}@{parent}", str(_free_name(root)), *words])


def _free_name(root: Path) -> Path:
    """Return a folder beside a run's that is not there."""
    number, name = 1, root.with_name(f"{root.name}-fork")
    while name.exists():
        number += 1
        name = root.with_name(f"{root.name}-fork{number}")
    return name
