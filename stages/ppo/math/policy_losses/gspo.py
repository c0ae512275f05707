"""Group sequence policy optimisation (arXiv 2507.18071): a response's ratio is its tokens' geometric mean."""

from pipeline.config.algorithm import AlgorithmConfig
from stages.ppo.math.policy_losses.contract import Compared, Surrogate, clipped_surrogate


def gspo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip a response's ratio (eq. 5), the same at all of its tokens."""
    ratio = given.mean_of_response(given.log_ratio).exp().expand_as(given.mask)
    return clipped_surrogate(ratio, given.advantages, algorithm)


def gspo_token(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip a response's ratio with the gradient of each token's own probability (eq. 13). Where a response's
    tokens have one advantage, gradient and value are those of :func:`gspo`."""
    own = given.log_probs - given.log_probs.detach()  # 0, with a gradient
    ratio = (given.mean_of_response(given.log_ratio.detach()) + own).exp()
    return clipped_surrogate(ratio, given.advantages, algorithm)
