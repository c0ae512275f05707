"""The configuration of learning from a reward: estimators, losses, KL, reward shaping, corrections."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipeline.config.types import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)


class Estimator(StrEnum):
    """Estimators of advantages."""

    GAE = "gae"
    """Generalised advantage estimation with a learned critic (arXiv 1506.02438)."""
    GRPO = "grpo"
    """Reward minus the group's mean, over the group's standard deviation (arXiv 2402.03300)."""
    RLOO = "rloo"
    """Reward minus the mean of the group's other samples (arXiv 2402.14740)."""
    REINFORCE_PLUS_PLUS = "reinforce++"
    """Discounted sum of the rewards to come, whitened over the iteration (arXiv 2501.03262)."""
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce++-baseline"
    """Reward minus the group's mean, whitened over the iteration (arXiv 2501.03262)."""
    REMAX = "remax"
    """Discounted sum of the rewards to come minus the reward of a greedy response (arXiv 2310.10505)."""


GROUP_ESTIMATORS = frozenset({Estimator.GRPO, Estimator.RLOO, Estimator.REINFORCE_PLUS_PLUS_BASELINE})
"""Estimators whose baseline is the other samples of the same prompt."""


class PolicyLossName(StrEnum):
    """Losses of the policy that come with slurm-ppo. Ratios are new probability over old."""

    PPO = "ppo"
    """Each token's ratio is clipped (arXiv 1707.06347), and the loss of negative advantages is bounded."""
    GSPO = "gspo"
    """A response's ratio, the geometric mean of its tokens', is clipped (arXiv 2507.18071)."""
    GSPO_TOKEN = "gspo-token"
    """As gspo, with each token's own gradient, for advantages that differ within a response."""
    CISPO = "cispo"
    """The clipped ratio weighs the token's log-probability; all keep a gradient (arXiv 2506.13585)."""
    SAPO = "sapo"
    """A smooth gate takes the place of clipping (arXiv 2511.20347)."""
    GMPO = "gmpo"
    """The geometric mean of a response's clipped ratios times its advantage (arXiv 2507.20673)."""


CLIPPING_LOSSES = frozenset(PolicyLossName) - {PolicyLossName.SAPO}
"""Losses that take algorithm.clip_range_low and clip_range_high."""
PolicyLoss = Annotated[str, Field(pattern=rf"^({'|'.join(PolicyLossName)}|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
"""One of :class:`PolicyLossName`, or ``module:function`` of the user's."""


class LossAggregation(StrEnum):
    """Aggregations of a matrix of per-token losses to one number, with counts of the whole mini-batch."""

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"


class KLEstimator(StrEnum):
    """Per-token estimators of KL(policy || reference) (Schulman, "Approximating KL divergence")."""

    K1 = "k1"
    ABS = "abs"
    K2 = "k2"
    K3 = "k3"


class KLController(StrEnum):
    """Controllers of the KL coefficient."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"
    """Proportional control towards a target KL (arXiv 1909.08593, section 2.2)."""


class KLPlacement(StrEnum):
    """Places where the KL to the reference enters."""

    REWARD = "reward"
    """Subtracted from the reward at every token (arXiv 1909.08593)."""
    LOSS = "loss"
    """Added to the policy loss (arXiv 2402.03300)."""


class DistillationPlacement(StrEnum):
    """Places where the KL to a teacher enters."""

    ADVANTAGE = "advantage"
    """Each token's log-probability ratio of teacher to old policy is added to its advantage: no later token
    shares in it."""
    LOSS = "loss"
    """Added to the policy loss."""


class ReferenceStage(StrEnum):
    """Stages that can compute the frozen reference's log-probabilities."""

    REWARD = "reward"
    """Beside the reward models; the update then needs no memory for the reference."""
    UPDATE = "update"
    """With the trainer's own micro-batches and precision; for rewards that need no GPU."""


class OldLogProbs(StrEnum):
    """Sources of the old policy's log-probabilities, to which the policy loss compares the new ones."""

    TRAINER = "trainer"
    """Computed by the trainer before the first step."""
    ROLLOUT = "rollout"
    """Those of the policy that wrote the responses, as the rollout engine gave them."""


class CorrectionLevel(StrEnum):
    """Granularity of the importance weights between rollout engine and trainer."""

    NONE = "none"
    """No correction; the mismatch is measured all the same."""
    TOKEN = "token"
    """Each token has its own ratio."""
    SEQUENCE = "sequence"
    """The product of the ratios of a response's tokens, for all of its tokens."""
    GEOMETRIC = "geometric"
    """The geometric mean of the ratios of a response's tokens, for all of its tokens."""


class CorrectionMode(StrEnum):
    """Treatment of an importance weight outside the thresholds."""

    TRUNCATE = "truncate"
    """A weight above the upper threshold is lowered to it (truncated importance sampling)."""
    MASK = "mask"
    """A weight outside becomes 0, so that its tokens teach nothing (IcePop)."""
    M2PO = "m2po"
    """As truncate; and of tokens whose ratio is on the side to which their advantage pushes it, those
    furthest from 1 become 0 until second_moment holds (arXiv 2510.01161)."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Distance to the reference model."""

    coef: NonNegativeFloat = 0.05
    """KL coefficient (the first one, when adaptive). 0 turns the reference model off."""
    placement: KLPlacement = KLPlacement.REWARD
    """Whether the KL is a penalty in the reward or a term of the policy loss."""
    estimator: KLEstimator | None = None
    """Per-token estimator. In the loss k1 is refused without straight_through, as its gradient is zero on
    average, and abs has a biased one. Default: k1 in the reward, k3 in the loss."""
    straight_through: bool = False
    """In the loss: the estimator's value with the gradient of k2, which is the gradient of the KL. The
    gradient of k3 is that of the KL from the reference to the policy, as GRPO was published."""
    reference_in: ReferenceStage = ReferenceStage.REWARD
    """Stage that computes the reference's log-probabilities."""
    sync_every: PositiveInt | None = None
    """Updates after which the policy takes the reference's place: the reference is the newest policy whose
    version is a multiple of this, of those that the iteration's rollouts could have. Default: never."""
    sync_weight: OpenFraction = 1.0
    """Share of the policy in the new reference; the rest is the old one (ref_model_mixup_alpha of TRL). Below
    1 the update at a sync commits the average too, in fp32."""
    controller: KLController = KLController.FIXED
    """Controller of the coefficient, which may keep it fixed."""
    target: PositiveFloat = 6.0
    """Adaptive controller: KL per sequence to steer to."""
    horizon: PositiveInt = 10000
    """Adaptive controller: responses over which the coefficient moves by the proportional error."""

    @property
    def per_token(self) -> KLEstimator:
        """Estimator that is computed."""
        by_placement = {KLPlacement.REWARD: KLEstimator.K1, KLPlacement.LOSS: KLEstimator.K3}
        return self.estimator or by_placement[self.placement]

    @property
    def sync_interval(self) -> int:
        """Updates from one sync of the reference to the next; 0: there is none."""
        return (self.sync_every or 0) if self.coef > 0 else 0

    @property
    def averages(self) -> bool:
        """Whether a new reference is an average of the policy and the old one."""
        return self.sync_interval > 0 and self.sync_weight < 1


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """KL(policy || teacher) on the policy's own responses (on-policy distillation, arXiv 2306.13649), for
    reward.teachers, whose weights are its coefficients."""

    placement: DistillationPlacement = DistillationPlacement.ADVANTAGE
    """Whether the KL is a part of each token's advantage or a term of the policy loss."""
    estimator: KLEstimator | None = None
    """Per-token estimator in the loss, as algorithm.kl.estimator. Default: k3. Advantages have k1."""
    straight_through: bool = False
    """In the loss: the estimator's value with the gradient of k2, which is the gradient of the KL."""
    top_k: PositiveInt | None = None
    """In the loss, in place of an estimate: the KL over the top_k tokens that the teacher finds most probable
    at each place, all others counted as one. A response may have one teacher then. Default: an estimate."""

    @property
    def per_token(self) -> KLEstimator:
        """Estimator that the loss has."""
        return self.estimator or KLEstimator.K3


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """Changes to a response's reward before advantages, in the order of these keys."""

    normalize: bool = False
    """Subtract the mean and divide by the standard deviation of all rewards of the run so far."""
    clip: PositiveFloat | None = None
    """Limit rewards to this magnitude."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Penalty subtracted from the reward of responses that did not end by themselves."""
    overlong_buffer: PositiveInt | None = None
    """Tokens before rollout.max_new_tokens over which a penalty for length grows from 0 to
    overlong_penalty (soft overlong punishment, arXiv 2503.14476)."""
    overlong_penalty: PositiveFloat = 1.0
    """Penalty of a response of max_new_tokens; needs overlong_buffer."""
    filter_groups: bool = False
    """Leave prompts whose samples all have the same reward, where steps have some the same at every step, out
    of the update; rollout.oversample puts others in their place. For grpo, rloo and reinforce++-baseline,
    which learn nothing from them."""


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights trainer / rollout engine, for what the two compute differently."""

    level: CorrectionLevel = CorrectionLevel.NONE
    """Granularity of the weights: one per token, or one per response."""
    mode: CorrectionMode = CorrectionMode.TRUNCATE
    """Treatment of weights outside the thresholds."""
    high: PositiveFloat = 2.0
    """Upper threshold."""
    low: NonNegativeFloat = 0.5
    """Lower threshold; only mask has one."""
    second_moment: PositiveFloat = 0.04
    """With m2po: the largest mean of squared log-ratios, over all tokens of the iteration whose ratio is on
    the side to which their advantage pushes it."""
    normalize: bool = False
    """Divide the weights by their mean over the iteration."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """PPO (arXiv 1707.06347) and its relatives."""

    estimator: Estimator = Estimator.GAE
    """Advantage estimator. Only gae needs a critic; grpo, rloo and reinforce++-baseline need
    rollout.samples_per_prompt > 1; remax generates one more, greedy response per prompt."""
    gamma: Fraction = 1.0
    """Discount per token (gae, reinforce++, remax)."""
    lam: Fraction = 0.95
    """GAE's lambda, for advantages and, unless critic_lam is given, for the critic's returns."""
    critic_lam: Fraction | None = None
    """Lambda of the returns that the critic learns (decoupled GAE, arXiv 2504.05118, which takes 1). Default:
    lam."""
    lam_alpha: PositiveFloat | None = None
    """Take 1 - 1 / (lam_alpha * tokens of the response) instead of lam, for advantages only if critic_lam is
    given (arXiv 2504.05118, which takes 0.05). Default: lam for all."""
    critic_warmup: NonNegativeInt = 0
    """First iterations in which the critic alone learns (gae): each commits the policy's weights as they
    were, and the policy's learning rate starts its schedule after them."""
    policy_loss: PolicyLoss = PolicyLossName.PPO
    """Loss of the policy by name, or module:function, which gets log_probs, old_log_probs,
    advantages and mask, all [B, T], and returns the loss of each token [B, T]."""
    old_log_probs: OldLogProbs = OldLogProbs.TRAINER
    """Source of the old policy's log-probabilities. rollout saves a forward pass over all responses; the
    ratio is then that of the new policy to the one that wrote the responses. For the group estimators,
    without correction and target_kl."""
    clip_range_low: PositiveFloat = 0.2
    """The probability ratio is clipped below at 1 - clip_range_low (gmpo: its logarithm, at the negative)."""
    clip_range_high: PositiveFloat = 0.2
    """The probability ratio is clipped above at 1 + clip_range_high (gmpo: its logarithm, at that)."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Bound of the loss for negative advantages (arXiv 1912.09729); of policy_loss=ppo."""
    gate_positive: PositiveFloat = 1.0
    """How sharply policy_loss=sapo attenuates tokens of positive advantage whose ratio is far from 1."""
    gate_negative: PositiveFloat = 1.05
    """The same for tokens of negative advantage, which make training unstable sooner."""
    value_clip_range: PositiveFloat = 0.2
    """Distance to which the new value is clipped around the old one."""
    whiten_rewards: bool = False
    """Scale per-token rewards of the whole iteration to variance 1, KL penalty included (GAE only)."""
    whiten_advantages: bool = True
    """Shift and scale advantages of the whole iteration to mean 0, variance 1 (GAE only)."""
    normalize_group_std: bool = True
    """GRPO: divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    mask_truncated: bool = False
    """Leave responses that were cut (finish_reason length) out of the update and out of the baseline of their
    prompt: their reward may reflect the limit more than the text (arXiv 2503.14476). Reward shards have them
    as truncated in the column validity."""
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    """Aggregation of per-token losses to one number."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy loss."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the loss that keeps the experts of a mixture equally busy (arXiv 2101.03961, as transformers
    has it). Default: router_aux_loss_coef of the policy's config.json where its output_router_logits is true;
    else 0."""
    router_replay: bool = False
    """Record which experts of a mixture each token goes through in the rollout, and train with these instead
    of the routers' own choice, weighed by the routers as they are then (R3, arXiv 2510.11370). For
    rollout.engine=transformers."""
    target_kl: PositiveFloat | None = None
    """End an iteration's training before the first step whose mini-batch has moved further than this from
    the old policy (KL per token, k3). Default: no limit."""
    kl: KLConfig = KLConfig()
    """KL to the reference."""
    distillation: DistillationConfig = DistillationConfig()
    """KL to teachers (reward.teachers)."""
    shaping: ShapingConfig = ShapingConfig()
    """Reward shaping."""
    correction: CorrectionConfig = CorrectionConfig()
    """Mismatch between rollout engine and trainer."""

    @property
    def has_own_loss(self) -> bool:
        """Whether the policy's loss is a function of the user's, of which nothing is known."""
        return ":" in self.policy_loss

    def trains_policy(self, iteration: int) -> bool:
        """Whether an iteration trains the policy, and not the critic alone."""
        return iteration > self.critic_warmup
