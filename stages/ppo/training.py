"""The optimizer steps of one update: epochs x mini-batches of clipped policy and value losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pipeline.config.algorithm import OldLogProbs
from pipeline.config.schema import Config
from stages import ranks
from stages.context import NumericalError
from stages.logs import log
from stages.models.devices import device
from stages.models.routing import routing_of
from stages.ppo.batching import MicroBatch
from stages.ppo.distillation import asked_of, teacher_loss
from stages.ppo.experience import Experience
from stages.ppo.forward import gather_rows, policy_outputs, response_values, scatter_rows
from stages.ppo.math.kl import kl_loss_per_token
from stages.ppo.math.losses import Counts, aggregate, policy_loss, value_loss
from stages.ppo.math.masked import masked_sum
from stages.ppo.minibatches import MiniBatch, StepPosition, all_minibatches
from stages.ppo.replay import Replay
from stages.ppo.routers import Routers, routers_of
from stages.ppo.state.learned import StepDecision
from stages.ppo.targets import Targets
from stages.ppo.trainer import Trainer


@dataclass(frozen=True)
class Learner:
    """Policy and critic under training. ``critic`` is None for estimators that need none."""

    config: Config
    policy: Trainer
    critic: Trainer | None
    trains_policy: bool = True
    """Whether the policy takes steps, not the critic alone."""

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        return (self.policy, self.critic) if self.critic else (self.policy,)

    @cached_property
    def routers(self) -> Routers | None:
        """Routers of the policy, where their loss is a part of the policy's."""
        return routers_of(self.policy.model, self.config.algorithm.router_aux_loss_coef)

    @cached_property
    def replay(self) -> Replay:
        """Routers of the policy, where it goes through the experts of its rollouts."""
        return Replay(routing_of(self.policy.model) if self.config.algorithm.router_replay else None)

    @property
    def trained(self) -> tuple[Trainer, ...]:
        """Those that take steps."""
        return self.trainers if self.trains_policy else self.trainers[1:]

    def of_iteration(self, iteration: int) -> "Learner":
        """Return the learner with what the iteration trains (algorithm.critic_warmup)."""
        return replace(self, trains_policy=self.config.algorithm.trains_policy(iteration))

    def position(self, trainer: Trainer, place: StepPosition) -> tuple[int, int]:
        """Return the place of a trainer's step among all that it takes in the run, and their number."""
        is_policy = trainer is self.policy
        return place.position(self.config, self.config.algorithm.critic_warmup if is_policy else 0)


SUMMED = (
    "policy_loss",
    "value_loss",
    "router_loss",
    "replayed",
    "replayed_differ",
    "entropy",
    "ratio",
    "approx_kl",
    "clip_low",
    "clip_high",
    "dual_clip",
    "kl_loss",
    "value_clip",
)
"""Names of the sums over a mini-batch: the losses, and per-token numbers over its tokens."""


@dataclass
class MiniBatchStats:
    """Sums over one mini-batch, of this rank's rows; on its device, so that adding does not wait for it."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    ratio_error: Tensor = field(default_factory=lambda: torch.zeros((), device=device()))
    """Largest |ratio - 1|."""
    losses: list[tuple[str, MicroBatch, Tensor]] = field(default_factory=list)
    """Losses, in order: name, micro-batch, and [B] the sum over each row's tokens."""

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.add_sum(name, masked_sum(values.detach().double(), mask))

    def add_loss(self, name: str, batch: MicroBatch, loss: Tensor, per_token: Tensor, mask: Tensor) -> None:
        """Add ``loss``, the aggregate of ``per_token`` [B, R]."""
        self.losses.append((name, batch, torch.where(mask, per_token, 0.0).sum(dim=1).detach()))
        self.add_sum(f"{name}_loss", loss.detach().double())

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a sum over a micro-batch."""
        assert name in SUMMED, name
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduced(self) -> dict[str, float]:
        """Return the sums over all ranks' rows. A rank with nothing but dummies has no sums of its own."""
        nothing = torch.zeros((), dtype=torch.float64, device=device())
        own = torch.stack([self.sums.get(name, nothing) for name in SUMMED])
        return dict(zip(SUMMED, ranks.sum_over_ranks(own).tolist(), strict=True))


@dataclass
class Steps:
    """The outcome of the mini-batches of one update; the same on every rank."""

    sums: list[Mapping[str, float]] = field(default_factory=list)
    """Sums of the mini-batches that were trained on, each as :meth:`MiniBatchStats.reduced` gives them: of
    those at which the policy took a step, or the critic where it learns alone."""
    tokens: int = 0
    """Valid tokens of these mini-batches that are learned from."""
    policy_norms: list[float] = field(default_factory=list)
    critic_norms: list[float] = field(default_factory=list)
    rate: float = 0.0
    """Learning rate of the policy's last step."""
    first_ratio_error: float | None = None
    """Largest |ratio - 1| in the first mini-batch, before any step: 0 unless old and new disagree. None where
    there is nothing to compare: the step gives the old ones itself."""
    skipped: list[str] = field(default_factory=list)
    """Reasons of skipped mini-batches; those at which fp16 lowered its loss scale are not among them."""
    overflows: int = 0
    """Steps at which fp16 lowered its loss scale."""
    is_stopped: bool = False
    """Whether target_kl ended the training."""
    decisions: list[Mapping[str, StepDecision]] = field(default_factory=list)
    """What became of each mini-batch's gradients, by the trainer's name."""
    log_probs: Tensor | None = None
    """[N, T] log-probabilities of this rank's rows before any step; None where known before."""
    first_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """[N] true for the rows, of all ranks, that have them."""


def train(
    learner: Learner, experience: Experience, targets: Targets, first_epoch: list[MiniBatch], iteration: int
) -> Steps:
    """Take all optimizer steps of an update.

    Raises:
        NumericalError: more steps had to be skipped than update.max_skipped_steps, or all of them.
    """
    config, steps, limit = learner.config, Steps(), learner.config.algorithm.target_kl
    per_token = targets.to(device())
    if targets.old_log_probs is None or config.algorithm.old_log_probs is OldLogProbs.ROLLOUT:
        steps.log_probs = torch.zeros_like(experience.rollout_log_probs, device=device())
        steps.first_rows = torch.zeros(len(experience), dtype=torch.bool)
    for place, batch in all_minibatches(config, experience, first_epoch, iteration):
        counts = Counts.of(experience.mask[list(batch.rows)], config.rollout.max_new_tokens)
        tokens = int(experience.mask[list(batch.computed)].sum())
        # 1. gradients of all micro-batches, and what they show
        is_before = steps.log_probs is not None and not steps.sums  # no step has moved the policy yet
        tally = accumulate(learner, per_token, batch, counts, steps.log_probs if is_before else None)
        if is_before:
            steps.first_rows[list(batch.computed)] = True
        sums, problem = tally.reduced(), ranks.first_of(problem_of(tally, experience, place))
        is_first = steps.first_ratio_error is None and steps.log_probs is None
        if learner.trains_policy and is_first and not problem:
            steps.first_ratio_error = float(ranks.max_over_ranks(tally.ratio_error))
        # 2. a step, unless something speaks against it
        if problem:
            discard(learner, steps)
            skip(config, steps, problem)
        elif limit is not None and sums["approx_kl"] / tokens > limit:
            discard(learner, steps)
            steps.is_stopped = True
            say(f"{place}: the policy has moved further than algorithm.target_kl allows; training ends")
            break
        else:
            failed = take_step(learner, steps, sums, tokens, place)
            if failed:
                skip(config, steps, f"{failed} in {place}; {experience.describe(batch.rows)}")
    if steps.skipped and not steps.sums:
        raise NumericalError(f"no step could be taken: {steps.skipped[0]}")
    return steps


def accumulate(
    learner: Learner, targets: Targets, batch: MiniBatch, counts: Counts, log_probs: Tensor | None = None
) -> MiniBatchStats:
    """Go forward and backward over the micro-batches; the gradients wait for a step or for being discarded.

    Args:
        log_probs: matrix [N, T] to write the policy's log-probabilities into.
    """
    tally, tokens = MiniBatchStats(), _tokens_of(batch) if learner.routers else 0
    for number, micro in enumerate(batch.micro_batches):
        is_last = number == len(batch.micro_batches) - 1
        on_device = micro.to(device())
        if learner.trains_policy:
            on_device.count_pass()
            with learner.replay.of(on_device, tally.add_sum):  # also what the backward pass computes again
                loss = routed_part(learner, targets, on_device, counts, tally, log_probs, tokens)
                learner.policy.backward(loss, is_last, batch.num_shares)
        if learner.critic:
            on_device.count_pass()
            loss = critic_part(learner, targets, on_device, counts, tally)
            learner.critic.backward(loss, is_last, batch.num_shares)
    return tally


def routed_part(
    learner: Learner,
    targets: Targets,
    batch: MicroBatch,
    counts: Counts,
    tally: MiniBatchStats,
    found: Tensor | None,
    tokens: int,
) -> Tensor:
    """Compute :func:`policy_part`, and the loss of the policy's routers over this micro-batch, as its share
    of the ``tokens`` of the mini-batch."""
    if learner.routers is None:
        return policy_part(learner, targets, batch, counts, tally, found)
    with learner.routers.recorded() as logits:
        loss = policy_part(learner, targets, batch, counts, tally, found)
    if batch.is_dummy:
        return loss
    balance = learner.routers.loss(logits, batch) * (batch.num_tokens / tokens)
    tally.add_sum("router_loss", balance.detach().double())
    return loss + learner.routers.coef * balance


def _tokens_of(batch: MiniBatch) -> int:
    """Return the tokens of a mini-batch that go through the policy, of all ranks."""
    own = sum(micro.num_tokens for micro in batch.micro_batches if not micro.is_dummy)
    return int(ranks.sum_over_ranks(torch.tensor(own, dtype=torch.float64)))


def policy_part(
    learner: Learner,
    targets: Targets,
    batch: MicroBatch,
    counts: Counts,
    tally: MiniBatchStats,
    found: Tensor | None = None,
) -> Tensor:
    """Compute the policy loss of one micro-batch, as its share of the mini-batch's loss; its
    log-probabilities are written into ``found`` [N, T], and are the old ones where there are no others."""
    algorithm, asked = learner.config.algorithm, asked_of(targets, batch)
    temperature, has_bonus = learner.config.rollout.temperature, algorithm.entropy_coef > 0
    outputs = policy_outputs(learner.policy.engine, batch, temperature, True, has_bonus, asked)
    log_probs, entropy = outputs.log_probs, outputs.entropy
    if batch.is_dummy:
        return no_loss(log_probs)
    assert entropy is not None, "it was asked for"
    if found is not None:
        scatter_rows(found, batch, log_probs)
    mask, old = gather_rows(targets.mask, batch), log_probs.detach()
    if targets.old_log_probs is not None:
        old = gather_rows(targets.old_log_probs, batch)
    weights = None if targets.weights is None else gather_rows(targets.weights, batch)
    advantages = gather_rows(targets.advantages, batch)
    result = policy_loss(log_probs, old, advantages, algorithm, weights, mask)
    per_token = result.loss - algorithm.entropy_coef * entropy
    if targets.reference_log_probs is not None:
        reference = gather_rows(targets.reference_log_probs, batch)
        kl = kl_loss_per_token(log_probs, reference, algorithm.kl.per_token, algorithm.kl.straight_through)
        per_token = per_token + targets.kl_coef * kl
        tally.add("kl_loss", kl, mask)
    if targets.teacher_log_probs is not None:
        per_token = per_token + teacher_loss(algorithm.distillation, targets, batch, outputs)
    with torch.no_grad():
        tally.add("entropy", entropy, mask)
        tally.add("ratio", result.ratio, mask)
        tally.add("approx_kl", result.ratio - 1 - (log_probs - old), mask)
        tally.add("clip_low", result.clipped_low, mask)
        tally.add("clip_high", result.clipped_high, mask)
        tally.add("dual_clip", result.dual_clipped, mask)
        error = torch.where(mask, (result.ratio - 1).abs(), 0.0).max()
        tally.ratio_error = torch.maximum(tally.ratio_error, error)
    loss = aggregate(per_token, mask, algorithm.loss_aggregation, counts)
    tally.add_loss("policy", batch, loss, per_token, mask)
    return loss


def critic_part(
    learner: Learner, targets: Targets, batch: MicroBatch, counts: Counts, tally: MiniBatchStats
) -> Tensor:
    """Compute the value loss of one micro-batch, as its share of the mini-batch's loss."""
    assert learner.critic is not None
    assert targets.old_values is not None
    assert targets.returns is not None
    algorithm = learner.config.algorithm
    values = response_values(learner.critic.engine, batch)
    if batch.is_dummy:
        return no_loss(values)
    mask = gather_rows(targets.mask, batch)
    returns, old_values = gather_rows(targets.returns, batch), gather_rows(targets.old_values, batch)
    per_token, is_clipped = value_loss(values, returns, old_values, algorithm.value_clip_range)
    tally.add("value_clip", is_clipped, mask)
    loss = aggregate(per_token, mask, algorithm.loss_aggregation, counts)
    tally.add_loss("value", batch, loss, per_token, mask)
    return loss


def no_loss(outputs: Tensor) -> Tensor:
    """Return 0, with a gradient of 0 for every weight that ``outputs`` depend on, also if some are inf."""
    return masked_sum(outputs, torch.zeros_like(outputs, dtype=torch.bool))


def problem_of(tally: MiniBatchStats, experience: Experience, place: StepPosition) -> str | None:
    """Name the first of this rank's losses that is not a number, with its rows; None if there is none."""
    for name, batch, of_rows in tally.losses:
        is_bad = ~torch.isfinite(of_rows)
        if bool(is_bad.any()):
            rows = experience.describe(batch.rows[is_bad].tolist())
            return f"the {name} loss is {float(of_rows[is_bad][0])} in {place}; {rows}"
    return None


def discard(learner: Learner, steps: Steps) -> None:
    """Throw the gradients of policy and critic away."""
    for trainer in learner.trained:
        trainer.discard()
    steps.decisions.append({trainer.name: StepDecision.DISCARDED for trainer in learner.trained})


def take_step(
    learner: Learner, steps: Steps, sums: Mapping[str, float], tokens: int, place: StepPosition
) -> str | None:
    """Take one optimizer step of policy and critic, each skipped if its own gradient is not finite.

    Args:
        tokens: what ``sums`` of numbers per token are over.

    Returns:
        What was not finite, in words; None also if fp16 merely had to lower its loss scale.
    """
    taken = {one.name: one.step(*learner.position(one, place)) for one in learner.trained}
    first, policy, critic = next(iter(taken.values())), taken.get("policy"), taken.get("critic")
    decided = {
        name: StepDecision.TAKEN if step.is_taken else StepDecision.SKIPPED for name, step in taken.items()
    }
    steps.decisions.append(decided)
    if any(step.is_overflow for step in taken.values()):
        steps.overflows += 1
    if first.is_taken:
        steps.sums.append(sums)
        steps.tokens += tokens
        say(f"{place}: {describe_step(sums, tokens, first.norm, learner.trains_policy)}")
    if policy and policy.is_taken:
        steps.rate = policy.rate
        steps.policy_norms.append(policy.norm)
    if critic and critic.is_taken:
        steps.critic_norms.append(critic.norm)
    bad = [(name, step.norm) for name, step in taken.items() if not step.is_taken and not step.is_overflow]
    return " and ".join(f"the gradient norm of the {name} is {norm}" for name, norm in bad) or None


def describe_step(sums: Mapping[str, float], tokens: int, norm: float, trains_policy: bool) -> str:
    """Describe a step for the log."""
    kl, clipped = (sums[name] / tokens for name in ("approx_kl", "clip_high"))
    value, size = f"value loss {sums['value_loss']:.4f}", f"gradient norm {norm:.3g}, {tokens} tokens"
    if not trains_policy:
        return f"the critic alone: {value}, {size}"
    policy = f"policy loss {sums['policy_loss']:+.4f}"
    return f"{policy}, {value}, KL to old {kl:.2e}, clipped above {clipped:.1%}, {size}"


def say(text: str) -> None:
    """Print one line to the task's log, on the first rank only."""
    if ranks.is_first():
        log.info(text)


def skip(config: Config, steps: Steps, problem: str) -> None:
    """Note a skipped step. Raises NumericalError when it was one too many."""
    say(f"step skipped: {problem}")
    steps.skipped.append(problem)
    limit = config.update.max_skipped_steps
    if len(steps.skipped) > limit:
        raise NumericalError(f"{problem} ({len(steps.skipped)} steps skipped; max_skipped_steps is {limit})")
