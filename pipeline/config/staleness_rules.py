"""What older policies of responses (rollout.staleness) need of other settings. Pure."""

from collections.abc import Iterator

from pipeline.config.algorithm import GROUP_ESTIMATORS, CorrectionLevel, Estimator, OldLogProbs
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

_WEIGHED = (CorrectionLevel.TOKEN, CorrectionLevel.GEOMETRIC)


def staleness_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield a correction that does not weigh responses for the policy that they are of."""
    staleness = config.rollout.staleness
    if not staleness or weighs_policies(config):
        return
    why = "nothing would weigh them for that"
    if config.algorithm.correction.level is CorrectionLevel.SEQUENCE:
        why = (
            "the product of a response's ratios grows or vanishes with its length, so that a few responses "
            "would have all the weight"
        )
    about = f"with rollout.staleness={staleness} responses are of an older policy than the one that learns"
    is_group = config.algorithm.estimator in GROUP_ESTIMATORS
    other = ", or algorithm.old_log_probs=rollout" if is_group else ""
    yield ConfigIssue.at(
        config, "algorithm.correction.level", f"{about} from them: {why}; give token or geometric{other}"
    )


def weighs_policies(config: Config) -> bool:
    """Whether responses of older policies are weighed for the policy that they are of."""
    algorithm = config.algorithm
    is_compared = algorithm.old_log_probs is OldLogProbs.ROLLOUT
    return is_compared or algorithm.correction.level in _WEIGHED


def staleness_warnings(config: Config) -> Iterator[str]:
    """Yield a line for what is allowed, and biased."""
    if config.rollout.staleness > 1 and config.algorithm.estimator is Estimator.GAE:
        yield (
            f"warning: rollout.staleness={config.rollout.staleness} with algorithm.estimator=gae: weights of "
            "tokens do not correct that the critic's values are of states which an older policy has reached, "
            "so advantages are biased, the more the further the policies are apart; 1 has less of it"
        )
