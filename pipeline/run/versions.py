"""Policies that people name as ``RUN``, ``RUN@ITERATION`` or ``RUN@best``; runs that other versions made."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import RECORD_VERSION, CorruptData, Record, require_record
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.identity import RunError, version
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier
from pipeline.run.retention import in_words, kept_versions, read_best
from pipeline.run.states import can_fork
from pipeline.run.tasks import PREPARE, Stage, Task
from slurm.sharedfiles import from_json, read_plainly


@dataclass(frozen=True)
class Version:
    """A committed policy of a run."""

    run: Run
    record: Record
    """Commit record of the update that made it."""

    @property
    def number(self) -> int:
        return self.record.task.iteration

    def __str__(self) -> str:
        return f"policy {self.number} of {self.run.paths.root}"


def find_version(text: str, needed: str, *parents: str) -> Version:
    """Find the version that ``text`` names, of which nothing below ``parents`` was pruned.

    Args:
        needed: name of what ``parents`` hold, for messages.

    Raises:
        RunError: there is no such run or version; the message names those that there are.
    """
    return _found(text, needed, lambda run: kept_versions(run.paths, parents))


def find_version_with_state(text: str) -> Version:
    """Find the version that ``text`` names, with all that learning needs to go on. Raises RunError."""
    parents = ("policy", "critic", "trainer")
    return _found(
        text,
        needed="trainer's state",
        versions=lambda run: [v for v in kept_versions(run.paths, parents) if can_fork(run.paths, v)],
    )


def _found(text: str, needed: str, versions: Callable[[Run], Sequence[int]]) -> Version:
    root, word = split(text)
    run = load_run(root)
    updated = find_frontier(run.plan, run.paths).updated
    number = choose(run.paths, word, updated)
    there = [version for version in versions(run) if version <= updated]
    if number not in there:
        choice = f"choose {in_words(there)}" if there else "there is none yet"
        if len(there) > 1:
            nearest = min(there, key=lambda version: abs(version - number))
            choice += f"; the nearest is {run.paths.root}@{nearest}"
        raise RunError(f"{needed} {number} of {run.paths.root} {_why_absent(run, number, updated)}; {choice}")
    try:
        return Version(run, require_record(run.paths, policy_maker(number)))
    except CorruptData as error:
        raise RunError(f"{run.paths.root}: {error}; slurm-ppo resume makes it again") from None


def _why_absent(run: Run, number: int, updated: int) -> str:
    if number > updated:
        return "is not there yet"
    if number < run.plan.start:
        return "belongs to the run that this one was forked from"
    if number == 0:
        return f"is the model that it began with, {run.config.model.policy}"
    if number in kept_versions(run.paths):
        return "was not due (update.save_every), was lost, or is still being saved (its policy is there)"
    return "was pruned on purpose (update.keep_last)"


def split(text: str) -> tuple[Path, str]:
    """Split off what follows the run directory, whose name may have an @ in it; "" for nothing."""
    root, _, word = text.rpartition("@")
    if not root or is_run(Path(text)):
        return Path(text), ""
    return Path(root), word


def choose(paths: RunPaths, word: str, newest: int) -> int:
    """Return the version that the word after the @ names: a number, ``best``, or nothing for the newest."""
    if word.isdecimal():
        return int(word)
    if word not in ("", "best"):
        raise RunError(f"@{word}: write RUN, RUN@ITERATION or RUN@best")
    if not word:
        return max(newest, 0)
    best = read_best(paths)
    if best is None:
        raise RunError(
            f"{paths.root} has no best policy: none was evaluated (evaluate.every and data.heldout; or "
            "evaluate.command, where evaluate.best is one of its numbers)"
        )
    return best.iteration


def version_warning(run: Run) -> str:
    """Return the warning before going on with a run of another version; empty if it is of this version.

    Raises:
        RunError: files of the run are in a format that this version does not read.
    """
    began, here = run.identity.version, version()
    if began == here:
        return ""
    if foreign := next(foreign_formats(run), ""):
        raise RunError(
            f"{run.paths.root} was begun with slurm-ppo {began}, and this is {here}: {foreign}. Go on with "
            f"{began}, or export its policy and start a new run"
        )
    return (
        f"warning: the run began with slurm-ppo {began}, and goes on with {here}: results may differ from "
        f"here on (to compare, see the rows before and after); or go on with {began}"
    )


def foreign_formats(run: Run) -> Iterator[str]:
    """Yield, in words, formats of committed files that are not what this version writes."""
    from pipeline.run.schemas import PROMPTS, ROLLOUT, version_of  # pyarrow is slow to import

    first = run.plan.start + 1
    for task, schema in ((PREPARE, PROMPTS), (Task(first, Stage.ROLLOUT, 0), ROLLOUT)):
        said = _said(run.paths, task)
        if said.get("version", RECORD_VERSION) != RECORD_VERSION:
            yield f"its records are of format {said['version']}, and {RECORD_VERSION} is read here"
        elif said.get("schema", version_of(schema)) != version_of(schema):
            yield f"its data is {said['schema']}, and {version_of(schema)} is read here"


def _said(paths: RunPaths, task: Task) -> dict[str, object]:
    """Return a record's content, unchecked; empty where there is none, or none that can be read."""
    try:
        found = from_json(read_plainly(paths.task(task).record))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
