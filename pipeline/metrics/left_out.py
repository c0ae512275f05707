"""Advice on responses that do not count: which reason leaves most of them out, and what to change."""

from pipeline.metrics.advice_input import (
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Rule,
    Severity,
    percent,
    recent,
    series,
)

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
