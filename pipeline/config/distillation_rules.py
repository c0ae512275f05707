"""What teachers (reward.teachers, algorithm.distillation) need of other settings. Pure."""

from collections.abc import Iterator, Sequence

from pipeline.config.algorithm import (
    DistillationConfig,
    DistillationPlacement,
    Estimator,
    KLEstimator,
    PolicyLossName,
)
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

_OF_ESTIMATE = ("estimator", "straight_through")
_OF_LOSS = (*_OF_ESTIMATE, "top_k")
_OF_RESPONSES = frozenset({PolicyLossName.GSPO, PolicyLossName.GMPO})
"""Losses with one ratio for a response, which a token's own advantage cannot move apart from the others."""
_MOST_NUMBERS = 2**31 - 1
"""Most numbers in a column of lists: Arrow counts them with 32 bits."""


def has_teachers_in(config: Config, placement: DistillationPlacement) -> bool:
    """Whether there are teachers, and the KL to them enters there."""
    return bool(config.reward.teachers) and config.algorithm.distillation.placement is placement


def distillation_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield keys of distillation without use, and what cannot learn from teachers."""
    if not config.reward.teachers:
        why = "there is no teacher; give reward.teachers.NAME.path=DIR, or leave it out"
        yield from _given(config, ("placement", *_OF_LOSS), why)
        return
    yield from _placement_problems(config)
    if not config.reward.components:
        yield from _problems_without_reward(config)


def _given(config: Config, names: Sequence[str], why: str) -> Iterator[ConfigIssue]:
    """Yield the keys of distillation that have other values than their defaults."""
    for name in names:
        if getattr(config.algorithm.distillation, name) != getattr(DistillationConfig, name):
            yield ConfigIssue.at(config, f"algorithm.distillation.{name}", why)


def _placement_problems(config: Config) -> Iterator[ConfigIssue]:
    given, loss = config.algorithm.distillation, config.algorithm.policy_loss
    if given.placement is DistillationPlacement.ADVANTAGE:
        why = "is for a KL in the loss: needs algorithm.distillation.placement=loss"
        yield from _given(config, _OF_LOSS, why)
        if loss in _OF_RESPONSES:
            why = (
                "has one ratio for a response, and teachers give each token an advantage of its own; use "
                "another, such as gspo-token, or algorithm.distillation.placement=loss"
            )
            yield ConfigIssue.at(config, "algorithm.policy_loss", why)
    elif given.top_k is not None:
        why = "is for an estimate, and top_k needs none; leave one of them out"
        yield from _given(config, _OF_ESTIMATE, why)
        yield from _shared_response_problems(config)
        yield from _column_problems(config, given.top_k)
    elif given.per_token is KLEstimator.K1 and not given.straight_through:
        why = (
            "its gradient in the loss is zero on average, so nothing would be learned; leave it out for k3, "
            "or give algorithm.distillation.straight_through=true too"
        )
        yield ConfigIssue.at(config, "algorithm.distillation.estimator", why)


def _column_problems(config: Config, top_k: int) -> Iterator[ConfigIssue]:
    """Yield more numbers than a column of a shard can have."""
    rollout = config.rollout
    tokens = -(-config.responses_per_iteration // rollout.num_shards) * rollout.max_new_tokens
    if tokens * top_k > _MOST_NUMBERS:
        most = _MOST_NUMBERS // tokens
        why = f"a shard of {tokens} response tokens has more than 2^31 of the teacher's numbers; give "
        why += f"{most} at most, or more shards (rollout.num_shards)" if most else "more rollout.num_shards"
        yield ConfigIssue.at(config, "algorithm.distillation.top_k", why)


def _shared_response_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield a teacher of all responses beside others: the likeliest tokens of two have no mean."""
    of_all = [name for name, teacher in config.reward.teachers.items() if not teacher.only]
    if of_all and len(config.reward.teachers) > 1:
        why = (
            f"a response may have one teacher, and {of_all[0]} teaches all of them; give "
            f"reward.teachers.{of_all[0]}.only, or leave top_k out"
        )
        yield ConfigIssue.at(config, "algorithm.distillation.top_k", why)


def _problems_without_reward(config: Config) -> Iterator[ConfigIssue]:
    """Yield what needs a reward, where the policy learns from teachers alone."""
    only = "responses have no reward (reward.components={})"
    if config.algorithm.estimator is Estimator.GAE:
        why = f"{only}, so a critic has nothing to learn; choose algorithm=reinforce_plus_plus"
        yield ConfigIssue.at(config, "algorithm.estimator", why)
    if config.algorithm.shaping.filter_groups:
        why = f"{only}, so all prompts would be left out; set it to false"
        yield ConfigIssue.at(config, "algorithm.shaping.filter_groups", why)
    if config.data.has_heldout and config.evaluate.every:
        why = f"{only}, so there is nothing to evaluate; add a component with weight 0, or set it to 0"
        yield ConfigIssue.at(config, "evaluate.every", why)
