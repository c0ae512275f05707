"""Contradictions between keys of the configuration, each with the way out. Pure: looks at no file."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from pipeline.config.algorithm import (
    GROUP_ESTIMATORS,
    AlgorithmConfig,
    Estimator,
    KLController,
    KLEstimator,
    KLPlacement,
    ReferenceStage,
    ShapingConfig,
)
from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.correction_rules import correction_problems, old_log_probs_problems
from pipeline.config.distillation_rules import distillation_problems
from pipeline.config.engine_rules import engine_problems
from pipeline.config.evaluate_rules import evaluation_problems
from pipeline.config.issue import ConfigIssue
from pipeline.config.loss_rules import loss_problems
from pipeline.config.name_rules import name_problems
from pipeline.config.refill_rules import refill_problems
from pipeline.config.reward_rules import component_problems
from pipeline.config.routing_rules import replay_problems
from pipeline.config.scheduler import CLUSTERS, LocalUpdateConfig, ResourcesConfig, SlurmConfig
from pipeline.config.schema import Config
from pipeline.config.staleness_rules import staleness_problems
from pipeline.config.update import HALF, Precision, TrainingEngine
from slurm.limits import parse_duration


def contradictions(config: Config) -> Iterator[ConfigIssue]:
    """Yield keys that do not go together. Pure: looks at no file."""
    for problems in (
        _batch_problems,
        _band_problems,
        _column_problems,
        _length_problems,
        _training_problems,
        name_problems,
        component_problems,
        engine_problems,
        _estimator_problems,
        loss_problems,
        _kl_problems,
        _sync_problems,
        distillation_problems,
        _shaping_problems,
        correction_problems,
        old_log_probs_problems,
        staleness_problems,
        refill_problems,
        replay_problems,
        _keeping_problems,
        _slurm_problems,
        _step_problems,
        _rank_problems,
        _pool_problems,
        _notify_problems,
        _tracking_problems,
        evaluation_problems,
    ):
        yield from problems(config)


def _column_problems(config: Config) -> Iterator[ConfigIssue]:
    data = config.data
    for key, other in (("prompt_column", data.prompt_column), ("id_column", data.id_column)):
        if data.tools_column is not None and data.tools_column == other:
            why = f"is data.{key} too; name the column with the tools, or null for none"
            yield ConfigIssue.at(config, "data.tools_column", why)


def _band_problems(config: Config) -> Iterator[ConfigIssue]:
    lowest, highest = config.data.band.lowest, config.data.band.highest
    if lowest is not None and highest is not None and lowest > highest:
        yield ConfigIssue.at(config, "data.band.lowest", f"must be at most data.band.highest={highest:g}")


def _batch_problems(config: Config) -> Iterator[ConfigIssue]:
    prompts, responses = config.data.prompts_per_iteration, config.responses_per_update
    if prompts % config.rollout.num_shards:
        why = f"must divide data.prompts_per_iteration={prompts} without remainder"
        yield ConfigIssue.at(config, "rollout.num_shards", why)
    minibatches = config.update.minibatches
    if responses % minibatches:
        divisors = (d for d in range(1, min(responses, 2 * minibatches) + 1) if responses % d == 0)
        nearest = min(divisors, key=lambda divisor: abs(divisor - minibatches))  # the smaller of two
        why = (
            f"must divide the {responses} responses of an iteration (data.prompts_per_iteration x "
            f"rollout.samples_per_prompt) without remainder; give {nearest}"
        )
        yield ConfigIssue.at(config, "update.minibatches", why)


def _length_problems(config: Config) -> Iterator[ConfigIssue]:
    context, prompt = config.model.context_length, config.data.max_prompt_tokens
    if context is None:
        return
    if context < 2:
        yield ConfigIssue.at(config, "model.context_length", "a prompt and a new token take 2; give more")
        return
    room = f"in model.context_length={context}; legal: 1 to {context - 1}"
    if prompt is not None and prompt + 1 > context:
        yield ConfigIssue.at(config, "data.max_prompt_tokens", f"leaves no room for one new token {room}")
    if config.rollout.max_new_tokens >= context:
        yield ConfigIssue.at(config, "rollout.max_new_tokens", f"leaves no room for a prompt {room}")


def _training_problems(config: Config) -> Iterator[ConfigIssue]:
    update = config.update
    remedy = "set update.zero_stage to 1, 2 or 3 (1 is enough on one GPU)"
    if update.precision in HALF and update.zero == 0:
        why = (
            "with update.zero_stage=0 DeepSpeed sums the gradients of micro-batches in this format, which "
            f"loses most of a long sum; {remedy}"
        )
        yield ConfigIssue.at(config, "update.precision", why)
    if (update.attention or "").startswith("flash") and update.precision is Precision.FP32:
        why = (
            f"computes in half precision only, and update.precision={update.precision}; set that to bf16 or "
            "fp16, or use sdpa or eager"
        )
        yield ConfigIssue.at(config, "update.attention", why)
    if update.offload_optimizer and update.zero == 0:
        why = f"with update.zero_stage=0 DeepSpeed cannot; {remedy}"
        yield ConfigIssue.at(config, "update.offload_optimizer", why)


def _estimator_problems(config: Config) -> Iterator[ConfigIssue]:
    estimator, warmup = config.algorithm.estimator, config.algorithm.critic_warmup
    if warmup and estimator is Estimator.GAE and warmup >= config.iterations:
        why = f"leaves none of iterations={config.iterations} to train the policy; give less"
        yield ConfigIssue.at(config, "algorithm.critic_warmup", why)
    if estimator in GROUP_ESTIMATORS and config.rollout.samples_per_prompt < 2:
        why = f"algorithm.estimator={estimator} compares samples of a prompt and needs at least 2"
        yield ConfigIssue.at(config, "rollout.samples_per_prompt", why)


def _kl_problems(config: Config) -> Iterator[ConfigIssue]:
    kl, responses = config.algorithm.kl, config.responses_per_update
    if kl.controller is KLController.ADAPTIVE and responses >= 5 * kl.horizon:
        why = (
            f"the coefficient would turn negative in one iteration of {responses} responses; "
            f"give more than {responses // 5}"
        )
        yield ConfigIssue.at(config, "algorithm.kl.horizon", why)
    if kl.coef == 0 and kl.controller is KLController.ADAPTIVE:
        why = "multiplies the coefficient, and algorithm.kl.coef=0 stays 0; give a coef, or set it to fixed"
        yield ConfigIssue.at(config, "algorithm.kl.controller", why)
    if kl.coef == 0 and kl.reference_in is ReferenceStage.UPDATE:
        why = "with algorithm.kl.coef=0 there is no reference; give a coef, or set it to reward"
        yield ConfigIssue.at(config, "algorithm.kl.reference_in", why)
    if kl.straight_through and kl.placement is not KLPlacement.LOSS:
        why = "is for a KL in the loss: needs algorithm.kl.placement=loss"
        yield ConfigIssue.at(config, "algorithm.kl.straight_through", why)
    if kl.placement is KLPlacement.LOSS and kl.per_token is KLEstimator.K1 and not kl.straight_through:
        why = (
            "its gradient in the loss is zero on average, so nothing would hold the policy; leave it out for "
            "k3, or give algorithm.kl.straight_through=true too"
        )
        yield ConfigIssue.at(config, "algorithm.kl.estimator", why)


def _sync_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what a reference that follows the policy needs, and what it cannot be made of."""
    kl, update = config.algorithm.kl, config.update
    if kl.sync_every is not None and kl.coef == 0:
        why = "with algorithm.kl.coef=0 there is no reference; give a coef, or leave it out"
        yield ConfigIssue.at(config, "algorithm.kl.sync_every", why)
    if kl.sync_weight < 1 and kl.sync_every is None:
        why = "the reference stays as it is without algorithm.kl.sync_every=N; give it too, or leave it out"
        yield ConfigIssue.at(config, "algorithm.kl.sync_weight", why)
    if kl.averages and update.lora is not None:
        why = "policies are adapters (update.lora), of which no average is made; set it to 1, or lora to null"
        yield ConfigIssue.at(config, "algorithm.kl.sync_weight", why)
    if kl.averages and update.engine not in (*TrainingEngine,):
        why = f"update.engine={update.engine} makes no average of weights; set it to 1"
        yield ConfigIssue.at(config, "algorithm.kl.sync_weight", why)
    is_sharded = kl.reference_in is ReferenceStage.UPDATE and update.zero == 3
    if kl.sync_interval and update.lora is not None and is_sharded:
        why = (
            "the policy is an adapter (update.lora), which is merged into whole weights, and "
            "update.zero_stage=3 has parts; set algorithm.kl.reference_in=reward"
        )
        yield ConfigIssue.at(config, "algorithm.kl.sync_every", why)


def _shaping_problems(config: Config) -> Iterator[ConfigIssue]:
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    shaping = algorithm.shaping
    if shaping.filter_groups and algorithm.estimator not in GROUP_ESTIMATORS:
        why = (
            f"algorithm.estimator={algorithm.estimator} learns from groups of equal rewards too; set it to "
            f"false, or use {', '.join(sorted(GROUP_ESTIMATORS))}"
        )
        yield ConfigIssue.at(config, "algorithm.shaping.filter_groups", why)
    if shaping.overlong_buffer is not None and shaping.overlong_buffer > longest:
        why = f"is more than rollout.max_new_tokens={longest}; give at most that"
        yield ConfigIssue.at(config, "algorithm.shaping.overlong_buffer", why)
    if shaping.overlong_buffer is None and shaping.overlong_penalty != ShapingConfig.overlong_penalty:
        why = "nothing is penalised without algorithm.shaping.overlong_buffer=N; give it too, or leave it out"
        yield ConfigIssue.at(config, "algorithm.shaping.overlong_penalty", why)
    for key in ("whiten_rewards", "critic_lam", "lam_alpha", "critic_warmup"):
        is_given = getattr(algorithm, key) != getattr(AlgorithmConfig, key)
        if is_given and algorithm.estimator is not Estimator.GAE:
            why = f"is for algorithm.estimator=gae only, and that is {algorithm.estimator}"
            yield ConfigIssue.at(config, f"algorithm.{key}", why)


def _keeping_problems(config: Config) -> Iterator[ConfigIssue]:
    update = config.update
    if update.keep_last == 1:
        why = "an update that is lost is made again from the one before it, so that one is needed too; give 2"
        yield ConfigIssue.at(config, "update.keep_last", why)
    if update.keep_shards_last == 1:
        why = "the newest update, and the one before it, may have to be made again from their shards; give 2"
        yield ConfigIssue.at(config, "update.keep_shards_last", why)
    if update.keep_every is not None and update.keep_last is None:
        why = "says which of the older iterations to keep; give update.keep_last=N too, e.g. 3"
        yield ConfigIssue.at(config, "update.keep_every", why)


_OURS = frozenset(
    {"array", "chdir", "dependency", "error", "gid", "hold", "job-name", "output"}
    | {"parsable", "quiet", "test-only", "uid", "wait", "wrap"}
)
"""sbatch options that slurm-ppo sets itself, to run a task in the job and to find the job again. sbatch takes
the begin of a name for it."""
_ELSEWHERE = {
    "cluster": "give scheduler.options.clusters=NAME instead: other commands need it too",
    "no-requeue": "give scheduler.STAGE.requeue=false instead",
    "requeue": "give scheduler.STAGE.requeue=true instead, which is the default",
}
"""sbatch options that have a key of their own, beside which they would do nothing, or harm."""


def _slurm_problems(config: Config) -> Iterator[ConfigIssue]:
    if given := config.slurm:
        yield from _cluster_problems(given)
        yield from _our_options("scheduler.", given.options)
        for stage, resources in given.resources.items():
            yield from _resource_problems(stage, resources)
        options = (given.options, *(one.options for one in given.resources.values()))
        if given.mail_user and not given.mail_type and not any("mail-type" in one for one in options):
            why = "nothing is sent there without scheduler.mail_type, e.g. scheduler.mail_type=[FAIL]"
            yield ConfigIssue.at(config, "scheduler.mail_user", why)


_ONE_CLUSTER = re.compile(r"(?!(all|true|false)$)\w[\w.-]*")


def _cluster_problems(given: SlurmConfig) -> Iterator[ConfigIssue]:
    """Yield several clusters: all jobs of a run are looked for, and end, on one."""
    if CLUSTERS in given.options and not _ONE_CLUSTER.fullmatch(given.cluster):
        why = "all jobs of a run are on one cluster; give the name of one (sacctmgr show clusters)"
        yield ConfigIssue("scheduler.options.clusters", given.options[CLUSTERS], why)
    for stage, resources in given.resources.items():
        if (named := resources.options.get(CLUSTERS)) is not None:
            why = f"all jobs of a run are on one cluster; give scheduler.options.clusters={named} instead"
            yield ConfigIssue(f"scheduler.{stage}.options.clusters", named, why)


def _our_options(key: str, options: Mapping[str, str | int | bool]) -> Iterator[ConfigIssue]:
    for option, value in options.items():
        if option in _ELSEWHERE:
            yield ConfigIssue(f"{key}options.{option}", value, _ELSEWHERE[option])
        elif any(ours.startswith(option) for ours in _OURS):
            yield ConfigIssue(f"{key}options.{option}", value, "is set by slurm-ppo itself; leave it out")


def _resource_problems(stage: str, given: ResourcesConfig) -> Iterator[ConfigIssue]:
    """Yield what one stage or pool asks for and no cluster can give."""
    key = f"scheduler.{stage}."
    yield from _our_options(key, given.options)
    if given.gres and given.gpus_per_node:
        why = f"give it or {key}gpus_per_node={given.gpus_per_node}, not both"
        yield ConfigIssue.at(given, "gres", why, key)
    yield from _several_problems(stage, given)
    seconds = parse_duration(given.time)
    if seconds is not None and given.signal >= seconds:
        why = f"the warning would come before the start: {key}time={given.time} is {seconds:g} s; give less"
        yield ConfigIssue.at(given, "signal", why, key)
    if given.array_parallelism and stage not in ("rollout", "reward") and not stage.startswith("pools."):
        yield ConfigIssue.at(given, "array_parallelism", "its arrays have one element; leave it out", key)


def _several_problems(stage: str, given: StepConfig) -> Iterator[ConfigIssue]:
    """Yield several nodes or ranks of a task that can only have one."""
    for name in ("nodes", "ntasks_per_node") if stage != "update" else ():
        if getattr(given, name) > 1:
            why = "only the update runs on several; legal: 1. Use rollout.num_shards for more at once"
            yield ConfigIssue.at(given, name, why, f"scheduler.{stage}.")


_OUR_STEP = frozenset(
    {"jobid", "job-name", "exact", "overlap", "nodelist", "chdir", "nodes", "ntasks", "output", "error"}
)
"""srun options that slurm-ppo sets itself, or that would give what a task holds to others."""


def _step_problems(config: Config) -> Iterator[ConfigIssue]:
    if not isinstance(config.scheduler, AllocationConfig):
        return
    for stage, step in config.scheduler.resources.items():
        yield from _several_problems(stage, step)
        for option in sorted(_OUR_STEP & step.options.keys()):
            why = "is set by slurm-ppo itself; leave it out"
            yield ConfigIssue(f"scheduler.{stage}.options.{option}", step.options[option], why)


def _rank_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield an update of which two ranks would compute on one GPU."""
    update = config.scheduler.update
    if isinstance(update, LocalUpdateConfig):
        name, where, ranks, gpus = "ranks", "gpus", update.ranks, update.gpus
    else:
        where = "gres" if isinstance(update, ResourcesConfig) and update.gres else "gpus_per_node"
        name, ranks, gpus = "ntasks_per_node", update.ntasks_per_node, update.num_gpus or 0
    if gpus != "auto" and 0 < gpus < ranks:
        why = (
            f"each rank computes on a GPU of its own, and scheduler.update.{where}={getattr(update, where)} "
            f"gives {gpus} to all of a node; ask for {ranks} there, or give scheduler.update.{name}={gpus}"
        )
        yield ConfigIssue.at(update, name, why, "scheduler.update.")


_SECRET_HOSTS = (
    *("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "logic.azure.com"),
    *("chat.googleapis.com", "api.telegram.org", "maker.ifttt.com", "open.feishu.cn", "qyapi.weixin.qq.com"),
)
"""Hosts of chat services' addresses that are secrets: each is all that posting there takes."""


def _notify_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield a secret address that would be written to config.yaml."""
    for word in config.notify.command or ():
        found = (
            one for one in _SECRET_HOSTS if re.search(rf"(?<![\w-]){re.escape(one)}(:\d+)?/", word, re.I)
        )
        for host in found:
            why = (
                "this address is a secret, and settings are written to config.yaml; keep it "
                "in a file that the command reads: see docs/howto/notifications.md"
            )
            yield ConfigIssue("notify.command", f"...{host}/...", why)


def _tracking_problems(config: Config) -> Iterator[ConfigIssue]:
    given = config.tracking.mlflow
    if given.uri and "@" in urlsplit(given.uri).netloc:
        why = "passwords are written to no file: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        yield ConfigIssue("tracking.mlflow.uri", "...", why)


def _pool_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield pools without resources, and resources without use. On this machine, pools default to a slot."""
    given = config.scheduler.pools
    scored = {f"reward.components.{name}.pool": one.pool for name, one in config.reward.components.items()}
    scored |= {f"reward.teachers.{name}.pool": one.pool for name, one in config.reward.teachers.items()}
    for key, pool in scored.items():
        if config.slurm and pool and pool not in given:
            why = f"scheduler.pools has no {pool!r}; give scheduler.pools.{pool}.partition=..."
            yield ConfigIssue(key, pool, why)
    for pool in given:
        if pool not in config.reward.pools:
            why = f"no component is scored there; give reward.components.NAME.pool={pool}, or leave it out"
            yield ConfigIssue("scheduler.pools", pool, why)
