"""Rules about signs so strong that the first iteration shows them: nothing will be learned until something is
changed. Pure; a rule without its numbers is silent.

The other rules wait for :data:`MIN_ROWS` rows; these only for as many responses, or prompts, that chance
alone hardly gives such a sign.
"""

from collections.abc import Callable

from pipeline.config.reward import RuleConfig
from pipeline.metrics.advice_input import (
    MIN_ROWS,
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Rule,
    Series,
    Severity,
    series,
)
from pipeline.text import number

_LEAST = 8
"""Responses, or prompts with several, of which all have to show a sign."""
_ROUNDING = 1e-6
"""Standard deviation of equal numbers, as a share of them, that rounding makes at most: the mean of many
0.1 is not quite 0.1."""
READ_SAMPLES = "read responses (slurm-ppo samples RUN)"


def constant_reward(evidence: AdviceInput) -> Findings:
    """Detect a reward that is the same for every response."""
    means = _same_for_all(evidence, "reward")
    if means is None or len(set(means.values)) != 1 or not evidence.config.reward.components:
        return
    remedy = f"{READ_SAMPLES}, and see whether a rule's arguments fit what they write; {EASIER}"
    title = "every response gets the same reward"
    yield _of_all(Severity.PROBLEM, Rule.CONSTANT_REWARD, title, means, remedy)


EASIER = (
    "say the form of the answer in the prompts, take easier data.prompts, a policy that solves some of them, "
    "or raise rollout.max_new_tokens where responses are cut"
)
"""Ways out where no response gets more than others."""


def is_constant(evidence: AdviceInput) -> bool:
    """Whether :func:`constant_reward` has something to say."""
    return any(constant_reward(evidence))


def flat_from_the_start(evidence: AdviceInput) -> Findings:
    """Detect that no prompt's samples differ in their reward, in the first iterations of a run."""
    config = evidence.config
    found = _always(evidence, "reward/frac_zero_std", 1.0, config.prompts_per_rollout)
    is_early = len(evidence.trained) < MIN_ROWS and config.rollout.samples_per_prompt > 1
    if found is None or not is_early or is_constant(evidence) or not config.reward.components:
        return
    what, title = f"all prompts of {found.span}", "no prompt's samples differ in their reward"
    yield Advice(Severity.PROBLEM, Rule.FLAT_GROUPS, title, what, UNEQUAL, (found.name,))


UNEQUAL = (
    "use data.prompts that are neither always nor never solved, raise rollout.samples_per_prompt or "
    "rollout.temperature"
)
"""Ways out where samples of a prompt get the same reward."""


def cut_from_the_start(evidence: AdviceInput) -> Findings:
    """Detect that no response ends by itself, in the first iterations of a run."""
    config = evidence.config
    found = _always(evidence, "finish_reason/length", 1.0, config.responses_per_iteration)
    if found is None or len(evidence.trained) >= MIN_ROWS:
        return
    what = f"all responses of {found.span} are cut at rollout.max_new_tokens={config.rollout.max_new_tokens}"
    title = "no response ends by itself"
    yield Advice(Severity.PROBLEM, Rule.TRUNCATION, title, what, NO_END, (found.name,))


NO_END = (
    "raise rollout.max_new_tokens; if responses go on after their answer, see whether the policy writes the "
    "end token that its tokenizer names, give rollout.stop_token_ids, or teach ending: "
    "algorithm.shaping.missing_eos_penalty"
)
"""Ways out where no response ends."""


def constant_component(evidence: AdviceInput) -> Findings:
    """Detect a rule among several components that gives every response the same, such as that of a format
    which is never met, in the first iterations of a run."""
    components = evidence.config.reward.components
    if len(components) < 2 or len(evidence.trained) >= MIN_ROWS or is_constant(evidence):
        return
    for name, component in components.items():
        means = _same_for_all(evidence, f"reward/{name}")
        if isinstance(component, RuleConfig) and means is not None:
            title = f"component {name} gives every response the same"
            yield _of_all(Severity.WARNING, Rule.CONSTANT_COMPONENT, title, means, never_met(name))


def never_met(name: str) -> str:
    """Return the way out where a component gives every response the same."""
    return (
        f"if it looks for a form that none has, say that form in the prompts, or fix "
        f"reward.components.{name}.arguments; if it has nothing to add, leave it out"
    )


def _same_for_all(evidence: AdviceInput, name: str) -> Series | None:
    """Return the means of a reward or a component that is the same for all responses of each row; None where
    it is not, or is not known."""
    rows = evidence.trained[-WINDOW:]
    means, stds = (series(rows, f"{name}/{what}") for what in ("mean", "std"))
    is_known = means.iterations == stds.iterations
    is_known &= _are_enough(evidence, means, evidence.config.responses_per_iteration)
    pairs = zip(means.values, stds.values, strict=is_known)
    return means if is_known and all(std <= _ROUNDING * abs(mean) for mean, std in pairs) else None


def _of_all(severity: Severity, rule: Rule, title: str, means: Series, remedy: str) -> Advice:
    """Return what is said of a number that all responses get."""
    what, std = f"{number(means.middle)} for all responses of {means.span}", means.name.replace("mean", "std")
    return Advice(severity, rule, title, what, remedy, (std, means.name))


def _always(evidence: AdviceInput, name: str, value: float, each: int) -> Series | None:
    """Return the newest values, at most :data:`WINDOW`, where they all are ``value``; None where one is not,
    or they are of too few responses.

    Args:
        each: responses, or prompts, that a value is of.
    """
    found = series(evidence.trained[-WINDOW:], name)
    is_known = _are_enough(evidence, found, each)
    return found if is_known and all(one == value for one in found.values) else None


def _are_enough(evidence: AdviceInput, found: Series, each: int) -> bool:
    """Whether each of the newest rows has the number, and they are of responses or prompts enough."""
    return len(found) == len(evidence.trained[-WINDOW:]) and len(found) * each >= _LEAST


FIRST_SIGNS: tuple[Callable[[AdviceInput], Findings], ...] = (
    constant_reward,
    flat_from_the_start,
    cut_from_the_start,
    constant_component,
)
