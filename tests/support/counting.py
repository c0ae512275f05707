"""Counts calls of Slurm's commands, of whatever process: wrappers in front of them on PATH note each.

A folder of wrappers goes before the real commands in the environment of whoever submits a run; its jobs
inherit that. Each call is a line of a file, appended in one write, so that those of many processes are whole.
"""

import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUERIES = ("squeue", "sacct", "sinfo", "sacctmgr")
"""Commands that only ask; ``scontrol show`` does as well."""
COMMANDS = (*QUERIES, "scontrol", "sbatch", "scancel")
_WRAPPER = """#!/bin/sh
# In front of the real {name}: notes when it is called, and with which first words.
printf '%s {name} %s %s\\n' "$(date +%s.%N)" "$1" "$2" >>{log}
exec {real} "$@"
"""


@dataclass(frozen=True)
class Call:
    """A call of one of Slurm's commands."""

    time: float
    """Unix time."""
    program: str
    words: tuple[str, ...]
    """Its first two words."""

    @property
    def is_query(self) -> bool:
        return self.program in QUERIES or (self.program == "scontrol" and self.words[:1] == ("show",))


@dataclass(frozen=True)
class Counting:
    """Wrappers, and the file that they write."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "calls.txt"

    def environment(self, given: dict[str, str]) -> dict[str, str]:
        """Return an environment in which the wrappers are found first."""
        return given | {"PATH": f"{self.folder}{os.pathsep}{given['PATH']}"}

    def calls(self) -> list[Call]:
        """Return the calls so far, oldest first."""
        found = []
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            moment, program, *words = line.split()
            found.append(Call(float(moment), program, tuple(words)))
        return sorted(found, key=lambda call: call.time)


def put_in_front(folder: Path, path: str, commands: Sequence[str] = COMMANDS) -> Counting:
    """Make wrappers of the commands that are found on ``path``, in a folder of their own."""
    folder.mkdir(parents=True)
    counting = Counting(folder)
    for name in commands:
        if real := shutil.which(name, path=path):
            file = folder / name
            file.write_text(_WRAPPER.format(name=name, log=counting.log, real=real))
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return counting


def most_in_a_minute(calls: Iterable[Call]) -> tuple[int, Counter[str]]:
    """Return how many queries there were in the busiest minute, and which. Pure."""
    queries = sorted((call for call in calls if call.is_query), key=lambda call: call.time)
    best: Sequence[Call] = ()
    first = 0
    for last, call in enumerate(queries):
        while call.time - queries[first].time >= 60:
            first += 1
        if last + 1 - first > len(best):
            best = queries[first : last + 1]
    return len(best), Counter(call.program for call in best)
