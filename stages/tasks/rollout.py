"""Rollout: sample responses to one shard of an iteration's prompts, and ReMax's greedy baselines."""

from pipeline.config.algorithm import Estimator
from pipeline.config.schema import Config
from pipeline.run.schemas import GREEDY_SAMPLE, ROLLOUT, is_sampled, version_of
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Task
from stages.context import Context, StageResult
from stages.engines.base import Sampling
from stages.generation.progress import SAVE_SECONDS
from stages.generation.responding import generator_of, num_tokens, respond, response_metrics
from stages.logs import log
from stages.models.tokenizers import stop_ids_of
from stages.tasks.dealing import dealt_to, prompts_of


def run(task: Task, context: Context, save_every: float = SAVE_SECONDS) -> StageResult:
    """Sample responses, saving progress every ``save_every`` seconds. Raises StoppedOnWarning, with progress
    saved."""
    config, rollout = context.config, context.config.rollout
    # 1. this shard's slice of the epoch's permutation
    dealt = dealt_to(task, context)
    prompts = prompts_of(dealt, context)
    # 2. responses of the plan's policy, each from a seed of its own
    version, start = context.plan.policy_of(task.iteration), context.plan.start
    if version > start and not config.algorithm.trains_policy(version):
        log.info(f"policy {version} has the weights of policy {start}: algorithm.critic_warmup is not over")
    sampling = Sampling(
        rollout.temperature, rollout.top_p, rollout.top_k, stop_token_ids=stop_ids_of(context)
    )
    rows = respond(context, prompts, version, sampling, samples_of_prompt(config), save_every)
    # 3. one Arrow shard
    output = write_shard(context.paths, context.files.data(context.attempt), rows)
    # All tokens count for the speed; the other metrics are of responses that the policy is trained on.
    metrics = response_metrics(rows.filter(is_sampled(rows))) | {"response_tokens": num_tokens(rows)}
    metrics["epoch"] = float(dealt.epoch)
    metrics |= {f"epoch/{name}": float(epoch) for name, epoch in dealt.epochs.items()}
    if config.data.band.is_given:
        metrics["epoch_left_out"] = float(dealt.num_left_out)
    return StageResult((output,), rows.num_rows, version_of(ROLLOUT), version, metrics)


def load(context: Context, version: int) -> None:
    """Make the engine, with policy ``version``: the newest one, if not yet the task's."""
    generator_of(context, context.policy_files(version))


def samples_of_prompt(config: Config) -> tuple[int, ...]:
    """Return the ``sample_index`` of all responses to a prompt; for ReMax (arXiv 2310.10505) the last is
    greedy."""
    greedy = (GREEDY_SAMPLE,) if config.algorithm.estimator is Estimator.REMAX else ()
    return (*range(config.rollout.samples_per_prompt), *greedy)
