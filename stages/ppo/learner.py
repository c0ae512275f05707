"""One PPO update of a policy and its critic on an iteration's experience (arXiv 1707.06347)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeline.algorithmconfig import Estimator
from pipeline.config import Config
from pipeline.seeds import derive_seed
from stages import ranks
from stages.models import device
from stages.ppo.advantages import gae, grpo, rloo
from stages.ppo.batching import MicroBatch, micro_batches_of_rank
from stages.ppo.experience import Experience
from stages.ppo.forward import (
    gather_rows,
    response_log_probs,
    response_logits,
    response_values,
    scatter_rows,
)
from stages.ppo.kl import kl_per_token
from stages.ppo.losses import Counts, aggregate, policy_loss, token_entropy, token_log_probs, value_loss
from stages.ppo.masked import masked_sum, masked_whiten
from stages.ppo.trainer import Trainer


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step."""

    rows: Sequence[int]
    """Of all ranks."""
    micro_batches: Sequence[MicroBatch]
    """Of this rank."""


@dataclass(frozen=True)
class Targets:
    """What the losses compare with; all [N, T]."""

    old_log_probs: Tensor
    old_values: Tensor | None
    advantages: Tensor
    returns: Tensor | None


PER_TOKEN = ("entropy", "ratio", "approx_kl", "clip_low", "clip_high", "dual_clip", "value_clip")
"""Names of the sums over tokens."""


@dataclass
class Sums:
    """Per-token sums over all steps of an update, for metrics. Of this rank's rows, until :meth:`reduced`."""

    values: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """Of all ranks from the start, like the gradient norms."""
    policy_losses: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    policy_norms: list[float] = field(default_factory=list)
    critic_norms: list[float] = field(default_factory=list)
    first_ratio_error: float = 0.0
    """Largest |ratio - 1| in the first mini-batch, before any step: 0 unless old and new disagree."""

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.values[name] = self.values.get(name, 0.0) + float(masked_sum(values.float(), mask))

    def reduced(self) -> "Sums":
        """Of all ranks' rows."""
        if ranks.size() == 1:
            return self
        # A rank that had nothing but dummies has no values, so the names cannot be its own.
        own = [self.values.get(name, 0.0) for name in PER_TOKEN]
        numbers = torch.tensor([*own, *self.policy_losses, *self.value_losses], dtype=torch.float64)
        total = ranks.sum_over_ranks(numbers).tolist()
        first, second = len(own), len(own) + len(self.policy_losses)
        error = ranks.max_over_ranks(torch.tensor(self.first_ratio_error, dtype=torch.float64))
        return replace(
            self,
            values=dict(zip(PER_TOKEN, total[:first], strict=True)),
            policy_losses=total[first:second],
            value_losses=total[second:],
            first_ratio_error=float(error),
        )


@dataclass(frozen=True)
class Learner:
    """Policy and critic under training. ``critic`` is None for estimators that need none."""

    config: Config
    policy: Trainer
    critic: Trainer | None

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        return (self.policy, self.critic) if self.critic else (self.policy,)


def split_epoch(config: Config, experience: Experience, iteration: int, epoch: int) -> list[MiniBatch]:
    """A fresh permutation of the rows in equal mini-batches, each dealt over the ranks, and this rank's share
    in length-sorted micro-batches."""
    seed = derive_seed(config.seed, iteration, "update", "epoch", epoch)
    order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed)).tolist()
    size = len(experience) // config.update.minibatches
    chunks = [order[i : i + size] for i in range(0, len(order), size)]
    budget, place = config.update.tokens_per_micro_batch, (ranks.rank(), ranks.size())
    return [MiniBatch(rows, micro_batches_of_rank(experience.rows, rows, budget, *place)) for rows in chunks]


@torch.no_grad()
def old_log_probs_and_values(
    learner: Learner, experience: Experience, minibatches: Sequence[MiniBatch]
) -> tuple[Tensor, Tensor | None]:
    """The trainer's own log-probabilities and values before the first step, [N, T] each.

    Computed over the very micro-batches of the first epoch, so that its first ratio is exactly 1; each rank
    computes its own, and all have all of them in the end.
    """
    log_probs = torch.zeros_like(experience.rollout_log_probs)
    values = torch.zeros_like(log_probs) if learner.critic else None
    temperature = learner.config.rollout.temperature
    for batch in (b.to(device()) for m in minibatches for b in m.micro_batches):
        scatter_rows(log_probs, batch, response_log_probs(learner.policy.engine, batch, temperature))
        if learner.critic and values is not None:
            scatter_rows(values, batch, response_values(learner.critic.engine, batch))
    log_probs = ranks.sum_over_ranks(log_probs)  # zeros but for this rank's rows
    return log_probs, values if values is None else ranks.sum_over_ranks(values)


def token_rewards(config: Config, experience: Experience, old_log_probs: Tensor, kl_coef: float) -> Tensor:
    """[N, T]: the response's reward at its last token, less the KL penalty at every token."""
    rewards = torch.zeros_like(old_log_probs)
    if experience.reference_log_probs is not None:
        kl = kl_per_token(old_log_probs, experience.reference_log_probs, config.algorithm.kl.estimator)
        rewards = torch.where(experience.mask, -kl_coef * kl, 0.0)
    columns = torch.arange(rewards.shape[1])
    last = torch.where(experience.mask, columns, -1).amax(dim=1)
    has_tokens = last >= 0  # a row of nothing but observations has no token to put its reward on
    rewards[has_tokens, last[has_tokens]] += experience.scores[has_tokens]
    return rewards


def make_targets(
    config: Config, experience: Experience, old_log_probs: Tensor, old_values: Tensor | None, kl_coef: float
) -> Targets:
    """Advantages, and returns where there is a critic."""
    algorithm, mask = config.algorithm, experience.mask
    rewards = token_rewards(config, experience, old_log_probs, kl_coef)
    returns = None
    if algorithm.estimator is Estimator.GAE:
        assert old_values is not None
        advantages, returns = gae(rewards, old_values, mask, algorithm.gamma, algorithm.lam)
        if algorithm.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
    else:
        totals = torch.where(mask, rewards, 0.0).sum(dim=1)
        if algorithm.estimator is Estimator.GRPO:
            advantages = grpo(totals, experience.groups, mask, algorithm.normalize_group_std)
        else:
            advantages = rloo(totals, experience.groups, mask)
    return Targets(old_log_probs, old_values, advantages, returns)


def train(
    learner: Learner, experience: Experience, targets: Targets, first_epoch: list[MiniBatch], iteration: int
) -> tuple[Sums, float]:
    """All epochs and mini-batches of an update. Returns metric sums and the last learning rate."""
    config, sums, rate = learner.config, Sums(), 0.0
    total_steps = config.iterations * config.update.epochs * config.update.minibatches
    for epoch in range(config.update.epochs):
        minibatches = first_epoch if epoch == 0 else split_epoch(config, experience, iteration, epoch)
        for number, minibatch in enumerate(minibatches):
            where = f"iteration {iteration}, epoch {epoch + 1}, mini-batch {number + 1}"
            rate = train_minibatch(learner, experience, targets, minibatch, sums, total_steps, where)
    return sums.reduced(), rate


def train_minibatch(
    learner: Learner,
    experience: Experience,
    targets: Targets,
    minibatch: MiniBatch,
    sums: Sums,
    total_steps: int,
    where: str,
) -> float:
    """One optimizer step of policy and critic. Returns the policy's learning rate.

    Raises:
        NumericalError: a loss or gradient is not finite; names the step and the rows.
        NoValidTokens: no row has a token of the policy's.
    """
    counts = Counts.of(experience.mask[list(minibatch.rows)], learner.config.rollout.max_new_tokens)
    is_first_step = not sums.policy_losses
    policy_total = value_total = 0.0
    for number, batch in enumerate(minibatch.micro_batches):
        is_last = number == len(minibatch.micro_batches) - 1
        on_device = batch.to(device())
        loss = policy_step(learner, experience, targets, on_device, counts, sums, is_first_step)
        check_finite(loss, "policy", where, experience, batch)
        learner.policy.backward(loss, is_last)
        policy_total += float(loss.detach())
        if learner.critic:
            loss = critic_step(learner, experience, targets, on_device, counts, sums)
            check_finite(loss, "value", where, experience, batch)
            learner.critic.backward(loss, is_last)
            value_total += float(loss.detach())
    sums.tokens += counts.tokens
    sums.policy_losses.append(policy_total)
    norm, rate = learner.policy.step(total_steps)
    sums.policy_norms.append(norm)
    if learner.critic:
        sums.value_losses.append(value_total)
        sums.critic_norms.append(learner.critic.step(total_steps)[0])
    return rate


def policy_step(
    learner: Learner,
    experience: Experience,
    targets: Targets,
    batch: MicroBatch,
    counts: Counts,
    sums: Sums,
    is_first_step: bool,
) -> Tensor:
    """Loss of one micro-batch, as its share of the mini-batch's loss."""
    algorithm = learner.config.algorithm
    logits = response_logits(learner.policy.engine, batch, learner.config.rollout.temperature)
    if batch.is_dummy:
        return no_loss(logits)
    log_probs = token_log_probs(logits, batch.response_tokens)
    with torch.set_grad_enabled(algorithm.entropy_coef > 0):  # else it is only looked at
        entropy = token_entropy(logits)
    mask = gather_rows(experience.mask, batch)
    old = gather_rows(targets.old_log_probs, batch)
    result = policy_loss(log_probs, old, gather_rows(targets.advantages, batch), algorithm)
    per_token = result.loss - algorithm.entropy_coef * entropy
    with torch.no_grad():
        sums.add("entropy", entropy, mask)
        sums.add("ratio", result.ratio, mask)
        sums.add("approx_kl", result.ratio - 1 - (log_probs - old), mask)
        sums.add("clip_low", result.clipped_low, mask)
        sums.add("clip_high", result.clipped_high, mask)
        sums.add("dual_clip", result.dual_clipped, mask)
        if is_first_step:
            error = float(torch.where(mask, (result.ratio - 1).abs(), 0.0).max())
            sums.first_ratio_error = max(sums.first_ratio_error, error)
    return aggregate(per_token, mask, algorithm.loss_aggregation, counts)


def critic_step(
    learner: Learner,
    experience: Experience,
    targets: Targets,
    batch: MicroBatch,
    counts: Counts,
    sums: Sums,
) -> Tensor:
    """Value loss of one micro-batch, as its share of the mini-batch's loss."""
    assert learner.critic is not None
    assert targets.old_values is not None
    assert targets.returns is not None
    algorithm = learner.config.algorithm
    values = response_values(learner.critic.engine, batch)
    if batch.is_dummy:
        return no_loss(values)
    mask = gather_rows(experience.mask, batch)
    returns, old_values = gather_rows(targets.returns, batch), gather_rows(targets.old_values, batch)
    loss, is_clipped = value_loss(values, returns, old_values, algorithm.value_clip_range)
    sums.add("value_clip", is_clipped, mask)
    return aggregate(loss, mask, algorithm.loss_aggregation, counts)


def no_loss(outputs: Tensor) -> Tensor:
    """0, with a gradient of 0 for every weight that ``outputs`` depend on, even if some are infinite."""
    return masked_sum(outputs, torch.zeros_like(outputs, dtype=torch.bool))


def check_finite(loss: Tensor, name: str, where: str, experience: Experience, batch: MicroBatch) -> None:
    """Raises NumericalError on every rank if the loss of any is not finite, naming the step and the rows."""
    problem = None
    if not bool(torch.isfinite(loss)):
        ids = [experience.prompt_ids[i] for i in batch.rows.tolist()]
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        problem = f"the {name} loss is {float(loss.detach())} in {where}; rows with prompt_id {shown}"
    ranks.fail_together(problem)


def update(
    learner: Learner, experience: Experience, iteration: int, kl_coef: float
) -> tuple[Targets, Sums, float]:
    """The PPO update, step by step. Returns what metrics are made of."""
    # 1. mini-batches of the first epoch, over which old log-probabilities and values are computed
    first_epoch = split_epoch(learner.config, experience, iteration, epoch=0)
    old_log_probs, old_values = old_log_probs_and_values(learner, experience, first_epoch)
    # 2. rewards per token, advantages and returns
    targets = make_targets(learner.config, experience, old_log_probs, old_values, kl_coef)
    # 3. clipped policy and value losses, epochs x mini-batches
    sums, rate = train(learner, experience, targets, first_epoch, iteration)
    return targets, sums, rate
