"""Policy losses by the names of :class:`PolicyLossName`, and the user's own."""

import functools
from collections.abc import Callable

from torch import Tensor

from pipeline.config.algorithm import AlgorithmConfig, PolicyLossName
from pipeline.plugins.load import load_plugin
from stages.context import UserError
from stages.ppo.math.policy_losses.cispo import cispo
from stages.ppo.math.policy_losses.contract import Compared, PolicyLossFunction, Surrogate
from stages.ppo.math.policy_losses.gmpo import gmpo
from stages.ppo.math.policy_losses.gspo import gspo, gspo_token
from stages.ppo.math.policy_losses.ppo import ppo
from stages.ppo.math.policy_losses.sapo import sapo

_OURS: dict[str, PolicyLossFunction] = {
    PolicyLossName.PPO: ppo,
    PolicyLossName.GSPO: gspo,
    PolicyLossName.GSPO_TOKEN: gspo_token,
    PolicyLossName.CISPO: cispo,
    PolicyLossName.SAPO: sapo,
    PolicyLossName.GMPO: gmpo,
}


@functools.cache
def policy_loss_function(name: str) -> PolicyLossFunction:
    """Return the loss of that name. Raises PluginError where a user's cannot be imported."""
    if name in _OURS:
        return _OURS[name]
    return users_own(name, load_plugin("algorithm.policy_loss", name))


def users_own(name: str, function: Callable[..., Tensor]) -> PolicyLossFunction:
    """Wrap a user's function: of log_probs (with a gradient), old_log_probs, advantages and mask, all [B, T],
    it returns the loss of each token [B, T]. Each row is a whole response; what it returns for one must not
    depend on the others, which lie beside it by chance.

    Raises (the function returned):
        UserError: the user's returns anything else.
    """

    def called(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
        loss = function(given.log_probs, given.old_log_probs, given.advantages, given.mask)
        if not isinstance(loss, Tensor) or loss.shape != given.mask.shape:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"algorithm.policy_loss={name} returned {found}; it must return the loss of each token, a "
                f"tensor of shape {list(given.mask.shape)}"
            )
        return Surrogate.unclipped(loss)

    return called
