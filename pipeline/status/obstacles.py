"""Jobs of a run that Slurm refuses, will never start, or holds, with the command that lets them start.

Pure but for :func:`read_permitted`. What a failed task needs is in :mod:`pipeline.status.remedies`.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.config.job_kinds import DRIVER, DRIVERS
from pipeline.config.scheduler import SlurmConfig, key_of, resources_of
from pipeline.executors.slurm.queue import is_pending
from pipeline.run.directory import Run, resume_command, slurm_settings
from pipeline.run.submissions import SUBMITTED, job_kind_of
from pipeline.run.tasks import PREPARE
from slurm.associations import Ceilings, read_associations, read_ceilings
from slurm.limits import format_duration, parse_duration
from slurm.query import Element
from slurm.reasons import explain, way_to_release

Event = Mapping[str, Any]
REFUSED = "refused"
"""Name of the event that sbatch refused an array."""


class Lack(StrEnum):
    """What jobs lack that Slurm refuses, or will never start."""

    TIME = "time"
    """They ask for more time than they may have."""
    ACCOUNT = "account"
    """Their account is not the user's, or its budget is used up."""
    QOS = "qos"
    """Likewise their QOS, or it takes no more jobs."""


_LACKS = (
    (Lack.TIME, r"time ?limit|MaxWall|DurationPerJob"),
    (Lack.ACCOUNT, r"invalid ?account|account ?not ?allowed|not permitted|AssocGrp\w+|AssocMaxSubmit\w*"),
    (Lack.QOS, r"invalid ?qos|qos ?not ?allowed|\bQOSGrp\w+|QOSUsageThreshold|QOSMaxSubmit\w*"),
)


@dataclass(frozen=True)
class Obstacle:
    """Jobs of a kind that Slurm refuses, or will never start."""

    job_kind: str
    words: str
    """Message of sbatch, or reason of squeue."""

    @property
    def lack(self) -> Lack | None:
        """What they lack; None where no setting is known to help."""
        found = (lack for lack, texts in _LACKS if re.search(texts, self.words, re.IGNORECASE))
        return next(found, None)


@dataclass(frozen=True)
class Permitted:
    """What this user may name, by accounting."""

    accounts: Collection[str] = ()
    qos: Collection[str] = ()
    ceilings: Ceilings = field(default_factory=Ceilings)

    def seconds(self, account: str | None, qos: str | None) -> float | None:
        """Return the seconds that a job may ask for; None where there is no limit."""
        found = self.ceilings.wall_of(account, qos)
        return found.wall if found else None


def read_permitted() -> Permitted:
    """Ask accounting; nothing is permitted where there is none, or none that answers."""
    if (mine := read_associations()) is None:
        return Permitted()
    return Permitted(mine.accounts, mine.qos, read_ceilings() or Ceilings())


def obstacles_in(events: Sequence[Event], waiting: Iterable[Element]) -> tuple[Obstacle, ...]:
    """Return what keeps jobs of a run from starting, one for each kind of job: refusals that nothing was
    submitted after, then reasons that do not pass by themselves.

    Args:
        events: the journal's end.
        waiting: elements of the run that wait.
    """
    found: dict[str, Obstacle] = {}
    for event in events:
        if event["event"] in (REFUSED, SUBMITTED):
            kind = _kind_of(str(event["array"]))
            found.pop(kind, None)
            if event["event"] == REFUSED:
                found[kind] = Obstacle(kind, str(event["message"]))
    for element in waiting:
        if explain(element.reason).is_stuck:
            kind = _kind_of(element.name)
            found.setdefault(kind, Obstacle(kind, element.reason))
    return tuple(one for one in found.values() if one.lack)


def _kind_of(name: str) -> str:
    """Return the job kind in a job's name whose resources it has."""
    kind = job_kind_of(name)
    return DRIVER if kind in DRIVERS else kind


def settings_for(
    config: SlurmConfig, obstacles: Sequence[Obstacle], may: Permitted, kinds: Sequence[str]
) -> dict[str, str]:
    """Return the settings with which jobs would start, by their keys; none where no value is known.

    Args:
        kinds: kinds of jobs that the run has: where one asks for too much time, others may too.
    """
    found: dict[str, str] = {}
    for one in obstacles:
        match one.lack:
            case Lack.TIME:
                found |= _time(config, one, may, kinds)
            case Lack.ACCOUNT:
                found |= _another(config, one.job_kind, "account", may.accounts)
            case Lack.QOS:
                found |= _another(config, one.job_kind, "qos", may.qos)
    return found


def _another(config: SlurmConfig, job_kind: str, name: str, mine: Collection[str]) -> dict[str, str]:
    """Return the first account or QOS of the user's that the jobs do not have, where it was set for them."""
    own = config.resources[key_of(job_kind).removeprefix("scheduler.")]
    section = key_of(job_kind) if getattr(own, name) else "scheduler"
    given = getattr(resources_of(config, job_kind), name)
    other = next((one for one in sorted(mine) if one != given), None)
    return {f"{section}.{name}": other} if other else {}


def _time(config: SlurmConfig, one: Obstacle, may: Permitted, kinds: Sequence[str]) -> dict[str, str]:
    """Return a QOS that allows the time that is asked for, or else times that are allowed."""
    given = resources_of(config, one.job_kind)
    longest, asked = may.seconds(given.account, given.qos), parse_duration(given.time)
    if longest is None or _allows(longest, asked):  # then it is a partition's limit that is in the way
        return {}
    enough = {name for name in may.qos if _allows(may.seconds(given.account, name), asked)}
    if other := _another(config, one.job_kind, "qos", enough):
        return other
    found = {}
    for kind in kinds:
        asked_for = resources_of(config, kind)
        if not _allows(longest, parse_duration(asked_for.time)):
            found[f"{key_of(kind)}.time"] = format_duration(longest)
            if asked_for.signal >= longest:  # the warning comes before the limit, and after the start
                found[f"{key_of(kind)}.signal"] = str(int(longest) // 2)
    return found


def _allows(longest: float | None, asked: float | None) -> bool:
    return longest is None or (asked is not None and asked <= longest)


# --- in words ---

_IN_WORDS = {"time": "less time", "account": "another account", "qos": "another QOS"}


def ways_to_start(
    run: Run, events: Sequence[Event], live: Iterable[Element], ask: Callable[[], Permitted]
) -> Iterator[str]:
    """Yield the commands that let jobs start which are refused, held, or would wait for ever.

    Args:
        events: the journal's end.
        live: elements of the run in the queue.
        ask: asks accounting, where its answer counts.
    """
    waiting = [element for element in live if is_pending(element)]
    if found := obstacles_in(events, waiting):
        settings = settings_for(slurm_settings(run), found, ask(), _job_kinds(run))
        if settings:
            what = _IN_WORDS[next(iter(settings)).rpartition(".")[2]]
            words = shlex.join(f"{key}={value}" for key, value in settings.items())
            yield f"go on with {what}: {resume_command(run)} {words}"
    if way := way_to_release(waiting):
        yield way


def _job_kinds(run: Run) -> list[str]:
    """Return the kinds of jobs that a run has."""
    plan = run.plan
    tasks = (PREPARE, *plan.tasks(plan.iterations), *plan.evaluation_tasks(), *plan.benchmark_tasks())
    return list(dict.fromkeys([*(task.job_kind for task in tasks), DRIVER]))
