"""The optimizer steps of an update that was done before: its decisions are followed, none is made."""

from pipeline.config.schema import Config
from stages.models import device
from stages.ppo.experience import Experience
from stages.ppo.math.losses import Counts
from stages.ppo.state.learned import Decision, Decisions
from stages.ppo.targets import Targets
from stages.ppo.trainer import Trainer
from stages.ppo.training import (
    Learner,
    MiniBatch,
    StepPosition,
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
    decisions: Decisions,
) -> Steps:
    """Take the steps that an update took, and no others."""
    config, per_token = learner.config, targets.to(device())
    batches = all_minibatches(config, experience, first_epoch, iteration)
    for (place, batch), decided in zip(batches, decisions, strict=False):  # it may have stopped early
        counts = Counts.of(experience.mask[list(batch.rows)], config.rollout.max_new_tokens)
        accumulate(learner, per_token, batch, counts)
        for trainer in learner.trainers:
            _carry_out(trainer, decided[trainer.name], place, config)
    return Steps()


def _carry_out(trainer: Trainer, decision: Decision, place: StepPosition, config: Config) -> None:
    match decision:
        case Decision.TAKEN:
            if not trainer.step(*place.position(config)).is_taken:
                say(f"{place}: the {trainer.name} took a step then, and its gradient is not finite now")
        case Decision.SKIPPED:
            trainer.skip()
        case Decision.DISCARDED:
            trainer.discard()
