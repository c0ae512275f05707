"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of clipping."""

import torch

from pipeline.config.algorithm import AlgorithmConfig
from stages.ppo.math.policy_losses.contract import Compared, Surrogate


def sapo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Weigh advantages by sigmoid(gate * (ratio - 1)) * 4 / gate, whose slope at ratio 1 is 1 for every gate
    and falls to both sides, the faster the larger the gate is."""
    ratio = given.log_ratio.exp()
    positive = given.advantages > 0
    gate = torch.where(positive, algorithm.gate_positive, algorithm.gate_negative).to(ratio.dtype)
    return Surrogate.unclipped(-given.advantages * torch.sigmoid(gate * (ratio - 1)) * 4 / gate)
