"""The ready rule that scores a response as the environment does that made its prompt.

Registered as ``environment``. What it needs goes with each prompt: the environment's source and interpreter,
its arguments, and what the environment keeps of the task.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from pipeline.plugins.called import Plugin
from pipeline.plugins.load import ENVIRONMENTS
from pipeline.plugins.making import opened
from pipeline.plugins.marks import rule


def open_all(environment_entry: Sequence[str]) -> None:
    """Make the environments of these tasks in this process."""
    for entry in dict.fromkeys(environment_entry):
        _environment(*_made_of(json.loads(entry)))


@rule(prepare=open_all)
def environment(
    *,
    responses: Sequence[str],
    environment_entry: Sequence[str],
    response_messages: Sequence[Any] | None = None,
    **columns: Any,
) -> list[Any]:
    """Score each response by its prompt's environment; those of a prompt together, where it compares them.

    Args:
        environment_entry: JSON text with source, arguments and metadata of each prompt's task.
        response_messages: messages that followed each prompt, in conversations of several turns.
    """
    messages = [None] * len(responses) if response_messages is None else response_messages
    rows = zip(environment_entry, responses, messages, strict=True)
    found: list[Any] = []
    for entry, same in groupby(rows, key=lambda row: row[0]):
        found += scores_of(entry, [(response, said) for _, response, said in same])
    return found


def scores_of(entry: str, said: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return what the environment says of responses to one task, which may be no numbers."""
    task = json.loads(entry)
    given = _made_of(task)
    made = _environment(*given)
    if getattr(made, "has_ended", False):
        _environment.cache_clear()
        made = _environment(*given)
    return list(
        made.scores(
            [
                {"response": text, "metadata": task["metadata"], "messages": messages}
                for text, messages in said
            ]
        )
    )


def _made_of(task: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Return source, interpreter, and arguments as JSON, of which an environment is made."""
    return task["source"], task.get("python"), json.dumps(task["arguments"])


@cache
def _environment(source: str, python: str | None, arguments: str) -> Any:
    plugin = Plugin("data.environment", source, ENVIRONMENTS, python=python)
    return opened(plugin, json.loads(arguments))
