"""Rows of a file without the rest of it: the same as from the whole file, and verified like it."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.commits import CorruptData
from pipeline.run.durable import digest_file
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import PROMPTS, SchemaError, conform
from pipeline.run.shards import listed, listing, read_rows, read_shard, write_in_chunks
from pipeline.run.tasks import PREPARE
from tests.support.damage import cut
from tests.support.records import in_child_with_small_disk, make_record


def prompts(rows: int) -> pa.Table:
    """Prompts with columns of the user's, one of them words of a dictionary."""
    columns = {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "prompt_text": ["x" * (i % 11) for i in range(rows)],
        "prompt_messages": [None if i % 3 else "[]" for i in range(rows)],
        "prompt_tokens": [[i] * (1 + i % 5) for i in range(rows)],
    }
    words = pa.array([f"topic {i % 4}" for i in range(rows)]).dictionary_encode()
    return conform(columns, PROMPTS, pa.table({"topic": words, "answer": list(range(rows))}))


def write(paths: RunPaths, table: pa.Table, rows: int):
    entry, chunks = write_in_chunks(paths, paths.task(PREPARE).data("1-aa"), table, rows)
    return make_record(PREPARE, outputs=(entry,)), listed(json.loads(json.dumps(listing(chunks))))


@settings(max_examples=60)
@given(data=st.data(), num_rows=st.integers(1, 60), rows=st.integers(1, 70))
def test_any_rows_in_any_order_are_those_of_the_whole_table(tmp_path_factory, data, num_rows, rows):
    paths, table = RunPaths(tmp_path_factory.mktemp("run")), prompts(num_rows)
    record, chunks = write(paths, table, rows)
    indices = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=20))
    found = read_rows(paths, record, PROMPTS, chunks, indices)
    assert found.equals(table.take(pa.array(indices, pa.int64())), check_metadata=True)


def test_a_file_in_chunks_is_read_whole_like_any_other(tmp_path):
    paths, table = RunPaths(tmp_path), prompts(30)
    record, chunks = write(paths, table, 4)
    (entry,) = record.outputs
    assert read_shard(paths, record, PROMPTS).equals(table, check_metadata=True)
    assert digest_file(tmp_path / entry.path) == (entry.bytes, entry.xxh3_128)
    assert [chunk.rows for chunk in chunks] == [4] * 7 + [2]


def test_only_the_chunks_of_the_rows_are_read(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    record, chunks = write(paths, prompts(400), 8)
    spans, preadv = [], os.preadv

    def watched(descriptor, buffers, offset):
        spans.append((offset, sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    read_rows(paths, record, PROMPTS, chunks, [300, 17, 16])
    assert spans == [(chunks[i].start, chunks[i].bytes) for i in (0, 2, 37)]  # 0 for its schema


def test_a_flipped_bit_is_seen_by_whoever_reads_its_chunk(tmp_path):
    paths, table = RunPaths(tmp_path), prompts(40)
    record, chunks = write(paths, table, 10)
    path = tmp_path / record.outputs[0].path
    good = path.read_bytes()
    draw = np.random.default_rng(0)
    for number, chunk in enumerate(chunks):
        for place in (0, chunk.bytes - 1, *draw.integers(0, chunk.bytes, 40)):
            bad = bytearray(good)
            bad[chunk.start + place] ^= 1 << draw.integers(8)
            path.write_bytes(bad)
            with pytest.raises(CorruptData, match=rf"arrow, bytes {chunk.start} to \d+: xxh3_128") as caught:
                read_rows(paths, record, PROMPTS, chunks, [10 * number])
            assert caught.value.task == PREPARE
    assert read_rows(paths, record, PROMPTS, chunks, [15]).equals(table.slice(15, 1))  # the last one is bad


def test_a_cut_a_missing_and_a_foreign_file_are_named(tmp_path):
    paths = RunPaths(tmp_path)
    record, chunks = write(paths, prompts(40), 10)
    path = tmp_path / record.outputs[0].path
    cut(path)
    with pytest.raises(CorruptData, match="bytes instead of"):
        read_rows(paths, record, PROMPTS, chunks, [0])
    path.unlink()
    with pytest.raises(CorruptData, match="arrow is gone"):
        read_rows(paths, record, PROMPTS, chunks, [0])
    record, chunks = write(paths, prompts(40).replace_schema_metadata(None), 10)
    with pytest.raises(SchemaError, match=r"holds no version.*reads prompts/1"):
        read_rows(paths, record, PROMPTS, chunks, [0])


def test_a_full_disk_leaves_no_part_of_a_file_in_chunks(tmp_path):
    body = """
import sys
from pathlib import Path
import pyarrow as pa
from pipeline.run.shards import write_in_chunks
from pipeline.run.paths import RunPaths
#LIMIT
paths = RunPaths(Path(sys.argv[1]))
write_in_chunks(paths, paths.root / "data/prompts.1-aa.arrow", pa.table({"a": range(100_000)}))
"""
    done = in_child_with_small_disk(100_000, body, tmp_path)
    assert done.returncode == 1
    assert "prompts.1-aa.arrow" in done.stderr.splitlines()[-1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
