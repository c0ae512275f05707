"""``forecast.json``: what was expected of a run when it began, for the report to compare with what came."""

import contextlib
import time
from dataclasses import dataclass, field

from pipeline.config.conversion import converted, plain
from pipeline.forecast.lengths import PromptLengths
from pipeline.forecast.seconds import SecondsForecast
from pipeline.run.durable import read_shared, replace_durably
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import sealed, unsealed


@dataclass
class Forecast:
    """Expectations, which the checks before a start fill in."""

    lengths: list[PromptLengths] = field(default_factory=list)
    """Lengths of the prompts of each file that could be tokenised, or of a sample of it."""
    memory: dict[str, float] = field(default_factory=dict)
    """Peak bytes of a process of each stage: on its GPU, or without one of the host."""
    seconds: SecondsForecast | None = None
    made: float = field(default_factory=time.time)
    """Unix time."""

    @property
    def of_training(self) -> PromptLengths | None:
        """Lengths of the prompts that are trained on; None where they are not known."""
        return next(iter(self.lengths), None)


def write_forecast(paths: RunPaths, forecast: Forecast) -> None:
    """Write it into a run's directory, in one step, with a checksum."""
    replace_durably(paths.forecast, sealed(plain(forecast)))


def read_forecast(paths: RunPaths) -> Forecast | None:
    """Read it; None where there is none, as in runs of earlier versions, or where it is not what was
    written."""
    with contextlib.suppress(OSError, ValueError):
        return converted(Forecast, unsealed(read_shared(paths.forecast)))
    return None
