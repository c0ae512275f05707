"""Columns of prompts that are large: stored once for all responses, never too large for Arrow's offsets."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.arrow_types import python_value
from pipeline.run.wide import repeat, take
from stages.rewards.rows import values_of

TESTS = "0123456789abcdef" * (17 << 16)
"""17.8 MB, as tests of a program have that are larger than the program."""


def large(copies: int) -> pa.Table:
    """Four rows, and the same four again and again, which takes no more memory."""
    few = pa.array([f"{TESTS}{i}" for i in range(4)])
    return pa.table({"tests": pa.chunked_array([few] * copies), "row": np.arange(4 * copies)})


def test_a_large_column_times_samples_is_stored_once():
    prompts = large(1)
    repeated = repeat(prompts, 32, plain=["row"])
    assert repeated["row"].to_pylist() == [i for i in range(4) for _ in range(32)]
    tests = repeated["tests"]
    assert tests.type.value_type == pa.large_string()
    assert [one.as_py() for one in tests[31:33]] == [f"{TESTS}0", f"{TESTS}1"]
    assert repeated.get_total_buffer_size() < 1.1 * prompts.get_total_buffer_size() + 4096


def test_some_rows_of_a_column_beyond_two_gigabytes_are_taken():
    found = take(large(32), [1, 127, 0])
    assert found["row"].to_pylist() == [1, 127, 0]
    assert [one.as_py()[-1] for one in found["tests"]] == ["1", "3", "0"]


COLUMNS = {
    "text": ["a", None, "ä"],
    "list": [["x"], [], None],
    "struct": [{"k": [1]}, None, {"k": None}],
    "map": pa.array([[("k", ["v"])], None, []], pa.map_(pa.string(), pa.list_(pa.string()))),
    "bytes": [b"1", None, b""],
    "bytes of one length": pa.array([b"12", None, b"34"], pa.binary(2)),
    "number": [1, None, 3],
    "nothing": [None, None, None],
    "lists of nothing": [[None], None, []],
    "lists of one length": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
    "wide decimal": pa.array([None, Decimal("1.5"), None], pa.decimal256(50, 2)),
    "interval": pa.array([(1, 2, 3), None, None], pa.month_day_nano_interval()),
    "time": pa.array([1, None, 2], pa.timestamp("ns", "Europe/Oslo")),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None, b"1" * 16], pa.binary(16))),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), (2,)), pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))
    ),
    "union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([1, 2]), pa.array(["a"])]
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_values_of_any_type_are_the_same_after_they_were_repeated_and_written(name, tmp_path):
    table = pa.table({name: COLUMNS[name]})
    repeated = repeat(table, 2, plain=[])
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), repeated.schema) as writer:
        writer.write_table(repeated, max_chunksize=2)
    with pa.ipc.open_file(str(tmp_path / "x.arrow")) as reader:
        found = reader.read_all()
    expected = [value for value in table[name].to_pylist() for _ in range(2)]
    assert repr(found[name].to_pylist()) == repr(values_of(found[name])) == repr(expected)
    assert repr(take(found, [5, 0])[name].to_pylist()) == repr([expected[5], expected[0]])
    assert len(list(map(python_value, table[name]))) == 3
    assert repeat(table.slice(0, 0), 2, plain=[]).num_rows == 0
