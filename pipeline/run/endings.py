"""Ends of claimed attempts that left no commit, on disk: ``<run>/slurm/00007/endings.json``.

Where workers stay, an attempt is no array element's, so that how it ended is not noted with a submission. The
file is written by passes that hold the lease, and each failure is judged once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import replace_durably
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import parse_task
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import make_folder, read_newest


@dataclass(frozen=True)
class ClaimEnding:
    """End of a claimed attempt without a commit."""

    task: str
    """Task key."""
    number: int
    """Number of the claim, which names the attempt's log."""
    invocation: int
    """Number of the invocation of submit, run or resume in which the task was claimed."""
    kind: FailureKind
    message: str
    node: str = ""
    job: str = ""
    is_redone: bool = False
    """Whether the task was done by another attempt before a pass saw this end: then it counts for nothing."""

    def failure(self, paths: RunPaths) -> Failure:
        task = parse_task(self.task)
        log = str(paths.task(task).log(self.number))
        return Failure(task, self.number, self.kind, self.message, log, self.node, self.job)


@dataclass(frozen=True)
class _Endings:
    attempts: Mapping[str, ClaimEnding] = field(default_factory=dict)


def read_endings(paths: RunPaths, iterations: Iterable[int]) -> dict[str, ClaimEnding]:
    """Return the ends of claimed attempts of some iterations, by attempt id.

    A file that is spoilt counts as empty: its attempts are then judged again.
    """
    found: dict[str, ClaimEnding] = {}
    for iteration in sorted(set(iterations)):
        found |= _read(_file(paths, iteration)).attempts
    return found


def note_endings(paths: RunPaths, endings: Mapping[str, ClaimEnding]) -> None:
    """Add ends of attempts, given by attempt id, to what is known of their iterations."""
    for iteration, added in _by_iteration(endings):
        path = _file(paths, iteration)
        make_folder(path.parent, paths.root)
        replace_durably(path, sealed(plain(_Endings({**_read(path).attempts, **added}))))


def _by_iteration(endings: Mapping[str, ClaimEnding]) -> Iterator[tuple[int, dict[str, ClaimEnding]]]:
    grouped: dict[int, dict[str, ClaimEnding]] = {}
    for attempt, ending in endings.items():
        grouped.setdefault(parse_task(ending.task).iteration, {})[attempt] = ending
    yield from grouped.items()


def _file(paths: RunPaths, iteration: int) -> Path:
    return paths.submissions(iteration) / "endings.json"


def _read(path: Path) -> _Endings:
    try:
        return converted(_Endings, unsealed(read_newest(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return _Endings()
