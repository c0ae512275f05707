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
READ_SAMPLES = "read responses (slurm-ppo samples RUN)"


def constant_reward(evidence: AdviceInput) -> Findings:
    """Detect a reward that is the same for every response."""
    found = _always(evidence, "reward/std", 0.0, evidence.config.responses_per_iteration)
    means = series(evidence.trained[-WINDOW:], "reward/mean")
    if found is None or len(set(means.values)) != 1:
        return
    what = f"{number(means.values[0])} for all responses of {found.span}"
    yield Advice(
        Severity.PROBLEM,
        Rule.CONSTANT_REWARD,
        "every response gets the same reward",
        what,
        f"{READ_SAMPLES}, and see whether a rule's arguments fit what they write; {EASIER}",
        (found.name, means.name),
    )


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
    found = _always(evidence, "reward/frac_zero_std", 1.0, config.data.prompts_per_iteration)
    is_early = len(evidence.trained) < MIN_ROWS and config.rollout.samples_per_prompt > 1
    if found is None or not is_early or is_constant(evidence):
        return
    what = f"all prompts of {found.span}"
    remedy = (
        "use data.prompts that are neither always nor never solved, raise rollout.samples_per_prompt or "
        "rollout.temperature"
    )
    title = "no prompt's samples differ in their reward"
    yield Advice(Severity.PROBLEM, Rule.FLAT_GROUPS, title, what, remedy, (found.name,))


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
        found = _always(evidence, f"reward/{name}/std", 0.0, evidence.config.responses_per_iteration)
        means = series(evidence.trained[-WINDOW:], f"reward/{name}/mean")
        if isinstance(component, RuleConfig) and found is not None and len(means):
            yield Advice(
                Severity.WARNING,
                Rule.CONSTANT_COMPONENT,
                f"component {name} gives every response the same",
                f"{number(means.middle)} for all responses of {found.span}",
                never_met(name),
                (found.name, means.name),
            )


def never_met(name: str) -> str:
    """Return the way out where a component gives every response the same."""
    return (
        f"if it looks for a form that none has, say that form in the prompts, or mend "
        f"reward.components.{name}.arguments; if it has nothing to add, leave it out"
    )


def _always(evidence: AdviceInput, name: str, value: float, each: int) -> Series | None:
    """Return the newest values, at most :data:`WINDOW`, where they all are ``value``; None where one is not,
    or they are of too few responses.

    Args:
        each: responses, or prompts, that a value is of.
    """
    rows = evidence.trained[-WINDOW:]
    found = series(rows, name)
    is_known = len(rows) == len(found) and len(rows) * each >= _LEAST
    return found if is_known and all(one == value for one in found.values) else None


FIRST_SIGNS: tuple[Callable[[AdviceInput], Findings], ...] = (
    constant_reward,
    flat_from_the_start,
    cut_from_the_start,
    constant_component,
)
