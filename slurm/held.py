"""Jobs that are held: they wait until somebody releases them, and by themselves never start."""

from collections.abc import Iterable

from slurm.query import Element

_BY_USER = frozenset({"jobhelduser", "jobrequeuedinheldstate", "jobholdmaxrequeue"})
_BY_ADMIN = frozenset({"jobheldadmin"})
_MOST_NAMED = 4


def way_to_release(waiting: Iterable[Element]) -> str | None:
    """Return what lets held elements start, in words; None where none of these is held. Pure."""
    held = {element.array_id: _bare(element.reason) for element in waiting}
    own = sorted((job for job, reason in held.items() if reason in _BY_USER), key=int)
    others = sorted((job for job, reason in held.items() if reason in _BY_ADMIN), key=int)
    told = [f"to let it start: scontrol release {_some(own)}"] if own else []
    told += [f"to let it start an administrator types: scontrol release {_some(others)}"] if others else []
    return "; ".join(told) or None


def _bare(reason: str) -> str:
    """Return a reason as the same word in every version of Slurm, and option of squeue."""
    return reason.strip("()").replace("_", "").replace(" ", "").lower()


def _some(jobs: list[str]) -> str:
    more = len(jobs) - _MOST_NAMED
    return " ".join(jobs[:_MOST_NAMED]) + (f" (and {more} more)" if more > 0 else "")
