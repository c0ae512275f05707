"""Checks of where a run's prompts come from, a file or environments. Looks at no file."""

from collections.abc import Iterator, Mapping

from pipeline.config.environment import EnvironmentConfig
from pipeline.config.issue import ConfigIssue
from pipeline.config.refill_rules import prompts_in_words
from pipeline.config.reward import ENVIRONMENT_RULE, RuleConfig
from pipeline.config.rollout import ENVIRONMENT_SCHEDULER
from pipeline.config.schema import PROMPTS_KEY, Config, DataConfig

_OF_FILES = ("prompt_column", "id_column", "tools_column", "columns", "split", "limit", "sort_by")
"""Keys of data that say how files are read."""


def source_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what is wrong with the choice between a file of prompts and environments."""
    data = config.data
    yield from _file_problems(config)
    if data.environment is None:
        yield from _rules_without_tasks(config)
        return
    for key in ("prompts", "heldout"):
        if getattr(data, key) is not None:
            why = f"data.environment makes the prompts; set data.{key}=null, or leave data.environment out"
            yield ConfigIssue.at(config, f"data.{key}", why)
    for key in _OF_FILES:
        if getattr(data, key) != DataConfig.__dataclass_fields__[key].default:
            why = "is for prompt files, and data.environment makes the prompts; leave it out"
            yield ConfigIssue.at(config, f"data.{key}", why)
    yield from _environment_problems(config, data.environment)


def _rules_without_tasks(config: Config) -> Iterator[ConfigIssue]:
    for name, component in config.reward.components.items():
        if isinstance(component, RuleConfig) and component.function == ENVIRONMENT_RULE:
            why = (
                "scores tasks of environments, and the run has none; "
                "give data.environment.components.NAME.source=..., or another rule"
            )
            yield ConfigIssue.at(component, "function", why, f"reward.components.{name}.")
    multi_turn = config.rollout.multi_turn
    if multi_turn and multi_turn.scheduler == ENVIRONMENT_SCHEDULER:
        why = "no environment makes the prompts; give data.environment.components.NAME.source=..."
        yield ConfigIssue.at(config, "rollout.multi_turn.scheduler", why)


def _file_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what is wrong with how files are read, and with several of them."""
    data, column = config.data, config.data.sort_column
    if column is not None and data.columns is not None and column not in data.columns:
        why = f"data.columns leaves it out; write data.columns=[{','.join([*data.columns, column])}]"
        yield ConfigIssue("data.sort_by", data.sort_by, why)
    files = data.prompts if isinstance(data.prompts, dict) else {}
    first = {path: name for name, path in reversed(files.items())}
    for name, path in files.items():
        if first[path] != name:
            why = f"is the file of {PROMPTS_KEY}.{first[path]} too; name each file once, and give it a weight"
            yield ConfigIssue(f"{PROMPTS_KEY}.{name}", path, why)
    if data.weights:
        yield from _problems_of_weights(config, files)


def _problems_of_weights(config: Config, files: Mapping[str, str]) -> Iterator[ConfigIssue]:
    data = config.data
    if not files:
        why = f"is for several files, and there are none by name; write {PROMPTS_KEY}.NAME=FILE for each"
        yield ConfigIssue("data.weights", _in_words(data.weights), why)
        return
    for name in sorted(data.weights.keys() - files.keys()):
        yield ConfigIssue(f"data.weights.{name}", data.weights[name], f"names no file of {PROMPTS_KEY}")
    for name in sorted(files.keys() - data.weights.keys()):
        yield ConfigIssue(f"data.weights.{name}", "null", "each file needs a weight, and this one has none")
    for name, share in config.prompt_shares.items():
        if not share:
            of = f"of {prompts_in_words(config)} prompts"
            yield ConfigIssue(f"data.weights.{name}", data.weights[name], f"{of} it gives none; raise either")


def _in_words(weights: Mapping[str, float]) -> str:
    return f"{{{', '.join(f'{name}: {weight:g}' for name, weight in weights.items())}}}"


def _environment_problems(config: Config, environment: EnvironmentConfig) -> Iterator[ConfigIssue]:
    sets = {"size": environment.shares}
    if config.evaluate.every:
        sets["heldout_size"] = environment.heldout_shares
    for key, shares in sets.items():
        if without := next((name for name, share in shares.items() if not share), None):
            total = getattr(environment, key)
            why = f"of data.environment.{key}={total} tasks it makes none; give a larger weight or {key}"
            weight = environment.components[without].weight
            yield ConfigIssue(f"data.environment.components.{without}.weight", weight, why)
