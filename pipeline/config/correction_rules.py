"""Keys of the policy loss's ratios, of their correction and of the policy that they are to: contradictions,
and what follows from them. Pure."""

from collections.abc import Iterator

from pipeline.config.algorithm import (
    GROUP_ESTIMATORS,
    CorrectionLevel,
    CorrectionMode,
    DistillationPlacement,
    KLPlacement,
    OldLogProbs,
)
from pipeline.config.distillation_rules import has_teachers_in
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config


def correction_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield thresholds that leave nothing, and a bound on tokens where tokens have no ratio of their own."""
    correction = config.algorithm.correction
    if correction.mode is CorrectionMode.MASK and correction.low >= correction.high:
        why = f"must be below algorithm.correction.high={correction.high}"
        yield ConfigIssue.at(config, "algorithm.correction.low", why)
    if correction.mode is CorrectionMode.M2PO and correction.level is not CorrectionLevel.TOKEN:
        why = f"bounds ratios of tokens, and algorithm.correction.level={correction.level}; set that to token"
        yield ConfigIssue.at(config, "algorithm.correction.mode", why)


def old_log_probs_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what needs the trainer's own log-probabilities before the first step."""
    algorithm = config.algorithm
    if algorithm.old_log_probs is OldLogProbs.TRAINER:
        return
    groups, level = ", ".join(sorted(GROUP_ESTIMATORS)), algorithm.correction.level
    if algorithm.estimator not in GROUP_ESTIMATORS:
        yield _refused(
            config, f"is for the estimators {groups}, and algorithm.estimator={algorithm.estimator}; use one"
        )
    if level is not CorrectionLevel.NONE:
        twice = "the ratio is to the policy that wrote the responses, so a correction would weigh them twice"
        yield _refused(config, f"{twice}; set algorithm.correction.level=none")
    if algorithm.target_kl is not None:
        unknown = "algorithm.target_kl is a distance from the policy before the update, which is not computed"
        yield _refused(config, f"{unknown}; leave it out")


def _refused(config: Config, why: str) -> ConfigIssue:
    return ConfigIssue.at(config, "algorithm.old_log_probs", f"{why}, or set this to trainer")


def step_gives_old_log_probs(config: Config) -> bool:
    """Whether an iteration has one step, which starts from the old policy, and what is computed before the
    step needs no old log-probabilities: no KL in the reward or to a teacher, and no importance weights."""
    algorithm, update = config.algorithm, config.update
    has_penalty = algorithm.kl.coef > 0 and algorithm.kl.placement is KLPlacement.REWARD
    is_taught = has_teachers_in(config, DistillationPlacement.ADVANTAGE)
    is_corrected = algorithm.correction.level is not CorrectionLevel.NONE or is_taught
    return update.epochs * update.minibatches == 1 and not has_penalty and not is_corrected


def passes_for_old_log_probs(config: Config) -> bool:
    """Whether the policy goes over all responses before the first step."""
    return config.algorithm.old_log_probs is OldLogProbs.TRAINER and not step_gives_old_log_probs(config)
