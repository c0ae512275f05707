"""A configuration made ready to run: paths absolute, gaps filled, refused where it cannot work. No torch."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.compose import compose_what_can_be
from pipeline.config.environment_rules import source_problems
from pipeline.config.evaluate_rules import missing_programs
from pipeline.config.findings import Findings, without_problems
from pipeline.config.hardware import decide, facts_of, has_auto, in_words, with_decisions
from pipeline.config.home import why_no_home
from pipeline.config.hub import Kind, located, way_to_have
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.model_files import position_limit, text_settings
from pipeline.config.model_rules import model_problems, used_models
from pipeline.config.reward import RemoteConfig, RewardModelConfig
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import CLUSTERS
from pipeline.config.schema import Config

_PATHS = {
    "run_dir": None,
    "model.policy": Kind.MODEL,
    "model.reference": Kind.MODEL,
    "model.critic": Kind.MODEL,
}
"""Keys whose values are paths, or names of a kind of repository on the hub; null ones stay null."""
_COMPONENT_PATHS = {
    RewardModelConfig: {"path": Kind.MODEL, "normalization.reference_samples": Kind.DATASET},
    RemoteConfig: {"tokenizer": Kind.MODEL},
}
"""The same below a component of the reward."""


def configure(
    overrides: Sequence[str],
    config_dir: Path | None = None,
    base: Mapping[str, Any] | None = None,
    found: Findings | None = None,
) -> Config:
    """Compose and resolve in one pass, so that no problem hides another.

    Args:
        base: as of :func:`pipeline.config.compose.compose`.
        found: takes what was decided of settings that are auto.

    Raises:
        ConfigError: every problem, one per line.
    """
    return without_problems(lambda made: configure_what_can_be(overrides, config_dir, made, base), found)


def configure_what_can_be(
    overrides: Sequence[str], config_dir: Path | None, found: Findings, base: Mapping[str, Any] | None = None
) -> Config | None:
    """Configure as :func:`configure` does, and add what is wrong to ``found``. Returns the configuration,
    with defaults in place of what is wrong, for other checks; None where nothing can be composed."""
    config = compose_what_can_be(overrides, config_dir, found, base)
    return None if config is None else resolve_what_can_be(config, found)


def resolve(config: Config) -> Config:
    """Make paths absolute, fill in what follows from the models, and refuse contradictions.

    Raises:
        ConfigError: every problem, one per line.
    """
    return without_problems(lambda found: resolve_what_can_be(config, found))


def resolve_what_can_be(config: Config, found: Findings) -> Config:
    """Resolve as :func:`resolve` does, and add what is wrong to ``found``."""
    if not (found.names("data.environment") or found.names_below("data.environment")):
        found.add(source_problems(config))
    found.add(unknown_homes(config))
    config = _decided(_absolute(with_cluster(config, os.environ)), found)
    found.add(missing_paths(config))
    with found.collecting("the context of the policy"):
        config = _with_context(config)
    found.add(contradictions(config))
    with found.collecting("vocabularies of the models"):
        found.add(list(_vocabulary_problems(config)))
    return config


def _decided(config: Config, found: Findings) -> Config:
    """Fill in what is auto, and note what was decided. The context, on which rules of vLLM look, may be
    wrong: then it is named later."""
    if not has_auto(config):
        return config
    filled = config
    with contextlib.suppress(ConfigError, OSError):
        filled = _with_context(config)
    decisions = decide(filled, facts_of(config))
    found.decided, found.auto = in_words(decisions), tuple(one.key for one in decisions)
    return with_decisions(config, decisions)


def unknown_homes(config: Config) -> Iterator[ConfigIssue]:
    """Yield paths that begin with a home directory that there is not. Others were put in their place."""
    models = ((model.key, str(model.directory)) for model in used_models(config))
    commands = {"notify.command": config.notify.command, "evaluate.command": config.evaluate.command}
    programs = ((key, words[0]) for key, words in commands.items() if words)
    data = ((key, path) for key, path, _ in _data_paths(config))
    for key, path in (*models, *data, *programs, ("run_dir", config.run_dir)):
        if path and (why := why_no_home(path)):
            yield ConfigIssue(key, path, why)


def missing_paths(config: Config) -> Iterator[ConfigIssue]:
    """Yield inputs of the user that do not exist or are not what they should be."""
    yield from model_problems(config)
    for key, path, kind in _data_paths(config):
        if path and not Path(path).exists():
            why = ", ".join(filter(None, ["no such file or directory", kind and way_to_have(path, kind)]))
            yield ConfigIssue(key, path, why)
    yield from missing_programs(config)


def _data_paths(config: Config) -> Iterator[tuple[str, str | None, Kind | None]]:
    """Yield keys and paths of data and tokenizers, with the kind of repository that each may be."""
    for key, path in (*config.data.prompt_keys.items(), *config.data.heldout_keys.items()):
        yield key, path, Kind.DATASET
    for name, component in config.reward.components.items():
        key = f"reward.components.{name}"
        if isinstance(component, RewardModelConfig) and component.normalization:
            samples = component.normalization.reference_samples
            yield f"{key}.normalization.reference_samples", samples, Kind.DATASET
        if isinstance(component, RemoteConfig):
            yield f"{key}.tokenizer", component.tokenizer, Kind.MODEL
    if config.data.environment:
        for name, environment in config.data.environment.components.items():
            yield f"data.environment.components.{name}.python", environment.python, None


def _with_context(config: Config) -> Config:
    """Fill in model.context_length and data.max_prompt_tokens."""
    limit = position_limit(Path(config.model.policy))
    context = config.model.context_length or limit
    if context is None:
        raise ConfigError(
            "model.context_length: must be given; config.json of model.policy has no max_position_embeddings"
        )
    if limit is not None and context > limit:
        why = f"the policy has positions for {limit} tokens only"
        raise ConfigError(str(ConfigIssue("model.context_length", context, why)))
    config = replace(config, model=replace(config.model, context_length=context))
    prompt = config.data.max_prompt_tokens or context - config.rollout.max_new_tokens
    if prompt < 1:
        return config  # reported by contradictions()
    return replace(config, data=replace(config.data, max_prompt_tokens=prompt))


def _vocabulary_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield stop token ids that the policy does not have, and teachers for which its context is too long."""
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    for token in config.rollout.stop_token_ids:
        if isinstance(size, int) and token >= size:
            why = f"the policy has {size} tokens; legal: 0 to {size - 1}"
            yield ConfigIssue("rollout.stop_token_ids", token, why)
    for name, teacher in config.reward.teachers.items():
        limit, context = position_limit(Path(teacher.path)), config.model.context_length
        if limit is not None and context is not None and limit < context:
            why = f"has positions for {limit} tokens, and model.context_length={context}; give it that limit"
            yield ConfigIssue(f"reward.teachers.{name}.path", teacher.path, why)
    yield from _top_k_problems(config)


def _top_k_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield a number of tokens that a teacher, or the policy, does not have."""
    top_k, paths = config.algorithm.distillation.top_k, [one.path for one in config.reward.teachers.values()]
    for path in dict.fromkeys([*paths, config.model.policy]) if top_k else ():
        size = text_settings(Path(path)).get("vocab_size")
        if isinstance(size, int) and top_k and top_k > size:
            why = f"{path} has {size} tokens; legal: 1 to {size}"
            yield ConfigIssue("algorithm.distillation.top_k", top_k, why)


def with_cluster(config: Config, environ: Mapping[str, str]) -> Config:
    """Fill in the cluster that the user's own squeue and sbatch ask, where the environment says so: jobs of
    the run, whose environment may say another, go to that one too."""
    given, name = config.slurm, environ.get("SLURM_CLUSTERS", "")
    if given is None or not name or CLUSTERS in given.options:
        return config
    return replace(config, scheduler=replace(given, options={**given.options, CLUSTERS: name}))


def _absolute(config: Config) -> Config:
    """Make every path absolute, so that it means the same to every task."""
    components = {
        name: _with_absolute(component, _COMPONENT_PATHS.get(type(component), {}))
        for name, component in config.reward.components.items()
    }
    given = config.reward.teachers
    teachers = {name: _with_absolute(one, {"path": Kind.MODEL}) for name, one in given.items()}
    config = replace(config, reward=replace(config.reward, components=components, teachers=teachers))
    command = config.notify.command
    if command and "/" in command[0]:  # a program without a slash is looked for on PATH
        command = (_full(command[0]), *command[1:])
        config = replace(config, notify=replace(config.notify, command=command))
    measure = config.evaluate.command
    if measure and "/" in measure[0]:
        measure = (_full(measure[0]), *measure[1:])
        config = replace(config, evaluate=replace(config.evaluate, command=measure))
    config = _with_files(_with_interpreters(config))
    absolute: Config = _with_absolute(config, _PATHS | _mlflow_folder(config))
    return absolute


def _mlflow_folder(config: Config) -> dict[str, Kind | None]:
    """Return the key of MLflow's tracking URI where that is a folder."""
    uri = config.tracking.mlflow.uri
    return {"tracking.mlflow.uri": None} if uri and "://" not in uri else {}


def _with_interpreters(config: Config) -> Config:
    """Make the paths of environments' interpreters absolute. Links stay: virtual environments are such."""
    made = config.data.environment
    if made is None:
        return config
    components = {name: _with_absolute(one, {"python": None}) for name, one in made.components.items()}
    return replace(config, data=replace(config.data, environment=replace(made, components=components)))


def _with_files(config: Config) -> Config:
    """Make the paths of prompts absolute, of those to train on and of held-out ones."""
    data = config.data
    return replace(
        config, data=replace(data, prompts=_all_full(data.prompts), heldout=_all_full(data.heldout))
    )


def _all_full(given: str | dict[str, str] | None) -> str | dict[str, str] | None:
    if isinstance(given, dict):
        return {name: located(path, Kind.DATASET) for name, path in given.items()}
    return None if given is None else located(given, Kind.DATASET)


def _with_absolute(owner: Any, keys: Mapping[str, Kind | None]) -> Any:
    """Return a dataclass with absolute paths under dotted keys, where a kind of repository is given also of
    names on the hub."""
    for key, kind in keys.items():
        name, _, rest = key.partition(".")
        if (value := getattr(owner, name)) is not None:
            path = _with_absolute(value, {rest: kind}) if rest else located(value, kind)
            owner = replace(owner, **{name: path})
    return owner


def _full(path: str) -> str:
    return str(Path(path).absolute())
