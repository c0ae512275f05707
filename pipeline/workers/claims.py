"""Claims: who works on a task now. A claim names an attempt; the commit record alone says that it is done.

``iterations/00003/rollout/shard-00002.claim-2.json`` is made by hard link, so of two workers one gets the
number; the other looks again. A claim whose worker is gone without a commit was a failed attempt at the task.

Claims lie with what they are about: going back moves them with their stage's folder, taking back a commit
moves those of its task, and they are removed with what losing attempts left when the iteration is finished.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import link_once
from pipeline.run.endings import Endings, read_endings
from pipeline.run.failures import FailureKind, last_attempt_number, read_said
from pipeline.run.paths import RunPaths
from pipeline.run.records import names_of_stage
from pipeline.run.tasks import Task, parse_task, task_key
from pipeline.workers.beats import Beat, Doing
from slurm.sharedfiles import NotAFile, is_there, make_folder, read_shared, sealed, unsealed

_NAME = re.compile(r"(.+)\.claim-(\d+)\.json")

_Key = tuple[int, int, str]
"""Device and inode of a claim's folder, and its name: a claim never changes, but going back puts another
folder, and other claims, under the same path."""
_GONE = (0, 0)
Known = dict[_Key, "Claim"]
"""Claims read before."""


@dataclass(frozen=True)
class Claim:
    """One attempt at a task, taken by a worker."""

    task: Task
    number: int
    """Number of the attempt at its task, from 1: names the folder of its log and its failure file."""
    attempt: str
    """Id of the attempt (:mod:`pipeline.run.attempts`); empty where the claim's file is spoilt."""
    worker: str
    """Name of the worker (:mod:`pipeline.workers.beats`)."""
    time: float
    """Unix time at which it was taken."""
    invocation: int = 0
    """Number of the invocation of submit, run or resume in which it was taken; 0 where there is no Slurm."""
    halvings: int = 0
    """Number of times that its batch budget is halved."""


@dataclass(frozen=True)
class Budget:
    """What an attempt that failed, or whose commit was taken back, computed at once."""

    halvings: int
    """Number of times that the batch budget was halved."""
    kind: FailureKind | None
    """Why it failed; None: it did not, or has not said so."""


@dataclass(frozen=True)
class Attempt:
    """What has become of a claim on a task that is not committed."""

    claim: Claim
    is_running: bool
    """Whether its worker lives, and does it. If not, the attempt has failed."""
    failure: FailureKind | None = None
    """Why it failed, as a pass has judged it; until then as it said itself, if it did."""
    ahead: float = 0.0
    """Seconds by which the clock of its worker is ahead of the reader's (:attr:`LiveWorkers.ahead`)."""
    saved: float = 0.0
    """Unix time at which its latest save was first seen (:func:`with_saves`); 0: there is none."""

    @property
    def taken(self) -> float:
        """Unix time at which it was taken, by the reader's clock."""
        return self.claim.time - self.ahead


@dataclass(frozen=True)
class ClaimFields:
    """Fields of a claim's file."""

    task: str
    number: int
    attempt: str
    worker: str
    time: float
    invocation: int = 0
    halvings: int = 0


def file_of(paths: RunPaths, task: Task, number: int) -> Path:
    """Return the file of a claim."""
    return paths.task(task).folder / _name(task, number)


def _name(task: Task, number: int) -> str:
    return f"{task.file_stem}.claim-{number}.json"


def take(paths: RunPaths, claim: Claim) -> bool:
    """Write a claim. False where its number is taken."""
    path = file_of(paths, claim.task, claim.number)
    make_folder(path.parent, paths.root)
    content = ClaimFields(**{**vars(claim), "task": task_key(claim.task)})
    return link_once(path, sealed(plain(content)))


def claims_of(
    paths: RunPaths, tasks: Iterable[Task], known: Known | None = None
) -> Mapping[Task, tuple[Claim, ...]]:
    """Return all claims of some tasks, by number; one listing for each folder.

    Args:
        known: claims read before, which are not read again; afterwards it holds those on these tasks alone,
            so that it does not grow with the run.
    """
    known = {} if known is None else known
    found: dict[Task, list[Claim]] = {}
    keys: set[_Key] = set()
    for folder, spoilt in _files_of(paths, tasks):
        for key, claim in _read(folder, spoilt, known):
            keys.add(key)
            found.setdefault(claim.task, []).append(claim)
    for key in known.keys() - keys:
        del known[key]
    return {task: tuple(sorted(claims, key=lambda claim: claim.number)) for task, claims in found.items()}


def newest_numbers(claims: Iterable[Claim]) -> dict[Task, int]:
    """Return the number of the newest claim on each task that has any. Pure."""
    newest: dict[Task, int] = {}
    for claim in claims:
        newest[claim.task] = max(claim.number, newest.get(claim.task, 0))
    return newest


def tasks_with_retries(paths: RunPaths, tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that have more than one claim; no file is read."""
    counts = Counter(claim.task for _, claims in _files_of(paths, tasks) for claim in claims)
    return [task for task, count in counts.items() if count > 1]


def commit_and_claims(paths: RunPaths, task: Task, known: Known) -> tuple[bool, tuple[Claim, ...]]:
    """Return whether a task has a commit record that is not packed, and all claims on it: one listing.

    Args:
        known: claims read before; this function adds to it.
    """
    folder = paths.task(task).folder
    names = names_of_stage(folder)
    numbers = sorted(
        int(match[2]) for match in map(_NAME.fullmatch, names) if match and match[1] == task.file_stem
    )
    spoilt = [Claim(task, number, "", "", 0.0) for number in numbers]
    claims = tuple(claim for _, claim in _read(folder, spoilt, known))
    return task.record_name in names, claims


def _files_of(paths: RunPaths, tasks: Iterable[Task]) -> Iterator[tuple[Path, list[Claim]]]:
    """Yield folders with all claims of some tasks that are there, each as if its file were spoilt."""
    groups: dict[Path, dict[str, Task]] = {}
    for task in tasks:
        groups.setdefault(paths.task(task).folder, {})[task.file_stem] = task
    for folder, by_stem in groups.items():
        matches = [match for match in map(_NAME.fullmatch, names_of_stage(folder)) if match]
        known = (match for match in matches if match[1] in by_stem)
        yield folder, [Claim(by_stem[match[1]], int(match[2]), "", "", 0.0) for match in known]


def _read(folder: Path, spoilt: Iterable[Claim], known: Known) -> Iterator[tuple[_Key, Claim]]:
    """Yield the claims of a folder. One whose file is damaged keeps its number, and has no worker."""
    identity = _identity(folder)
    for claim in spoilt:
        key = (*identity, _name(claim.task, claim.number))
        if key not in known and identity != _GONE:
            with contextlib.suppress(FileNotFoundError, NotAFile):  # gone, as the run went back, or spoilt
                known[key] = _parsed(read_shared(folder / key[2]), claim)
        yield key, known.get(key, claim)


def _identity(folder: Path) -> tuple[int, int]:
    """Return the device and inode of a folder; of one that is not there ``_GONE``."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return _GONE
    return status.st_dev, status.st_ino


def _parsed(data: bytes, spoilt: Claim) -> Claim:
    try:
        content = converted(ClaimFields, unsealed(data))
        claim = Claim(**{**vars(content), "task": parse_task(content.task)})
    except (ValueError, TypeError):
        return spoilt
    return claim if (claim.task, claim.number) == (spoilt.task, spoilt.number) else spoilt


def next_number(paths: RunPaths, task: Task, claims: Sequence[Claim]) -> int:
    """Return a number for the next attempt that no claim and no log has yet."""
    return 1 + max([last_attempt_number(paths, task), *(claim.number for claim in claims)])


def is_unlisted(paths: RunPaths, task: Task, claims: Sequence[Claim], number: int) -> bool:
    """Whether there is a claim below a number that was not listed: logs are listed after claims, and of
    another's attempt that began between the two there is a log."""
    listed = {claim.number for claim in claims}
    return any(is_there(file_of(paths, task, n)) for n in range(1, number) if n not in listed)


def is_running(claim: Claim, live: Mapping[str, Beat]) -> bool:
    """Whether the worker of a claim lives and does it, or writes the state that it left. Pure.

    A worker says what it will do before it takes the claim, so a reader of claims first and beats after
    them never takes one for ended that has just begun.
    """
    beat, it = live.get(claim.worker), (task_key(claim.task), claim.attempt)
    if beat is None:
        return False
    is_at_it = beat.doing is Doing.BUSY and (beat.task, beat.attempt) == it
    return is_at_it or (beat.saving, beat.saving_attempt) == it


def attempts_of(
    paths: RunPaths, claims: Iterable[Claim], live: Mapping[str, Beat], invocation: int = 0
) -> tuple[Attempt, ...]:
    """Return what has become of the claims on a task that was not committed when they were listed.

    An attempt that has just committed counts as failed here: look for the record again before acting on it.

    Args:
        live: workers that live (:meth:`pipeline.workers.beats.LiveWorkers.live`), read after the claims.
        invocation: number of the present invocation of submit, run or resume: of earlier ones only those
            claims count that still run. By number, as clocks of nodes differ.
    """
    commit_and_claims = [(claim, is_running(claim, live)) for claim in claims]
    counted = [
        (c, runs) for c, runs in commit_and_claims if runs or c.invocation >= invocation or not c.attempt
    ]
    judged = read_endings(paths, {claim.task.iteration for claim, runs in counted if not runs})
    return tuple(
        Attempt(claim, runs, None if runs else _why(paths, claim, judged)) for claim, runs in counted
    )


def _why(paths: RunPaths, claim: Claim, judged: Endings) -> FailureKind | None:
    """Return why an attempt failed: as a pass has judged it, until then as far as it knows itself."""
    ending = judged.get(claim.attempt)
    return ending.kind if ending else reported_failure(paths, claim)


def budgets_tried(paths: RunPaths, task: Task, claims: Iterable[Claim]) -> list[Budget]:
    """Return what earlier attempts at a task computed at once, of all invocations: their claims, and what is
    known of those whose claims are gone, as their commit was taken back."""
    judged = read_endings(paths, [task.iteration])
    key = task_key(task)
    found = [Budget(one.halvings, one.kind) for one in judged.values() if one.task == key]
    unjudged = (claim for claim in claims if claim.attempt not in judged)
    return found + [Budget(claim.halvings, reported_failure(paths, claim)) for claim in unjudged]


Saves = dict[str, tuple[float, float]]
"""Latest saves by attempt: the file's time, and when that was first seen."""


def with_saves(paths: RunPaths, attempts: Iterable[Attempt], seen: Saves, now: float) -> tuple[Attempt, ...]:
    """Look when attempts that run have last saved what they have, and return them with that. A save counts
    from when it is first seen: the file's time is by another clock.

    Args:
        seen: saves seen before; this function adds to it.
        now: unix time.
    """
    return tuple(replace(a, saved=_save_seen(paths, a.claim, seen, now)) for a in attempts)


def _save_seen(paths: RunPaths, claim: Claim, seen: Saves, now: float) -> float:
    known, saved = seen.get(claim.attempt, (0.0, 0.0)), _saved_at(paths, claim)
    if saved != known[0]:
        seen[claim.attempt] = known = (saved, now)
    return known[1]


def _saved_at(paths: RunPaths, claim: Claim) -> float:
    """Return the unix time at which an attempt last saved what it has; 0 if it never did."""
    with contextlib.suppress(OSError):
        return paths.task(claim.task).partial_record(claim.attempt).stat().st_mtime
    return 0.0


def reported_failure(paths: RunPaths, claim: Claim) -> FailureKind | None:
    """Return why a claim's attempt failed, by its own failure file; None if it left none, or a spoilt one."""
    found = read_said(paths, claim.task, claim.number)
    return found.kind if found else None
