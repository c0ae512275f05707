"""One update of a policy and its critic on an iteration's experience (PPO, arXiv 1707.06347)."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config.algorithm import OldLogProbs, ReferenceStage
from pipeline.config.correction_rules import step_gives_old_log_probs
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.schema import Config
from stages import ranks
from stages.context import Stopwatch, UserError
from stages.models.devices import device
from stages.ppo.batching import MicroBatch
from stages.ppo.experience import Experience
from stages.ppo.forward import (
    check_packing,
    packing_problem,
    response_log_probs,
    response_values,
    scatter_rows,
)
from stages.ppo.math.losses import Counts
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.minibatches import (
    MiniBatch,
    all_minibatches,
    begin_epochs,
    is_packed,
    rows_to_learn_from,
)
from stages.ppo.sharing import can_share
from stages.ppo.state.learned import Learned, StepDecision
from stages.ppo.targets import Targets, TargetScores, flat_rows, make_targets, shape, teaching_rows
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, Steps, accumulate, say, train


def follow(
    learner: Learner,
    experience: Experience,
    targets: Targets,
    first_epoch: list[MiniBatch],
    iteration: int,
    past: Learned,
) -> Steps:
    """Take the steps that an update took, and no others, by micro-batches of the same rows."""
    config, per_token = learner.config, targets.to(device())
    batches = all_minibatches(config, experience, first_epoch, iteration, past.machine.ranks)
    for (place, batch), decided in zip(batches, past.decisions, strict=False):  # it may have stopped early
        counts = Counts.of(experience.mask[list(batch.rows)], config.rollout.max_new_tokens)
        accumulate(learner, per_token, batch, counts)
        for trainer in learner.trained:
            position = learner.position(trainer, place)
            _carry_out(trainer, decided[trainer.name], position, batch.num_shares)
    return Steps()


def _carry_out(
    trainer: Trainer, decision: StepDecision, position: tuple[int, int], num_shares: int | None
) -> None:
    match decision:
        case StepDecision.TAKEN:
            if not trainer.step(*position, num_shares).is_taken:
                say(f"the {trainer.name} took step {trainer.steps + 1} then; its gradient is not finite now")
        case StepDecision.SKIPPED:
            trainer.skip()
        case StepDecision.DISCARDED:
            trainer.discard()


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    experience: Experience
    """Responses that were trained on."""
    scores: TargetScores
    """Scores of these responses."""
    targets: Targets | None
    """Targets of the losses; None when nothing was trained on."""
    steps: Steps
    num_discarded: int
    """Responses with a reward that were left out: they do not count, or their groups have nothing to
    teach."""
    padding_efficiency: float
    """Share of real tokens in the first epoch's micro-batches."""
    before: Tensor | None = None
    """[N, T] the trainer's log-probabilities before the first step; None when nothing was trained on, or
    where steps of the past were taken again and nothing needed them."""
    compared: Tensor | None = None
    """[N, T] true for the tokens that have them."""


def update(
    learner: Learner,
    experience: Experience,
    iteration: int,
    kl_coef: float,
    moments: RunningMoments,
    stopwatch: Stopwatch,
    past: Learned | None = None,
) -> Update:
    """Update policy and critic, or the critic alone (algorithm.critic_warmup), step by step.

    Args:
        moments: moments of all scores of the run up to and with this iteration's.
        past: what an update that was done before has learned: its steps are taken again, and its
            micro-batches go through the models, whatever the number of ranks.
    """
    learner = learner.of_iteration(iteration)
    config, num_shares = learner.config, past.machine.ranks if past else None
    total = len(experience.rewarded)
    # 1. shaped scores, and only responses that have something to teach
    experience, scores = _shaped(config, experience, moments)
    if not len(experience):
        return Update(experience, scores, None, Steps(), total, 1.0)
    learner.replay.check(experience.rows)
    # 2. mini-batches of the first epoch, of responses with a gradient: for old log-probabilities and values
    teaching = None if learner.routers else teaching_rows(config, experience, scores)
    experience = replace(experience, teaching=teaching, shares_prompts=shares_prompts(learner))
    experience, first_epoch = begin_epochs(config, experience, iteration, num_shares)
    if is_packed(config.update):
        _check_packing(learner, experience)
    with stopwatch.timing("old_log_probs"):
        before = log_probs_before(learner, experience, first_epoch)
        old_values = old_values_of(learner, experience, first_epoch)
    if is_own_reference(config, experience):
        experience = replace(experience, reference_log_probs=before)
    # 3. rewards per token, advantages, returns, importance weights
    old = old_log_probs_of(config, experience, before)
    targets = make_targets(config, experience, scores, old, old_values, kl_coef)
    # 4. clipped policy and value losses, epochs x mini-batches
    with stopwatch.timing("steps"):
        steps = _take_steps(learner, experience, targets, first_epoch, iteration, past)
    before, compared = with_first_steps(experience, before, steps)
    targets = replace(targets, old_log_probs=before) if targets.old_log_probs is None else targets
    discarded, padding = total - len(experience), padding_efficiency(first_epoch)
    return Update(experience, scores, targets, steps, discarded, padding, before, compared)


def _take_steps(
    learner: Learner,
    experience: Experience,
    targets: Targets,
    first_epoch: list[MiniBatch],
    iteration: int,
    past: Learned | None,
) -> Steps:
    """Take the steps of an update, or those that one took before."""
    if past is None:
        return train(learner, experience, targets, first_epoch, iteration)
    return follow(learner, experience, targets, first_epoch, iteration, past)


def _shaped(
    config: Config, experience: Experience, moments: RunningMoments
) -> tuple[Experience, TargetScores]:
    """Return the responses that are learned from, and their shaped scores: without those of flat groups, if
    these are left out."""
    scores = shape(config, experience, moments)
    if not config.algorithm.shaping.filter_groups:
        return experience, scores
    kept = (~flat_rows(experience, scores.shaped)).nonzero().flatten()
    return experience.select(kept.tolist()), scores.select(kept)


def shares_prompts(learner: Learner) -> bool:
    """Whether responses to one prompt go through policy and critic behind one copy of it."""
    several = learner.config.rollout.samples_per_prompt > 1 and not is_packed(learner.config.update)
    return several and all(can_share(trainer.engine) for trainer in learner.trainers)


def _check_packing(learner: Learner, experience: Experience) -> None:
    """Try the policy on two rows laid end to end: the shortest that are learned from.

    Raises:
        UserError: it does not keep them apart, or its attention costs more than padding would.
    """
    attention = getattr(learner.policy.model.config, "_attn_implementation", None)
    budget = learner.config.update.micro_batch_tokens
    if problem := packing_problem(attention, budget, device().type == "cuda"):
        raise UserError(problem)
    rows = [experience.rows[i] for i in rows_to_learn_from(experience).tolist()]
    shortest = sorted(rows, key=lambda row: row.length)[:2]
    check_packing(learner.policy.engine, (shortest[0], shortest[-1]), device())


def padding_efficiency(minibatches: Sequence[MiniBatch]) -> float:
    """Return the share of real tokens among those that go through the models, of all ranks."""
    batches = [batch for minibatch in minibatches for batch in minibatch.micro_batches]
    real = sum(batch.num_tokens for batch in batches if not batch.is_dummy)
    computed = sum(batch.input_ids.numel() for batch in batches)
    counts = ranks.sum_over_ranks(torch.tensor([real, computed], dtype=torch.float64))
    return float(counts[0] / counts[1])


def old_log_probs_of(config: Config, experience: Experience, before: Tensor | None) -> Tensor | None:
    """Return the old policy's log-probabilities, [N, T]: the trainer's ``before`` its first step, or those of
    the policy that wrote the responses.

    Raises:
        UserError: the rollout engine gave numbers that are no log-probabilities.
    """
    if config.algorithm.old_log_probs is OldLogProbs.TRAINER:
        return before
    # The loss is masked, but in its backward pass 0 times NaN is NaN.
    found = torch.where(experience.mask, experience.rollout_log_probs, 0.0)
    if bad := int((~torch.isfinite(found)).sum()):
        raise UserError(
            f"rollout.engine={config.rollout.engine} gave no log-probability for {bad} tokens, and "
            "algorithm.old_log_probs=rollout needs them; set it to trainer"
        )
    return found


def log_probs_before(
    learner: Learner, experience: Experience, minibatches: Sequence[MiniBatch]
) -> Tensor | None:
    """Compute the trainer's own log-probabilities before the first step, [N, T]; None where that step gives
    them, or where the rollout's are the old ones.

    Computed over the very micro-batches of the first epoch, so that its first ratio is exactly 1.
    """
    config = learner.config
    is_reference = is_own_reference(config, experience)
    if config.algorithm.old_log_probs is OldLogProbs.ROLLOUT and not is_reference:
        say("the old log-probabilities are the rollout's (algorithm.old_log_probs): none are computed")
        return None
    if learner.trains_policy and step_gives_old_log_probs(config) and not is_reference:
        say("one step an iteration, and nothing before it needs old log-probabilities: the step gives them")
        return None
    temperature, policy = config.rollout.temperature, learner.policy.engine

    def forward(batch: MicroBatch) -> Tensor:
        with learner.replay.of(batch):
            return response_log_probs(policy, batch, temperature)

    return per_token(experience, minibatches, forward)


def with_first_steps(
    experience: Experience, before: Tensor | None, steps: Steps
) -> tuple[Tensor | None, Tensor]:
    """Return the trainer's log-probabilities before its first step, and which tokens have them, both [N, T]:
    those of mini-batches that came before any step, where no pass was made for them."""
    if before is not None or steps.log_probs is None:
        return before, experience.computed
    of_all_ranks = ranks.sum_over_ranks(steps.log_probs).cpu()
    return of_all_ranks, experience.computed & steps.first_rows.unsqueeze(1)


def is_own_reference(config: Config, experience: Experience) -> bool:
    """Whether the policy's log-probabilities before the first step are the reference's, which the update then
    has not computed (:func:`stages.ppo.reference.is_policy`)."""
    is_wanted = has_reference_in(config, ReferenceStage.UPDATE)
    return is_wanted and experience.reference_log_probs is None


def old_values_of(
    learner: Learner, experience: Experience, minibatches: Sequence[MiniBatch]
) -> Tensor | None:
    """Compute the critic's values before the first step, [N, T]; None without a critic."""
    if not learner.critic:
        return None
    return per_token(experience, minibatches, functools.partial(response_values, learner.critic.engine))


@torch.no_grad()
def per_token(
    experience: Experience, minibatches: Sequence[MiniBatch], forward: Callable[[MicroBatch], Tensor]
) -> Tensor:
    """Evaluate ``forward`` on all rows; [N, T]. Each rank computes its own rows, and all get all of them."""
    found = torch.zeros_like(experience.rollout_log_probs, device=device())
    for batch in (b.to(device()) for m in minibatches for b in m.micro_batches):
        batch.count_pass()
        scatter_rows(found, batch, forward(batch))
    return ranks.sum_over_ranks(found).cpu()  # zeros but for this rank's rows
