"""The configuration of a small run: the first iteration of a run's, with few prompts and in one shard. Pure.

Its prompts are the first that the run would deal, and its responses those that the run would sample, as seeds
derive from the run's seed and the prompt.
"""

import math
from dataclasses import replace
from pathlib import Path

from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.issue import ConfigError
from pipeline.config.notify import NotifyConfig
from pipeline.config.schema import Config, TrackingConfig, WandbConfig, WandbMode
from pipeline.config.update import UpdateConfig

_RESPONSES, _LEAST_PROMPTS = 32, 4


def prompts_to_try(config: Config, wanted: int | None) -> int:
    """Return how many prompts are tried: as many as were asked for, or as give 32 responses, and at least 4.

    Raises:
        ConfigError: an iteration of the run has fewer than were asked for.
    """
    most = config.data.prompts_per_iteration
    if wanted is None:
        return min(most, max(_LEAST_PROMPTS, math.ceil(_RESPONSES / config.rollout.samples_per_prompt)))
    if wanted > most:
        raise ConfigError(
            f"--prompts {wanted}: an iteration of the run has data.prompts_per_iteration={most}; ask for at "
            "most that"
        )
    return wanted


def small_config(config: Config, prompts: int, root: Path) -> Config:
    """Return the configuration of one iteration with so many prompts, in a directory of its own. It keeps
    everything that decides what is computed, how fast and with what memory."""
    return replace(
        config,
        name=f"{config.name}-try",
        run_dir=str(root),
        iterations=1,
        data=replace(config.data, prompts_per_iteration=prompts),
        rollout=replace(config.rollout, num_shards=1, oversample=1.0),
        update=_small_update(config.update, prompts * config.rollout.samples_per_prompt),
        evaluate=EvaluateConfig(),
        tracking=TrackingConfig(wandb=WandbConfig(mode=WandbMode.DISABLED)),
        notify=NotifyConfig(),
    )


def _small_update(update: UpdateConfig, responses: int) -> UpdateConfig:
    """Return an update with two mini-batches at most, which keeps everything: what several steps make
    necessary is then computed too."""
    minibatches = 2 if update.minibatches > 1 and responses % 2 == 0 else 1
    return replace(update, minibatches=minibatches, keep_last=None, keep_every=None, keep_shards_last=None)
