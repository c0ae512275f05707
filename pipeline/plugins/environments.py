"""Tasks of environments: the prompts of a run that Python makes, in place of a file.

An environment is what its source returns, called with its arguments: an object with

    tasks(size: int, seed: int) -> Iterable of {"prompt": ..., "answer": ..., "metadata": ..., "tools": ...}
    score(response: str, metadata) -> float

It is made in a process of its own, in which strings hash the same on every machine. ``metadata`` goes as JSON
text with the prompt, to where responses are scored (:mod:`stages.rewards.environments`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.environment import EnvironmentComponentConfig, EnvironmentConfig
from pipeline.config.schema import Config
from pipeline.plugins.called import Plugin, PluginFailure
from pipeline.plugins.load import ENVIRONMENTS, PluginError
from pipeline.plugins.making import CHUNK_SECONDS, NUMBER_BYTES, Task, begin, make
from pipeline.plugins.sandbox import Calls, open_calls
from pipeline.run.schemas import ENVIRONMENT_ENTRY, ENVIRONMENT_TASK
from pipeline.run.seeds import derive_seed

_SEEDS = 2**31
"""Number of seeds that an environment is given: more than NumPy takes would be of no use."""

NamedTask = tuple[str, dict[str, Any]]
"""Name of a task, such as ``sums/17``, and its row: prompt, tools, and the columns that go with it."""


def training_tasks(config: Config, most: int | None = None) -> list[NamedTask]:
    """Make the tasks that a run trains on, those of its environments mixed evenly.

    Args:
        most: tasks of each environment that are enough, the first ones. Default: all.

    Raises:
        PluginError: an environment cannot be made, or one of its tasks, which is named.
    """
    made = _made_of(config)
    seed = config.seed if made.seed is None else made.seed
    return mixed(_tasks(made, made.shares, ("train", seed), most))


def heldout_tasks(config: Config, most: int | None = None) -> list[NamedTask]:
    """Make the held-out tasks of a run, as :func:`training_tasks` does."""
    made = _made_of(config)
    seed = config.seed if made.seed is None else made.seed
    seed = seed if made.heldout_seed is None else made.heldout_seed
    return mixed(_tasks(made, made.heldout_shares, ("heldout", seed), most))


def _made_of(config: Config) -> EnvironmentConfig:
    assert config.data.environment is not None
    return config.data.environment


def _tasks(
    made: EnvironmentConfig, shares: Mapping[str, int], seed: tuple[str, int], most: int | None
) -> dict[str, list[NamedTask]]:
    found = {}
    for name, size in shares.items():
        if size:
            own = derive_seed("environment", *seed, name) % _SEEDS
            found[name] = list(tasks_of(name, made, size, own, min(size, most or size)))
    return found


def mixed(tasks: Mapping[str, list[NamedTask]]) -> list[NamedTask]:
    """Return the tasks of all environments in one order, in every part of which each has its share."""
    placed = [
        ((index + 0.5) / len(some), order, task)
        for order, some in enumerate(tasks.values())
        for index, task in enumerate(some)
    ]
    return [task for _, _, task in sorted(placed, key=lambda one: one[:2])]


def tasks_of(
    name: str, made: EnvironmentConfig, size: int, seed: int, num_wanted: int
) -> Iterator[NamedTask]:
    """Yield the first tasks of one environment, of the ``size`` that it is asked for. Raises PluginError."""
    given = made.components[name]
    plugin = plugin_of(name, made)
    with open_calls(plugin, 1) as calls:
        if failure := calls.call(made.time_limit, begin, given.arguments, size, seed):
            raise PluginError(
                failure.text
                if failure.text.startswith(plugin.key)
                else f"{plugin.key}={given.source}: the environment cannot be made: it {failure.text}"
            )
        index = 0
        for index, task in enumerate(_made(calls, made, num_wanted), start=1):
            yield f"{name}/{index - 1}", row_of(f"{name}/{index - 1}", given, task)
        if index < num_wanted:
            why = f"made {index} tasks, and {size} were asked for"
            raise PluginError(f"{plugin.key}={given.source}: {why}; ask for fewer (size, weight)")


def _made(calls: Calls, made: EnvironmentConfig, num_wanted: int) -> Iterator[Task]:
    plugin, progress = calls.plugin, Path(calls.folder.name, "task")
    progress.write_bytes(bytes(NUMBER_BYTES))
    while num_wanted:
        asked = calls.ask(made.time_limit + CHUNK_SECONDS, make, num_wanted, str(progress))
        found = calls.answer(asked, made.time_limit)
        if isinstance(found, PluginFailure):
            index = int.from_bytes(progress.read_bytes()) if found.index is None else found.index
            raise PluginError(f"{plugin.key}={plugin.name}: its task {index} {found.text}")
        yield from found
        num_wanted = num_wanted - len(found) if found else 0


def plugin_of(name: str, made: EnvironmentConfig) -> Plugin:
    """Return the plug-in of an environment."""
    key = f"data.environment.components.{name}.source"
    return Plugin(key, made.components[name].source, ENVIRONMENTS, made.import_limit)


def row_of(name: str, given: EnvironmentComponentConfig, task: Task) -> dict[str, Any]:
    """Return a task as a row of prompts, with all that scoring a response takes."""
    source, arguments = json.dumps(given.source), json.dumps(given.arguments, sort_keys=True)
    entry = f'{{"source": {source}, "arguments": {arguments}, "metadata": {task.metadata}}}'
    kept = {"answer": task.answer, ENVIRONMENT_TASK: name, ENVIRONMENT_ENTRY: entry}
    return {"prompt": task.prompt, "tools": task.tools, **kept}
