"""Ids of attempts: ``2-4711_3r0`` on Slurm (number at its task, array element, restart count; ``.1`` after it
for the second task of an element or worker, see :mod:`slurm.tasklist`), ``2-9f3a`` elsewhere.
"""

import os
import re
from typing import NamedTuple

_FORMAT = re.compile(r"(\d+)(?:\Z|-(?:(\d+)_\d+r(\d+)(?:\.\d+)?\Z)?)")


class AttemptId(NamedTuple):
    """Parts of an attempt's id."""

    number: int
    """Number of the attempt at its task, which names the folder of its log; 0 if the id has none."""
    job: str = ""
    """Id of Slurm's array job; empty elsewhere."""
    restart: int = 0
    """Times that Slurm had restarted the job."""

    @staticmethod
    def parse(text: str) -> "AttemptId":
        """Read an id, or a number alone. One without a number, as a fork's first commit has, gets 0."""
        found = _FORMAT.match(text)
        return AttemptId(int(found[1]), found[2] or "", int(found[3] or 0)) if found else AttemptId(0)


def new_attempt(number: int) -> str:
    """Return the id of a new attempt as a process of this machine."""
    return f"{number}-{os.urandom(4).hex()}"
