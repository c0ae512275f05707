"""What runs in the processes of environments (:mod:`pipeline.plugins.environments`): making an environment,
and its tasks one after the other. Imports nothing but the standard library, so that the processes start fast.
"""

import mmap
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.plugins.called import Plugin, PluginFailure, loaded
from pipeline.plugins.interpreter.contract import Environment, MadeTask, raised
from pipeline.plugins.load import PluginError

CHUNK_SECONDS = 0.2
"""Seconds after which a call returns the tasks that it has."""
_CHUNK_TASKS = 1000
NUMBER_BYTES = 8
"""Bytes of the file that says which task is being made."""


@dataclass(frozen=True)
class Abilities:
    """Abilities of an environment beside tasks and scores."""

    has_step: bool
    """Whether it converses in several turns."""
    compares: bool
    """Whether its scores mean something only among those of a prompt's responses."""


@dataclass
class _Making:
    """Tasks that are being made in this process."""

    tasks: Iterator[Any] = field(default_factory=lambda: iter(()))
    num_made: int = 0


_making = _Making()


def opened(plugin: Plugin, arguments: Mapping[str, Any]) -> Any:
    """Make an environment, in this process or in one of its interpreter. Raises PluginError where it cannot
    be imported; and whatever the user's code raises."""
    function = loaded(plugin)
    if isinstance(function, PluginFailure):
        raise PluginError(function.text)
    made = function(**arguments)
    return made if plugin.is_hosted else Environment(made)


def begin(
    plugin: Plugin, arguments: Mapping[str, Any], size: int, seed: int, heldout: bool
) -> PluginFailure | Abilities:
    """Make the environment and begin its tasks. Returns what it can do, or why it cannot be."""
    function = loaded(plugin)
    if isinstance(function, PluginFailure):
        return function
    try:
        found = opened(plugin, arguments)
        _making.tasks, _making.num_made = iter(found.tasks(size, seed, heldout)), 0
    except BaseException as error:  # also SystemExit: the message has to name the environment
        return PluginFailure(raised(error), trace=traceback.format_exc(), is_users=True)
    return Abilities(found.has_step, found.compares)


def make(plugin: Plugin, num_wanted: int, progress: str) -> list[MadeTask] | PluginFailure:
    """Return the next tasks: up to ``num_wanted``, fewer where they take long, none where there are no more.

    Args:
        progress: file of 8 bytes that gets the number of the task that is being made, should it never end.
    """
    until, made = time.monotonic() + CHUNK_SECONDS, list[MadeTask]()
    with Path(progress).open("r+b") as file, mmap.mmap(file.fileno(), NUMBER_BYTES) as number:
        while not made or (len(made) < min(num_wanted, _CHUNK_TASKS) and time.monotonic() < until):
            number[:] = _making.num_made.to_bytes(NUMBER_BYTES)
            try:
                task = next(_making.tasks)
            except StopIteration:
                break
            except BaseException as error:
                trace = traceback.format_exc()
                return PluginFailure(raised(error), _making.num_made, trace, is_users=True)
            if isinstance(task, str):
                return PluginFailure(task, _making.num_made, is_users=True)
            made.append(task)
            _making.num_made += 1
    return made
