"""Advice on a run: rules that read its numbers and say what is wrong, how it shows, what to change.

Pure. Every rule is a function of its own in :mod:`pipeline.metrics.learning_advice` (what the policy
learns), :mod:`pipeline.metrics.first_signs` (what the first iteration shows),
:mod:`pipeline.metrics.speed_advice` (where the time goes), :mod:`pipeline.metrics.starts` (what workers
cost), :mod:`pipeline.metrics.staleness` (what responses of older policies are worth) or below (whether
engines agree, and what is not learned from), with its thresholds and their reasons beside it. A rule that
lacks a number is silent, and so are all rules on short runs but those about first signs, engines that
disagree and responses of older policies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeline.config.algorithm import CorrectionLevel
from pipeline.config.engines import Engine
from pipeline.metrics.advice_input import (
    LOOK_BACK,
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Rule,
    Series,
    Severity,
    percent,
    recent,
    series,
)
from pipeline.metrics.first_signs import FIRST_SIGNS
from pipeline.metrics.learning_advice import LEARNING_RULES
from pipeline.metrics.speed_advice import SPEED_RULES
from pipeline.metrics.staleness import stale_responses
from pipeline.metrics.starts import START_RULES
from pipeline.text import number

_K3_MUCH, _K3_TOO_MUCH = 0.01, 0.1
"""Nats per token: engines that differ in rounding alone are at 1e-3 (bf16) and below."""
_AT_ONCE = 0.05
"""Nats per token in a single iteration, below which chance and rounding may be what is seen."""


def engine_mismatch(evidence: AdviceInput) -> Findings:
    """Detect a rollout engine and a trainer that compute different probabilities; from the first iteration
    on, since what makes them differ does not pass. Of responses of an older policy (rollout.staleness, or
    groups that waited) they are meant to differ."""
    same = [row for row in evidence.rows if not row.get("staleness/lag") and not row.get("refill/carried")]
    found = _mismatch(replace(evidence, rows=same))
    if found is None:
        return
    severity = Severity.PROBLEM if found.middle > _K3_TOO_MUCH else Severity.WARNING
    median = "median " if len(found) > 1 else ""
    what = f"{found.name}: {median}{number(found.middle)} nats per token in {found.span}"
    title = "the rollout engine's probabilities differ from the trainer's"
    remedy = "; ".join(_mismatch_remedies(evidence))
    yield Advice(severity, Rule.ENGINE_MISMATCH, title, what, remedy, ("mismatch/k3", "mismatch/kl"))


def _mismatch(evidence: AdviceInput) -> Series | None:
    """Return the mismatch of recent iterations, or of the last of a few, if it is too large."""
    usual = recent(evidence, "mismatch/k3")
    if usual is not None:
        return usual if usual.middle > _K3_MUCH else None
    newest = (series(evidence.trained[-1:], name) for name in ("mismatch/kl", "mismatch/k3"))
    largest = max((one for one in newest if len(one)), key=lambda one: one.middle, default=None)
    return largest if largest and largest.middle > _AT_ONCE else None


def _mismatch_remedies(evidence: AdviceInput) -> Iterator[str]:
    config = evidence.config
    if config.algorithm.correction.level is CorrectionLevel.NONE:
        yield "set algorithm.correction.level=token"
    if config.rollout_precision is not config.update.precision:
        yield (
            f"give rollout.precision={config.rollout_precision} and "
            f"update.precision={config.update.precision} the same format"
        )
    if config.rollout.engine == Engine.TRANSFORMERS:
        yield (
            "to see what it comes from, generate one row at a time (rollout.tokens_per_batch=1), then train "
            "with update.attention=eager and update.remove_padding=false"
        )
    else:
        yield "try rollout.engine=transformers"


_MANY, _MOST = 0.25, 0.75
"""Shares of responses: what is left out was generated and scored all the same."""
_GIVE_SCORES = "see of which responses the rules return None (slurm-ppo samples RUN), and give more a score"
_REASONS = {
    "abstained": ("no rule gave a score", _GIVE_SCORES),
    "unscorable": (
        "a reward model could not take them",
        "look at the logs (slurm-ppo logs RUN reward), or take another reward model",
    ),
    "no_baseline": ("the greedy response to the prompt has no reward", _GIVE_SCORES),
    "refused": ("the prompt was refused", "lower data.max_prompt_tokens, or raise model.context_length"),
    "truncated": (
        "they were cut, and algorithm.mask_truncated is true",
        "raise rollout.max_new_tokens, or set algorithm.mask_truncated=false and "
        "algorithm.shaping.overlong_buffer, which teaches ending",
    ),
}
"""Words for each reason (:class:`pipeline.run.schemas.Validity`), and what to change."""


def left_out(evidence: AdviceInput) -> Findings:
    """Detect that many responses do not count. The commonest reason is named."""
    window, rows = recent(evidence, "iteration"), evidence.trained[-WINDOW:]
    scored, *lost = (sum(series(rows, f"validity/{how}").values) for how in ("scored", *_REASONS))
    share = sum(lost) / total if (total := scored + sum(lost)) else 0.0
    if window is None or share <= _MANY:
        return
    counts = dict(zip(_REASONS, lost, strict=True))
    commonest = max(counts, key=lambda how: counts[how])
    why, remedy = _REASONS[commonest]
    what = (
        f"{percent(share)} of {total:,.0f} responses are left out of the update ({window.span}), "
        f"most of them since {why}"
    )
    severity = Severity.PROBLEM if share > _MOST else Severity.WARNING
    names = ("validity/scored", f"validity/{commonest}")
    yield Advice(severity, Rule.UNSCORED, "many responses do not count", what, remedy, names)


RULES = (
    *FIRST_SIGNS,
    *LEARNING_RULES,
    left_out,
    engine_mismatch,
    stale_responses,
    *SPEED_RULES,
    *START_RULES,
)


def advise(evidence: AdviceInput) -> list[Advice]:
    """Apply every rule. Findings come worst first, equally bad ones in the order of :class:`Rule`."""
    found = [advice for rule in RULES for advice in rule(evidence)]
    severities, rules = list(Severity), list(Rule)
    return sorted(found, key=lambda a: (-severities.index(a.severity), rules.index(a.rule)))


def first_shown(evidence: AdviceInput) -> list[Advice]:
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
