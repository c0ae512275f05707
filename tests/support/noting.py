"""Light engines that note in the file NOTES for which run and where they compute, and the GPUs seen there."""

import json
import os
from pathlib import Path

from pipeline.config.schema import Config
from stages.engines.base import takes_ranks, without_torch
from tests.support import light

FILE = "NOTES"
"""Variable that names the file."""
WORDS = (
    "rollout.engine=tests.support.noting:make_generator",
    "reward.engine=tests.support.noting:make_scorer",
    "update.engine=tests.support.noting:make_trainer",
)


def note(stage: str, config: Config) -> None:
    names = {"sees": "CUDA_VISIBLE_DEVICES", "rank": "RANK", "node": "SLURMD_NODENAME"}
    said = {key: os.environ.get(name) for key, name in names.items()}
    said |= {"stage": stage, "run": Path(config.run_dir).name}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(said) + "\n")


def read(file: Path, stage: str) -> list[dict]:
    """What engines of a stage have noted."""
    said = map(json.loads, file.read_text().splitlines())
    return [one for one in said if one["stage"] == stage]


@without_torch
def make_generator(config, directory):
    note("rollout", config)
    return light.make_generator(config, directory)


@without_torch
def make_scorer(config, directory):
    note("reward", config)
    return light.make_scorer(config, directory)


@without_torch
@takes_ranks
def make_trainer(config):
    """Rank 0 computes; the others only take part."""
    note("update", config)
    made = light.make_trainer(config)
    if os.environ.get("RANK", "0") != "0":
        made.update = lambda context, iteration: None
    return made
