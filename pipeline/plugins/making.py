"""What runs in the processes of environments (:mod:`pipeline.plugins.environments`): making an environment,
and its tasks one after the other. Imports nothing but the standard library, so that the processes start fast.
"""

import json
import mmap
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.plugins.called import Plugin, PluginFailure, loaded, raised

KEYS = ("prompt", "answer", "metadata", "tools")
"""Keys that a task may have."""
CHUNK_SECONDS = 0.2
"""Seconds after which a call returns the tasks that it has."""
_CHUNK_TASKS = 1000
NUMBER_BYTES = 8
"""Bytes of the file that says which task is being made."""

_NO_JSON = "JSON text cannot give back as they are"
_USE = "use dictionaries with keys of text, lists, text, finite numbers, true, false and null"


@dataclass(frozen=True)
class MadeTask:
    """A task of an environment, in plain values."""

    prompt: str | list[Any]
    answer: str | None
    """A right response, where the environment knows one."""
    tools: Any
    metadata: str
    """JSON text of what the environment needs to score a response."""


@dataclass
class _Making:
    """Tasks that are being made in this process."""

    tasks: Iterator[Any] = field(default_factory=lambda: iter(()))
    num_made: int = 0


_making = _Making()


def environment_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Make an environment. Raises TypeError for what is none; and whatever the user's code raises."""
    found = function(**arguments)
    for name, given in (("tasks", "size, seed"), ("score", "response, metadata")):
        if not callable(getattr(found, name, None)):
            raise TypeError(f"returned {type(found).__name__} without a method {name}({given})")
    return found


def begin(plugin: Plugin, arguments: Mapping[str, Any], size: int, seed: int) -> PluginFailure | None:
    """Make the environment and begin its tasks. Returns why that cannot be; None if it can.

    What draws from Python's or NumPy's own generator draws the same each time, too.
    """
    function = loaded(plugin)
    if isinstance(function, PluginFailure):
        return function
    try:
        found = environment_of(function, arguments)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        _making.tasks, _making.num_made = iter(found.tasks(size=size, seed=seed)), 0
    except BaseException as error:  # also SystemExit: the message has to name the environment
        return PluginFailure(raised(error), trace=traceback.format_exc(), is_users=True)
    return None


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
                row = next(_making.tasks)
            except StopIteration:
                break
            except BaseException as error:
                trace = traceback.format_exc()
                return PluginFailure(raised(error), _making.num_made, trace, is_users=True)
            task = task_of(row)
            if isinstance(task, str):
                return PluginFailure(task, _making.num_made, is_users=True)
            made.append(task)
            _making.num_made += 1
    return made


def task_of(row: Any) -> MadeTask | str:
    """Return a task in plain values, or what is wrong with it."""
    if not isinstance(row, Mapping):
        return f"is {row!r:.80} instead of a dictionary with a prompt"
    if unknown := [key for key in row if key not in KEYS]:
        return f"has the unknown key {unknown[0]!r:.80}; legal: {', '.join(KEYS)}"
    prompt, answer = row.get("prompt"), row.get("answer")
    if not isinstance(prompt, str | list):
        return f"has as prompt {prompt!r:.80} instead of text or a list of messages"
    if not isinstance(answer, str | int | float | None):
        return f"has as answer {answer!r:.80} instead of text"
    if plain_json([prompt, answer, row.get("tools")]) is None:
        return f"has a prompt, answer or tools that {_NO_JSON}, {row!r:.80}; {_USE}"
    metadata = plain_json(row.get("metadata"))
    if metadata is None:
        return f"has metadata that {_NO_JSON}, {row.get('metadata')!r:.80}; {_USE}"
    return MadeTask(prompt, None if answer is None else str(answer), row.get("tools"), metadata)


def plain_json(value: Any) -> str | None:
    """Return a value's JSON text; None where reading it would give another value."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return text if json.loads(text) == value else None
    except (TypeError, ValueError, RecursionError):
        return None
