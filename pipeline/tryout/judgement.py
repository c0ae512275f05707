"""What to change before a run, by what a small one shows. Pure.

Of few responses: a share says little, so that most findings are warnings; a problem is what no response
contradicts.
"""

import math
from collections.abc import Iterator

from pipeline.checks.finding import Finding, problem, warning
from pipeline.config.algorithm import GROUP_ESTIMATORS
from pipeline.metrics.first_signs import EASIER, NO_END, UNEQUAL, never_met
from pipeline.run.schemas import FinishReason
from pipeline.text import number
from pipeline.tryout.result import TryResult, known_rewards

_FLAT_MANY, _CUT_MANY = 0.6, 0.5
_MORE = 32
"""Prompts that are worth a second look."""
_FEW = 8
"""Prompts with several responses below which that all are flat may be chance."""


def judge(result: TryResult) -> list[Finding]:
    """Return what is to be changed, the worst first. Nothing where all is well."""
    found = [
        finding
        for rule in (_rewards, _components, _groups, _lengths, _losses, _memory)
        for finding in rule(result)
    ]
    return sorted(found, key=lambda finding: finding.verdict != "problem")


def _rewards(result: TryResult) -> Iterator[Finding]:
    rewards = known_rewards(result.samples)
    if not result.config.reward.components:  # teachers alone say what is learned
        return
    if len(set(rewards)) == 1 < len(rewards):
        only = rewards[0]
        none = "no reward is above 0: " if only <= 0 else ""
        measured = f"{none}{_all(result, len(rewards))} get {number(only)}"
        yield problem(
            "rewards", measured, f"read the responses; see whether reward.components fit them; {EASIER}"
        )


def _all(result: TryResult, num_scored: int) -> str:
    """Say of how many responses a sentence is."""
    return f"all {num_scored} responses{' that are scored' * (num_scored < len(result.samples))}"


def _is_constant(result: TryResult) -> bool:
    return any(_rewards(result))


def _components(result: TryResult) -> Iterator[Finding]:
    """Find components that add nothing, such as a format that is never met."""
    names = result.config.reward.components
    for name in names if len(names) > 1 and not _is_constant(result) else ():
        given = [sample.components.get(name, math.nan) for sample in result.samples]
        scores = [score for score in given if not math.isnan(score)]
        if len(set(scores)) == 1 < len(scores):
            measured = f"{_all(result, len(scores))} get {number(scores[0])} of it"
            yield warning(f"reward {name}", measured, never_met(name))


def _groups(result: TryResult) -> Iterator[Finding]:
    flat, prompts = result.num_flat, len(result.groups)
    config = result.config
    if flat is None or flat < _FLAT_MANY * prompts or _is_constant(result) or not config.reward.components:
        return
    make = problem if flat == prompts >= _FEW and config.algorithm.estimator in GROUP_ESTIMATORS else warning
    most = min(_MORE, config.data.prompts_per_iteration)
    more = f"; slurm-ppo try --prompts {most} looks at more of them" if most > prompts else ""
    yield make("groups", f"of {flat} of {prompts} prompts all responses get the same reward", UNEQUAL + more)


def _lengths(result: TryResult) -> Iterator[Finding]:
    config, count = result.config, len(result.samples)
    limit = f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
    cut, ended = result.num_ended(FinishReason.LENGTH), result.num_ended(FinishReason.STOP)
    if cut and not ended:
        yield problem("lengths", f"no response ends by itself: {cut} of {count} are cut at {limit}", NO_END)
    elif cut >= _CUT_MANY * count:
        advice = "raise rollout.max_new_tokens (and model.context_length), or ask for shorter answers"
        yield warning("lengths", f"{cut} of {count} responses are cut at {limit}", advice)
    longest, context = max(result.prompt_lengths.values()), config.model.context_length
    if context is not None and longest + config.rollout.max_new_tokens > context:
        measured = f"behind a prompt of {longest} tokens there is no room for {limit} in {context}"
        yield warning("context", measured, "raise model.context_length, or lower data.max_prompt_tokens")


def _losses(result: TryResult) -> Iterator[Finding]:
    """Find responses that cannot be trained on."""
    count = len(result.samples)
    if refused := result.num_ended(FinishReason.REFUSED):
        advice = "lower data.max_prompt_tokens to what the engine takes"
        yield warning("refused", f"the engine refused {refused} of {count} prompts or turns", advice)
    if lost := sum(math.isnan(sample.reward) for sample in result.samples):
        advice = "lower rollout.max_new_tokens or data.max_prompt_tokens, or take another reward model"
        make = problem if lost == count else warning
        yield make("unscored", f"{lost} of {count} responses have no reward", advice)


_BUDGETS = {
    "rollout": "rollout.tokens_per_batch",
    "update": "update.tokens_per_micro_batch",
}


def _memory(result: TryResult) -> Iterator[Finding]:
    for stage in result.stages:
        if stage.halvings:
            key = _BUDGETS.get(stage.job_kind, "reward.tokens_per_batch")
            measured = f"the GPU's memory sufficed only for 1/{2**stage.halvings} of {key}"
            yield warning(f"memory of {stage.job_kind}", measured, f"lower {key}, so that no try is lost")
