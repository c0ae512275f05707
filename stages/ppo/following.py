"""The optimizer steps of an update that was done before: its decisions are followed, none is made."""

from stages.models.loading import device
from stages.ppo.experience import Experience
from stages.ppo.math.losses import Counts
from stages.ppo.state.learned import Decision, Learned
from stages.ppo.targets import Targets
from stages.ppo.trainer import Trainer
from stages.ppo.training import (
    Learner,
    MiniBatch,
    Steps,
    accumulate,
    all_minibatches,
    say,
)


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
        for trainer in learner.trainers:
            _carry_out(trainer, decided[trainer.name], place.position(config), batch.num_shares)
    return Steps()


def _carry_out(
    trainer: Trainer, decision: Decision, position: tuple[int, int], num_shares: int | None
) -> None:
    match decision:
        case Decision.TAKEN:
            if not trainer.step(*position, num_shares).is_taken:
                say(f"the {trainer.name} took step {trainer.steps + 1} then; its gradient is not finite now")
        case Decision.SKIPPED:
            trainer.skip()
        case Decision.DISCARDED:
            trainer.discard()
