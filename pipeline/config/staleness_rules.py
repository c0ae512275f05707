"""What older policies of responses (rollout.staleness) need of other settings. Pure."""

from collections.abc import Iterator

from pipeline.config.algorithm import GROUP_ESTIMATORS, CorrectionLevel, Estimator, OldLogProbs
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

_WEIGHED = (CorrectionLevel.TOKEN, CorrectionLevel.GEOMETRIC)


def staleness_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield a correction that does not weigh responses for the policy that they are of."""
    staleness, algorithm = config.rollout.staleness, config.algorithm
    level, is_compared = algorithm.correction.level, algorithm.old_log_probs is OldLogProbs.ROLLOUT
    if not staleness or level in _WEIGHED or is_compared:
        return
    why = "nothing would weigh them for that"
    if level is CorrectionLevel.SEQUENCE:
        why = (
            "the product of a response's ratios grows or vanishes with its length, so that a few responses "
            "would have all the weight"
        )
    about = f"with rollout.staleness={staleness} responses are of an older policy than the one that learns"
    other = ", or algorithm.old_log_probs=rollout" if algorithm.estimator in GROUP_ESTIMATORS else ""
    yield ConfigIssue.at(
        config, "algorithm.correction.level", f"{about} from them: {why}; give token or geometric{other}"
    )


def staleness_warnings(config: Config) -> Iterator[str]:
    """Yield a line for what is allowed, and biased."""
    if config.rollout.staleness > 1 and config.algorithm.estimator is Estimator.GAE:
        yield (
            f"warning: rollout.staleness={config.rollout.staleness} with algorithm.estimator=gae: weights of "
            "tokens do not correct that the critic's values are of states which an older policy has reached, "
            "so advantages are biased, the more the further the policies are apart; 1 has less of it"
        )
