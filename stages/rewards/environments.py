"""The ready rule that scores a response as the environment does that made its prompt.

Registered as ``environment``. What it needs goes with each prompt: the environment's source, its arguments,
and what the environment keeps of the task.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from pipeline.plugins.load import ENVIRONMENTS, load_plugin
from pipeline.plugins.making import environment_of
from pipeline.plugins.marks import rule


@rule()
def environment(*, responses: Sequence[str], environment_entry: Sequence[str], **columns: Any) -> list[Any]:
    """Score each response by the ``score`` of its prompt's environment.

    Args:
        environment_entry: JSON text with source, arguments and metadata of each prompt's task.
    """
    return [score_of(response, entry) for response, entry in zip(responses, environment_entry, strict=True)]


def score_of(response: str, entry: str) -> Any:
    """Return what the environment says of a response, which may be no number."""
    task = json.loads(entry)
    made = _environment(task["source"], json.dumps(task["arguments"]))
    return made.score(response=response, metadata=task["metadata"])


@cache
def _environment(source: str, arguments: str) -> Any:
    function = load_plugin("data.environment", source, ENVIRONMENTS)
    return environment_of(function, json.loads(arguments))
