"""Shards: what was written is what is read, or the reader says which file is not what was committed."""

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.commits import CorruptData
from pipeline.run.durable import digest_file
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import REWARD, VERSION_KEY, SchemaError, conform
from pipeline.run.shards import read_shard, write_shard
from tests.support.records import TASK, in_child_with_small_disk, make_record


def reward_table(rows: int, **extra: object) -> pa.Table:
    columns = {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "sample_index": [0] * rows,
        "reward": [i / 8 for i in range(rows)],
        "reference_logprobs": [[-0.5] * (i % 7) for i in range(rows)],
    }
    return conform(columns, REWARD, pa.table(extra) if extra else None)


def write(paths: RunPaths, table: pa.Table):
    entry = write_shard(paths, paths.task(TASK).data("1-aa"), table)
    return make_record(outputs=(entry,))


def test_a_shard_comes_back_as_it_was(tmp_path):
    paths = RunPaths(tmp_path)
    table = reward_table(40, **{"reward/rm": pa.array([0.5] * 40, pa.float32())})
    record = write(paths, table)
    assert read_shard(paths, record, REWARD).equals(table, check_metadata=True)


def test_the_hash_taken_while_writing_is_that_of_the_file(tmp_path):
    paths = RunPaths(tmp_path)
    entry = write(paths, reward_table(1000)).outputs[0]
    assert digest_file(tmp_path / entry.path) == (entry.bytes, entry.xxh3_128)


@pytest.mark.parametrize("largest", [1, 7, 1000, 1 << 20])
def test_a_shard_that_is_read_in_pieces_is_hashed_in_their_order(tmp_path, monkeypatch, largest):
    """Another thread hashes them; a bit that flips in any of them is seen."""
    monkeypatch.setattr("pipeline.run.shards._SMALLEST_PIECE", 1)
    monkeypatch.setattr("pipeline.run.shards._LARGEST_PIECE", largest)
    paths = RunPaths(tmp_path)
    table = reward_table(60)
    record = write(paths, table)
    assert read_shard(paths, record, REWARD).equals(table)
    path = tmp_path / record.outputs[0].path
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptData, match="xxh3_128"):
            read_shard(paths, record, REWARD)


def test_an_empty_shard_is_a_shard(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_shard(paths, write(paths, reward_table(0)), REWARD).num_rows == 0


def test_the_same_table_is_the_same_bytes(tmp_path):
    one, two = (write(RunPaths(tmp_path / name), reward_table(30)) for name in "ab")
    assert one.fingerprint == two.fingerprint


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), max_size=20),
    lists=st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=5) | st.none(), max_size=20),
)
def test_any_values_survive(tmp_path_factory, values, lists):
    rows = min(len(values), len(lists))
    columns = {
        "prompt_id": [str(i) for i in range(rows)],
        "sample_index": list(range(rows)),
        "reward": values[:rows],
        "reference_logprobs": lists[:rows],
    }
    paths = RunPaths(tmp_path_factory.mktemp("shard"))
    read = read_shard(paths, write(paths, conform(columns, REWARD)), REWARD).to_pydict()
    assert read == columns


def test_every_flipped_bit_is_seen(tmp_path):
    paths = RunPaths(tmp_path)
    record = write(paths, reward_table(60))
    path = tmp_path / record.outputs[0].path
    good = path.read_bytes()
    rng = random.Random(0)
    positions = {0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(300))}
    for position in positions:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CorruptData, match=r"shard-00001\.1-aa\.arrow has xxh3_128"):
            read_shard(paths, record, REWARD)
    path.write_bytes(good)
    read_shard(paths, record, REWARD)


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_a_cut_shard_is_seen(tmp_path, keep):
    paths = RunPaths(tmp_path)
    record = write(paths, reward_table(60))
    path = tmp_path / record.outputs[0].path
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * keep) if keep == 0.5 else keep])
    with pytest.raises(CorruptData, match="bytes instead of"):
        read_shard(paths, record, REWARD)


def test_a_shard_whose_data_is_gone_is_corrupt(tmp_path):
    paths = RunPaths(tmp_path)
    record = write(paths, reward_table(3))
    (tmp_path / record.outputs[0].path).unlink()
    with pytest.raises(CorruptData, match=r"arrow is gone") as caught:
        read_shard(paths, record, REWARD)
    assert caught.value.task == TASK


def test_a_shard_of_another_version_is_refused_with_both_named(tmp_path):
    paths = RunPaths(tmp_path)
    newer = reward_table(2).replace_schema_metadata({VERSION_KEY: b"reward/9"})
    with pytest.raises(SchemaError, match=r"shard-00001.*holds reward/9.*reads reward/1"):
        read_shard(paths, write(paths, newer), REWARD)
    unmarked = reward_table(2).replace_schema_metadata(None)
    with pytest.raises(SchemaError, match=r"holds no version.*reads reward/1"):
        read_shard(paths, write(paths, unmarked), REWARD)


def test_a_column_that_is_absent_or_of_another_type_is_named(tmp_path):
    paths = RunPaths(tmp_path)
    table = reward_table(2)
    with pytest.raises(SchemaError, match="column 'reward' is absent"):
        read_shard(paths, write(paths, table.drop_columns(["reward"])), REWARD)
    index = table.schema.get_field_index("sample_index")
    wide = table.set_column(index, "sample_index", table["sample_index"].cast(pa.int64()))
    with pytest.raises(SchemaError, match="'sample_index' has type int64; reward/1 wants int32"):
        read_shard(paths, write(paths, wide), REWARD)


def test_a_full_disk_names_the_file_and_leaves_neither_record_nor_data(tmp_path):
    body = """
import sys
from pathlib import Path
import pyarrow as pa
from pipeline.run.paths import RunPaths
from pipeline.run.shards import write_shard
#LIMIT
paths = RunPaths(Path(sys.argv[1]))
path = paths.root / "iterations/00003/rollout/shard-00001.1-aa.arrow"
write_shard(paths, path, pa.table({"a": range(100_000)}))
"""
    done = in_child_with_small_disk(100_000, body, tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "File too large" in last
    assert "shard-00001.1-aa.arrow" in last
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
