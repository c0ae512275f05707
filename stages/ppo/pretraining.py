"""A critic trained on the rollouts of a run: ``python -m stages.ppo.pretraining RUN DIR``.

Value pretraining (VAPO, arXiv 2504.05118): it learns the rewards to come as they came (lambda 1), in which
there is no value that is still wrong. The directory is for ``model.critic`` of runs with the same tokenizer.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.schema import Config
from pipeline.run.commits import BadCommit, read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task
from stages import ranks
from stages.context import Context, NumericalError, UserError
from stages.logs import set_up_log
from stages.models.numerics import set_up_chance, set_up_torch
from stages.models.publishing import check_is_free, exit_code_of, published
from stages.ppo.experience import Experience, read_experience
from stages.ppo.forward import response_values
from stages.ppo.learner import per_token
from stages.ppo.math.advantages import gae
from stages.ppo.math.masked import masked_whiten
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.metrics import value_metrics
from stages.ppo.minibatches import split_epoch
from stages.ppo.resuming import critic_from, critic_start
from stages.ppo.targets import Targets, shape, token_rewards
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, say, train
from stages.training import save_tokenizer

SOURCE = "pretraining.json"
"""File of the directory that says what the critic was trained on."""


@dataclass(frozen=True)
class Pretrained:
    """What a critic was trained on, and how well it knew each iteration before it was trained on that."""

    run: str
    iterations: tuple[int, ...]
    epochs: int
    learning_rate: float
    responses: int
    """Responses of one epoch."""
    explained_variance: tuple[float, ...]
    """Share of the returns' variance that the critic foresaw, of each iteration in each epoch."""
    inputs: dict[str, str]
    """Fingerprints of the shards, by task."""


def pretrain(
    root: Path, directory: Path, num_iterations: int | None = None, epochs: int = 1, rate: float | None = None
) -> Pretrained:
    """Train the critic that a run begins with on the run's committed rollouts, and write it.

    Args:
        directory: it must not exist; it is built beside its place and renamed when it is complete.
        num_iterations: so many of the first iterations that have rewards. Default: all.
        epochs: passes over all of them, each in order.
        rate: peak learning rate. Default: the run's ``update.critic_learning_rate``.

    Raises:
        UserError: there is nothing to learn from, a directory exists, or a model has changed since the run
            began.
        BadCommit: a shard is not what was committed.
        NumericalError: too many steps had to be skipped.
    """
    check_is_free(directory)
    run = load_run(root)
    iterations = _scored_iterations(run)[:num_iterations]
    if not iterations:
        raise UserError(f"{root} has no iteration whose rewards are all committed: nothing to learn from")
    config = _settings(run.config, len(iterations) * epochs, rate)
    context = Context(run.paths, config, Task(iterations[0], Stage.UPDATE), "pretraining")
    seed = derive_seed(config.seed, "critic", "pretraining")
    set_up_chance(seed)
    set_up_torch(config.update.num_threads, seed)
    ranks.start_distributed()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with published(directory) as building:
        model = critic_from(critic_start(context, None), config)
        critic = Trainer("critic", model, config.update.critic_learning_rate, config.update)
        done = _train(critic, context, iterations, epochs)
        critic.save_model(building)
        save_tokenizer(context, building)
        (building / SOURCE).write_text(json.dumps(asdict(done), indent=1) + "\n")
    return done


def _scored_iterations(run: Run) -> list[int]:
    """Return the iterations whose reward shards are all committed."""
    plan = run.plan

    def is_scored(iteration: int) -> bool:
        tasks = (Task(iteration, Stage.REWARD, shard) for shard in range(plan.num_shards))
        return all(read_record(run.paths, task) is not None for task in tasks)

    return list(filter(is_scored, range(1, plan.iterations + 1)))


def _settings(config: Config, num_passes: int, rate: float | None) -> Config:
    """Return the run's settings for so many passes over an iteration, as if each were one of a run in which
    the critic learns alone."""
    update = replace(config.update, epochs=1, critic_learning_rate=rate or config.update.critic_learning_rate)
    algorithm = replace(config.algorithm, critic_warmup=0, target_kl=None, value_clip_range=math.inf)
    return replace(config, iterations=num_passes, update=update, algorithm=algorithm)


def _train(critic: Trainer, context: Context, iterations: Sequence[int], epochs: int) -> Pretrained:
    config, inputs = context.config, dict[str, str]()
    explained, responses, number = list[float](), 0, 0
    for _ in range(epochs):
        moments, responses = RunningMoments(), 0
        for iteration in iterations:
            reader = replace(context, task=Task(iteration, Stage.UPDATE), lineage={})
            experience = read_experience(reader, iteration)
            moments = moments.including(experience.outcome.scores)
            number, responses, inputs = number + 1, responses + len(experience), inputs | reader.lineage
            say(f"iteration {iteration} of {context.paths.root}, {len(experience)} responses:")
            explained.append(_learn(critic, config, experience, moments, number))
    rate = config.update.critic_learning_rate
    run = str(context.paths.root)
    return Pretrained(run, tuple(iterations), epochs, rate, responses, tuple(explained), inputs)


def _learn(
    critic: Trainer, config: Config, experience: Experience, moments: RunningMoments, number: int
) -> float:
    """Train on one iteration's responses, the ``number``-th from 1. Returns how much of the variance of their
    returns the critic foresaw."""
    targets = monte_carlo(config, experience, moments)
    batches = split_epoch(config, experience, number, 0)
    values = per_token(experience, batches, functools.partial(response_values, critic.engine))
    assert targets.returns is not None
    explained = value_metrics(experience.mask, values, targets.returns)["value/explained_variance"]
    # A policy is never asked for anything where the critic learns alone.
    learner = Learner(config, policy=critic, critic=critic, trains_policy=False)
    train(learner, experience, targets, batches, number)
    say(f"explained variance before that: {explained:.3f}")
    return explained


def monte_carlo(config: Config, experience: Experience, moments: RunningMoments) -> Targets:
    """Return targets of the value loss: the discounted rewards to come, shaped, and scaled with
    algorithm.whiten_rewards; without the KL penalty, which is 0 for a policy that is the reference."""
    algorithm: AlgorithmConfig = config.algorithm
    scores = shape(config, experience, moments).shaped
    without_kl = replace(experience, reference_log_probs=None)
    rewards = token_rewards(config, without_kl, scores, None, kl_coef=0.0)
    if algorithm.whiten_rewards:
        rewards = masked_whiten(rewards, experience.mask, shift_mean=False)
    nothing = torch.zeros_like(rewards)
    _, returns = gae(rewards, nothing, experience.mask, algorithm.gamma, lam=1.0)
    return Targets(
        mask=experience.mask,
        old_log_probs=nothing,
        old_values=nothing,
        advantages=nothing,
        returns=returns,
        weights=None,
        reference_log_probs=None,
        kl_coef=0.0,
    )


def described(done: Pretrained, directory: Path) -> str:
    """Return in words what a directory holds, and its use."""
    first, last = done.explained_variance[0], done.explained_variance[-1]
    source = f"{done.responses} responses of {len(done.iterations)} iterations of {done.run}"
    return (
        f"{directory}: a critic trained on {source}; explained variance {first:.3f} at first, "
        f"{last:.3f} before the last iteration\n"
        f"give model.critic={directory} to a run whose model.policy has the same tokenizer"
    )


def main(argv: Sequence[str]) -> int:
    """Train a critic, and say how well it does. Returns the exit code: 2 where that cannot be done."""
    given = _parser().parse_args(argv)
    set_up_log()

    def make() -> list[str]:
        done = pretrain(given.run, given.directory, given.iterations, given.epochs, given.rate)
        return [described(done, given.directory)]

    return exit_code_of(given.directory, make, BadCommit, NumericalError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.ppo.pretraining",
        description="Train a critic on the committed rollouts and rewards of a run, with the run's "
        "settings: a model directory for model.critic of other runs.",
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--iterations", type=_at_least_1, help="so many of the first ones; default: all")
    parser.add_argument("--epochs", type=_at_least_1, default=1, help="passes over all; default: 1")
    parser.add_argument("--learning-rate", dest="rate", type=_rate, help="default: the run's")
    return parser


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
