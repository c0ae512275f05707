"""Reward components: what is scored how, and their weighted sum."""

from stages.rewards.components import component_scores, measure_normalization
from stages.rewards.rules import load_rule

__all__ = ["component_scores", "load_rule", "measure_normalization"]
