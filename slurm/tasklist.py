"""The task list of an array job: what each of its elements runs, as :mod:`slurm.element` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ATTEMPT = "{attempt}"
"""Word among the arguments that stands for the attempt's id."""
PARENT_PIPE = "SLURM_PPO_PARENT_PIPE"
"""Variable that names the file descriptor of a pipe to the parent process, into which a running task may
write the bytes below."""
ELIGIBLE = "SLURM_PPO_ELIGIBLE"
"""Variable that tells a worker since when it could have started (unix time)."""
KNOWN = "SLURM_PPO_KNOWN"
"""Variable that tells a worker the number of the newest claim on its first task that its driver knew of."""
STARTED = "SLURM_PPO_STARTED"
"""Variable that tells a worker when its job started, before anything that its script sets up (unix time)."""
COMMITTED, RELEASED = b"c", b"r"
"""What a task says: its result is committed; its devices are free, and only files are still written."""


@dataclass(frozen=True)
class TaskList:
    """Content of an array's task list, a JSON object. A worker goes on with other tasks after its own."""

    module: str
    """Module that is run for every task."""
    arguments: tuple[str, ...]
    """Arguments common to all tasks."""
    elements: Mapping[str, tuple[str, ...]]
    """Arguments of each element's task alone, by array index."""
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
            elements={index: tuple(words) for index, words in content["elements"].items()},
            number=content["number"],
            max_restarts=content["max_restarts"],
            eligible=max(float(content.get("created", 0.0)), float(content.get("begins") or 0.0)),
            known={index: int(number) for index, number in content.get("known", {}).items()},
        )

    def words(self, index: str, attempt: str) -> list[str]:
        """Return the module and arguments of an attempt at an element's task."""
        words = (self.module, *self.arguments, *self.elements[index])
        return [attempt if word == ATTEMPT else word for word in words]


def attempt_id(number: int, job: str, index: str, restarts: int, position: int = 0) -> str:
    """Return the id of an attempt like ``2-4711_3r0``: no other start of an element, and no other attempt of
    its worker, has it.

    Args:
        number: number of the submission.
        job: Slurm's id of the array.
        index: index of the element in it.
        restarts: number of times that Slurm has restarted the element.
        position: position of the attempt among its worker's; the first one's id does not show it.
    """
    return f"{number}-{job}_{index}r{restarts}" + (f".{position}" if position else "")
