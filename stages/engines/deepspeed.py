"""The trainer that comes with slurm-ppo: PPO and its relatives with DeepSpeed, on one rank or many."""

from pipeline.config.schema import Config
from stages.context import Context, Result
from stages.engines.base import Trainer
from stages.ppo.update import load, update


def make_trainer(config: Config) -> Trainer:
    return DeepSpeedTrainer()


class DeepSpeedTrainer(Trainer):
    """The trainer of :mod:`stages.ppo.update`."""

    def update(self, context: Context, iteration: int) -> Result | None:
        return update(context, iteration)

    def load(self, context: Context, version: int) -> None:
        load(context, version)
