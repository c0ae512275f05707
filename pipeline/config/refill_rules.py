"""What replacing groups without spread (rollout.oversample) needs of other settings. Pure."""

import math
from collections.abc import Iterator

from pipeline.config.algorithm import GROUP_ESTIMATORS
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config
from pipeline.config.staleness_rules import weighs_policies
from pipeline.config.update import TrainingEngine


def refill_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what leaves nothing to replace, who would not, prompts that shards cannot share equally, and
    groups that wait without being weighed for it."""
    if not config.is_refilled:
        return
    for why in _reasons(config):
        yield ConfigIssue.at(config, "rollout.oversample", why)
    carry = config.rollout.carry
    if carry and not weighs_policies(config):
        why = (
            "groups that wait are of an older policy than the one that learns from them, and nothing would "
            "weigh them for that; give 0, algorithm.correction.level=token or geometric, or "
            "algorithm.old_log_probs=rollout"
        )
        yield ConfigIssue.at(config, "rollout.carry", why)


def prompts_in_words(config: Config) -> str:
    """Return the settings that say how many prompts an iteration rolls out."""
    times = f" x rollout.oversample={config.rollout.oversample:g}" if config.is_refilled else ""
    return f"data.prompts_per_iteration={config.data.prompts_per_iteration}{times}"


def _reasons(config: Config) -> Iterator[str]:
    estimator, update = config.algorithm.estimator, config.update
    if estimator not in GROUP_ESTIMATORS:
        names = ", ".join(sorted(GROUP_ESTIMATORS))
        yield f"algorithm.estimator={estimator} has no groups to replace; give 1, or use {names}"
    elif not config.algorithm.shaping.filter_groups:
        yield "replaces groups that are left out: give algorithm.shaping.filter_groups=true too, or 1"
    if update.engine != TrainingEngine.DEEPSPEED:
        needed = f"needs update.engine={TrainingEngine.DEEPSPEED}, which replaces groups"
        yield f"{needed}, and that is {update.engine}; give 1"
    prompts, shards = config.prompts_per_rollout, config.rollout.num_shards
    given = config.data.prompts_per_iteration
    if given % shards == 0 and prompts % shards:
        fits = math.ceil(prompts / shards) * shards / given
        yield (
            f"makes {prompts} prompts of data.prompts_per_iteration={given}, which do not divide by "
            f"rollout.num_shards={shards}; give {fits:.6g}"
        )
