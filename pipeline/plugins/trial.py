"""Trial of a configuration's plug-ins before anything runs.

They are tried in processes of their own, so that none can hang or crash the caller, and so that what they
import (torch, vLLM) stays out of it. A first look at a rule shows the scores of an empty response to some
prompts, and of each one's answer as its response.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from pipeline.config.rollout import ENVIRONMENT_SCHEDULER
from pipeline.config.schema import Config
from pipeline.plugins.called import (
    Plugin,
    PluginFailure,
    Steps,
    has_mark,
    import_error,
    rule_error,
    score,
    signature_error,
)
from pipeline.plugins.load import RULES, PluginError
from pipeline.plugins.sandbox import Calls, open_calls
from pipeline.run.schemas import ENVIRONMENT_ENTRY


@dataclass(frozen=True)
class SampleRow:
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


def check_rules(config: Config, rules: Sequence[OpenRule], samples: Sequence[SampleRow]) -> Iterator[str]:
    """Call every rule on an empty response to each sample's prompt: any policy may write one.

    Yields a warning for one that fails there, where the configuration gives such responses a score.

    Raises:
        PluginError, ConfigError: rules are not there, do not take their arguments, or give no number.
    """
    found = Findings()
    for rule in rules:
        with found.collecting(f"the rule {rule.name}"):
            for sample in samples:
                given = list(trial_row(rule.config, config, sample)), list(rule.config.arguments)
                _refuse_rule(rule.config, rule.calls.call(rule.config.time_limit, rule_error, *given))
                if rule.config.trial and (entry := sample.columns.get(ENVIRONMENT_ENTRY)):
                    rule.calls.prepare({ENVIRONMENT_ENTRY: [entry]})
                if rule.config.trial:
                    yield from _try_rule(rule, config, sample)
    found.refuse()


def check_is_there(rule: OpenRule) -> None:
    """Import a rule, where there is no row to try it on. Raises PluginError, as :func:`check_rules` does."""
    _refuse_rule(rule.config, rule.calls.call(rule.config.time_limit, import_error))


def _refuse_rule(rule: RuleConfig, trouble: PluginFailure | None) -> None:
    """Raise PluginError for what is wrong with a rule. A module that is missing here is no error without a
    trial: the rule's own jobs may have it."""
    if trouble and (rule.trial or not trouble.is_elsewhere):
        raise PluginError(trouble.text)


def trial_row(rule: RuleConfig, config: Config, sample: SampleRow, text: str = "") -> dict[str, Any]:
    """Return what a rule gets for a response, by argument."""
    row = {**sample.columns, "prompts": sample.prompt, "responses": prefill_of(sample.prompt, rule) + text}
    if rule.special_tokens:
        row[PLAIN_RESPONSES] = text
    if config.rollout.multi_turn:
        row["response_messages"] = [{"role": "assistant", "content": text}]
    return row


def _try_rule(opened: OpenRule, config: Config, sample: SampleRow) -> Iterator[str]:
    rule = opened.config
    is_group = rule.rows_per_call is RowsPerCall.PROMPT
    num_rows = config.rollout.samples_per_prompt if is_group else 1
    row, seconds = trial_row(rule, config, sample), rule.time_limit * num_rows
    arguments = {key: [value] * num_rows for key, value in row.items()} | rule.arguments
    answer = opened.calls.call(seconds, score, arguments, num_rows, rule.steps)
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
    given = config.rollout.multi_turn
    if given and given.scheduler != ENVIRONMENT_SCHEDULER:  # environments are tried as they make tasks
        plugin = Plugin("rollout.multi_turn.scheduler", given.scheduler)
        for trouble in tried({plugin: 1}):
            raise PluginError(trouble.text)


def check_engines(config: Config) -> Iterator[str]:
    """Import the user's own engines, trainer, loss and tokenizer. Yields a line for each that cannot be tried
    here. Raises PluginError for those that are missing, or no function of the right number of arguments."""
    components = config.reward.components.items()
    models = {name: one.engine for name, one in components if isinstance(one, RewardModelConfig)}
    given: dict[str, tuple[str | None, int]] = {
        "rollout.engine": (config.rollout.engine, 2),
        "reward.engine": (config.reward.engine, 2),
        **{f"reward.components.{name}.engine": (engine, 2) for name, engine in models.items()},
        "update.engine": (config.update.engine, 1),
        "algorithm.policy_loss": (config.algorithm.policy_loss, 4),
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


# --- first look ---

NUM_ROWS = 20
"""Prompts that are looked at."""
_SECONDS = 3.0
"""Seconds for all calls of one rule."""
_LEAST_ANSWERS = 4
"""Answers of which none has to get a reward before that is worth a warning."""
_COLUMN = "column"
"""Argument of ready rules that names the column with the answer."""
_PATTERN = "pattern"
"""Argument of ready rules, and of environments, whose first group is the answer in a response."""
_FINDERS = ("exact_match", "numeric_match", "math_match")
"""Ready rules with that argument."""
_ANSWERS = ("ground_truth", "answer", "solution", "reference", "response", "completion", "target")
"""Columns that are taken for the answer where a rule names none, the first that is there."""


@dataclass
class _Seen:
    """Scores of one kind of text."""

    what: str
    scores: list[float] = field(default_factory=list)
    abstentions: int = 0
    """Texts for which the rule returned None."""

    def __str__(self) -> str:
        if not self.scores:
            return f"{self.what} gets no score (None)"
        mean, low, high = sum(self.scores) / len(self.scores), min(self.scores), max(self.scores)
        spread = f" ({low:g} to {high:g})" if low < high else ""
        abstained = f", and {self.abstentions} times no score (None)" if self.abstentions else ""
        return f"{self.what} gets {mean:g}{spread}{abstained}"

    @property
    def num_texts(self) -> int:
        """Texts that were scored, or of which the rule abstained."""
        return len(self.scores) + self.abstentions


def _finds_answers(config: Config) -> bool:
    """Whether an environment finds answers in responses by a pattern, so that an answer alone is no right
    response."""
    environment = config.data.environment
    given = environment.components.values() if environment else ()
    return any(_PATTERN in component.arguments for component in given)


def first_look(config: Config, rules: Sequence[OpenRule], samples: Sequence[SampleRow]) -> Iterator[str]:
    """Yield a line for each rule that may be tried: the mean and the range of its scores for each kind of
    text; a warning of a text at which it fails, and one where rules give even answers nothing.

    Args:
        samples: rows of the prompt file; some are enough.
    """
    best: dict[str, float] = {}
    for opened in rules:
        if opened.config.trial and samples:
            yield from _lines(opened, config, samples, best)
    # Another component may give what these do not, and with teachers components may only measure.
    are_all = best.keys() == config.reward.components.keys()
    is_weighed = any(component.weight for component in config.reward.components.values())
    if best and are_all and is_weighed and sum(best.values()) <= 0 and not _finds_answers(config):
        yield (
            "warning: reward.components: the reward is never above 0, not even for the answers of the first "
            "look as responses: see whether the rules' arguments name the right column, and what form of "
            "answer they look for"
        )


def _lines(
    opened: OpenRule, config: Config, samples: Sequence[SampleRow], best: dict[str, float]
) -> Iterator[str]:
    """Look at one rule; adds its highest share in the reward to ``best`` where it has seen an answer."""
    column, pattern = _answer_column(opened.config, samples[0]), _answer_pattern(opened.config)
    where = " in the rule's pattern" if pattern else ""
    empty, answer = _Seen("an empty response"), _Seen(f"the text of column {column}{where} as response")
    until, end = time.monotonic() + _SECONDS, ""
    for sample, seen, text in _texts(samples, empty, answer, column, pattern):
        found = _score(opened, config, sample, text, until - time.monotonic())
        if found is None:
            seen.abstentions += 1
            continue
        if not isinstance(found, PluginFailure):
            seen.scores.append(found)
            continue
        end = f"; no more in {_SECONDS:g} s"
        if not found.is_late:
            end, at = "", f"for {seen.what} to prompt_id {sample.prompt_id}"
            yield f"warning: {opened.key}={opened.config.function}: {found.text} {at}"
        break
    if len(answer.scores) >= _LEAST_ANSWERS:
        best[opened.name] = max(opened.config.weight * score for score in (*empty.scores, *answer.scores))
    if message := "; ".join(str(seen) for seen in (empty, answer) if seen.num_texts):
        prompts = f"{empty.num_texts} prompt{'s' * (empty.num_texts > 1)}, without a model"
        yield f"reward {opened.name}: a first look at {prompts}: {message}{end}"


def _texts(
    samples: Sequence[SampleRow], empty: _Seen, answer: _Seen, column: str | None, pattern: str | None
) -> Iterator[tuple[SampleRow, _Seen, str]]:
    for sample in samples:
        yield sample, empty, ""
        if text := _text_of(sample, column):
            yield sample, answer, _in_pattern(text, pattern) if pattern else text


def _score(
    opened: OpenRule, config: Config, sample: SampleRow, text: str, seconds: float
) -> float | PluginFailure | None:
    """Return what the rule gives a response, as one of a group of equal ones where it compares them; None
    where it abstains."""
    rule = opened.config
    if seconds <= 0:
        return PluginFailure("", is_late=True)
    num_rows = config.rollout.samples_per_prompt if rule.rows_per_call is RowsPerCall.PROMPT else 1
    row = trial_row(rule, config, sample, text)
    arguments = {key: [value] * num_rows for key, value in row.items()} | rule.arguments
    limit = rule.time_limit * num_rows
    found = opened.calls.call(min(seconds, limit), score, arguments, num_rows, rule.steps)
    if not isinstance(found, PluginFailure):
        first: float | Steps | None = found[0]
        return sum(number for _, number in first) if isinstance(first, tuple) else first
    if not found.is_late or limit > seconds:
        return found
    # The rule's own limit: in a run it is an error too, or has a score of its own.
    return replace(found, is_late=False) if rule.timeout_score is None else rule.timeout_score


def _answer_column(rule: RuleConfig, sample: SampleRow) -> str | None:
    """Return the column of the prompt file that holds the answer, as far as is known; None if none is."""
    named = rule.arguments.get(_COLUMN)
    return next(
        (name for name in (named, *_ANSWERS) if isinstance(name, str) and name in sample.columns), None
    )


def _answer_pattern(rule: RuleConfig) -> str | None:
    """Return the pattern by which a ready rule finds answers; None where there is none to put them into."""
    pattern = rule.arguments.get(_PATTERN) if rule.function in _FINDERS else None
    return pattern if isinstance(pattern, str) and _in_pattern("1", pattern) != "1" else None


def _in_pattern(answer: str, pattern: str) -> str:
    """Return an answer between what a pattern has around its group, unless it is not found there."""
    around = pattern[: pattern.find("(")], pattern[pattern.rfind(")") + 1 :]
    before, after = (re.sub(r"\\(.)", r"\1", part) for part in around)
    found = re.search(pattern, text := f"{before}{answer}{after}", re.DOTALL)
    return text if found and found.groups()[:1] == (answer,) else answer


def _text_of(sample: SampleRow, column: str | None) -> str | None:
    """Return an answer as the text of a response: the first of several; None where there is no text in it."""
    value = sample.columns.get(column) if column else None
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return str(value) if isinstance(value, str | int | float) else None
