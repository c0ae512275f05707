"""Tasks of environments: the prompts of a run that Python makes, in place of a file.

An environment is what its source returns, called with its arguments: an object with

    tasks(size: int, seed: int) -> Iterable of {"prompt": ..., "answer": ..., "metadata": ..., "tools": ...}
    score(response: str, metadata) -> float

It is made in a process of its own, in which strings hash the same on every machine, and where it has one, in
an interpreter of its own (:mod:`pipeline.plugins.hosted`). ``metadata`` goes as JSON text with the prompt, to
where conversations go on (:mod:`stages.generation.environments`) and responses are scored
(:mod:`stages.rewards.environments`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.environment import (
    HELDOUT_TASKS_KEY,
    TASKS_KEY,
    EnvironmentComponentConfig,
    EnvironmentConfig,
)
from pipeline.config.reward import ENVIRONMENT_RULE, RowsPerCall, RuleConfig
from pipeline.config.rollout import ENVIRONMENT_SCHEDULER
from pipeline.config.schema import Config
from pipeline.config.shares import mixed
from pipeline.plugins.called import Plugin, PluginFailure
from pipeline.plugins.interpreter.contract import MadeTask
from pipeline.plugins.load import ENVIRONMENTS, MissingImport, PluginError
from pipeline.plugins.making import CHUNK_SECONDS, NUMBER_BYTES, Abilities, begin, make
from pipeline.plugins.sandbox import Calls, open_calls
from pipeline.run.schemas import ENVIRONMENT_ENTRY, ENVIRONMENT_TASK
from pipeline.run.seeds import derive_seed

_SEEDS = 2**31
"""Number of seeds that an environment is given: more than NumPy takes would be of no use."""

NamedTask = tuple[str, dict[str, Any]]
"""Name of a task, such as ``sums/17``, and its row: prompt, tools, and the columns that go with it."""


def made_tasks(config: Config, most: int | None = None) -> dict[str, list[NamedTask]]:
    """Make the tasks of a run, those of its environments mixed evenly, by the key that says how many. Without
    environments there are none; held-out ones are made only if something is evaluated.

    Args:
        most: tasks of each environment that are enough, the first ones. Default: all.

    Raises:
        PluginError: an environment cannot be made, or one of its tasks, which is named.
        MissingImport: a package is not on this machine.
    """
    made = config.data.environment
    if made is None:
        return {}
    sets = task_sets(made, config.seed, bool(config.evaluate.every))
    found: dict[str, dict[str, list[NamedTask]]] = {one.key: {} for one in sets}
    seen: list[Abilities] = []
    for name, given in made.components.items():
        with open_calls(plugin_of(name, made), 1) as calls:
            for one in sets:
                tasks = tasks_of(name, given, calls, one, made.time_limit, most, seen.append)
                found[one.key][name] = list(tasks)
        check_abilities(config, f"{calls.plugin.key}={given.source}", seen[-1])
    check_converses(config, seen)
    return {key: mixed(tasks) for key, tasks in found.items()}


@dataclass(frozen=True)
class TaskSet:
    """Tasks to train on, or held-out ones."""

    key: str
    """Key that says how many there are."""
    shares: Mapping[str, int]
    """How many, by environment."""
    seed: tuple[str, int]
    """Name and seed that seeds of environments are derived from."""

    def seed_of(self, name: str) -> int:
        """Return the seed of an environment's tasks."""
        return derive_seed("environment", *self.seed, name) % _SEEDS


def task_sets(made: EnvironmentConfig, seed: int, has_heldout: bool) -> list[TaskSet]:
    """Return the sets of tasks of a run with this seed."""
    seed = seed if made.seed is None else made.seed
    heldout = seed if made.heldout_seed is None else made.heldout_seed
    sets = [
        TaskSet(TASKS_KEY, made.shares, ("train", seed)),
        TaskSet(HELDOUT_TASKS_KEY, made.heldout_shares, ("heldout", heldout)),
    ]
    return sets if has_heldout else sets[:1]


def tasks_of(
    name: str,
    given: EnvironmentComponentConfig,
    calls: Calls,
    wanted: TaskSet,
    time_limit: float,
    most: int | None,
    note: Callable[[Abilities], None],
) -> Iterator[NamedTask]:
    """Yield the first tasks of one environment, after noting what else it can do. Raises PluginError."""
    source, size = f"{calls.plugin.key}={given.source}", wanted.shares[name]
    heldout = wanted.key == HELDOUT_TASKS_KEY
    found = calls.call(time_limit, begin, given.arguments, size, wanted.seed_of(name), heldout)
    if isinstance(found, PluginFailure):
        text = " ".join(found.text.split())
        is_named = text.startswith(calls.plugin.key)
        raise (MissingImport if found.is_elsewhere else PluginError)(
            text if is_named else f"{source}: as it is made, it {text}"
        )
    note(found)
    num_wanted, num_made = min(size, most or size), 0
    for task in _made(calls, num_wanted, time_limit):
        yield f"{name}/{num_made}", row_of(f"{name}/{num_made}", given, task)
        num_made += 1
    if num_made < num_wanted:
        why = f"it makes {num_made} tasks, and {size} are its share of {wanted.key}"
        raise PluginError(f"{source}: {why}; ask for fewer")


def _made(calls: Calls, num_wanted: int, time_limit: float) -> Iterator[MadeTask]:
    plugin, progress = calls.plugin, Path(calls.folder.name, "task")
    progress.write_bytes(bytes(NUMBER_BYTES))
    while num_wanted:
        asked = calls.ask(time_limit + CHUNK_SECONDS, make, num_wanted, str(progress))
        found = calls.answer(asked, time_limit)
        if isinstance(found, PluginFailure):
            index = int.from_bytes(progress.read_bytes()) if found.index is None else found.index
            raise PluginError(f"{plugin.key}={plugin.name}: its task {index} {' '.join(found.text.split())}")
        yield from found
        num_wanted = num_wanted - len(found) if found else 0


def plugin_of(name: str, made: EnvironmentConfig) -> Plugin:
    """Return the plug-in of an environment."""
    key = f"data.environment.components.{name}.source"
    given = made.components[name]
    return Plugin(key, given.source, ENVIRONMENTS, made.import_limit, given.python)


def check_converses(config: Config, found: Sequence[Abilities]) -> None:
    """Raise PluginError where environments are to converse, and none of them does."""
    given = config.rollout.multi_turn
    if given and given.scheduler == ENVIRONMENT_SCHEDULER and not any(one.has_step for one in found):
        key = f"rollout.multi_turn.scheduler={given.scheduler}"
        raise PluginError(f"{key}: no environment of the run has a method step(messages, metadata)")


def check_abilities(config: Config, source: str, found: Abilities) -> None:
    """Raise PluginError where an environment can do what the configuration makes no use of, and needs it."""
    if found.has_step and config.rollout.multi_turn is None:
        why = "it converses in several turns; set rollout.multi_turn.scheduler=environment"
        raise PluginError(f"{source}: {why}")
    for name, rule in config.reward.components.items():
        if not found.compares or not isinstance(rule, RuleConfig) or rule.function != ENVIRONMENT_RULE:
            continue
        if rule.rows_per_call is RowsPerCall.RESPONSE:
            way_out = f"set reward.components.{name}.rows_per_call=prompt"
            raise PluginError(f"{source}: it compares the responses to a prompt; {way_out}")


def row_of(name: str, given: EnvironmentComponentConfig, task: MadeTask) -> dict[str, Any]:
    """Return a task as a row of prompts, with all that scoring a response takes."""
    source, arguments = json.dumps(given.source), json.dumps(given.arguments, sort_keys=True)
    python = "" if given.python is None else f'"python": {json.dumps(given.python)}, '
    entry = f'{{"source": {source}, {python}"arguments": {arguments}, "metadata": {task.metadata}}}'
    kept = {"answer": task.answer, ENVIRONMENT_TASK: name, ENVIRONMENT_ENTRY: entry}
    return {"prompt": task.prompt, "tools": task.tools, **kept}
