"""Advice on a run: rules that read its numbers and say what is wrong, how it shows, what to change.

Pure. Every rule is a function of its own in :mod:`pipeline.metrics.learning_advice` (what the policy
learns), :mod:`pipeline.metrics.engine_advice` (whether engines agree), :mod:`pipeline.metrics.speed_advice`
(where the time goes) or :mod:`pipeline.metrics.starts` (what workers cost), with its thresholds and their
reasons beside it. A rule that lacks a number is silent, and so are all rules on short runs but that about
engines that disagree.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.metrics.advice_input import LOOK_BACK, Advice, Evidence, Rule, Severity, TaskTime
from pipeline.metrics.engine_advice import engine_mismatch
from pipeline.metrics.learning_advice import LEARNING_RULES
from pipeline.metrics.speed_advice import SPEED_RULES
from pipeline.metrics.starts import START_RULES

__all__ = [
    "Advice",
    "Evidence",
    "Rule",
    "Severity",
    "TaskTime",
    "advise",
    "first_shown",
    "in_a_line",
    "worst",
]

RULES = (*LEARNING_RULES, engine_mismatch, *SPEED_RULES, *START_RULES)


def advise(evidence: Evidence) -> list[Advice]:
    """Apply every rule. Findings come worst first, equally bad ones in the order of :class:`Rule`."""
    found = [advice for rule in RULES for advice in rule(evidence)]
    severities, rules = list(Severity), list(Rule)
    return sorted(found, key=lambda a: (-severities.index(a.severity), rules.index(a.rule)))


def first_shown(evidence: Evidence) -> list[Advice]:
    """Return warnings and problems that the newest row is the first to show."""
    now = replace(evidence, rows=evidence.rows[-LOOK_BACK - 1 :])
    before = {advice.rule for advice in advise(replace(now, rows=now.rows[:-1]))}
    return [a for a in advise(now) if a.severity is not Severity.NOTE and a.rule not in before]


def in_a_line(advice: Advice) -> str:
    """Format a finding as one line: what was noticed, with its numbers, and what to do."""
    return f"{advice.severity}: {advice.title} ({advice.rule}): {advice.what}; {advice.remedy}"


def worst(found: Sequence[Advice], count: int = 2) -> tuple[Advice, ...]:
    """Return the first ``count`` findings that are more than notes."""
    return tuple(advice for advice in found if advice.severity is not Severity.NOTE)[:count]
