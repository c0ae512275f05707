"""The reader of an iteration's responses: first the scores, then of the shards with texts those that are
needed. Shards that cannot be read are named, and the choice is made among the others."""

import json
import math
import random
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.metrics.samples import Choice, Damage, Sample, Samples, Turn, choose
from pipeline.run.commits import (
    BadCommit,
    CorruptData,
    NotCommitted,
    Record,
    StaleData,
    check_sizes,
    read_record,
)
from pipeline.run.directory import Run
from pipeline.run.identity import RunError
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier, recorded
from pipeline.run.schemas import GREEDY_SAMPLE, REWARD, ROLLOUT, SchemaError
from pipeline.run.seeds import derive_seed
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from pipeline.text import listing

_UNREADABLE = (BadCommit, SchemaError, OSError)
_COMPONENT, _REFILL = "reward/", "refill/"
"""Prefix of the components' columns; see :func:`pipeline.run.schemas.component_column`."""


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


ALL = Selection()


def newest_scored(run: Run) -> int | None:
    """Return the newest iteration of which a shard has rewards; None where there is none."""
    newest = find_frontier(run.plan, run.paths).updated + 1 + run.plan.staleness
    for iteration in range(min(newest, run.plan.iterations), run.plan.start, -1):
        if any(recorded(run.paths, _tasks(run, iteration, Stage.REWARD))):
            return iteration
    return None


def check_iteration(run: Run, iteration: int) -> None:
    """Check that responses of an iteration belong to the run. Raises RunError with those that do."""
    first, last = run.plan.start + 1, run.plan.iterations
    if not first <= iteration <= last:
        raise RunError(f"{run.paths.root} has iterations {first} to {last}, and no iteration {iteration}")


def sample_seed(run: Run, iteration: int) -> int:
    """Derive the seed of what is drawn from an iteration, from the run's seed and the iteration only."""
    return derive_seed(run.config.seed, "samples", iteration)


def read_samples(
    run: Run, iteration: int, selection: Selection = ALL, max_bytes: int | None = None
) -> Samples:
    """Read the responses that are wanted, without greedy ones.

    Args:
        max_bytes: of an iteration with more rollout data only some shards are read, drawn by the run's seed,
            at least one.

    Raises:
        RunError: a number is negative, or ``selection.prompt`` does not name exactly one prompt.
    """
    selection.check()
    scores = _read_scores(run, iteration, max_bytes)
    if selection.prompt is not None and all(score.prompt_id != selection.prompt for score in scores.rows):
        texts, damaged = _read_prompts(run, iteration, scores)
        scores = scores.without(damaged)
        selection = replace(selection, prompt=_only_match(selection.prompt, texts, iteration))
    while True:
        wanted = _select(run, iteration, scores.rows, selection)
        found, damaged = _read_texts(run, iteration, [score for _, score in wanted])
        if not damaged:
            rows = tuple(found[score.shard, score.row] for _, score in wanted)
            choices = tuple(choice for choice, _ in wanted)
            known = [score.reward for score in scores.rows if not math.isnan(score.reward)]
            mean = math.fsum(known) / len(known) if known else None
            count = len(scores.rows)
            about = mean, scores.damage, scores.num_pending, run.plan.lag_of(iteration)
            return Samples(iteration, rows, choices, count, *about, _refill_of(run, iteration))
        scores = scores.without(damaged)


def _read_scores(run: Run, iteration: int, max_bytes: int | None) -> Scores:
    """Read the rewards of an iteration, without those of greedy responses."""
    tasks = sorted(recorded(run.paths, _tasks(run, iteration, Stage.REWARD)))
    rows: list[Score] = []
    damage = []
    for task in tasks if max_bytes is None else _drawn(run, tasks, max_bytes):
        try:
            rows += _scores_of(run, _record(run, task))
        except _UNREADABLE as error:
            damage.append(_damage_of(task, error))
    return Scores(tuple(rows), tuple(damage), run.plan.num_shards - len(tasks))


def _refill_of(run: Run, iteration: int) -> dict[str, int]:
    """Return :attr:`Samples.refill`; nothing where the update has no record that can be read."""
    try:
        record = read_record(run.paths, policy_maker(iteration))
    except CorruptData:
        return {}
    metrics = record.metrics if record else {}
    return {name.removeprefix(_REFILL): int(metrics[name]) for name in metrics if name.startswith(_REFILL)}


def _drawn(run: Run, scored: Sequence[Task], max_bytes: int) -> list[Task]:
    """Draw shards whose rollouts have so many bytes together, or a few more."""
    drawn: list[Task] = []
    read, order = 0, list(range(run.plan.num_shards))
    if scored:
        random.Random(sample_seed(run, scored[0].iteration)).shuffle(order)
    by_shard = {task.shard: task for task in scored}
    for task in (by_shard[shard] for shard in order if shard in by_shard):
        if read and read >= max_bytes:
            break
        try:
            record = _record(run, task._replace(stage=Stage.ROLLOUT))
            check_sizes(run.paths, record)
        except (CorruptData, NotCommitted):  # another shard is shown in its place
            continue
        read += sum(entry.bytes for entry in record.outputs)
        drawn.append(task)
    return sorted(drawn)


def _damage_of(task: Task, error: Exception) -> Damage:
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
            samples = _read_pair(run, _record(run, rollout), _record(run, reward), rows)
        except _UNREADABLE as error:
            damaged[shard] = _damage_of(rollout, error)
        else:
            found |= {(shard, row): sample for row, sample in zip(rows, samples, strict=True)}
    return found, damaged


def _record(run: Run, task: Task) -> Record:
    """Return a task's commit record. Raises CorruptData or NotCommitted."""
    record = read_record(run.paths, task)
    if record is None:
        raise NotCommitted(task, "its record is gone")
    return record


def _read_pair(run: Run, rollout: Record, reward: Record, rows: Sequence[int]) -> list[Sample]:
    """Read the sampled responses of a shard and their scores.

    Args:
        rows: rows of the shard to read, in this order.

    Raises:
        CorruptData: a file is not what was committed.
        StaleData: the scores are of other responses than there are now.
        SchemaError: a file is of another version of slurm-ppo.
    """
    texts = read_shard(run.paths, rollout, ROLLOUT)
    scores = read_shard(run.paths, reward, REWARD)
    if not all(texts[name].equals(scores[name]) for name in ("prompt_id", "sample_index")):
        raise StaleData(reward.task, f"it scored other responses than {rollout.task} holds now")
    return _samples(rollout.task.iteration, texts.take(rows), scores.take(rows))


def _samples(iteration: int, texts: pa.Table, scores: pa.Table) -> list[Sample]:
    conversations = [json.loads(text) if text else () for text in texts["response_messages"].to_pylist()]
    gaps = (texts["rollout_logprobs"], texts["response_mask"], scores["reference_logprobs"])
    columns = [
        *(texts[name].to_pylist() for name in ("prompt_id", "sample_index", "prompt_text", "response_text")),
        _numbers(scores["reward"]),
        _components(scores),
        [_kl(*row) for row in zip(*gaps, strict=True)],
        [len(tokens) for tokens in texts["response_tokens"]],
        texts["finish_reason"].to_pylist(),
        texts["num_turns"].to_pylist(),
        [tuple(Turn(m["role"], m["content"]) for m in messages) for messages in conversations],
    ]
    return [Sample(iteration, *row) for row in zip(*columns, strict=True)]


def _components(scores: pa.Table) -> list[dict[str, float]]:
    """Return each row's component scores by name: [rows]."""
    columns = [name for name in scores.column_names if name.startswith(_COMPONENT)]
    names = [name.removeprefix(_COMPONENT) for name in columns]
    if not names:
        return [{} for _ in range(scores.num_rows)]
    values = zip(*(_numbers(scores[column]) for column in columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in values]


def _numbers(column: pa.ChunkedArray) -> list[float]:
    """Return scores, NaN for a response that a reward model could not take."""
    return [math.nan if value is None else value for value in column.to_pylist()]


def _kl(rollout: pa.ListScalar, mask: pa.ListScalar, reference: pa.ListScalar) -> float | None:
    """Compute :attr:`Sample.kl` of a row."""
    if not reference.is_valid:
        return None
    gaps = rollout.values.to_numpy() - reference.values.to_numpy()
    return float(gaps[mask.values.to_numpy(zero_copy_only=False)].sum(dtype="float64"))


# --- prompts by their text ---


def _read_prompts(run: Run, iteration: int, scores: Scores) -> tuple[dict[str, str], dict[int, Damage]]:
    """Read the prompts of all shards that have rewards: texts by id, and what is wrong by shard."""
    texts: dict[str, str] = {}
    damaged: dict[int, Damage] = {}
    for shard in sorted({score.shard for score in scores.rows}):
        task = Task(iteration, Stage.ROLLOUT, shard)
        try:
            table = read_shard(run.paths, _record(run, task), ROLLOUT)
        except _UNREADABLE as error:
            damaged[shard] = _damage_of(task, error)
        else:
            texts |= zip(table["prompt_id"].to_pylist(), table["prompt_text"].to_pylist(), strict=True)
    return texts, damaged


def _only_match(words: str, texts: Mapping[str, str], iteration: int) -> str:
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
