"""The trainer that comes with slurm-ppo: PPO and its relatives with DeepSpeed, on one rank or many."""

from pipeline.config.schema import Config
from stages.context import Context, StageResult
from stages.engines.base import PolicyTrainer
from stages.ppo.update import load, update


def make_trainer(config: Config) -> PolicyTrainer:
    return DeepSpeedTrainer()


class DeepSpeedTrainer(PolicyTrainer):
    """The trainer of :mod:`stages.ppo.update`."""

    def update(self, context: Context, iteration: int) -> StageResult | None:
        return update(context, iteration)

    def load(self, context: Context, version: int) -> None:
        load(context, version)
