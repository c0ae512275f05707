"""What responses of older policies (rollout.staleness) are worth: a number of the row, a rule on it. Pure."""

import shlex
from collections.abc import Sequence
from statistics import median

from pipeline.metrics.advice_input import (
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Row,
    Rule,
    Severity,
    percent,
    series,
)
from pipeline.text import number

LAG, SAMPLES, RELATIVE = "staleness/lag", "mismatch/effective_samples", "staleness/effective_samples"
_FEW, _ALMOST_NONE = 0.8, 0.5
"""Shares of the effective samples without lag: exp(-s^2) for log-ratios of standard deviation s, so that s is
0.47 and 0.83; M2PO (arXiv 2510.01161) bounds it to 0.2. The quickstart with staleness 1 has 0.98."""
_LEAST = 3
"""Iterations of which a median is taken; of fewer the newest has to be below the lower share."""


def staleness_metrics(row: Row, earlier: Sequence[Row]) -> dict[str, float]:
    """Return the effective samples of a row with a lag, relative to the median of this run's without; nothing
    where either is unknown.

    Args:
        earlier: rows of the run before this one.
    """
    own = [one for one in earlier if one.get(LAG) == 0 and not one.get("refill/carried")]
    usual = [one[SAMPLES] for one in own if SAMPLES in one]
    if not row.get(LAG) or SAMPLES not in row or not usual or median(usual) <= 0:
        return {}
    return {RELATIVE: row[SAMPLES] / median(usual)}


def stale_responses(evidence: AdviceInput) -> Findings:
    """Detect updates that move the policy so far that responses of an older one are worth few samples."""
    found = series(evidence.trained[-2 * WINDOW :], RELATIVE)[-WINDOW:]
    if len(found) < _LEAST:
        found = found[-1:]
    if not len(found) or found.middle >= (_FEW if len(found) >= _LEAST else _ALMOST_NONE):
        return
    rate = series(evidence.trained, "policy/learning_rate")[-1:]
    now = f", which is {number(rate.middle)} now" if len(rate) else ""
    run = shlex.quote(evidence.config.run_dir)
    yield Advice(
        Severity.PROBLEM if found.middle < _ALMOST_NONE else Severity.WARNING,
        Rule.STALE_RESPONSES,
        "responses of an older policy are worth few samples",
        f"{percent(found.middle)} of the effective samples of this run without lag, in {found.span}",
        f"lower update.learning_rate{now}, or learn from the newest policy's responses alone: slurm-ppo fork "
        f"{run} NEW_RUN rollout.staleness=0",
        (RELATIVE, SAMPLES, LAG),
    )
