"""Trial of a configuration's plug-ins before anything runs.

They are tried in processes of their own, so that none can hang or crash the caller, and so that what they
import (torch, vLLM) stays out of it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.findings import Findings
from pipeline.config.reward import (
    PLAIN_RESPONSES,
    OnError,
    RewardModelConfig,
    RowsPerCall,
    RuleConfig,
    prefill_of,
)
from pipeline.config.schema import Config
from pipeline.plugins.called import (
    Plugin,
    PluginFailure,
    has_mark,
    import_error,
    rule_error,
    score,
    signature_error,
)
from pipeline.plugins.load import RULES, PluginError
from pipeline.plugins.sandbox import Calls, open_calls


@dataclass(frozen=True)
class Sample:
    """The first usable row of a prompt file."""

    source: str
    """The file, as KEY=PATH."""
    prompt_id: str
    prompt: str
    columns: Mapping[str, Any]
    """The user's own columns."""


def plugin_of(name: str, rule: RuleConfig) -> Plugin:
    """Return the plug-in of a rule component."""
    return Plugin(f"reward.components.{name}.function", rule.function, RULES, rule.import_limit)


@dataclass(frozen=True)
class OpenRule:
    """A rule component with a process that has imported it."""

    name: str
    config: RuleConfig
    calls: Calls

    @property
    def key(self) -> str:
        return self.calls.plugin.key


@contextlib.contextmanager
def open_rules(config: Config) -> Iterator[list[OpenRule]]:
    """Open a process for each rule of a configuration, which starts when it is first asked."""
    with contextlib.ExitStack() as stack:
        yield [
            OpenRule(name, component, stack.enter_context(open_calls(plugin_of(name, component), 1)))
            for name, component in config.reward.components.items()
            if isinstance(component, RuleConfig)
        ]


def check_rules(config: Config, rules: Sequence[OpenRule], samples: Sequence[Sample]) -> Iterator[str]:
    """Call every rule on an empty response to each sample's prompt: any policy may write one.

    Yields a warning for one that fails there, where the configuration gives such responses a score.

    Raises:
        PluginError, ConfigError: rules are not there, do not take their arguments, or give no number.
    """
    found = Findings()
    for rule in rules:
        with found.collecting(f"the rule {rule.name}"):
            for sample in samples:
                _check_signature(rule.calls, rule.config, config, sample)
                if rule.config.trial:
                    yield from _try_rule(rule, config, sample)
    found.refuse()


def check_is_there(rule: OpenRule) -> None:
    """Import a rule, where there is no row to try it on. Raises PluginError, as :func:`check_rules` does."""
    _refuse_rule(rule.config, rule.calls.call(rule.config.time_limit, import_error))


def _check_signature(calls: Calls, rule: RuleConfig, config: Config, sample: Sample) -> None:
    """Refuse a rule that does not take its arguments."""
    given = list(trial_row(rule, config, sample)), list(rule.arguments)
    _refuse_rule(rule, calls.call(rule.time_limit, rule_error, *given))


def _refuse_rule(rule: RuleConfig, trouble: PluginFailure | None) -> None:
    """Raise PluginError for what is wrong with a rule. A module that is missing here is no error without a
    trial: the rule's own jobs may have it."""
    if trouble and (rule.trial or not trouble.is_elsewhere):
        raise PluginError(trouble.text)


def trial_row(rule: RuleConfig, config: Config, sample: Sample, text: str = "") -> dict[str, Any]:
    """Return what a rule gets for a response, by argument."""
    row = {**sample.columns, "prompts": sample.prompt, "responses": prefill_of(sample.prompt, rule) + text}
    if rule.special_tokens:
        row[PLAIN_RESPONSES] = text
    if config.rollout.multi_turn:
        row["response_messages"] = [{"role": "assistant", "content": text}]
    return row


def _try_rule(opened: OpenRule, config: Config, sample: Sample) -> Iterator[str]:
    rule = opened.config
    is_group = rule.rows_per_call is RowsPerCall.PROMPT
    num_rows = config.rollout.samples_per_prompt if is_group else 1
    row, seconds = trial_row(rule, config, sample), rule.time_limit * num_rows
    arguments = {key: [value] * num_rows for key, value in row.items()} | rule.arguments
    answer = opened.calls.call(seconds, score, arguments, num_rows)
    if not isinstance(answer, PluginFailure) or (answer.is_late and rule.timeout_score is not None):
        return
    key = sample.source.partition("=")[0]
    text = (
        f"{opened.key}={rule.function}: {answer.text} for an empty response to prompt_id {sample.prompt_id} "
        f"of {key}"
    )
    if rule.on_error is OnError.SCORE and answer.is_of_response:
        yield f"warning: {text}; it gets error_score={rule.error_score:g}"
    else:
        key = f"reward.components.{opened.name}.trial"
        raise PluginError(f"{text}; if it needs what only its jobs have, set {key}=false")


def check_scheduler(config: Config) -> None:
    """Import the scheduler of conversations. Raises PluginError if it is no function of one argument."""
    if config.rollout.multi_turn:
        plugin = Plugin("rollout.multi_turn.scheduler", config.rollout.multi_turn.scheduler)
        for trouble in tried({plugin: 1}):
            raise PluginError(trouble.text)


def check_engines(config: Config) -> Iterator[str]:
    """Import the user's own engines, trainer and tokenizer. Yields a line for each that cannot be tried here.
    Raises PluginError for those that are missing, or no function of the right number of arguments."""
    components = config.reward.components.items()
    models = {name: one.engine for name, one in components if isinstance(one, RewardModelConfig)}
    given: dict[str, tuple[str | None, int]] = {
        "rollout.engine": (config.rollout.engine, 2),
        "reward.engine": (config.reward.engine, 2),
        **{f"reward.components.{name}.engine": (engine, 2) for name, engine in models.items()},
        "update.engine": (config.update.engine, 1),
        "model.tokenizer": (config.model.tokenizer, 1),
    }
    wrong = []
    for trouble in tried({Plugin(key, n): num for key, (n, num) in given.items() if n and ":" in n}):
        if trouble.is_elsewhere:
            yield f"warning: {trouble.text}; compute nodes may have it"
        else:
            wrong.append(trouble.text)
    if wrong:
        raise PluginError("\n".join(wrong))
    check_takes_ranks(config)


def check_takes_ranks(config: Config) -> None:
    """Raise PluginError for several ranks with a trainer that takes none: each would write the policy."""
    plugin = Plugin("update.engine", config.update.engine)
    if config.scheduler.num_update_ranks == 1 or ":" not in plugin.name:
        return
    with open_calls(plugin, 1) as calls:
        answer = calls.call(plugin.import_limit, has_mark, "takes_ranks")
    if answer is False:
        raise too_many_ranks(config)


def too_many_ranks(config: Config) -> PluginError:
    """Return the error about a trainer of the user's that does not take several ranks."""
    return PluginError(
        f"update.engine={config.update.engine}: the update is given {config.scheduler.num_update_ranks} "
        "ranks, and this trainer does not say that it takes several; give one, or put @takes_ranks of "
        "stages.engines.base before its function"
    )


def tried(plugins: Mapping[Plugin, int]) -> Iterator[PluginFailure]:
    """Import functions, given with the number of their positional arguments; those of a module together.
    Yields, for each that cannot be called with so many, why."""
    groups: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        groups.setdefault(plugin.name.partition(":")[0], []).append(plugin)
    for group in groups.values():
        with open_calls(group[0], 1) as calls:
            for plugin in group:
                own = calls.of(plugin)
                asked = own.ask(plugin.import_limit, signature_error, [], plugins[plugin])
                if trouble := own.answer(asked, 0):
                    yield trouble
