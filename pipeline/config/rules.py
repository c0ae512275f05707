"""Contradictions between keys of the configuration, each with the way out. Pure: looks at no file."""

from collections.abc import Iterator

from pipeline.config.algorithm import (
    GROUP_ESTIMATORS,
    CorrectionMode,
    Estimator,
    KLController,
    KLEstimator,
    KLPlacement,
    ReferenceStage,
    ShapingConfig,
)
from pipeline.config.engine_rules import engine_problems
from pipeline.config.issue import ConfigIssue
from pipeline.config.notify_rules import notify_problems
from pipeline.config.reward import NormalizationConfig, RewardModelConfig
from pipeline.config.reward_rules import component_problems
from pipeline.config.scheduler import LocalConfig, MailType, ResourcesConfig, SlurmConfig
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from slurm.limits import parse_duration, parse_memory

SLURM_STAGES = ("prepare", "rollout", "reward", "update", "evaluate", "driver")
"""Stages whose jobs have resources of their own, and the driver."""


def contradictions(config: Config) -> Iterator[ConfigIssue]:
    """Yield keys that do not go together. Pure: looks at no file."""
    yield from _batch_problems(config)
    yield from _length_problems(config)
    yield from _placement_problems(config)
    yield from _precision_problems(config)
    yield from _reward_problems(config)
    yield from component_problems(config)
    yield from engine_problems(config)
    estimator, samples = config.algorithm.estimator, config.rollout.samples_per_prompt
    if estimator in GROUP_ESTIMATORS and samples < 2:
        yield ConfigIssue(
            "rollout.samples_per_prompt",
            samples,
            f"algorithm.estimator={estimator} compares samples of a prompt and needs at least 2",
        )
    yield from _clip_problems(config)
    yield from _kl_problems(config)
    yield from _shaping_problems(config)
    yield from _keeping_problems(config)
    yield from _slurm_problems(config.scheduler)
    yield from _pool_problems(config)
    yield from notify_problems(config.notify)
    if config.evaluate.every and not config.data.heldout:
        yield ConfigIssue("evaluate.every", config.evaluate.every, "needs data.heldout=FILE; or set it to 0")


def _batch_problems(config: Config) -> Iterator[ConfigIssue]:
    prompts, shards = config.data.prompts_per_iteration, config.rollout.num_shards
    if prompts % shards:
        yield ConfigIssue(
            "rollout.num_shards",
            shards,
            f"must divide data.prompts_per_iteration={prompts} without remainder",
        )
    responses, minibatches = config.responses_per_iteration, config.update.minibatches
    if responses % minibatches:
        yield ConfigIssue(
            "update.minibatches",
            minibatches,
            f"must divide the {responses} responses of an iteration (data.prompts_per_iteration x "
            f"rollout.samples_per_prompt) without remainder; give {_nearest_divisor(responses, minibatches)}",
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of ``number`` that is nearest to ``wanted``, the smaller of two."""
    divisors = (divisor for divisor in range(1, min(number, 2 * wanted) + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _kl_problems(config: Config) -> Iterator[ConfigIssue]:
    kl, responses = config.algorithm.kl, config.responses_per_iteration
    if kl.controller is KLController.ADAPTIVE and responses >= 5 * kl.horizon:
        yield ConfigIssue(
            "algorithm.kl.horizon",
            kl.horizon,
            f"the coefficient would turn negative in one iteration of {responses} responses; "
            f"give more than {responses // 5}",
        )
    if kl.coef == 0 and kl.controller is KLController.ADAPTIVE:
        why = "multiplies the coefficient, and algorithm.kl.coef=0 stays 0; give a coef, or set it to fixed"
        yield ConfigIssue("algorithm.kl.controller", kl.controller, why)
    if kl.coef == 0 and kl.reference_in is ReferenceStage.UPDATE:
        why = "with algorithm.kl.coef=0 there is no reference; give a coef, or set it to reward"
        yield ConfigIssue("algorithm.kl.reference_in", kl.reference_in, why)
    if kl.straight_through and kl.placement is not KLPlacement.LOSS:
        yield ConfigIssue(
            "algorithm.kl.straight_through", True, "is of a KL in the loss: needs algorithm.kl.placement=loss"
        )
    if kl.placement is KLPlacement.LOSS and kl.per_token is KLEstimator.K1 and not kl.straight_through:
        why = (
            "its gradient in the loss is zero on average, so nothing would hold the policy; leave it out for "
            "k3, or give algorithm.kl.straight_through=true too"
        )
        yield ConfigIssue("algorithm.kl.estimator", KLEstimator.K1, why)


def _keeping_problems(config: Config) -> Iterator[ConfigIssue]:
    update = config.update
    if update.keep_last == 1:
        why = "an update that is lost is made again from the one before it, so that one is needed too; give 2"
        yield ConfigIssue("update.keep_last", 1, why)
    if update.keep_shards_last == 1:
        why = "the newest update, and the one before it, may have to be made again from their shards; give 2"
        yield ConfigIssue("update.keep_shards_last", 1, why)
    if update.keep_every is not None and update.keep_last is None:
        why = "says which of the older iterations to keep; give update.keep_last=N too, e.g. 3"
        yield ConfigIssue("update.keep_every", update.keep_every, why)


def _shaping_problems(config: Config) -> Iterator[ConfigIssue]:
    algorithm, rollout = config.algorithm, config.rollout
    shaping, correction = algorithm.shaping, algorithm.correction
    if shaping.filter_groups and algorithm.estimator not in GROUP_ESTIMATORS:
        why = (
            f"algorithm.estimator={algorithm.estimator} learns from groups of equal rewards too; set it to "
            f"false, or use {', '.join(sorted(GROUP_ESTIMATORS))}"
        )
        yield ConfigIssue("algorithm.shaping.filter_groups", True, why)
    if shaping.overlong_buffer is not None and shaping.overlong_buffer > rollout.max_new_tokens:
        why = f"is more than rollout.max_new_tokens={rollout.max_new_tokens}; give at most that"
        yield ConfigIssue("algorithm.shaping.overlong_buffer", shaping.overlong_buffer, why)
    if shaping.overlong_buffer is None and shaping.overlong_penalty != ShapingConfig.overlong_penalty:
        why = "nothing is penalised without algorithm.shaping.overlong_buffer=N; give it too, or leave it out"
        yield ConfigIssue("algorithm.shaping.overlong_penalty", shaping.overlong_penalty, why)
    if correction.mode is CorrectionMode.MASK and correction.low >= correction.high:
        why = f"must be below algorithm.correction.high={correction.high}"
        yield ConfigIssue("algorithm.correction.low", correction.low, why)
    if algorithm.whiten_rewards and algorithm.estimator is not Estimator.GAE:
        why = f"is of algorithm.estimator=gae only, and it is {algorithm.estimator}"
        yield ConfigIssue("algorithm.whiten_rewards", True, why)


def _length_problems(config: Config) -> Iterator[ConfigIssue]:
    context, prompt = config.model.context_length, config.data.max_prompt_tokens
    if context is None:
        return
    if context < 2:
        yield ConfigIssue("model.context_length", context, "a prompt and a new token take 2; give more")
        return
    if prompt is not None and prompt + 1 > context:
        yield ConfigIssue(
            "data.max_prompt_tokens",
            prompt,
            f"leaves no room for one new token in model.context_length={context}; legal: 1 to {context - 1}",
        )
    if config.rollout.max_new_tokens >= context:
        yield ConfigIssue(
            "rollout.max_new_tokens",
            config.rollout.max_new_tokens,
            f"leaves no room for a prompt in model.context_length={context}; legal: 1 to {context - 1}",
        )


def _placement_problems(config: Config) -> Iterator[ConfigIssue]:
    if config.update.device_map is not None:
        yield ConfigIssue(
            "update.device_map",
            config.update.device_map,
            "DeepSpeed places the trained model itself, so a device_map cannot be given too; set it to null "
            "and shard with update.zero_stage. For generation and scoring: rollout.device_map, "
            "reward.device_map",
        )


def _clip_problems(config: Config) -> Iterator[ConfigIssue]:
    low = config.algorithm.clip_range_low
    if low >= 1:
        why = "a ratio of probabilities is never below 0: nothing would be clipped; give less, e.g. 0.2"
        yield ConfigIssue("algorithm.clip_range_low", low, why)


def _precision_problems(config: Config) -> Iterator[ConfigIssue]:
    update = config.update
    if update.precision is not Precision.FP32 and update.zero_stage == 0:
        yield ConfigIssue(
            "update.precision",
            update.precision,
            "with update.zero_stage=0 DeepSpeed sums the gradients of micro-batches in this format, which "
            "loses most of a long sum; set update.zero_stage to 1, 2 or 3 (1 is enough on one GPU)",
        )
    if (update.attention or "").startswith("flash") and update.precision is Precision.FP32:
        why = (
            f"computes in half precision only, and update.precision={update.precision}; set that to bf16 or "
            "fp16, or use sdpa or eager"
        )
        yield ConfigIssue("update.attention", update.attention, why)
    if update.offload_optimizer and update.zero_stage == 0:
        yield ConfigIssue(
            "update.offload_optimizer",
            update.offload_optimizer,
            "with update.zero_stage=0 DeepSpeed cannot; set update.zero_stage to 1, 2 or 3 (1 is enough on "
            "one GPU)",
        )


def _reward_problems(config: Config) -> Iterator[ConfigIssue]:
    for name, component in config.reward.components.items():
        if isinstance(component, RewardModelConfig) and component.normalization:
            yield from _normalization_problems(
                f"reward.components.{name}.normalization", component.normalization
            )


def _normalization_problems(key: str, given: NormalizationConfig) -> Iterator[ConfigIssue]:
    numbers = (given.mean is not None, given.std is not None)
    if given.reference_samples and any(numbers):
        yield ConfigIssue(
            f"{key}.reference_samples", given.reference_samples, "give it or mean and std, not both"
        )
    elif not given.reference_samples and not all(numbers):
        yield ConfigIssue(
            key, f"(mean={given.mean}, std={given.std})", "give mean and std, or reference_samples"
        )


_OURS = frozenset(
    {"array", "chdir", "clusters", "dependency", "error", "export", "hold", "job-name", "output"}
    | {"parsable", "quiet", "test-only", "wait", "wrap"}
)
"""sbatch options that slurm-ppo sets itself, to run a task in the job and to find the job again."""


def _slurm_problems(given: LocalConfig | SlurmConfig) -> Iterator[ConfigIssue]:
    if isinstance(given, SlurmConfig):
        for stage in SLURM_STAGES:
            yield from _resource_problems(stage, getattr(given, stage))
        for name, resources in given.pools.items():
            yield from _resource_problems(f"pools.{name}", resources)
        yield from _mail_problems(given)


def _mail_problems(given: SlurmConfig) -> Iterator[ConfigIssue]:
    """Yield an address that nothing is sent to, and mail types that exclude each other."""
    stages = {stage: getattr(given, stage) for stage in SLURM_STAGES} | dict(given.pools)
    listed = {"scheduler": given.mail_type} | {f"scheduler.{name}": s.mail_type for name, s in stages.items()}
    if given.mail_user and not any(listed.values()):
        why = "nothing is sent there without scheduler.mail_type, e.g. scheduler.mail_type=[FAIL]"
        yield ConfigIssue("scheduler.mail_user", given.mail_user, why)
    for key, types in listed.items():
        if types and MailType.NONE in types and len(types) > 1:
            yield ConfigIssue(f"{key}.mail_type", ",".join(types), "NONE goes with no other")


def _pool_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield pools without resources, and resources without use. On this machine, pools default to a slot."""
    given = config.scheduler
    for name, component in config.reward.components.items():
        pool = component.pool
        if pool and pool not in given.pools and isinstance(given, SlurmConfig):
            why = f"scheduler.pools has no {pool!r}; give scheduler.pools.{pool}.partition=..."
            yield ConfigIssue(f"reward.components.{name}.pool", pool, why)
    for pool in given.pools:
        if pool not in config.reward.pools:
            why = f"no component is scored there; give reward.components.NAME.pool={pool}, or leave it out"
            yield ConfigIssue("scheduler.pools", pool, why)


def _resource_problems(stage: str, given: ResourcesConfig) -> Iterator[ConfigIssue]:
    """Yield what one stage or pool asks for and no cluster can give."""
    key = f"scheduler.{stage}"
    for option in sorted(_OURS & given.options.keys()):
        yield ConfigIssue(
            f"{key}.options.{option}",
            given.options[option],
            "is set by slurm-ppo itself; leave it out",
        )
    if given.gres and given.gpus_per_node:
        yield ConfigIssue(
            f"{key}.gres", given.gres, f"give it or {key}.gpus_per_node={given.gpus_per_node}, not both"
        )
    if stage != "update":
        for name, count in (("nodes", given.nodes), ("ntasks_per_node", given.ntasks_per_node)):
            if count > 1:
                why = "only the update runs on several; legal: 1. Use rollout.num_shards for more at once"
                yield ConfigIssue(f"{key}.{name}", count, why)
    seconds = parse_duration(given.time)
    if seconds is not None and given.signal >= seconds:
        yield ConfigIssue(
            f"{key}.signal",
            given.signal,
            f"the warning would come before the start: {key}.time={given.time} is {seconds:g} s; give less",
        )
    if given.mem and given.max_mem and parse_memory(given.max_mem) < parse_memory(given.mem):
        yield ConfigIssue(f"{key}.max_mem", given.max_mem, f"is less than {key}.mem={given.mem}")
    if given.array_parallelism and stage not in ("rollout", "reward") and not stage.startswith("pools."):
        yield ConfigIssue(
            f"{key}.array_parallelism", given.array_parallelism, "its arrays have one element; leave it out"
        )
