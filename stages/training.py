"""Steps shared by all trainers: reading an iteration's shards, writing folders to be committed,
and committing the state behind a policy.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pipeline.run.commits import (
    FileEntry,
    Record,
    StaleData,
    check_sizes,
    discard,
    hash_file,
    hash_tree,
    is_of_the_past,
    publish,
    read_record,
)
from pipeline.run.durable import fsync_path
from pipeline.run.paths import RunPaths
from pipeline.run.plan import state_of
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.tasks import Stage, Task, task_key
from stages.context import Context, UserError
from stages.models.tokenizers import load_tokenizer

_KEY = ["prompt_id", "sample_index"]


def read_shards(context: Context, iteration: int) -> tuple[pa.Table, pa.Table, Sequence[int]]:
    """Return all shards of an iteration, verified and joined row by row.

    Returns:
        The rollout table, the reward table with the same rows, and [rows] the shard that each came in.

    Raises:
        NotCommitted, CorruptData, StaleData: naming the shard.
        UserError: there is no response to learn from.
    """
    num_shards = context.config.rollout.num_shards
    rollouts, rewards = zip(*(read_pair(context, iteration, i) for i in range(num_shards)), strict=True)
    shards = [i for i, rows in enumerate(rollouts) for _ in range(rows.num_rows)]
    check_has_responses(iteration, len(shards))
    return pa.concat_tables(rollouts), pa.concat_tables(rewards), shards


def read_pair(context: Context, iteration: int, shard: int) -> tuple[pa.Table, pa.Table]:
    """Return one shard's rollout table and its reward table, verified, which have the same rows.

    Raises:
        NotCommitted, CorruptData, StaleData: naming the shard.
    """
    reward_task = Task(iteration, Stage.REWARD, shard)
    rollout = context.table(Task(iteration, Stage.ROLLOUT, shard), ROLLOUT)
    reward = context.table(reward_task, REWARD)
    _check_same_rows(reward_task, rollout, reward)
    return rollout, reward


def read_pair_in_batches(context: Context, iteration: int, shard: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Return the tables of :func:`read_pair` some rows at a time; raises as it does, where their rows are not
    the same after those that are."""
    reward_task = Task(iteration, Stage.REWARD, shard)
    rollouts = context.batches(Task(iteration, Stage.ROLLOUT, shard), ROLLOUT)
    rewards = context.batches(reward_task, REWARD)

    def in_step() -> Iterator[tuple[pa.Table, pa.Table]]:
        due = REWARD.empty_table()
        for rollout in rollouts:
            due = _with_rows(due, rewards, rollout.num_rows)
            reward, due = due.slice(0, rollout.num_rows), due.slice(rollout.num_rows)
            _check_same_rows(reward_task, rollout, reward)
            yield rollout, reward
        _check_same_rows(reward_task, ROLLOUT.empty_table(), _with_rows(due, rewards, 1))

    return in_step()


def _with_rows(table: pa.Table, following: Iterator[pa.Table], num_rows: int) -> pa.Table:
    """Return a table with as many of those that follow it as it takes to have ``num_rows``, if there are."""
    while table.num_rows < num_rows and (more := next(following, None)) is not None:
        table = pa.concat_tables([table, more]) if table.num_rows else more
    return table


def _check_same_rows(reward_task: Task, rollout: pa.Table, reward: pa.Table) -> None:
    """Raise StaleData where a reward table has not the rows of the rollout table."""
    if not rollout.select(_KEY).equals(reward.select(_KEY)):
        raise StaleData(reward_task, "its rows are not those of the rollout shard")


def check_has_responses(iteration: int, rows: int) -> None:
    """Raise UserError where all shards of an iteration together have no row to learn from."""
    if not rows:
        raise UserError(f"iteration {iteration} has no response in any of its shards")


def save_tokenizer(context: Context, folder: Path) -> None:
    """Write tokenizer and generation settings of version 0 into a policy folder, so that it stands alone."""
    model = context.config.model
    load_tokenizer(model.policy, model).save_pretrained(folder)
    source = Path(model.policy) / "generation_config.json"
    if source.is_file():
        shutil.copyfile(source, folder / source.name)


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove ``folder`` where the block does not come to its end: it would only keep a full disk full."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            shutil.rmtree(folder, ignore_errors=True)


def hash_folders(context: Context, folders: Iterable[Path]) -> tuple[FileEntry, ...]:
    """Make every file of the folders durable and hash it; return them as a result's outputs."""
    return tuple(entry for folder in folders for entry in hash_tree(context.paths, folder))


def committed_entries(
    context: Context, folder: Path, written: Iterable[tuple[Path, int, str]]
) -> tuple[FileEntry, ...]:
    """Return all files of a folder as a result's outputs.

    Args:
        written: path, bytes and hash of files that are durable already, of this process and of others. All
            else in the folder is made durable and hashed here.
    """
    paths = context.paths
    entries = {path: FileEntry(paths.relative(path), size, digest) for path, size, digest in written}
    small = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in entries]
    for path in (*small, *{file.parent for file in (*small, *entries)}, folder.parent):
        fsync_path(path)
    entries |= {path: hash_file(paths, path) for path in small}
    return tuple(entries[path] for path in sorted(entries))


def publish_state(
    context: Context, update: Record, files: tuple[FileEntry, ...], started: float, history: int
) -> str:
    """Commit a state that is written, unless its policy was taken back meanwhile. Returns what came of it."""
    lineage = {task_key(update.task): update.fingerprint}
    state = replace(update, task=state_of(update.policy_version), outputs=files, inputs=lineage)
    state = replace(state, started=started, ended=time.time(), metrics={}, promises_state=False)
    state = replace(state, attempt=context.attempt, skips_state=False)
    is_past = is_of_the_past(context.paths, state.task, history)
    if not is_past and not stands(context.paths, update):
        discard(context.paths, state)
        return "its policy was retracted meanwhile, so its state is not kept"
    if not is_past:
        check_sizes(context.paths, state)  # a pass that took this attempt for dead may have removed them
    if not publish(context.paths, state, history):
        return "another attempt's state was first"
    size, seconds = sum(entry.bytes for entry in files), state.ended - started
    where = " with what was moved aside" if is_past else ""
    return f"state committed{where}: {size / 2**30:.2f} GiB in {seconds:.2f} s"


def stands(paths: RunPaths, record: Record) -> bool:
    """Whether a commit is still the task's. One of another attempt may hold other bytes."""
    now = read_record(paths, record.task)
    return now is not None and now.attempt == record.attempt
