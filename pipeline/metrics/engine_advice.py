"""The rule about a rollout engine and a trainer that disagree. Pure; without its numbers it is silent."""

from collections.abc import Iterator

from pipeline.config.algorithm import CorrectionLevel
from pipeline.config.engines import Engine
from pipeline.metrics.advice_input import Advice, Evidence, Findings, Rule, Series, Severity, recent, series
from pipeline.text import number

_K3_MUCH, _K3_TOO_MUCH = 0.01, 0.1
"""Nats per token: engines that differ in rounding alone are at 1e-3 (bf16) and below."""
_AT_ONCE = 0.05
"""Nats per token in a single iteration, below which chance and rounding may be what is seen."""


def engine_mismatch(evidence: Evidence) -> Findings:
    """Detect a rollout engine and a trainer that compute different probabilities; from the first iteration
    on, since what makes them differ does not pass."""
    found = _mismatch(evidence)
    if found is None:
        return
    severity = Severity.PROBLEM if found.middle > _K3_TOO_MUCH else Severity.WARNING
    median = "median " if len(found) > 1 else ""
    what = f"{found.name}: {median}{number(found.middle)} nats per token in {found.span}"
    title = "the rollout engine's probabilities differ from the trainer's"
    remedy = "; ".join(_mismatch_remedies(evidence))
    yield Advice(severity, Rule.ENGINE_MISMATCH, title, what, remedy, ("mismatch/k3", "mismatch/kl"))


def _mismatch(evidence: Evidence) -> Series | None:
    """Return the mismatch of recent iterations, or of the last of a few, if it is too large."""
    usual = recent(evidence, "mismatch/k3")
    if usual is not None:
        return usual if usual.middle > _K3_MUCH else None
    newest = (series(evidence.trained[-1:], name) for name in ("mismatch/kl", "mismatch/k3"))
    largest = max((one for one in newest if len(one)), key=lambda one: one.middle, default=None)
    return largest if largest and largest.middle > _AT_ONCE else None


def _mismatch_remedies(evidence: Evidence) -> Iterator[str]:
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
