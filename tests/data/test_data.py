"""Prompts: every format gives the same rows, and bad rows are told apart."""

import contextlib
import csv
import gzip
import json
import string
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import rows as columns
from pipeline.data import sources
from pipeline.data.prompts import (
    Message,
    PromptError,
    Prompts,
    Rejected,
    RejectReason,
    content_id,
    read_prompts,
    summarize,
    write_rejected,
)
from tests.support.light import write_jsonl

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ROWS = [
    {"prompt": "one", "key": "a", "level": 3, "tags": ["x"], "score": 0.5},
    {"prompt": "two", "key": "b", "level": None, "tags": [], "score": 1.5},
    {"prompt": " ", "key": "c", "level": 5, "tags": None, "score": 2.5},
    {"prompt": "four", "key": "d", "level": 7, "tags": ["y", "z"], "score": 3.5},
]


def write_stream(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_arrow_file(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_parquet(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def write_saved(path: Path, table: pa.Table, shards: int = 1, indices=None, split=None) -> Path:
    """The layout of datasets.Dataset.save_to_disk; with indices, that of its versions before 1.15."""
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    size = -(-table.num_rows // shards)
    for shard, name in enumerate(names):
        write_stream(path / name, table.slice(shard * size, size))
    state = {"_data_files": [{"filename": name} for name in names], "_split": split, "_format_type": None}
    if indices is not None:
        write_stream(path / "indices.arrow", pa.table({"indices": pa.array(indices, pa.uint64())}))
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return path


def write_saved_splits(path: Path, **splits: pa.Table) -> Path:
    for split, table in splits.items():
        write_saved(path / split, table, split=split)
    (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return path


def table_of(rows) -> pa.Table:
    table = pa.Table.from_pylist(rows)
    return table.replace_schema_metadata({b"huggingface": b"{}"})


def write_parquet_parts(path: Path, table: pa.Table) -> Path:
    write_parquet(path / "b.parquet", table.slice(2))
    write_parquet(path / "a.parquet", table.slice(0, 2))
    (path / "README.md").write_text("not data")
    return path


def write_parquet_splits(path: Path, *stems: str) -> Path:
    for stem in stems:
        write_parquet(path / f"{stem}.parquet", pa.table({"prompt": [stem], "key": [stem]}))
    return path


def jsonl_of(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zst(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


FORMATS = {
    "jsonl": lambda folder: write_jsonl(folder / "p.jsonl", ROWS),
    "ndjson": lambda folder: write_jsonl(folder / "p.ndjson", ROWS),
    "json": lambda folder: write_jsonl(folder / "p.JSON", ROWS),
    "jsonl.gz": lambda folder: write_bytes(folder / "p.jsonl.gz", gzip.compress(jsonl_of(ROWS))),
    "jsonl.gz in two parts": lambda folder: write_bytes(
        folder / "p.jsonl.gz", b"".join(gzip.compress(jsonl_of(some)) for some in (ROWS[:2], ROWS[2:]))
    ),
    "ndjson.zst": lambda folder: write_bytes(folder / "p.ndjson.ZST", zst(jsonl_of(ROWS))),
    "parquet": lambda folder: write_parquet(folder / "p.parquet", table_of(ROWS)),
    "parquet in a key=value folder": lambda folder: write_parquet(
        folder / "k=1" / "p.parquet", table_of(ROWS)
    ),
    "arrow file": lambda folder: write_arrow_file(folder / "p.arrow", table_of(ROWS)),
    "arrow stream": lambda folder: write_stream(folder / "p.arrow", table_of(ROWS)),
    "feather": lambda folder: write_arrow_file(folder / "p.feather", table_of(ROWS)),
    "saved": lambda folder: write_saved(folder / "d", table_of(ROWS)),
    "saved in shards": lambda folder: write_saved(folder / "d", table_of(ROWS), shards=2),
    "saved with indices": lambda folder: write_saved(
        folder / "d", table_of([ROWS[3], {**ROWS[0], "prompt": "dropped"}, *ROWS[:3]]), indices=[2, 3, 4, 0]
    ),
    "saved splits": lambda folder: write_saved_splits(
        folder / "d", test=table_of(ROWS[:1]), train=table_of(ROWS)
    ),
    "parquet parts": lambda folder: write_parquet_parts(folder / "d", table_of(ROWS)),
}


def read(path: Path, **changes) -> Prompts:
    arguments = {"prompt_column": "prompt", "id_column": "key", "split": "train", **changes}
    return read_prompts(path, **arguments)


def read_rows(folder: Path, rows, *, id_column=None, **changes) -> Prompts:
    return read(write_jsonl(folder / "p.jsonl", rows), id_column=id_column, **changes)


def reasons(prompts: Prompts) -> list[str]:
    return [str(one.reason) for one in prompts.rejected]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_prompts(name, tmp_path):
    prompts = read(FORMATS[name](tmp_path))
    assert [(one.row, one.prompt_id, one.prompt) for one in prompts.rows] == [
        (0, "a", "one"),
        (1, "b", "two"),
        (3, "d", "four"),
    ]
    assert [(one.row, one.prompt_id, one.reason) for one in prompts.rejected] == [(2, "c", "empty")]
    assert prompts.columns.column_names == ["level", "tags", "score"]
    assert prompts.columns.to_pylist() == [
        {key: ROWS[row][key] for key in ("level", "tags", "score")} for row in (0, 1, 3)
    ]
    assert prompts.columns.schema.field("level").type == pa.int64()
    assert prompts.columns.schema.metadata is None


@pytest.mark.parametrize(
    ("stems", "used"),
    [
        (["test-0", "train-0", "train-1", "trainer-0"], ["train-0", "train-1"]),
        (["test", "train", "validation-0"], ["train"]),
        (["test-0", "test-1", "testing"], ["test-0", "test-1", "testing"]),
        (["test-0", "more"], ["more", "test-0"]),
    ],
)
def test_parquet_files_named_after_the_split_are_read_alone(stems, used, tmp_path):
    prompts = read(write_parquet_splits(tmp_path / "d", *stems))
    assert [one.prompt for one in prompts.rows] == used


def test_columns_keep_their_types(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(["one", "two"], pa.large_string()),
            "small": pa.array([1, 2], pa.int8()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "when": pa.array([1, 2], pa.timestamp("ns", "UTC")),
        }
    )
    columns = read(write_parquet(tmp_path / "p.parquet", table), id_column=None).columns
    # but for categories, of which files have several sets, and a file of the run can have one
    assert columns.schema.types == [pa.int8(), pa.string(), pa.timestamp("ns", "UTC")]


def test_a_source_without_other_columns_still_has_a_row_per_prompt(tmp_path):
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    for path in (
        write_jsonl(tmp_path / "p.jsonl", rows),
        write_parquet(tmp_path / "p.parquet", table_of(rows)),
    ):
        assert read(path, id_column=None).columns.shape == (2, 0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_chats_and_their_ids_are_the_same_in_every_format(suffix, tmp_path):
    write = {"jsonl": write_jsonl, "parquet": lambda path, rows: write_parquet(path, table_of(rows))}[suffix]
    (prompt,) = read(write(tmp_path / f"p.{suffix}", [{"prompt": CHAT}]), id_column=None).rows
    assert prompt.prompt == (Message("system", "Be brief."), Message("user", "Hi"))
    assert prompt.prompt_id == content_id(prompt.prompt) == "639b474a1daa6580940274e594b61332"


def test_content_ids_are_fixed_forever():
    assert content_id("Grüß Gott") == "78765c1b464b5f8dd06c6f8cc0b70437"
    assert content_id("Hi") != content_id((Message("user", "Hi"),))


BAD_PROMPTS = {
    "null": (None, "null"),
    "number": (3, "not_text"),
    "object": ({"role": "user", "content": "Hi"}, "not_text"),
    "list of text": (["Hi"], "not_text"),
    "list with null": ([None], "not_text"),
    "no text": ("", "empty"),
    "white space": ("\n\t ", "empty"),
    "no messages": ([], "empty"),
    "blank question": ([CHAT[0], {"role": "user", "content": " "}], "empty"),
    "no role": ([{"content": "Hi"}], "bad_message"),
    "no content": ([{"role": "user"}], "bad_message"),
    "content in parts": ([{"role": "user", "content": [{"type": "text"}]}], "bad_message"),
    "unknown role": ([{"role": "human", "content": "Hi"}], "bad_role"),
    "answered": ([*CHAT, {"role": "assistant", "content": "Hello"}], "nothing_to_answer"),
    "only a system message": (CHAT[:1], "nothing_to_answer"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_rejected_with_its_reason_and_line(name, tmp_path):
    value, reason = BAD_PROMPTS[name]
    prompts = read_rows(tmp_path, [{"prompt": "good"}, {"prompt": value}, {"prompt": CHAT}])
    assert [one.row for one in prompts.rows] == [0, 2]
    assert reasons(prompts) == [reason]
    assert prompts.rejected[0].row == 1
    assert prompts.rejected[0].detail.startswith("line 2: ")


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([3, 4]), "not_text"),
        (pa.array([b"x", b"y"]), "not_text"),
        (pa.array([1, 2], pa.timestamp("ns")), "not_text"),
        (pa.array([["x"], ["y"]]), "not_text"),
        (pa.array([None, None]), "null"),
    ],
)
def test_a_typed_column_that_is_not_text_rejects_each_row(column, reason, tmp_path):
    prompts = read(write_parquet(tmp_path / "p.parquet", pa.table({"prompt": column})), id_column=None)
    assert reasons(prompts) == [reason, reason]
    assert prompts.columns.num_rows == 0


def test_a_tool_answer_can_be_the_last_message(tmp_path):
    chat = [*CHAT, {"role": "assistant", "content": ""}, {"role": "tool", "content": ""}]
    assert len(read_rows(tmp_path, [{"prompt": chat}]).rows) == 1


def test_broken_lines_cost_only_themselves(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        b'\xef\xbb\xbf{"prompt": "one"}\r',
        b"",
        b"{",
        b'["prompt"]',
        b'{"prompt": "\xff"}',
        b'{"prompt": "half \\ud83d"}',
        b"  ",
        b'{"text": "two"}',
        b"[" * 100_000,
        b'{"n": ' + b"1" * 5000 + b"}",
        b'{"prompt": "whole \\ud83d\\ude00"}',
    ]
    path.write_bytes(b"\n".join(lines))
    prompts = read(path, id_column=None)
    assert [(one.row, one.prompt) for one in prompts.rows] == [(0, "one"), (8, "whole 😀")]
    assert [(one.row, str(one.reason)) for one in prompts.rejected] == [
        (1, "bad_json"),
        (2, "not_object"),
        (3, "bad_utf8"),
        (4, "bad_utf8"),
        (5, "missing"),
        (6, "bad_json"),
        (7, "bad_json"),
    ]
    assert prompts.rejected[0].detail.startswith("line 3: not JSON: ")


def test_a_line_of_any_depth_never_raises(tmp_path):
    for depth in range(800, 1100, 7):
        deep = "[" * depth + "]" * depth
        lines = [f'{{"prompt": {deep}}}', f'{{"prompt": "x", "key": {deep}}}', '{"prompt": "good", "key": 1}']
        path = write_bytes(tmp_path / "p.jsonl", "\n".join(lines).encode())
        assert [one.prompt for one in read(path).rows] == ["good"]


def test_bad_bytes_in_a_typed_column_cost_only_their_row(tmp_path):
    texts = pa.array([b"one", b"\xff", b"three"]).view(pa.string())
    prompts = read(write_stream(tmp_path / "p.arrow", pa.table({"prompt": texts})), id_column=None)
    assert [one.prompt for one in prompts.rows] == ["one", "three"]
    assert reasons(prompts) == ["bad_utf8"]


def test_ids_are_text_or_integers_and_the_first_usable_row_of_an_id_wins(tmp_path):
    ids = [7, "7", "", " ", None, True, 1.5, [1], "x", "x"]
    rows = [{"prompt": f"p{place}", "key": value} for place, value in enumerate(ids)]
    rows += [{"prompt": "no id"}, {"prompt": "", "key": "late"}, {"prompt": "late", "key": "late"}]
    prompts = read_rows(tmp_path, rows, id_column="key")
    assert [(one.row, one.prompt_id) for one in prompts.rows] == [(0, "7"), (8, "x"), (12, "late")]
    assert reasons(prompts) == ["duplicate_id", *["bad_id"] * 6, "duplicate_id", "bad_id", "empty"]
    assert prompts.rejected[0] == Rejected(1, "7", RejectReason.DUPLICATE_ID, "line 2: same id as line 1")


def test_without_ids_the_same_prompt_twice_is_a_duplicate(tmp_path):
    prompts = read_rows(tmp_path, [{"prompt": CHAT}, {"prompt": "x"}, {"prompt": CHAT, "n": 1}])
    assert prompts.rejected[0].detail == "line 3: same prompt as line 1"
    assert prompts.rejected[0].prompt_id == prompts.rows[0].prompt_id


def test_keys_that_some_lines_lack_become_null(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "f": {"x": 1}}, {"prompt": "c", "n": 2.5}]
    assert read_rows(tmp_path, rows).columns.to_pylist() == [
        {"n": 1.0, "f": None},
        {"n": None, "f": {"x": 1}},
        {"n": 2.5, "f": None},
    ]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([42, "42", None], ["42", "42", None]),
        (["x", {"a": "\u00e4"}], ["x", '{"a": "\u00e4"}']),
        ([1.5, True], ["1.5", "true"]),
        ([[1], [{"a": 1}]], ["[1]", '[{"a": 1}]']),
        ([1, 2**70], ["1", str(2**70)]),
        ([1.5, 2**60], ["1.5", str(2**60)]),
    ],
)
def test_a_column_whose_types_differ_is_text_and_costs_no_row(values, texts, tmp_path):
    rows = [{"prompt": str(place), "answer": value} for place, value in enumerate(values)]
    prompts = read_rows(tmp_path, rows)
    assert prompts.columns["answer"].to_pylist() == texts
    assert (len(prompts.rows), prompts.rejected) == (len(values), ())
    ((made, count),) = prompts.read_as.items()
    assert str(made) == "values of 'answer', whose types differ, were read as text"
    assert count == sum(value is not None and not isinstance(value, str) for value in values)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_columns_that_are_named_are_kept(name, tmp_path):
    path = FORMATS[name](tmp_path)
    assert read(path, columns=["score", "tags"]).columns.column_names == ["tags", "score"]
    assert read(path, columns=[]).columns.shape == (3, 0)
    assert read(path, columns=["score"], reserved=frozenset({"level"})).columns.column_names == ["score"]
    with pytest.raises(PromptError, match=r"no column 'scroe'.*data\.columns.*'prompt', 'key', 'level'"):
        read(path, columns=["scroe"])


def test_columns_that_are_not_kept_may_be_damaged_twofold_or_of_many_types(tmp_path):
    twofold = pa.table([["one"], ["a"], [1], [2]], names=["prompt", "key", "n", "n"])
    parts = tmp_path / "d"
    write_parquet(parts / "a.parquet", pa.table({"prompt": ["one"], "key": ["a"], "n": [1]}))
    write_parquet(parts / "b.parquet", pa.table({"prompt": ["two"], "key": ["b"], "n": [["x"]]}))
    with pytest.raises(PromptError, match=r"columns of its files differ in type.*data\.columns"):
        read(parts)
    assert len(read(parts, columns=[]).rows) == 2
    assert len(read(write_stream(tmp_path / "p.arrow", twofold), columns=[]).rows) == 1
    assert len(read(with_bad_extra_column(tmp_path), columns=[]).rows) == 1


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_of_many_rows_a_sample_is_the_same_each_time_and_names_their_lines(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_SAMPLE_ROWS", 40)
    rows = [{"prompt": f"p{i}" if i % 2 else "", "key": str(i), "level": i} for i in range(400)]
    write = {"jsonl": write_jsonl, "parquet": lambda path, rows: write_parquet(path, table_of(rows))}[name]
    path = write(tmp_path / f"p.{name}", rows)
    prompts = read(path, is_sample=True)
    assert (prompts.num_rows, prompts.num_total) == (40, 400)
    assert [one.prompt for one in prompts.rows] == [
        f"p{level}" for level in prompts.columns["level"].to_pylist()
    ]
    first = 1 if name == "jsonl" else 0
    assert all(f" {int(one.prompt_id) + first}: " in one.detail for one in prompts.rejected)
    assert read(path, is_sample=True) == prompts
    assert (read(path).num_rows, read(path).num_total) == (400, 400)


def test_a_mixed_value_in_a_row_that_is_left_out_does_not_matter(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "", "n": "x"}]
    assert read_rows(tmp_path, rows).columns.to_pylist() == [{"n": 1}]


def test_missing_columns_name_the_columns_there_are(tmp_path):
    for path in (FORMATS["jsonl"](tmp_path), FORMATS["parquet"](tmp_path)):
        with pytest.raises(
            PromptError, match=r"no column 'text'.*data\.prompt_column.*'prompt', 'key', 'level'"
        ):
            read(path, prompt_column="text")
        with pytest.raises(PromptError, match=r"no column 'uid'.*data\.id_column.*'prompt', 'key', 'level'"):
            read(path, id_column="uid")


def test_reserved_names_are_refused_except_for_the_prompt_and_the_id(tmp_path):
    path = FORMATS["jsonl"](tmp_path)
    read(path, reserved=frozenset({"prompt", "key"}))
    with pytest.raises(PromptError, match=r"reserved names: 'level', 'score'; rename.*data\.columns"):
        read(path, reserved=frozenset({"score", "level", "prompt"}))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([["one"], [1], [2]], names=["prompt", "n", "n"])
    with pytest.raises(PromptError, match="several columns of the name 'n'"):
        read(write_stream(tmp_path / "p.arrow", table), id_column=None)


def break_state(folder: Path, text: str) -> Path:
    write_saved(folder / "d", table_of(ROWS))
    (folder / "d" / "state.json").write_text(text)
    return folder / "d"


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


def lose_a_shard(folder: Path) -> Path:
    write_saved(folder / "d", table_of(ROWS), shards=2)
    (folder / "d" / "data-00001-of-00002.arrow").unlink()
    return folder / "d"


def write_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


def with_bad_extra_column(folder: Path) -> Path:
    bad = pa.array([b"\xff"]).view(pa.string())
    return write_stream(folder / "p.arrow", pa.table({"prompt": ["one"], "key": ["a"], "note": bad}))


WHOLE_SOURCE_TROUBLE = {
    "missing": (lambda folder: folder / "none.jsonl", r"none\.jsonl does not exist; name a \.jsonl"),
    "empty": (lambda folder: write_bytes(folder / "p.parquet", b""), "is empty"),
    "blank": (lambda folder: write_bytes(folder / "p.jsonl", b"\n \n"), "has no rows"),
    "no rows": (lambda folder: write_parquet(folder / "p.parquet", table_of(ROWS).slice(9)), "has no rows"),
    "extension": (
        lambda folder: write_bytes(folder / "p.txt", b"prompt"),
        r"extension '\.txt'; name a \.jsonl",
    ),
    "cut gz": (
        lambda folder: write_bytes(folder / "p.jsonl.gz", gzip.compress(jsonl_of(ROWS))[:-9]),
        r"p\.jsonl\.gz cannot be read \(Truncated compressed stream\)",
    ),
    "wrong sum of gz": (
        lambda folder: write_bytes(folder / "p.jsonl.gz", gzip.compress(jsonl_of(ROWS))[:-8] + bytes(8)),
        r"cannot be read \(zlib inflate failed: incorrect data check\)",
    ),
    "no gz": (lambda folder: write_bytes(folder / "p.csv.gz", b"prompt,key\na,b\n"), "cannot be read"),
    "no zst": (lambda folder: write_bytes(folder / "p.jsonl.zst", jsonl_of(ROWS)), "cannot be read"),
    "nothing in gz": (lambda folder: write_bytes(folder / "p.json.gz", gzip.compress(b"")), "has no rows"),
    "array in gz": (
        lambda folder: write_bytes(folder / "p.json.gz", gzip.compress(b'[\n{"prompt": "a"}\n]\n')),
        "is one JSON array, and JSON Lines are wanted",
    ),
    "header alone": (lambda folder: write_bytes(folder / "p.csv", b"prompt,key\n"), "has no rows"),
    "open quote": (
        lambda folder: write_bytes(folder / "p.csv", b'prompt,key\na,b\n"never closed,c\nd,e\n'),
        r"is no CSV from line 3 on \(unexpected end of data\); put text with commas",
    ),
    "text after a quote": (
        lambda folder: write_bytes(folder / "p.tsv", b'prompt\tkey\n"a"x\tb\n'),
        r"is no CSV from line 2 on \('\t' expected after '\"'\); put text",
    ),
    "columns of one name": (
        lambda folder: write_bytes(folder / "p.csv", b"prompt,key,key\na,b,c\n"),
        "several columns of the name 'key'",
    ),
    "semicolons": (
        lambda folder: write_bytes(folder / "p.csv", b"prompt;key\na;b\n"),
        r"no column 'prompt' in any row; set data\.prompt_column .*: 'prompt;key'",
    ),
    "csv in utf-16": (
        lambda folder: write_bytes(folder / "p.csv", "prompt,key\na,b\n".encode("utf-16")),
        "its header is not UTF-8 text; save it as UTF-8",
    ),
    "no extension": (lambda folder: write_bytes(folder / "p", b"prompt"), "extension ''"),
    "utf-16": (
        lambda folder: write_bytes(folder / "p.json", '{"prompt": "x"}'.encode("utf-16")),
        "line 1 is not UTF-8",
    ),
    "not parquet": (
        lambda folder: write_bytes(folder / "p.parquet", b"x" * 99),
        r"p\.parquet cannot be read",
    ),
    "cut parquet": (lambda folder: cut(FORMATS["parquet"](folder)), r"p\.parquet cannot be read"),
    "not arrow": (lambda folder: write_bytes(folder / "p.arrow", b"x" * 99), r"p\.arrow cannot be read"),
    "cut stream": (lambda folder: cut(FORMATS["arrow stream"](folder)), r"p\.arrow cannot be read"),
    "cut arrow file": (lambda folder: cut(FORMATS["arrow file"](folder)), r"p\.arrow cannot be read"),
    "bad bytes": (with_bad_extra_column, "column 'note' is corrupt"),
    "other folder": (
        lambda folder: make_folder(folder / "d", "x.csv", "y.txt"),
        r"directory with 'x\.csv', 'y\.txt'; name",
    ),
    "empty folder": (lambda folder: make_folder(folder / "d"), "directory with nothing; name"),
    "wrong split": (
        lambda folder: write_saved_splits(folder / "d", test=table_of(ROWS), dev=table_of(ROWS)),
        r"no split 'train'; set data\.split to one of 'test', 'dev'",
    ),
    "broken state": (lambda folder: break_state(folder, "{"), r"state\.json is not what save_to_disk writes"),
    "state of another kind": (lambda folder: break_state(folder, "[]"), "is not what save_to_disk writes"),
    "state with odd files": (
        lambda folder: break_state(folder, '{"_data_files": [{}]}'),
        "is not what save_to",
    ),
    "state without files": (lambda folder: break_state(folder, "{}"), "names no data files"),
    "parquet of other splits": (
        lambda folder: write_parquet_splits(folder / "d", "test-00000-of-00001", "validation"),
        r"the splits 'test', 'validation', none of 'train'; set data\.split to one of them, or name a single",
    ),
    "lost shard": (lose_a_shard, r"data-00001-of-00002\.arrow cannot be read"),
    "bad indices": (
        lambda folder: write_saved(folder / "d", table_of(ROWS), indices=[9]),
        "cannot be read .*out of bounds",
    ),
}


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=9)


@given(st.lists(st.tuples(CELLS.filter(str.strip), CELLS), min_size=1, unique_by=lambda row: row[0]))
def test_what_pythons_csv_writes_is_read_as_it_was(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "p.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("", "prompt", "note"), *((i, *row) for i, row in enumerate(rows))])
    found = read(path, id_column=None)
    texts = [row.prompt for row in found.rows if isinstance(row.prompt, str)]
    assert list(zip(texts, found.columns["note"].to_pylist(), strict=True)) == rows
    assert found.columns.column_names == ["note"]  # the unnamed numbers of rows are left out


def test_rows_of_csv_that_do_not_fit_its_header_are_left_out_with_their_lines(tmp_path):
    path = write_bytes(tmp_path / "p.csv", b'prompt,key\r\n"a,\r\nb",1\r\n\r\nc, d,2\r\ncaf\xe9,3\r\ne,4\r\n')
    found = read(path)
    assert [(row.prompt, row.prompt_id) for row in found.rows] == [("a,\r\nb", "1"), ("e", "4")]
    assert reasons(found) == ["bad_csv", "bad_utf8"]
    assert found.rejected[0].detail.startswith("line 5: 3 fields, and the header has 2; put text with commas")
    assert found.rejected[1].detail == "line 6: not UTF-8 text"


@pytest.mark.parametrize("name", FORMATS)
def test_a_limit_takes_the_first_rows_as_if_there_were_no_others(name, tmp_path):
    path = FORMATS[name](tmp_path)
    for is_sample in (False, True):
        found = read(path, limit=3, is_sample=is_sample)
        assert [row.prompt_id for row in found.rows] == ["a", "b"]
        assert (found.num_total, reasons(found)) == (3, ["empty"])
    assert read(path, limit=9).num_total == 4
    scanned = [where for where, _ in sources.scan(path, "train", ["level"], 2, limit=3)]
    assert sum(map(len, scanned)) == 3


@pytest.mark.parametrize("name", WHOLE_SOURCE_TROUBLE)
def test_trouble_with_the_whole_source_is_one_line_that_names_it(name, tmp_path):
    make, message = WHOLE_SOURCE_TROUBLE[name]
    with pytest.raises(PromptError, match=message) as error:
        read(make(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["parquet", "arrow file", "arrow stream"])
def test_flipped_bytes_never_raise_anything_else(name, tmp_path):
    path = FORMATS[name](tmp_path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        for place in generator.integers(0, len(whole), 2):
            broken[place] = generator.integers(0, 256)
        path.write_bytes(broken)
        with contextlib.suppress(PromptError):
            read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "tool", "x"]), "content": st.text()})
)
OBJECTS = st.fixed_dictionaries(
    {}, optional={"prompt": st.text() | MESSAGES | JSON, "key": st.integers(0, 3) | JSON, "extra": JSON}
)


@given(values=st.lists(OBJECTS | JSON), blanks=st.integers(0, 3), id_column=st.sampled_from([None, "key"]))
def test_any_json_lines_are_accounted_for(values, blanks, id_column, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "p.jsonl"
    path.write_text(("\n" * blanks).join(json.dumps(value) + "\n" for value in values))
    try:
        prompts = read(path, id_column=id_column)
    except PromptError:
        return
    places = sorted([one.row for one in prompts.rows] + [one.row for one in prompts.rejected])
    assert places == list(range(len(values)))
    assert prompts.columns.num_rows == len(prompts.rows) == len({one.prompt_id for one in prompts.rows})


NUMBERS = st.integers(-(2**53), 2**53) | st.floats()
COLUMN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(values=st.lists(COLUMN, max_size=8))
def test_any_values_make_one_column_of_as_many(values):
    array, read_as = columns.column("answer", values)
    assert len(array) == len(values)
    assert array.null_count == values.count(None)
    assert not read_as or pa.types.is_string(array.type)


@given(lines=st.lists(st.binary(max_size=20) | st.text(string.printable, max_size=20).map(str.encode)))
def test_any_bytes_are_accounted_for(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "p.jsonl"
    content = b'{"prompt": "good"}\n' + b"\n".join(lines)
    path.write_bytes(content)
    prompts = read(path, id_column=None)
    filled = [line for line in content.split(b"\n") if line.strip()]
    assert len(prompts.rows) + len(prompts.rejected) == len(filled)


def test_rejected_rows_are_listed_and_summarized(tmp_path):
    rejected = [
        Rejected(3, None, RejectReason.TOO_LONG, "line 4: 900 tokens, 512 fit"),
        Rejected(5, "ä", RejectReason.EMPTY, "line 6: empty"),
        Rejected(6, "b", RejectReason.EMPTY, "line 7: empty"),
    ]
    write_rejected(tmp_path / "rejected.jsonl", rejected)
    lines = (tmp_path / "rejected.jsonl").read_text("utf-8").splitlines()
    first = {"row": 3, "prompt_id": None, "reason": "too_long", "detail": "line 4: 900 tokens, 512 fit"}
    assert json.loads(lines[0]) == first
    assert '"ä"' in lines[1]
    assert len(lines) == 3
    assert summarize(rejected) == "3 rows cannot be used: 2 empty, 1 too_long"
    assert summarize(rejected[:1]) == "1 row cannot be used: 1 too_long"
    assert summarize([]) == "all rows can be used"
