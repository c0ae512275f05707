"""The configuration of environments: Python that makes prompts, and scores the responses to them."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, JsonValue

from pipeline.config.shares import divided
from pipeline.config.types import ArgumentName, Name, PositiveFloat, Seed, SourceName, Text, Weight

NumTasks = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
"""Tasks that one process makes, and one table holds."""
TASKS_KEY, HELDOUT_TASKS_KEY = "data.environment.size", "data.environment.heldout_size"
"""Keys that say how many tasks there are, and that messages call them by."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentComponentConfig:
    """An environment that makes a share of the prompts. See docs/howto/environments.md."""

    source: SourceName
    """``module:function`` of your own, or the name of one that a package has registered, such as
    reasoning_gym; called with the arguments, it returns an object that makes tasks and scores responses."""
    arguments: dict[ArgumentName, JsonValue] = field(default_factory=dict)
    """Keyword arguments of that call; of reasoning_gym the dataset and its settings."""
    python: Text | None = None
    """Interpreter with the environment's packages, such as .../bin/python of a virtual environment: it makes
    tasks, converses and scores there. Default: slurm-ppo's own."""
    weight: Weight = 1.0
    """Share of the tasks, relative to the other environments' weights."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Environments whose tasks are the run's prompts, made once, in prepare."""

    components: Annotated[dict[Name, EnvironmentComponentConfig], Field(min_length=1)]
    """Named environments; each makes a share of the tasks by its weight."""
    size: NumTasks = 10_000
    """Tasks to train on, of all environments together."""
    heldout_size: NumTasks = 200
    """Held-out tasks, of all environments together; made if evaluate.every is not 0. Those with a prompt that
    is trained on are left out."""
    seed: Seed | None = None
    """Seed of the tasks to train on. Default: the run's seed."""
    heldout_seed: Seed | None = None
    """Seed of the held-out tasks, which are others than those of the same seed to train on. Default: as
    seed."""
    time_limit: PositiveFloat = 60.0
    """Seconds that making an environment, and each of its tasks, may take."""
    import_limit: PositiveFloat = 60.0
    """Seconds that importing an environment may take."""

    @property
    def shares(self) -> dict[str, int]:
        """Tasks to train on by environment; they add up to :attr:`size`."""
        return self._shares(self.size)

    @property
    def heldout_shares(self) -> dict[str, int]:
        """Held-out tasks by environment; they add up to :attr:`heldout_size`."""
        return self._shares(self.heldout_size)

    def _shares(self, total: int) -> dict[str, int]:
        return divided(total, {name: one.weight for name, one in self.components.items()})
