"""Responses of an iteration, chosen by their scores: of the shards with texts only those are read that are
needed. Shards that cannot be read are named, and the choice is made among the others."""

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.api.values import Damage, Samples
from pipeline.metrics.samples import Choice, Sample, choose, read_pair, sample_seed
from pipeline.run.commits import BadCommit, NotCommitted, Record, read_record
from pipeline.run.directory import Run
from pipeline.run.identity import RunError
from pipeline.run.records import find_frontier, recorded
from pipeline.run.schemas import GREEDY_SAMPLE, REWARD, ROLLOUT, SchemaError
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from pipeline.text import listing

_UNREADABLE = (BadCommit, SchemaError, OSError)


@dataclass(frozen=True)
class Score:
    """A response's place and reward."""

    shard: int
    row: int
    prompt_id: str
    reward: float


@dataclass(frozen=True)
class Scores:
    """Rewards of an iteration."""

    rows: tuple[Score, ...]
    damage: tuple[Damage, ...]
    num_pending: int
    """Shards without rewards."""

    def without(self, damaged: Mapping[int, Damage]) -> "Scores":
        """Return the scores of the other shards."""
        rows = tuple(score for score in self.rows if score.shard not in damaged)
        return replace(self, rows=rows, damage=(*self.damage, *damaged.values()))


@dataclass(frozen=True)
class Selection:
    """Which responses of an iteration are wanted. With no numbers all of them."""

    best: int = 0
    worst: int = 0
    at_random: int = 0
    prompt: str | None = None
    """Id of the prompt whose responses are wanted, or a part of its text."""
    seed: int | None = None
    """Seed of the random ones. Default: by the run's seed and the iteration."""

    def check(self) -> None:
        """Raise RunError where a number is negative."""
        counts = {"best": self.best, "worst": self.worst, "at_random": self.at_random}
        for name, count in counts.items():
            if count < 0:
                raise RunError(f"{name}={count} is negative; give 0 or more")


def newest_scored(run: Run) -> int | None:
    """Return the newest iteration of which a shard has rewards; None where there is none."""
    updated = find_frontier(run.plan, run.paths).updated
    for iteration in range(min(updated + 1, run.plan.iterations), run.plan.start, -1):
        if any(recorded(run.paths, _tasks(run, iteration, Stage.REWARD))):
            return iteration
    return None


def check_iteration(run: Run, iteration: int) -> None:
    """Check that responses of an iteration belong to the run. Raises RunError with those that do."""
    first, last = run.plan.start + 1, run.plan.iterations
    if not first <= iteration <= last:
        raise RunError(f"{run.paths.root} has iterations {first} to {last}, and no iteration {iteration}")


def read_selected(run: Run, iteration: int, selection: Selection) -> Samples:
    """Read the responses that are wanted.

    Raises:
        RunError: the run has no such iteration, a number is negative, or ``selection.prompt`` does not name
            exactly one prompt.
    """
    check_iteration(run, iteration)
    selection.check()
    scores = read_scores(run, iteration)
    if selection.prompt is not None and all(score.prompt_id != selection.prompt for score in scores.rows):
        texts, damaged = read_prompts(run, iteration, scores)
        scores = scores.without(damaged)
        selection = replace(selection, prompt=only_match(selection.prompt, texts, iteration))
    while True:
        wanted = _select(run, iteration, scores.rows, selection)
        found, damaged = _read_texts(run, iteration, [score for _, score in wanted])
        if not damaged:
            rows = tuple(found[score.shard, score.row] for _, score in wanted)
            return _samples(iteration, scores, rows, tuple(choice for choice, _ in wanted))
        scores = scores.without(damaged)


def read_scores(run: Run, iteration: int) -> Scores:
    """Read the rewards of an iteration, without those of greedy responses."""
    tasks = set(recorded(run.paths, _tasks(run, iteration, Stage.REWARD)))
    rows: list[Score] = []
    damage = []
    for task in sorted(tasks):
        try:
            rows += _scores_of(run, _record(run, task))
        except _UNREADABLE as error:
            damage.append(damage_of(task, error))
    return Scores(tuple(rows), tuple(damage), run.plan.num_shards - len(tasks))


def damage_of(task: Task, error: Exception) -> Damage:
    """Describe why the commit of ``task``, or of the one that the error names, cannot be read."""
    if isinstance(error, BadCommit):
        return Damage(str(error.task), error.why)
    return Damage(str(task), str(error))


def _tasks(run: Run, iteration: int, stage: Stage) -> list[Task]:
    return [Task(iteration, stage, shard) for shard in range(run.plan.num_shards)]


def _scores_of(run: Run, record: Record) -> Iterator[Score]:
    table = read_shard(run.paths, record, REWARD).select(["prompt_id", "sample_index", "reward"])
    columns = zip(*(column.to_pylist() for column in table.columns), strict=True)
    for row, (prompt_id, sample_index, reward) in enumerate(columns):
        if sample_index != GREEDY_SAMPLE:
            yield Score(record.task.shard, row, prompt_id, math.nan if reward is None else reward)


def _select(
    run: Run, iteration: int, scores: Sequence[Score], selection: Selection
) -> list[tuple[Choice | None, Score]]:
    if selection.prompt is not None:
        scores = [score for score in scores if score.prompt_id == selection.prompt]
    numbers = selection.best, selection.worst, selection.at_random
    if not any(numbers):
        return [(None, score) for score in scores]
    seed = sample_seed(run, iteration) if selection.seed is None else selection.seed
    return [*choose(scores, *numbers, seed)]


def _read_texts(
    run: Run, iteration: int, wanted: Sequence[Score]
) -> tuple[dict[tuple[int, int], Sample], dict[int, Damage]]:
    """Read the responses at some places: by shard and row, and what is wrong with a shard by its number."""
    found: dict[tuple[int, int], Sample] = {}
    damaged: dict[int, Damage] = {}
    for shard in sorted({score.shard for score in wanted}):
        rows = [score.row for score in wanted if score.shard == shard]
        rollout, reward = (Task(iteration, stage, shard) for stage in (Stage.ROLLOUT, Stage.REWARD))
        try:
            samples = read_pair(run, _record(run, rollout), _record(run, reward), rows)
        except _UNREADABLE as error:
            damaged[shard] = damage_of(rollout, error)
        else:
            found |= {(shard, row): sample for row, sample in zip(rows, samples, strict=True)}
    return found, damaged


def _record(run: Run, task: Task) -> Record:
    """Return a task's commit record. Raises CorruptData or NotCommitted."""
    record = read_record(run.paths, task)
    if record is None:
        raise NotCommitted(task, "its record is gone")
    return record


def _samples(
    iteration: int, scores: Scores, rows: tuple[Sample, ...], choices: tuple[Choice | None, ...]
) -> Samples:
    count = len(scores.rows)
    known = [score.reward for score in scores.rows if not math.isnan(score.reward)]
    mean = math.fsum(known) / len(known) if known else None
    return Samples(iteration, rows, choices, count, mean, scores.damage, scores.num_pending)


# --- prompts by their text ---


def read_prompts(run: Run, iteration: int, scores: Scores) -> tuple[dict[str, str], dict[int, Damage]]:
    """Read the prompts of all shards that have rewards: texts by id, and what is wrong by shard."""
    texts: dict[str, str] = {}
    damaged: dict[int, Damage] = {}
    for shard in sorted({score.shard for score in scores.rows}):
        task = Task(iteration, Stage.ROLLOUT, shard)
        try:
            table = read_shard(run.paths, _record(run, task), ROLLOUT)
        except _UNREADABLE as error:
            damaged[shard] = damage_of(task, error)
        else:
            texts |= zip(table["prompt_id"].to_pylist(), table["prompt_text"].to_pylist(), strict=True)
    return texts, damaged


def only_match(words: str, texts: Mapping[str, str], iteration: int) -> str:
    """Return the id of the only prompt whose text has ``words`` in it, in upper or lower case. Pure.

    Raises:
        RunError: there is none, or there are several.
    """
    found = [prompt_id for prompt_id, text in texts.items() if words.lower() in text.lower()]
    if len(found) == 1:
        return found[0]
    where, wanted = f"iteration {iteration}", reprlib.repr(words)
    if not found:
        raise RunError(f"{where} has no prompt with the id {wanted}, nor one with that text")
    raise RunError(f"{len(found)} prompts of {where} have the text {wanted}; give one's id: {listing(found)}")
