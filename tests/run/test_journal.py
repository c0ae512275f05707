"""JSON lines that survive crashes: whole lines are never lost, cut ones never believed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run import journal

values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
nested = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
rows = st.lists(st.dictionaries(st.text(max_size=6), nested, min_size=1, max_size=3), max_size=6)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_what_is_appended_is_read_in_order(path):
    for number in range(3):
        journal.append(path, {"n": number, "text": "two\nlines \u2028 and ü"})
    assert [row["n"] for row in journal.read(path)] == [0, 1, 2]
    assert len(path.read_bytes().splitlines()) == 3


def test_a_run_without_events_has_none(path):
    assert journal.read(path) == []
    assert journal.read_tail(path) == []


def test_a_line_cut_by_a_crash_stays_alone(path):
    journal.append(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "te')
    journal.append(path, {"n": 3})
    assert journal.read(path) == [{"n": 1}, {"n": 3}]


def test_zeros_left_by_a_power_cut_are_skipped(path):
    journal.append(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b"\x00" * 100)
    journal.append(path, {"n": 2})
    assert journal.read(path) == [{"n": 1}, {"n": 2}]


def test_an_event_has_a_name_and_a_time(path):
    journal.event(path, "launched", task="1/rollout/0")
    (row,) = journal.read(path)
    assert row["event"] == "launched"
    assert row["task"] == "1/rollout/0"
    assert row["time"] > 1e9


def test_rewriting_replaces_the_whole_file(path):
    journal.append(path, {"n": 1})
    journal.rewrite(path, [{"n": 5}, {"n": 6}])
    assert journal.read(path) == [{"n": 5}, {"n": 6}]
    assert [p.name for p in path.parent.iterdir()] == ["events.jsonl"]


@settings(max_examples=30)
@given(rows, st.data())
def test_a_file_cut_anywhere_gives_a_prefix(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("journal") / "rows.jsonl"
    journal.rewrite(path, written)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    read = journal.read(path)
    assert read == written[: len(read)]
    journal.append(path, {"last": 1})
    assert journal.read(path) == [*read, {"last": 1}]


@settings(max_examples=30)
@given(rows, st.integers(1, 200))
def test_the_tail_is_the_end_of_the_rows(tmp_path_factory, written, num_bytes):
    path = tmp_path_factory.mktemp("journal") / "rows.jsonl"
    journal.rewrite(path, written)
    tail = journal.read_tail(path, num_bytes)
    assert tail == written[len(written) - len(tail) :]
    sizes = [len(json.dumps(row)) + 1 for row in written]
    fitting = sum(sum(sizes[i:]) <= num_bytes for i in range(len(sizes)))
    assert len(tail) >= fitting
