"""The contract of environments: what their objects are asked for, and what their tasks may be.

It is the same in this interpreter and in one of an environment's own (:mod:`.serve`). So it imports nothing
but the standard library, nothing of this package either, and runs on Python 3.10 and later.
"""

import inspect
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEYS = ("prompt", "answer", "metadata", "tools")
"""Keys that a task may have."""
METHODS = (("tasks", "size, seed"), ("score", "response, metadata"))
"""Methods that an environment has, with their arguments. ``step(messages, metadata)`` and
``score_group(responses, metadata)`` are optional."""
MOST_LEVELS = 100
"""Levels of a value in metadata, messages or tools: readers of JSON take some hundreds at most."""

_NO_JSON = "JSON text cannot give back as they are"
_USE = "use dictionaries with keys of text, lists, text, finite numbers, true, false and null"


class DescribedError(Exception):
    """A failure whose text says what happened and where, to be read after the name of what failed."""


@dataclass(frozen=True)
class MadeTask:
    """A task of an environment, in plain values."""

    prompt: "str | list[Any]"
    answer: "str | None"
    """A right response, where the environment knows one."""
    tools: Any
    metadata: str
    """JSON text of what the environment needs to score a response."""


class Environment:
    """An environment in this process.

    Args:
        made: what a source has returned.

    Raises:
        TypeError: it lacks a method of :data:`METHODS`.
    """

    def __init__(self, made: Any) -> None:
        for name, given in METHODS:
            if not callable(getattr(made, name, None)):
                raise TypeError(f"returned {type(made).__name__} without a method {name}({given})")
        self._made = made
        self._scores_groups = callable(getattr(made, "score_group", None))
        self.has_step = callable(getattr(made, "step", None))
        """Whether it says what follows a turn of the policy."""
        self.compares = bool(getattr(made, "compares", False))
        """Whether its scores mean something only among those of a prompt's responses."""

    def tasks(self, size: int, seed: int, heldout: bool) -> "Iterator[MadeTask | str]":
        """Yield tasks in plain values, or what is wrong with one; the same ones for the same seed, also where
        they are drawn by Python's or NumPy's own generator."""
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        chosen = {"heldout": heldout} if takes(self._made.tasks, "heldout") else {}
        return map(task_of, self._made.tasks(size=size, seed=seed, **chosen))

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what the environment says of responses to one task, which may be no numbers.

        Args:
            rows: ``response``, ``metadata`` and, of conversations, ``messages`` that followed the prompt.
        """
        if not self._scores_groups:
            return [self._score(**row) for row in rows]
        values = {"responses": [row["response"] for row in rows], "metadata": rows[0]["metadata"]}
        if takes(self._made.score_group, "messages"):
            values["messages"] = [row.get("messages") for row in rows]
        return list(self._made.score_group(**values))

    def _score(self, response: str, metadata: Any, messages: Any = None) -> Any:
        given = {"messages": messages} if takes(self._made.score, "messages") else {}
        return self._made.score(response=response, metadata=metadata, **given)

    def step(self, messages: "list[dict[str, Any]]", metadata: Any) -> Any:
        """Return the messages to continue a conversation with, or None to stop.

        Args:
            messages: what followed the prompt, up to the policy's last turn.
        """
        return self._made.step(messages=messages, metadata=metadata)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a few built-in functions have no signature
        return False


def raised(error: BaseException) -> str:
    """Describe an exception and the line it came from."""
    if isinstance(error, DescribedError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {said_by(error)} at {last.filename}:{last.lineno}"


def said_by(error: BaseException) -> str:
    """Return the text of an exception, which may itself raise one."""
    try:
        return str(error)
    except Exception:
        return "an exception without a text"


def quoted(value: Any) -> str:
    """Return the beginning of a value's repr, which may raise an exception."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} without a text"


def task_of(row: Any) -> "MadeTask | str":
    """Return a task in plain values, or what is wrong with it."""
    if not isinstance(row, Mapping):
        return f"is {quoted(row)} instead of a dictionary with a prompt"
    if unknown := [key for key in row if key not in KEYS]:
        return f"has the unknown key {quoted(unknown[0])}; legal: {', '.join(KEYS)}"
    prompt, answer = row.get("prompt"), row.get("answer")
    if not isinstance(prompt, (str, list)):
        return f"has as prompt {quoted(prompt)} instead of text or a list of messages"
    if not isinstance(answer, (str, int, float, type(None))):
        return f"has as answer {quoted(answer)} instead of text"
    if plain_json([prompt, answer, row.get("tools")]) is None:
        return f"has a prompt, answer or tools that {_NO_JSON}, {quoted(row)}; {_USE}"
    metadata = plain_json(row.get("metadata"))
    if metadata is None:
        return f"has metadata that {_NO_JSON}, {quoted(row.get('metadata'))}; {_USE}"
    return MadeTask(prompt, None if answer is None else str(answer), row.get("tools"), metadata)


def plain_json(value: Any) -> "str | None":
    """Return a value's JSON text; None where reading it would give another value, or might fail."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text if _num_levels(value) <= MOST_LEVELS and json.loads(text) == value else None
    except (TypeError, ValueError, RecursionError):
        return None


def _num_levels(value: Any) -> int:
    """Count the levels of lists and dictionaries in each other, up to one more than :data:`MOST_LEVELS`."""
    count, level = 0, [value]
    while count <= MOST_LEVELS and (level := [one for one in level if isinstance(one, (list, dict))]):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        count += 1
    return count
