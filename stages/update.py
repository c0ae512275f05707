"""Update: train policy and critic on an iteration's scored responses, and commit the next policy.

Runs on any number of ranks: all read everything, each trains on its share, the first one writes.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.algorithmconfig import Estimator
from pipeline.commits import FileEntry, hash_tree
from pipeline.tasks import PREPARE, Task
from stages import ranks
from stages.context import Context, Result
from stages.models import load_causal_lm, load_critic, load_tokenizer
from stages.ppo.experience import read_experience
from stages.ppo.kl import next_kl_coef
from stages.ppo.learner import Learner, update
from stages.ppo.metrics import mean_kl, update_metrics
from stages.ppo.trainer import Trainer


@dataclass(frozen=True)
class TrainerState:
    """What learning needs to go on, besides weights and optimizer moments.

    Learning rates and every random choice are functions of these counters and of the run's seed, so there
    is no generator state to save.
    """

    iteration: int
    optimizer_steps: int
    kl_coef: float
    responses: int
    """Responses trained on since the run began."""
    seed: int


def run(task: Task, context: Context) -> Result | None:
    """None on every rank but the first, which has the result of all of them."""
    config, iteration = context.config, task.iteration
    context.read(PREPARE)
    # 1. policy, critic and their optimizers where the previous iteration left them
    ranks.start_distributed()
    learner, state = load_learner(context, iteration - 1)
    # 2. every shard of this iteration, verified
    experience = read_experience(context, iteration, config.rollout.num_shards)
    # 3. the update, and the KL coefficient of the next one
    with context.computing():
        targets, sums, rate = update(learner, experience, iteration, state.kl_coef)
        kl = mean_kl(experience, targets.old_log_probs)
        coef = state.kl_coef
        if kl is not None:
            coef = next_kl_coef(coef, kl, len(experience), config.algorithm.kl)
    # 4. everything that learning needs to go on
    following = TrainerState(
        iteration, learner.policy.steps, coef, state.responses + len(experience), config.seed
    )
    outputs = save(context, learner, following)
    if not ranks.is_first():
        return None
    metrics = update_metrics(config, experience, targets, sums)
    metrics |= {"policy/learning_rate": rate, "objective/kl_coef": state.kl_coef}
    metrics["samples"] = float(following.responses)
    return Result(outputs, len(experience), "trainer/1", iteration, metrics)


def load_learner(context: Context, version: int) -> tuple[Learner, TrainerState]:
    """Models, optimizers and counters as they were committed with policy ``version``."""
    config, trust = context.config, context.config.model.trust_remote_code
    policy_directory = context.policy_directory(version)
    policy_model = load_causal_lm(policy_directory, config.update.precision, trust)
    policy = Trainer("policy", policy_model, config.update.learning_rate, config.update)
    critic = None
    if config.algorithm.estimator is Estimator.GAE:
        start = context.critic_directory(version) or context.source(
            config.model.critic or config.model.policy
        )
        model = load_critic(start, config.update.precision, trust)
        critic = Trainer("critic", model, config.update.critic_learning_rate, config.update)
    learner = Learner(config, policy, critic)
    folder = context.trainer_directory(version)
    if folder is None:
        return learner, TrainerState(0, 0, config.algorithm.kl.coef, 0, config.seed)
    state = TrainerState(**json.loads((folder / "state.json").read_text()))
    for trainer in learner.trainers:
        trainer.load_state(folder / f"{trainer.name}.safetensors", state.optimizer_steps)
    return learner, state


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
    return tuple(entry for folder in folders for entry in hash_tree(context.paths, folder))


def save_tokenizer(context: Context, folder: Path) -> None:
    """The policy directory stands alone: it has the tokenizer and the generation settings of version 0."""
    source = Path(context.config.model.policy)
    load_tokenizer(source, context.config.model.trust_remote_code).save_pretrained(folder)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
