"""Which workers of rollouts measure policies while they have nothing else to do. Pure.

The engine that they hold serves evaluations too, where these are set up like rollouts: then no worker starts
up for them, and it takes no more memory than such a one would.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipeline.config.engines import Engine
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.config.schema import Config
from pipeline.run.engine_use import engines_of
from pipeline.run.tasks import Stage
from pipeline.workers.beats import Beat, Doing

_OF_MAIL = ("mail-type", "mail-user")
MEASURED, MEASURES = str(Stage.EVALUATE), str(Stage.ROLLOUT)
"""Job kinds of what is measured, and of the workers that do it besides. Never evaluate.command: that may need
the memory which an engine holds."""


def measures_policies(config: Config) -> bool:
    """Whether workers of rollouts may measure policies: they stay, their jobs ask for what evaluations' jobs
    do, and the engine that they hold serves these and stays when they are scored."""
    scheduler = config.scheduler
    if not isinstance(scheduler, SlurmConfig):
        return False
    own, other = (resources_of(scheduler, kind) for kind in (MEASURES, MEASURED))
    is_alike = own.linger != 0 and _asked_for(own) == _asked_for(other)
    is_same_engine = config.rollout.num_threads == config.evaluate.num_threads
    return is_alike and is_same_engine and _stays(config, own.has_gpus)


def _asked_for(given: ResourcesConfig) -> ResourcesConfig:
    """Return resources without what says how long and how many jobs there are, and who gets mail of them."""
    options = {name: value for name, value in given.options.items() if name not in _OF_MAIL}
    return replace(given, time="", linger=0, start_early=False, array_parallelism=None, options=options)


def _stays(config: Config, has_gpus: bool) -> bool:
    """Whether the engine of rollouts stays beside each that scores an evaluation: both are of transformers,
    or one is and no GPU's memory is to be shared."""
    own, *others = [name == Engine.TRANSFORMERS for _, name in engines_of(config, Stage.EVALUATE)]
    return all((own and other) or (own != other and not has_gpus) for other in others)


def is_manned(live: Iterable[Beat]) -> bool:
    """Whether a worker of evaluations lives, which is there for nothing else."""
    return any(beat.job_kind == MEASURED for beat in live)


@dataclass(frozen=True)
class Helper:
    """A worker of rollouts, by what decides which of them stays for the last evaluations."""

    name: str
    measured: int = 0
    """Evaluations that it has done."""
    is_measuring: bool = False
    """Whether it is at an evaluation; of the one that asks: whether that was the last that it did."""


def others_of(own: str, live: Iterable[Beat]) -> list[Helper]:
    """Return the workers of rollouts that live, but for one."""
    others = (beat for beat in live if beat.job_kind == MEASURES and beat.worker != own)
    return [Helper(beat.worker, beat.measured, _is_measuring(beat)) for beat in others]


def _is_measuring(beat: Beat) -> bool:
    return beat.doing is Doing.BUSY and f"/{MEASURED}/" in beat.task


def stays_for_last(own: Helper, others: Iterable[Helper]) -> bool:
    """Whether a worker is the one of its kind that stays for the last evaluations: the one that measures, or
    did last; else the one that has done most. Two that look at the same time both stay, rather than none."""
    beside = list(others)
    if any(one.is_measuring for one in beside):
        return False
    return own.is_measuring or all(_rank(own) < _rank(one) for one in beside)


def _rank(one: Helper) -> tuple[int, str]:
    return -one.measured, one.name
