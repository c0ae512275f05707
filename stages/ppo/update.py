"""Train policy and critic on an iteration's scored responses.

Runs on any number of ranks: all read everything, each trains on its share, the first one writes.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.config.algorithm import Estimator, KLConfig, KLController
from pipeline.run.commits import FileEntry
from pipeline.run.durable import read_shared
from stages import ranks
from stages.context import Context, Result
from stages.ppo.critics import load_critic
from stages.ppo.experience import Experience, read_experience
from stages.ppo.learner import update as learner_update
from stages.ppo.lora import load_policy
from stages.ppo.math.kl import next_kl_coef
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.memory import out_of_memory_explained
from stages.ppo.metrics import mean_kl, update_metrics
from stages.ppo.reference import with_reference
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner
from stages.training import hash_folders, save_tokenizer


@dataclass(frozen=True)
class TrainerState:
    """State that learning needs to resume, besides weights, optimizer moments and loss scales.

    Learning rates and every random choice are functions of counters and of the run's seed, and the iteration
    says which prompts come next, so there is neither a generator's state nor a position in the data to save.
    """

    iteration: int
    kl_coef: float
    responses: int
    """Responses rolled out since the run began."""
    rewards: RunningMoments
    """Moments of all rewards since the run began, before shaping."""
    seed: int


def update(context: Context, iteration: int) -> Result | None:
    """Train on an iteration. Returns None on every rank but the first, which has the result of all."""
    ranks.start_distributed()
    context.verifies = ranks.is_first()
    # 1. every shard of this iteration, verified
    with context.stopwatch.timing("read"):
        experience = read_experience(context, iteration)
    with out_of_memory_explained(context.config, experience):
        return learn(iteration, context, experience)


def learn(iteration: int, context: Context, experience: Experience) -> Result | None:
    """Learn from an iteration's experience, and write policy, critic and trainer state."""
    config, stopwatch = context.config, context.stopwatch
    # 2. the reference's log-probabilities, unless the reward stage has computed them
    with stopwatch.timing("reference"):
        experience = with_reference(context, experience, iteration)
    # 3. policy, critic and their optimizers where the previous iteration left them
    with stopwatch.timing("load"):
        learner, state = load_learner(context, iteration - 1)
    # 4. the update, and the KL coefficient of the next one
    moments = state.rewards.including(experience.outcome.scores)
    with context.computing():
        done = learner_update(learner, experience, iteration, state.kl_coef, moments, stopwatch)
    kl, coef = mean_kl(done.experience, done.targets), state.kl_coef  # which stays where no KL was measured
    following = TrainerState(
        iteration=iteration,
        kl_coef=coef if kl is None else next_kl_coef(coef, kl, len(done.experience), config.algorithm.kl),
        responses=state.responses + len(experience),
        rewards=moments,
        seed=config.seed,
    )
    # 5. everything that learning needs to go on
    with stopwatch.timing("save"):
        outputs = save(context, learner, following)
    if not ranks.is_first():
        return None
    metrics = update_metrics(config, experience, done) | {"objective/kl_coef": state.kl_coef}
    metrics |= {f"seconds/update/{name}": seconds for name, seconds in stopwatch.seconds.items()}
    metrics["samples"] = float(following.responses)
    return Result(outputs, len(experience), "trainer/1", iteration, metrics)


def load_learner(context: Context, version: int) -> tuple[Learner, TrainerState]:
    """Load models, optimizers and counters as they were committed with policy ``version``."""
    config, trust = context.config, context.config.model.trust_remote_code
    attention = config.update.attention
    base = 0 if config.update.lora else version  # which never changes; the trainer state has the adapters
    policy_model = load_policy(context.policy_directory(base), config)
    policy = Trainer("policy", policy_model, config.update.learning_rate, config.update)
    critic = None
    if config.algorithm.estimator is Estimator.GAE:
        first = config.model.critic or config.model.policy
        start = context.critic_directory(version) or context.source(first)
        model = load_critic(start, config.update.precision, trust, attention)
        critic = Trainer("critic", model, config.update.critic_learning_rate, config.update)
    learner = Learner(config, policy, critic)
    folder = context.trainer_directory(version)
    if folder is None:
        return learner, TrainerState(0, config.algorithm.kl.coef, 0, RunningMoments(), config.seed)
    for trainer in learner.trainers:
        trainer.load_state(folder / f"{trainer.name}.safetensors")
    return learner, resumed(read_state(folder), config.algorithm.kl)


def resumed(state: TrainerState, kl: KLConfig) -> TrainerState:
    """Return the state to resume from. A fixed KL coefficient is the configuration's: a fork may have
    another one."""
    return replace(state, kl_coef=kl.coef) if kl.controller is KLController.FIXED else state


def read_state(folder: Path) -> TrainerState:
    given = json.loads(read_shared(folder / "state.json"))
    return TrainerState(**given | {"rewards": RunningMoments(**given["rewards"])})


def save(context: Context, learner: Learner, state: TrainerState) -> tuple[FileEntry, ...]:
    """Write policy, critic and trainer state under this attempt's own names, durably.

    Every rank takes part; the first one writes, and has what it wrote. The others have nothing.
    """
    files, attempt = context.files, context.attempt
    folders = [files.policy(attempt), files.trainer(attempt)]
    learner.policy.save_model(folders[0])
    if ranks.is_first():
        save_tokenizer(context, folders[0])
        folders[1].mkdir(parents=True)
        (folders[1] / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")
    for trainer in learner.trainers:
        trainer.save_state(folders[1] / f"{trainer.name}.safetensors")
    if learner.critic:
        folders.append(files.critic(attempt))
        learner.critic.save_model(folders[2])
    if not ranks.is_first():
        return ()
    return hash_folders(context, folders)
