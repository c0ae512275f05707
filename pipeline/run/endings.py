"""The one store of ended attempts: what ended, how it is judged, and by what evidence.

``<run>/slurm/00007/endings.json``, which is kept twice, holds for each attempt at a task of iteration 7 that
left no commit, or whose commit was taken back, one :class:`Ending`. It is written by passes that hold the
lease, each attempt is judged once, and all others read it here.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.conversion import converted, plain
from pipeline.run.attempts import AttemptId, new_attempt
from pipeline.run.durable import make_folder, replace_durably
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.packed import read_packed
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from pipeline.run.twofold import both_of, read_either, read_one, why_spoilt, write_both
from slurm.sharedfiles import sealed, unsealed


class Evidence(StrEnum):
    """What the judgement of an ended attempt rests on."""

    FAILURE_FILE = "failure_file"
    """The attempt's own word: its failure file."""
    EXIT_CODE = "exit_code"
    """Exit code or signal of its process or job, which said no more."""
    SLURM = "slurm"
    """Slurm's state of its job."""
    MISSING = "missing"
    """Job that neither Slurm's queue nor its accounting knows."""
    BEAT = "beat"
    """Word of its worker, which left, or went on with something else."""
    SILENCE = "silence"
    """Worker that was not heard of for minutes, and was cancelled for that."""
    CANCELLATION = "cancellation"
    """Cancellation of all jobs of the run, by slurm-ppo or by hand."""
    RETRACTION = "retraction"
    """Commit that was taken back."""
    LOG = "log"
    """End of the log of a process that said no more."""


BY_EVIDENCE = {
    Evidence.FAILURE_FILE: "by its own report",
    Evidence.EXIT_CODE: "by its exit code",
    Evidence.SLURM: "by Slurm's state",
    Evidence.MISSING: "as Slurm does not know its job",
    Evidence.BEAT: "by its worker's report",
    Evidence.SILENCE: "by its worker's silence",
    Evidence.CANCELLATION: "as all jobs of the run were cancelled",
    Evidence.RETRACTION: "as its commit was retracted",
    Evidence.LOG: "by the end of its log",
}
"""Evidence in words, after a judgement."""


@dataclass(frozen=True)
class Ending:
    """How one attempt ended without a commit that stands."""

    attempt: str
    """Id of the attempt (:mod:`pipeline.run.attempts`), or the name, like ``4711_3r0``, of a worker that
    ended before it took any task."""
    task: str
    """Task key. Of a worker that took none, the task that it was submitted for."""
    number: int = 0
    """Number of the attempt at its task, or of the submission of a worker that took none."""
    invocation: int = 0
    """Number of the invocation of submit, run or resume that it belongs to."""
    kind: FailureKind | None = None
    """Judgement; None: no failure, of a worker that left in order, or whose attempts are judged by
    themselves."""
    evidence: Evidence | None = None
    """None until it is judged."""
    message: str = ""
    node: str = ""
    job: str = ""
    """Slurm's id of the element, like ``4711_3``; empty elsewhere."""
    started: float | None = None
    time: float = 0.0
    """Unix times of its start and end, as far as they are known, else of the judgement."""
    is_redone: bool = False
    """Whether the task was done by another attempt before a pass saw this end: then it counts for nothing."""
    log: str = ""
    """Path of its log, relative to the run; empty: where logs of attempts are."""
    halvings: int = 0
    """Number of times that its batch budget was halved (:mod:`pipeline.decide.budgets`)."""

    @property
    def is_failure(self) -> bool:
        """Whether people are shown it as a failed attempt."""
        return self.kind is not None and self.kind is not FailureKind.CANCELLED

    def failure(self, paths: RunPaths) -> Failure:
        """Return it as the failure that it is. Raises ValueError where it is none."""
        if self.kind is None:
            raise ValueError(f"{self.attempt} did not fail")
        task = parse_task(self.task)
        number = 0 if self.evidence is Evidence.RETRACTION else self.number
        log = str(paths.root / self.log if self.log else paths.task(task).log(self.number))
        return Failure(task, number, self.kind, self.message, log if number else "", self.node, self.job)


@dataclass(frozen=True)
class Endings(Mapping[str, Ending]):
    """Endings by attempt id, those of a task in the order in which they were judged."""

    attempts: Mapping[str, Ending] = field(default_factory=dict)

    def __getitem__(self, attempt: str) -> Ending:
        return self.attempts[attempt]

    def __iter__(self) -> Iterator[str]:
        return iter(self.attempts)

    def __len__(self) -> int:
        return len(self.attempts)

    def adding(self, endings: Iterable[Ending]) -> "Endings":
        return Endings({**self.attempts, **{ending.attempt: ending for ending in endings}})

    def of_element(self, submission: Submission, index: int) -> Ending | None:
        """Return how an array element ended; None where that is not judged, or its worker took a task."""
        return self._of_elements.get(submission.element_name(index))

    @cached_property
    def _of_elements(self) -> dict[str, Ending]:
        return {name.rpartition("r")[0]: ending for name, ending in self.attempts.items()}


NO_ENDINGS = Endings()


def read_endings(paths: RunPaths, iterations: Iterable[int]) -> Endings:
    """Return how attempts at the tasks of some iterations ended.

    Where neither of the two files of an iteration can be read they count as empty: its attempts are then
    judged again.
    """
    found: dict[str, Ending] = {}
    for iteration in sorted(set(iterations)):
        kept = read_either(paths.endings(iteration), _parse)
        if kept is None:
            kept = _packed(paths, iteration)
        if isinstance(kept, Endings):
            found |= kept.attempts
    return Endings(found)


def _packed(paths: RunPaths, iteration: int) -> Endings | None:
    """Return how attempts at the tasks of a packed iteration ended; None where that is not known."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        content = read_packed(paths, iteration, paths.relative(paths.endings(iteration)))
        return None if content is None else _parse(unsealed(content))
    return None


def note_endings(paths: RunPaths, endings: Iterable[Ending]) -> None:
    """Add to what is known of the attempts' iterations, for the holder of the run's lease."""
    grouped: dict[int, list[Ending]] = {}
    for ending in endings:
        grouped.setdefault(parse_task(ending.task).iteration, []).append(ending)
    for iteration, added in grouped.items():
        _write(paths, iteration, read_endings(paths, [iteration]).adding(added))


def mend_endings(paths: RunPaths, iterations: Iterable[int]) -> list[str]:
    """Write both files of an iteration again where one is spoilt, for the holder of the run's lease. Returns
    what was wrong, in words."""
    found = []
    for iteration in sorted(set(iterations)):
        path = paths.endings(iteration)
        if (why := why_spoilt(path, _parse)) and not isinstance(read_either(path, _parse), str):
            _write(paths, iteration, read_endings(paths, [iteration]))
            found.append(why)
    return found


def move_endings(paths: RunPaths, tasks: Iterable[Task], target: Path) -> None:
    """Move how attempts at some tasks ended below a folder, for the holder of the run's lease who takes these
    tasks back: attempts belong to the history that they were started in."""
    keys = {task_key(task) for task in tasks}
    for iteration in {parse_task(key).iteration for key in keys}:
        endings = read_endings(paths, [iteration])
        moved = Endings({name: ending for name, ending in endings.items() if ending.task in keys})
        if moved:
            file = target / paths.relative(paths.endings(iteration))
            make_folder(file.parent, paths.root)
            replace_durably(file, sealed(_content(moved)))
            _write(paths, iteration, Endings({n: e for n, e in endings.items() if n not in moved}))


def spoilt_endings(paths: RunPaths, iterations: Iterable[int]) -> str | None:
    """Return why a file of some iterations cannot be read; None where all can."""
    files = (one for iteration in sorted(set(iterations)) for one in both_of(paths.endings(iteration)))
    return next((why for path in files if isinstance(why := read_one(path, _parse), str)), None)


def element_ending(paths: RunPaths, submission: Submission, index: int) -> Ending:
    """Return an ending of an array element's own task, at its first start, without a judgement."""
    task, state = submission.task(index), submission.state
    name = f"{submission.element_name(index)}r0"
    job = f"{state.job}_{index}" if state.job else ""
    log = submission.own_log(paths, task)
    return Ending(name, task_key(task), submission.number, submission.invocation, job=job, log=log)


def retraction(
    failure: Failure, attempt: str, invocation: int, time: float, halvings: int = 0
) -> list[Ending]:
    """Return the ending of an attempt whose commit was taken back. None for a trainer's state, which is a
    cache: the update's attempt that wrote it has not failed.

    Args:
        attempt: its id; empty where its record cannot be read.
        time: unix time.
        halvings: number of times that its batch budget was halved, as a repetition's is.
    """
    if failure.task.stage is Stage.STATE:
        return []
    named, number = attempt or new_attempt(0), AttemptId.parse(attempt).number
    judged = (failure.kind, Evidence.RETRACTION, failure.message)
    return [Ending(named, task_key(failure.task), number, invocation, *judged, time=time, halvings=halvings)]


def failures_of(paths: RunPaths, endings: Endings, invocation: int) -> dict[Task, list[Failure]]:
    """Collect the failures of one invocation that count, commits that were taken back included."""
    found: dict[Task, list[Failure]] = {}
    for ending in endings.values():
        if ending.invocation == invocation and ending.kind is not None and not ending.is_redone:
            failure = ending.failure(paths)
            found.setdefault(failure.task, []).append(failure)
    return found


@dataclass(frozen=True)
class _Content:
    attempts: Mapping[str, Ending]


def _write(paths: RunPaths, iteration: int, endings: Endings) -> None:
    write_both(paths.endings(iteration), paths.root, _content(endings))


def _content(endings: Endings) -> dict[str, Any]:
    """Return what a file holds, without what readers add by themselves: a thousand workers may leave."""
    content = plain(_Content(endings.attempts))["attempts"]
    short = {name: {k: v for k, v in one.items() if v and k != "attempt"} for name, one in content.items()}
    return {"attempts": short}


def _parse(content: dict[str, Any]) -> Endings:
    """Raises ValueError, TypeError or AttributeError where it holds no endings."""
    named = {name: {**one, "attempt": name} for name, one in content.get("attempts", {}).items()}
    attempts = converted(_Content, {"attempts": named}).attempts
    for ending in attempts.values():
        parse_task(ending.task)
    return Endings(attempts)
