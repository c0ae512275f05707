"""A configuration made ready to run: paths absolute, gaps filled, refused where it cannot work. No torch."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.model_dir import position_limit, text_settings
from pipeline.config.model_rules import model_problems
from pipeline.config.notify_rules import absolute, missing_means
from pipeline.config.reward import Component, RemoteConfig, RewardModelConfig, RuleConfig
from pipeline.config.rules import contradictions
from pipeline.config.schema import Config


def resolve(config: Config) -> Config:
    """Make paths absolute, fill in what follows from the models, and refuse contradictions.

    Raises:
        ConfigError: every problem, one per line.
    """
    config = _absolute(config)
    missing = list(missing_paths(config))
    if missing:
        raise ConfigError("\n".join(map(str, missing)))
    config = _with_context(config)
    problems = [*contradictions(config), *_vocabulary_problems(config)]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return config


def missing_paths(config: Config) -> Iterator[ConfigIssue]:
    """Yield inputs of the user that do not exist or are not what they should be."""
    yield from model_problems(config)
    for key, path in _data_paths(config):
        if not Path(path).exists():
            yield ConfigIssue(key, path, "no such file or directory")
    yield from missing_means(config.notify)


def _data_paths(config: Config) -> Iterator[tuple[str, str]]:
    yield "data.prompts", config.data.prompts
    if config.data.heldout:
        yield "data.heldout", config.data.heldout
    for name, component in config.reward.components.items():
        if isinstance(component, RewardModelConfig) and component.normalization:
            samples = component.normalization.reference_samples
            if samples:
                yield f"reward.components.{name}.normalization.reference_samples", samples
        if isinstance(component, RemoteConfig) and component.tokenizer:
            yield f"reward.components.{name}.tokenizer", component.tokenizer


def _with_context(config: Config) -> Config:
    """Fill in model.context_length and data.max_prompt_tokens."""
    limit = position_limit(Path(config.model.policy))
    context = config.model.context_length or limit
    if context is None:
        raise ConfigError(
            "model.context_length: must be given; the policy's config.json has no max_position_embeddings"
        )
    if limit is not None and context > limit:
        problem = ConfigIssue(
            "model.context_length", context, f"the policy has positions for {limit} tokens only"
        )
        raise ConfigError(str(problem))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, context_length=context))
    prompt = config.data.max_prompt_tokens or context - config.rollout.max_new_tokens
    if prompt < 1:
        return config  # reported by contradictions()
    return dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=prompt))


def _vocabulary_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield stop token ids that the policy does not have."""
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    for token in config.rollout.stop_token_ids:
        if isinstance(size, int) and token >= size:
            yield ConfigIssue(
                "rollout.stop_token_ids", token, f"the policy has {size} tokens; legal: 0 to {size - 1}"
            )


def _absolute(config: Config) -> Config:
    """Make every path absolute, so that it means the same to every task."""
    model, data = config.model, config.data
    return dataclasses.replace(
        config,
        run_dir=_full(config.run_dir),
        model=dataclasses.replace(
            model,
            policy=_full(model.policy),
            reference=_full_if(model.reference),
            critic=_full_if(model.critic),
        ),
        data=dataclasses.replace(data, prompts=_full(data.prompts), heldout=_full_if(data.heldout)),
        reward=dataclasses.replace(
            config.reward,
            components={name: _absolute_component(c) for name, c in config.reward.components.items()},
        ),
        notify=absolute(config.notify),
    )


def _absolute_component(given: Component) -> Component:
    if isinstance(given, RuleConfig):
        return given
    if isinstance(given, RemoteConfig):
        return dataclasses.replace(given, tokenizer=_full_if(given.tokenizer))
    norm = given.normalization
    if norm:
        norm = dataclasses.replace(norm, reference_samples=_full_if(norm.reference_samples))
    return dataclasses.replace(given, path=_full(given.path), normalization=norm)


def _full(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _full_if(path: str | None) -> str | None:
    return None if path is None else _full(path)
