"""Shards: what was written is what is read, or the reader says which file is not what was committed."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run import shards
from pipeline.run.commits import CorruptData
from pipeline.run.durable import digest_file
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import REWARD, VERSION_KEY, SchemaError, conform
from pipeline.run.shards import HashingFile, read_batches, read_shard, write_shard
from tests.support.records import TASK, in_child_with_small_disk, make_record


def reward_table(rows: int, **extra: object) -> pa.Table:
    columns = {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "sample_index": [0] * rows,
        "reward": [i / 8 for i in range(rows)],
        "reference_logprobs": [[-0.5] * (i % 7) for i in range(rows)],
        "validity": ["scored"] * rows,
    }
    return conform(columns, REWARD, pa.table(extra) if extra else None)


def write(paths: RunPaths, table: pa.Table):
    paths.root.mkdir(exist_ok=True)
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


@pytest.mark.parametrize("large", [0, 1 << 30])
@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_a_shard_that_is_read_in_pieces_is_hashed_in_their_order(tmp_path, monkeypatch, large, piece):
    """Another thread hashes those of large ones; a bit that flips in any of them is seen."""
    monkeypatch.setattr("pipeline.run.shards._LARGE", large)
    monkeypatch.setattr("pipeline.run.shards._PIECE", piece)
    monkeypatch.setattr("pipeline.run.shards._LARGE_PIECE", piece)
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


def test_small_pieces_are_written_together_and_large_ones_at_once(tmp_path):
    sink, pieces = HashingFile(tmp_path / "shard.arrow"), [b"ab", b"", bytes(1 << 19), b"cd", b"e" * 1000]
    written = []
    sink._file, raw = SimpleNamespace(write=lambda view: written.append(len(view)) or len(view)), sink._file
    for piece in pieces:
        sink.write(piece)
    assert written == [2, 1 << 19]
    sink._file = raw
    for piece in pieces:
        sink.write(piece)
    assert sink.tell() == 2 * sum(map(len, pieces))
    assert sink.finish("it").bytes == sink.tell()
    assert (tmp_path / "shard.arrow").read_bytes() == b"".join([*pieces[3:], *pieces])


def test_an_empty_shard_is_a_shard(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_shard(paths, write(paths, reward_table(0)), REWARD).num_rows == 0


def test_the_same_table_is_the_same_bytes(tmp_path):
    one, two = (write(RunPaths(tmp_path / name), reward_table(30)) for name in "ab")
    assert one.fingerprint == two.fingerprint


@settings(max_examples=40)
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
        "validity": ["scored"] * rows,
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
    with pytest.raises(SchemaError, match=r"shard-00001.*holds reward/9.*reads reward/2"):
        read_shard(paths, write(paths, newer), REWARD)
    unmarked = reward_table(2).replace_schema_metadata(None)
    with pytest.raises(SchemaError, match=r"holds no version.*reads reward/2"):
        read_shard(paths, write(paths, unmarked), REWARD)


def test_a_column_that_is_absent_or_of_another_type_is_named(tmp_path):
    paths = RunPaths(tmp_path)
    table = reward_table(2)
    with pytest.raises(SchemaError, match="column 'reward' is absent"):
        read_shard(paths, write(paths, table.drop_columns(["reward"])), REWARD)
    index = table.schema.get_field_index("sample_index")
    wide = table.set_column(index, "sample_index", table["sample_index"].cast(pa.int64()))
    with pytest.raises(SchemaError, match="'sample_index' has type int64; reward/2 wants int32"):
        read_shard(paths, write(paths, wide), REWARD)


# batch by batch


@pytest.fixture
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr("pipeline.run.shards._BATCH_BYTES", 500)


@pytest.mark.usefixtures("small_batches")
def test_batches_are_the_table_whoever_reads_it(tmp_path):
    """Also where a column of the user's is one of words, which stand before the first batch."""
    paths = RunPaths(tmp_path)
    words = pa.array([f"topic {i % 4}" for i in range(90)]).dictionary_encode()
    table = reward_table(90, topic=words)
    record = write(paths, table)
    batches = list(read_batches(paths, record, REWARD))
    assert len(batches) > 4
    assert pa.concat_tables(batches).equals(table, check_metadata=True)
    assert read_shard(paths, record, REWARD).equals(table, check_metadata=True)
    assert list(read_batches(paths, write(paths, reward_table(0)), REWARD)) == []


def test_a_file_of_one_large_batch_is_read_too(tmp_path, monkeypatch):
    """As those that were written before batches were small."""
    paths, table = RunPaths(tmp_path), reward_table(90)
    monkeypatch.setattr("pipeline.run.shards._BATCH_BYTES", 64 << 20)
    monkeypatch.setattr("pipeline.run.shards._HUGE_PAGE", 4096)
    assert [batch.equals(table) for batch in read_batches(paths, write(paths, table), REWARD)] == [True]


@pytest.mark.usefixtures("small_batches")
def test_no_batch_of_a_file_that_was_changed_or_cut_is_given_out(tmp_path):
    """Nor does anything of it come before Arrow's reader, wherever it was changed."""
    paths = RunPaths(tmp_path)
    record = write(paths, reward_table(60))
    path = tmp_path / record.outputs[0].path
    good, draw = path.read_bytes(), random.Random(0)
    for position in {0, 8, len(good) - 1, *(draw.randrange(len(good)) for _ in range(100))}:
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        with pytest.raises(CorruptData, match=r"shard-00001\.1-aa\.arrow has xxh3_128"):
            read_batches(paths, record, REWARD)
    for length in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptData, match="bytes instead of"):
            read_batches(paths, record, REWARD)
    path.unlink()
    with pytest.raises(CorruptData, match="arrow is gone"):
        read_batches(paths, record, REWARD)
    newer = reward_table(2).replace_schema_metadata({VERSION_KEY: b"reward/9"})
    with pytest.raises(SchemaError, match=r"holds reward/9.*reads reward/2"):
        read_batches(paths, write(paths, newer), REWARD)


def test_a_file_s_memory_becomes_less_with_each_batch(tmp_path):
    paths, rows = RunPaths(tmp_path), 8000
    numbers = pa.array(np.random.default_rng(0).random(rows * 1000, np.float32))
    table = reward_table(rows).set_column(
        3, REWARD.field(3), pa.ListArray.from_arrays(pa.array(range(0, rows * 1000 + 1, 1000)), numbers)
    )
    record = write(paths, table)
    batches = read_batches(paths, record, REWARD)
    before, read = own_memory(), 0
    for batch in batches:
        read += batch.num_rows
        if read > rows // 2:
            break
    del batch
    pa.default_memory_pool().release_unused()
    assert before - own_memory() > 0.4 * record.outputs[0].bytes - 2 * shards._BATCH_BYTES


def own_memory() -> int:
    """Bytes of memory that belong to this process alone."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.usefixtures("small_batches")
def test_the_same_values_are_the_same_bytes_whoever_made_the_columns(tmp_path):
    """Lists of Python or numbers of numpy, in one piece or in several."""
    table = reward_table(60)
    lengths = [i % 7 for i in range(60)]
    numbers = pa.array(np.full(sum(lengths), -0.5, np.float32))
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    none_null = pa.array([False] * 60)
    for number, lists in enumerate(
        (
            pa.ListArray.from_arrays(offsets, numbers),
            pa.ListArray.from_arrays(offsets, numbers, mask=none_null),
        )
    ):
        made = table.set_column(3, REWARD.field(3), lists)
        one, other = (write(RunPaths(tmp_path / f"{number}{i}"), t) for i, t in enumerate((table, made)))
        assert one.fingerprint == other.fingerprint


def test_a_full_disk_names_the_file_and_leaves_neither_record_nor_data(tmp_path):
    body = """
import sys
from pathlib import Path
from types import SimpleNamespace
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
