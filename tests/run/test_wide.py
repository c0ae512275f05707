"""Columns of prompts that are large: stored once for all responses, never too large for Arrow's offsets."""

import numpy as np
import pyarrow as pa

from pipeline.run.wide import repeat, take

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


def test_values_of_any_type_are_the_same_after_they_were_repeated():
    columns = {
        "text": ["a", None, "ä"],
        "list": [["x"], [], None],
        "struct": [{"k": [1]}, None, {"k": None}],
        "map": pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
        "bytes": [b"1", None, b""],
        "number": [1, None, 3],
        "nothing": [None, None, None],
        "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
    }
    table = pa.table(columns)
    expected = [row for row in table.to_pylist() for _ in range(2)]
    assert repeat(table, 2, plain=[]).to_pylist() == expected
    assert repeat(table.slice(0, 0), 2, plain=[]).to_pylist() == []
