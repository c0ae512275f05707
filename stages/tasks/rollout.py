"""Rollout: sample responses to one shard of an iteration's prompts, and ReMax's greedy baselines."""

from pipeline.config.algorithm import Estimator
from pipeline.config.schema import Config
from pipeline.data.sampler import Deal, deal, deal_by_weight, portions
from pipeline.run.schemas import GREEDY_SAMPLE, PROMPTS, ROLLOUT, is_sampled, version_of
from pipeline.run.shards import LISTING, SOURCES, write_shard
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, StageResult
from stages.engines.base import Sampling
from stages.generation.progress import SAVE_SECONDS
from stages.generation.responding import generator_of, num_tokens, respond, response_metrics
from stages.logs import log
from stages.models.tokenizers import stop_ids_of


def run(task: Task, context: Context, save_every: float = SAVE_SECONDS) -> StageResult:
    """Sample responses, saving progress every ``save_every`` seconds. Raises StoppedOnWarning, with progress
    saved."""
    config, rollout = context.config, context.config.rollout
    # 1. this shard's slice of the epoch's permutation
    dealt = dealt_to(task, context)
    prompts = context.rows(PREPARE, PROMPTS, dealt.indices)
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
    return StageResult((output,), rows.num_rows, version_of(ROLLOUT), version, metrics)


def dealt_to(task: Task, context: Context) -> Deal:
    """Return the prompts of a shard: of all, or by the weights of their files."""
    config, data = context.config, context.config.data
    num_shards, seed = config.rollout.num_shards, config.seed
    if not data.weights:
        return deal(
            context.read(PREPARE).rows,
            iteration=task.iteration,
            prompts_per_iteration=config.prompts_per_rollout,
            num_shards=num_shards,
            shard=task.shard,
            seed=seed,
            shuffle=data.shuffles_epochs,
        )
    return deal_by_weight(
        portions(context.json(PREPARE, LISTING)[SOURCES], config.prompt_shares),
        iteration=task.iteration,
        num_shards=num_shards,
        shard=task.shard,
        seed=seed,
        shuffle=data.shuffles_epochs,
    )


def load(context: Context, version: int) -> None:
    """Make the engine, with policy ``version``: the newest one, if not yet the task's."""
    generator_of(context, context.policy_files(version))


def samples_of_prompt(config: Config) -> tuple[int, ...]:
    """Return the ``sample_index`` of all responses to a prompt; for ReMax (arXiv 2310.10505) the last is
    greedy."""
    greedy = (GREEDY_SAMPLE,) if config.algorithm.estimator is Estimator.REMAX else ()
    return (*range(config.rollout.samples_per_prompt), *greedy)
