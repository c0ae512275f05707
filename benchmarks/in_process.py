"""PPO in one process with the functions that the stages call: models loaded once, no files in between.

    python benchmarks/in_process.py RUN [--iterations 8] [--profile FILE]

RUN is a finished run of one machine: its configuration and its prompts are taken, and the policy at the end
is compared with the one that the run committed. Shard by shard, with each stage's own threads and seeds:
generate, score, reference, join the shards, update, and give the new weights to the generator in memory. What
a row of metrics needs is computed as well. Left out are commits, hashes, digests of moments, progress that is
saved, and evaluation. Prints JSON: seconds of each iteration, and how much of them models computed.
"""

import argparse
import cProfile
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.run.environment import TASK_ENVIRONMENT  # noqa: E402

os.environ.update(TASK_ENVIRONMENT)
os.environ.setdefault("DS_LOG_LEVEL", "ERROR")

import pyarrow as pa  # noqa: E402
import torch  # noqa: E402

from pipeline.config.algorithm import Estimator, ReferenceStage  # noqa: E402
from pipeline.config.engine_rules import has_reference_in  # noqa: E402
from pipeline.config.reward import RewardModelConfig  # noqa: E402
from pipeline.config.schema import Config  # noqa: E402
from pipeline.data.sampler import deal  # noqa: E402
from pipeline.run.directory import Run, load_run  # noqa: E402
from pipeline.run.held import num_threads  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.run.schemas import PROMPTS  # noqa: E402
from pipeline.run.seeds import derive_seed  # noqa: E402
from pipeline.run.tasks import PREPARE, Stage, Task  # noqa: E402
from stages import ranks  # noqa: E402
from stages.context import Context  # noqa: E402
from stages.engines import make_generator  # noqa: E402
from stages.engines.base import Sampling  # noqa: E402
from stages.generation.episodes import Episode  # noqa: E402
from stages.generation.responding import requests_of, rollout_table  # noqa: E402
from stages.models.numerics import set_up_torch  # noqa: E402
from stages.models.tokenizers import load_tokenizer, policy_ends, stop_ids_of  # noqa: E402
from stages.ppo.critics import load_critic  # noqa: E402
from stages.ppo.experience import build_experience  # noqa: E402
from stages.ppo.learner import update  # noqa: E402
from stages.ppo.lora import load_policy  # noqa: E402
from stages.ppo.math.kl import next_kl_coef  # noqa: E402
from stages.ppo.math.shaping import RunningMoments  # noqa: E402
from stages.ppo.metrics import mean_kl, update_metrics  # noqa: E402
from stages.ppo.trainer import Trainer  # noqa: E402
from stages.ppo.training import Learner  # noqa: E402
from stages.rewards.components import normalization_of  # noqa: E402
from stages.rewards.models import RewardModel  # noqa: E402
from stages.rewards.reference import reference_log_probs  # noqa: E402
from stages.rewards.teachers import combined, teacher_log_probs  # noqa: E402
from stages.tasks.reward import reward_table  # noqa: E402
from stages.tasks.rollout import samples_of_prompt  # noqa: E402

Rule = Callable[[pa.Table], Sequence[float | None]]
"""Function that scores the rows of a rollout table."""


class FromMemory(Context):
    """A context whose model directories are trusted: they were verified when the run began."""

    def source(self, directory: str) -> Path:
        return Path(directory)


@dataclass
class Loop:
    """Everything that is kept from iteration to iteration."""

    run: Run
    prompts: pa.Table
    tokenizer: Any
    generator: Any
    rewards: Mapping[str, Rule]
    """Function that scores rows, by component."""
    learner: Learner
    kl_coef: float
    moments: RunningMoments = field(default_factory=RunningMoments)
    compute_seconds: float = 0.0

    def context(self, task: Task) -> FromMemory:
        """Return the task's context, with torch set up as the task would."""
        config = self.run.config
        seed = derive_seed(config.seed, task.iteration, task.stage, task.shard)
        set_up_torch(num_threads(config, task.stage), seed)
        return FromMemory(self.run.paths, config, task, "1-memory")


def load(run: Run) -> Loop:
    """Load all models.

    Raises:
        ValueError: the run has what this loop cannot do.
    """
    config, path = run.config, run.config.model.policy
    others = config.reward.pools or config.algorithm.kl.sync_interval
    others = others or config.data.weights or config.data.band.is_given
    if others or config.update.lora or has_reference_in(config, ReferenceStage.UPDATE):
        raise ValueError(
            "pools, adapters, weights of prompt files, bands, and a reference that follows or is in the "
            "update are no part of this loop"
        )
    context = FromMemory(run.paths, config, PREPARE, "1-memory")
    set_up_torch(config.update.num_threads, config.seed)
    ranks.start_distributed()
    components = config.reward.components.items()
    return Loop(
        run,
        context.table(PREPARE, PROMPTS),
        load_tokenizer(path, config.model),
        make_generator(config, path),
        {name: scorer_of(context, name, part) for name, part in components},
        learner_of(config),
        config.algorithm.kl.coef,
    )


def scorer_of(context: Context, name: str, part: RewardModelConfig) -> Rule:
    """Load a reward model, whose scores are normalised with its mean and standard deviation."""
    model, (mean, std) = RewardModel(context, part), normalization_of(context, name, part.normalization)
    return lambda rows: [None if raw is None else (raw - mean) / std for raw in model.score(rows)]


def learner_of(config: Config) -> Learner:
    """Load the policy, and a critic where the estimator has one."""
    path, given, critic = config.model.policy, config.update, None
    if config.algorithm.estimator is Estimator.GAE:
        model = load_critic(config.model.critic or path, given.precision, config.model.trust_remote_code)
        critic = Trainer("critic", model, given.critic_learning_rate, given)
    policy = Trainer("policy", load_policy(Path(path), config), given.learning_rate, given)
    return Learner(config, policy, critic)


def roll_out(loop: Loop, task: Task) -> pa.Table:
    """Do what a rollout task computes."""
    config = loop.run.config
    dealt = deal(
        loop.prompts.num_rows,
        iteration=task.iteration,
        prompts_per_iteration=config.prompts_per_rollout,
        num_shards=config.rollout.num_shards,
        shard=task.shard,
        seed=config.seed,
        shuffle=config.data.shuffles_epochs,
    )
    return respond(loop, task, loop.prompts.take(dealt.indices))


def respond(loop: Loop, task: Task, prompts: pa.Table) -> pa.Table:
    """Return the rollout table of responses to some prompts."""
    config, context = loop.run.config, loop.context(task)
    samples, rollout = samples_of_prompt(config), config.rollout
    repeated = prompts.take([i for i in range(prompts.num_rows) for _ in samples])
    requests = requests_of(context, repeated, samples)
    sampling = Sampling(
        rollout.temperature, rollout.top_p, rollout.top_k, stop_token_ids=stop_ids_of(context)
    )
    found: dict[int, Episode] = {}
    with context.computing():
        for part in loop.generator.stream(requests, sampling, frozenset(), lambda: False, None):
            found |= {index: Episode.of(response) for index, response in part.items()}
    loop.compute_seconds += context.compute_seconds
    episodes, unwritten = [found[i] for i in range(len(requests))], policy_ends(context).unwritten
    return rollout_table(repeated, episodes, samples, loop.tokenizer, unwritten)


def score(loop: Loop, task: Task, rows: pa.Table) -> pa.Table:
    """Do what a reward task computes."""
    config, context = loop.run.config, loop.context(task)
    with context.computing():
        scores = {name: rule(rows) for name, rule in loop.rewards.items()}
    teachers = config.reward.teachers
    extra = combined(teachers, teacher_log_probs(context, rows, teachers))
    has_reference = has_reference_in(config, ReferenceStage.REWARD)
    reference = reference_log_probs(context, rows) if has_reference else None
    loop.compute_seconds += context.compute_seconds
    return reward_table(config, rows, scores, reference, extra)


def learn(loop: Loop, task: Task, shards: list[tuple[pa.Table, pa.Table]]) -> dict[str, float]:
    """Do what an update computes. Returns its metrics."""
    config, context = loop.run.config, loop.context(task)
    responses, rewards = (pa.concat_tables(tables) for tables in zip(*shards, strict=True))
    numbers = [shard for shard, (table, _) in enumerate(shards) for _ in range(table.num_rows)]
    experience = build_experience(responses, rewards, numbers)
    loop.moments = loop.moments.including(experience.outcome.scores)
    with context.computing():
        done = update(loop.learner, experience, task.iteration, loop.kl_coef, loop.moments, context.stopwatch)
    kl = mean_kl(done.experience, done.targets)
    if kl is not None:
        loop.kl_coef = next_kl_coef(loop.kl_coef, kl, len(done.experience), config.algorithm.kl)
    loop.compute_seconds += context.compute_seconds
    return update_metrics(config, experience, done)


def iterate(loop: Loop, iteration: int) -> None:
    """Do one iteration, until the generator has the new policy."""
    shards = []
    for shard in range(loop.run.plan.num_shards):
        rows = roll_out(loop, Task(iteration, Stage.ROLLOUT, shard))
        shards.append((rows, score(loop, Task(iteration, Stage.REWARD, shard), rows)))
    learn(loop, policy_maker(iteration), shards)
    loop.generator._model.load_state_dict(loop.learner.policy.model.state_dict())


def is_same_policy(loop: Loop, version: int) -> bool:
    """Whether the run committed the very weights that the learner has now."""
    context = FromMemory(loop.run.paths, loop.run.config, policy_maker(version), "1-memory")
    theirs = load_policy(context.policy_directory(version), loop.run.config).state_dict()
    ours = loop.learner.policy.model.state_dict()
    return all(torch.equal(ours[name], weights) for name, weights in theirs.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--profile", type=Path, help="file for cProfile's numbers")
    given = parser.parse_args()
    run = load_run(given.run)
    loop, last = load(run), given.iterations or run.plan.iterations
    profile = cProfile.Profile() if given.profile else None
    seconds, compute = [], []
    for iteration in range(1, last + 1):
        if profile and iteration == 3:
            profile.enable()
        started, before = time.perf_counter(), loop.compute_seconds
        iterate(loop, iteration)
        seconds.append(time.perf_counter() - started)
        compute.append(loop.compute_seconds - before)
    if profile:
        profile.disable()
        profile.dump_stats(given.profile)
    same = is_same_policy(loop, last)
    print(json.dumps({"seconds": seconds, "compute": compute, "is_same_policy": same}))


if __name__ == "__main__":
    main()
