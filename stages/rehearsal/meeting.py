"""The ranks of a check meet, or say which of them did not come."""

import os

from torch import distributed as dist

from stages import ranks
from stages.rehearsal.answers import MissedRanks

MEETING_SECONDS = 120.0
"""Seconds for which ranks wait for each other: so few that the missing ones are named before the limit of the
check ends it."""
_ADVICE = (
    "see whether that rank's node is up, shares the filesystem, and can connect to the others (a firewall "
    "between nodes?); scheduler.STAGE.exclude leaves a node out"
)


def meet() -> None:
    """Join the other ranks of this check. Later calls do nothing. Raises MissedRanks, which names them, where
    some did not come in time."""
    try:
        ranks.start_distributed(MEETING_SECONDS)
    except (TimeoutError, dist.DistError) as error:
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        said = " ".join(str(error).split())
        raise MissedRanks(f"{said}; the ranks are on {nodes}" if nodes else said, _ADVICE) from error
