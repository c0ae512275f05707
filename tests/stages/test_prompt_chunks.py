"""A rollout reads its own prompts of the file that prepare wrote, and nothing else changes by that."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.run.commits import CorruptData, Record, hash_file, publish, read_record, verify_outputs
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import PROMPTS, ROLLOUT
from pipeline.run.shards import LISTING, listed, listing, read_shard, write_in_chunks, write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context
from stages.tasks import rollout
from tests.support.damage import flip_bit


def prepared(run: Run) -> Record:
    record = read_record(run.paths, PREPARE)
    assert record
    return record


def commit_prompts(run: Run, rows: int | None) -> None:
    """Commit the run's prompts again, in chunks of so many rows; without chunks, as older versions did."""
    paths, files, record = run.paths, run.paths.task(PREPARE), prepared(run)
    table = read_shard(paths, record, PROMPTS)
    main, chunks = record.output(), record.output(LISTING, "json")
    others = [entry for entry in record.outputs if entry not in (main, chunks)]
    if rows is None:
        (paths.root / chunks.path).unlink()
        new = [write_shard(paths, files.data(record.attempt), table)]
    else:
        entry, parts = write_in_chunks(paths, files.data(record.attempt), table, rows)
        (paths.root / chunks.path).write_text(json.dumps(listing(parts)))
        new = [entry, hash_file(paths, paths.root / chunks.path)]
    files.record.unlink()
    assert publish(paths, replace(record, outputs=(*new, *others)))


def rolled_out(run: Run, shard: int) -> str:
    """The hash of what a rollout of the first iteration gives now."""
    task = Task(1, Stage.ROLLOUT, shard)
    (output,) = rollout.run(task, Context(run.paths, run.config, task, "9-again")).outputs
    return output.xxh3_128


@pytest.mark.parametrize("rows", [1, 3, None], ids=["1 row", "3 rows", "as older versions wrote it"])
def test_a_rollout_is_the_same_whatever_the_chunks_of_its_prompts(run, rows):
    commit_prompts(run, rows)
    for shard in (0, 1):
        before = read_record(run.paths, Task(1, Stage.ROLLOUT, shard))
        assert rolled_out(run, shard) == before.output().xxh3_128


def test_who_reads_another_run_checks_its_models_by_what_that_run_prepared(run):
    """As a fork does, which reads its parent: models that only the parent uses are in its record alone."""
    task = Task(1, Stage.UPDATE)
    context = Context(run.paths, run.config, task, "1-aa")
    ours = context.read(PREPARE)
    copied = Path(shutil.copytree(run.paths.root, run.paths.root.with_name("parent"), symlinks=True))
    parent = load_run(copied)
    theirs = replace(prepared(parent), inputs={**ours.inputs, "file:/models/critic/weights": "1:2:3"})
    parent.paths.task(PREPARE).record.unlink()
    assert publish(parent.paths, theirs)
    reader = replace(context, paths=parent.paths, config=parent.config, lineage={})
    assert reader.read(PREPARE).inputs == theirs.inputs
    assert context.read(PREPARE).inputs == ours.inputs


def test_what_is_spoilt_for_one_rollout_is_not_for_the_other(run):
    """Each reads and verifies its own prompts; the driver, asked about the file, hashes all of it."""
    commit_prompts(run, rows=1)
    entry, context = prepared(run).output(), Context(run.paths, run.config, PREPARE, "9-look")
    chunks = listed(context.json(PREPARE, LISTING))
    chunk = chunks[max(rows_of(run, shard=1))]
    with (run.paths.root / entry.path).open("r+b") as file:
        file.seek(chunk.start + chunk.bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert rolled_out(run, 0) == read_record(run.paths, Task(1, Stage.ROLLOUT, 0)).output().xxh3_128
    with pytest.raises(CorruptData, match=r"prompts\.[\w-]+\.arrow, bytes \d+ to \d+") as caught:
        rolled_out(run, 1)
    assert caught.value.task == PREPARE
    with pytest.raises(CorruptData):
        verify_outputs(run.paths, prepared(run))


def rows_of(run: Run, shard: int) -> list[int]:
    """The rows of the prompts that a shard of the first iteration has."""
    ids = read_shard(run.paths, prepared(run), PROMPTS)["prompt_id"].to_pylist()
    dealt = read_shard(run.paths, read_record(run.paths, Task(1, Stage.ROLLOUT, shard)), ROLLOUT)
    return [ids.index(prompt_id) for prompt_id in dealt["prompt_id"].to_pylist()]


@pytest.mark.parametrize("part", ["", LISTING])
def test_spoilt_prompts_or_a_spoilt_listing_of_them_are_prepares_fault(run, part):
    flip_bit(run.paths.root / prepared(run).output(part, "json" if part else "arrow").path)
    with pytest.raises(CorruptData) as caught:
        rolled_out(run, 0)
    assert caught.value.task == PREPARE
