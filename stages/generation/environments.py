"""The scheduler of conversations with the environments that made the prompts."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.plugins.hosted import HostedEnvironment, connect
from pipeline.plugins.interpreter.contract import DescribedError
from pipeline.run.schemas import ENVIRONMENT_ENTRY, ENVIRONMENT_TASK
from stages.context import UserError

_Made = tuple[str, str | None, str]
"""Source, interpreter, and arguments as JSON."""


class EnvironmentScheduler:
    """Returns what the prompt's environment says to a turn. Each environment has a process of its own."""

    def __init__(self, environments: Mapping[_Made, HostedEnvironment]) -> None:
        self._environments = environments

    def __call__(self, conversation: Any) -> Any:
        """Return the messages to continue with, or None: also for environments of one turn."""
        entry = json.loads(conversation.columns[ENVIRONMENT_ENTRY])
        environment = self._environments[_made_of(entry)]
        if not environment.has_step:
            return None
        return environment.step(conversation.response_messages, entry["metadata"])


@contextlib.contextmanager
def open_environments(entries: Sequence[str], workers: int) -> Iterator[EnvironmentScheduler]:
    """Start a process for each environment that made one of a task's prompts.

    Args:
        entries: JSON text of each prompt's task.
        workers: calls of a process at once.

    Raises:
        PluginError, UserError: an environment cannot be made.
    """
    wanted = dict.fromkeys(_made_of(json.loads(entry)) for entry in entries)
    with contextlib.ExitStack() as stack:
        yield EnvironmentScheduler({made: _started(made, workers, stack) for made in wanted})


def name_of_task(columns: Mapping[str, Any]) -> str:
    """Return the task of a prompt for messages; empty where no environment made it."""
    return f", task {columns[ENVIRONMENT_TASK]}" if ENVIRONMENT_TASK in columns else ""


def _made_of(entry: Mapping[str, Any]) -> _Made:
    return entry["source"], entry.get("python"), json.dumps(entry["arguments"])


def _started(made: _Made, workers: int, stack: contextlib.ExitStack) -> HostedEnvironment:
    source, python, arguments = made
    try:
        environment = connect("data.environment", source, python, workers)(**json.loads(arguments))
    except DescribedError as error:
        raise UserError(f"data.environment={source}: as it is made, it {error}") from error
    stack.callback(environment.close)
    return environment
