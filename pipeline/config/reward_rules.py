"""Keys of reward components that do not go together, each with the way out. Looks at no file."""

import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import urlsplit

from pipeline.config.engine_rules import scores_with
from pipeline.config.engines import Engine
from pipeline.config.issue import ConfigIssue
from pipeline.config.reward import (
    ModelSteps,
    NormalizationConfig,
    OnError,
    RemoteApi,
    RemoteConfig,
    RewardModelConfig,
    RowsPerCall,
    RuleConfig,
    StepUnit,
    passed_names,
    template_problem,
)
from pipeline.config.schema import Config

_OURS = frozenset(
    {"model", "input", "use_activation", "messages", "prompts", "responses", "columns", "n", "stream"}
)
"""Request fields that slurm-ppo sets: those for what is asked, and for the form of the answer."""
_KEYS_OF = {
    RemoteApi.CLASSIFY: ("tokenizer", "max_model_len"),
    RemoteApi.CHAT: ("template", "score_pattern", "unreadable_score"),
}
"""Keys that belong to one protocol only."""
_OF_STEPS: Mapping[str, Collection[ModelSteps]] = {
    "separator": (ModelSteps.SEPARATOR,),
    "step_token": (ModelSteps.SEPARATOR,),
    "step_score": tuple(ModelSteps),
}
"""Keys of a reward model that belong to some values of ``steps`` only."""


def component_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield contradictions among the keys of each component."""
    for name, component in config.reward.components.items():
        key = f"reward.components.{name}."
        if isinstance(component, RemoteConfig):
            yield from _remote_problems(key, component)
            continue
        if component.steps in (StepUnit.CHARACTERS, ModelSteps.SEPARATOR) and config.rollout.multi_turn:
            why = "a conversation is no single text; set it to turns"
            yield ConfigIssue.at(component, "steps", why, key)
        if isinstance(component, RuleConfig):
            yield from _rule_problems(key, component)
            continue
        if component.normalization:
            yield from _normalization_problems(f"{key}normalization", component.normalization)
        yield from _step_problems(key, component, scores_with(config.reward, component))


def _step_problems(key: str, model: RewardModelConfig, engine: str | None) -> Iterator[ConfigIssue]:
    """Yield keys of steps that do not go together.

    Args:
        engine: name of the engine that scores with the model.
    """
    for name, units in _OF_STEPS.items():
        is_given = getattr(model, name) != RewardModelConfig.__dataclass_fields__[name].default
        if is_given and model.steps not in units:
            has = "null" if model.steps is None else model.steps
            why = (
                f"is for {key}steps={' or '.join(units)}, and that is {has}; set that too, or leave this out"
            )
            yield ConfigIssue.at(model, name, why, key)
    if model.steps is None:
        return
    if engine != Engine.TRANSFORMERS:
        why = f"{engine} gives a score for a whole response only; set {key}engine=transformers"
        yield ConfigIssue.at(model, "steps", why, key)
    if model.normalization and model.normalization.reference_samples:
        why = f"measures scores of whole responses, and {key}steps gives those of steps; give mean and std"
        yield ConfigIssue.at(model, "normalization.reference_samples", why, key)


def _normalization_problems(key: str, given: NormalizationConfig) -> Iterator[ConfigIssue]:
    numbers = (given.mean is not None, given.std is not None)
    if given.reference_samples and any(numbers):
        yield ConfigIssue.at(given, "reference_samples", "give it or mean and std, not both", f"{key}.")
    elif not given.reference_samples and not all(numbers):
        shown = f"(mean={given.mean}, std={given.std})"
        yield ConfigIssue(key, shown, "give mean and std, or reference_samples")


def _rule_problems(key: str, rule: RuleConfig) -> Iterator[ConfigIssue]:
    for name in sorted(passed_names(rule) & rule.arguments.keys()):
        why = "is what slurm-ppo itself passes under this name; leave it out"
        yield ConfigIssue(f"{key}arguments.{name}", rule.arguments[name], why)
    given = {"timeout_score": rule.timeout_score is not None, "on_error": rule.on_error is OnError.SCORE}
    for name in (name for name, is_given in given.items() if is_given):
        if rule.rows_per_call is not RowsPerCall.RESPONSE:
            why = (
                f"all responses of a call would get it, with {key}rows_per_call={rule.rows_per_call}; "
                "leave it out, or set rows_per_call to response"
            )
            yield ConfigIssue.at(rule, name, why, key)
    for name in ("error_score", "max_failed") if rule.on_error is OnError.STOP else ():
        if getattr(rule, name) != RuleConfig.__dataclass_fields__[name].default:
            why = f"is for {key}on_error=score, and that is stop; set that too, or leave this out"
            yield ConfigIssue.at(rule, name, why, key)
    if rule.prefill is not None and not rule.prefill.strip():
        why = "is blank; write what prompts end with, such as <think>, or leave it out"
        yield ConfigIssue.at(rule, "prefill", why, key)


def special_token_warnings(config: Config, special: Collection[str]) -> Iterator[str]:
    """Warn of rules that are given words to look for which are special tokens, and never get to see these.

    Args:
        special: special tokens of the policy's tokenizer.
    """
    for name, rule in config.reward.components.items():
        if not isinstance(rule, RuleConfig) or rule.special_tokens:
            continue
        for argument, value in rule.arguments.items():
            text = value if isinstance(value, str) else ""
            if named := sorted(one for one in special if one in text or re.escape(one) in text):
                yield (
                    f"warning: reward.components.{name}.arguments.{argument}: {', '.join(named)} are special "
                    "tokens of the policy's tokenizer, which are not in the text that rules get; set "
                    f"reward.components.{name}.special_tokens=true"
                )


def _remote_problems(key: str, remote: RemoteConfig) -> Iterator[ConfigIssue]:
    for api, names in _KEYS_OF.items():
        for name in names:
            if remote.api is not api and getattr(remote, name) is not None:
                why = f"is for {key}api={api}, and that is {remote.api}; leave this out"
                yield ConfigIssue.at(remote, name, why, key)
    if remote.api is RemoteApi.CHAT:
        yield from _chat_problems(key, remote)
    if remote.max_model_len is not None and remote.tokenizer is None:
        why = f"only tokens can be counted and cut; give {key}tokenizer=DIRECTORY too, or leave it out"
        yield ConfigIssue.at(remote, "max_model_len", why, key)
    if remote.max_backoff < remote.backoff:
        yield ConfigIssue.at(remote, "max_backoff", f"is less than {key}backoff={remote.backoff}", key)
    for name in sorted(_OURS & remote.parameters.keys()):
        why = "is set by slurm-ppo itself; leave it out"
        yield ConfigIssue(f"{key}parameters.{name}", remote.parameters[name], why)
    try:
        is_complete = bool(urlsplit(remote.url).hostname) and urlsplit(remote.url).port != 0
    except ValueError:
        is_complete = False
    if not is_complete:
        yield ConfigIssue.at(remote, "url", "is not an address; write e.g. http://gpu07:8000/classify", key)


def _chat_problems(key: str, remote: RemoteConfig) -> Iterator[ConfigIssue]:
    for name in ("model", "template"):
        if getattr(remote, name) is None:
            yield ConfigIssue.at(remote, name, f"must be given with {key}api=chat", key)
    if (remote.batch_size or 1) > 1:
        yield ConfigIssue.at(remote, "batch_size", "a judge gets one response per request; legal: 1", key)
    if remote.score_pattern is not None and (problem := _pattern_problem(remote.score_pattern)):
        yield ConfigIssue.at(remote, "score_pattern", problem, key)
    if remote.template is not None and (problem := template_problem(remote.template)):
        yield ConfigIssue.at(remote, "template", problem, key)


def _pattern_problem(pattern: str) -> str | None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}"
    return None if groups == 1 else f"has {groups} groups; one is wanted, around the number"
