"""The task list of an array job: what each of its elements runs, as :mod:`slurm.element` reads it. The task of
a worker's element is the first of several."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ATTEMPT = "{attempt}"
"""Word among the arguments that stands for the attempt's id."""
BELL = "SLURM_PPO_BELL"
"""Variable that names the file descriptor to which a running task may write the bytes below."""
ELIGIBLE = "SLURM_PPO_ELIGIBLE"
"""Variable that tells a worker since when it could have started (unix time)."""
KNOWN = "SLURM_PPO_KNOWN"
"""Variable that tells a worker the number of the newest claim on its first task that its driver knew of."""
STARTED = "SLURM_PPO_STARTED"
"""Variable that tells a worker when its job started, before anything that its script sets up (unix time)."""
COMMITTED, RELEASED = b"c", b"r"
"""What a task says: its result is committed; its devices are free, and only files are still written."""


@dataclass(frozen=True)
class Assignment:
    """One task of an array element."""

    arguments: tuple[str, ...]
    """Arguments of this task alone; they name its own failure file."""
    log: str = ""
    """Path of the file for its output; empty: the output of the job."""


@dataclass(frozen=True)
class TaskList:
    """Content of an array's task list, a JSON object.

    An element of one task is a list of that task's arguments, and writes to the job's output. An element of
    several is a list of objects with the fields of :class:`Assignment`; they run one after the other.
    """

    module: str
    """Module that is run for every task."""
    arguments: tuple[str, ...]
    """Arguments common to all tasks."""
    elements: Mapping[str, tuple[Assignment, ...]]
    """Tasks by array index."""
    number: int
    """Number of the submission, which begins the ids of its attempts."""
    max_restarts: int
    """Number of times that an element may be restarted before it gives up."""
    eligible: float = 0.0
    """Unix time from which it could have started: its submission, or its begin time if that is later."""

    known: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest claim on its task that the driver knew of, by array index; none is 0."""

    @staticmethod
    def of(content: Mapping[str, Any]) -> "TaskList":
        """Read a JSON object; what else it holds is the driver's.

        Raises:
            KeyError, TypeError: it is no task list.
        """
        return TaskList(
            module=content["module"],
            arguments=tuple(content["arguments"]),
            elements={index: _assignments(given) for index, given in content["elements"].items()},
            number=content["number"],
            max_restarts=content["max_restarts"],
            eligible=max(float(content.get("created", 0.0)), float(content.get("begins") or 0.0)),
            known={index: int(number) for index, number in content.get("known", {}).items()},
        )

    def words(self, assignment: Assignment, attempt: str) -> list[str]:
        """Return the module and arguments of one attempt."""
        words = (self.module, *self.arguments, *assignment.arguments)
        return [attempt if word == ATTEMPT else word for word in words]


def _assignments(given: list[Any]) -> tuple[Assignment, ...]:
    if given and isinstance(given[0], dict):
        return tuple(Assignment(tuple(one["arguments"]), one.get("log", "")) for one in given)
    return (Assignment(tuple(given)),)


def attempt_id(number: int, job: str, index: str, restarts: int, position: int = 0) -> str:
    """Return the id of an attempt like ``2-4711_3r0``: no other start of an element, and no other of its
    tasks, has it.

    Args:
        number: number of the submission.
        job: Slurm's id of the array.
        index: index of the element in it.
        restarts: number of times that Slurm has restarted the element.
        position: position of the task in its element, or of the attempt among its worker's; the first one's
            id does not show it.
    """
    return f"{number}-{job}_{index}r{restarts}" + (f".{position}" if position else "")
