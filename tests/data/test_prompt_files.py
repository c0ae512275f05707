"""Files of every writer and messages of every shape: read alike, or refused in words; and what validate
accepts a run takes.

With SOAK_ROUNDS=20, as `make soak` has it, 500 inputs of each kind are tried instead of 25.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.arrow_types import python_value
from pipeline.data.chat import Rendering
from pipeline.data.checks import judge
from pipeline.data.enough import check_sets
from pipeline.data.messages import Message
from pipeline.data.prompts import PromptError, Prompts
from pipeline.data.rendering import ScoringTemplate
from pipeline.data.tokenizer_files import read_tokenizer
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import HELDOUT_SET, PROMPTS
from pipeline.run.shards import write_in_chunks
from pipeline.run.wide import repeat
from stages.rewards.rows import tools_of, values_of
from stages.tasks.prepare import joined, prompt_table
from tests.support.chats import (
    ANY,
    CALL,
    CHAT,
    MANY,
    RENDERING,
    ROUNDS,
    TEMPLATES,
    TOOL,
    WORDS,
    policy_folder,
    read,
    tokenizers,
)
from tests.support.processes import config_of

# --- writers ---


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
    return path


def by_pandas(path: Path, rows: list[dict]) -> Path:
    pd.DataFrame(rows).to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def by_pandas_with_categories(path: Path, rows: list[dict]) -> Path:
    frame = pd.DataFrame(rows).astype({"answer": "category"})
    frame.to_feather(path.with_suffix(".feather"))
    return path.with_suffix(".feather")


def as_polars_has_it(kind: pa.DataType) -> pa.DataType:
    """Texts as views, lists with 64-bit offsets."""
    if pa.types.is_string(kind):
        return pa.string_view()
    if pa.types.is_list(kind):
        return pa.large_list(as_polars_has_it(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_polars_has_it(field.type)) for field in kind])
    return kind


def polars_table(rows: list[dict]) -> pa.Table:
    table = pa.Table.from_pylist(rows)
    return table.cast(pa.schema([field.with_type(as_polars_has_it(field.type)) for field in table.schema]))


def as_polars(path: Path, rows: list[dict]) -> Path:
    """Without the views in lists, which Arrow does not write into Parquet files."""
    table, views = pa.Table.from_pylist(rows), polars_table(rows)
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(index, field.name, views.column(index))
    return write_parquet(path.with_suffix(".parquet"), table)


def write_arrow(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def as_polars_arrow(new: Callable) -> Callable[[Path, list[dict]], Path]:
    def write(path: Path, rows: list[dict]) -> Path:
        table, path = polars_table(rows), path.with_suffix(".arrow")
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        return path

    return write


def as_spark(path: Path, rows: list[dict]) -> Path:
    table, half = pa.Table.from_pylist(rows), len(rows) // 2
    for part, piece in enumerate((table.slice(0, half), table.slice(half))):
        name = f"part-0000{part}-7a3f-c000.snappy.parquet"
        write_parquet(path / name, piece)
        (path / f".{name}.crc").write_bytes(b"crc")
    (path / "_SUCCESS").touch()
    (path / "._SUCCESS.crc").touch()
    return path


def as_on_the_hub(path: Path, rows: list[dict]) -> Path:
    table, half = pa.Table.from_pylist(rows), len(rows) // 2
    write_parquet(path / "data" / "train-00000-of-00002.parquet", table.slice(0, half))
    write_parquet(path / "data" / "train-00001-of-00002.parquet", table.slice(half))
    write_parquet(path / "data" / "test-00000-of-00001.parquet", table.slice(0, 1))
    (path / "README.md").write_text("A data set.")
    (path / ".git").mkdir()
    return path


def by_datasets(path: Path, rows: list[dict]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(path)
    return path


def with_json_column(path: Path, rows: list[dict]) -> Path:
    """As datasets stores what has a type of its own in each row."""
    plain = {key: [row.get(key) for row in rows] for key in rows[0]}
    texts = pa.array([None if value is None else json.dumps(value) for value in plain.pop("prompt")])
    table = pa.table({"prompt": pa.ExtensionArray.from_storage(pa.json_(), texts), **plain})
    return write_parquet(path.with_suffix(".parquet"), table)


def polars_itself(path: Path, rows: list[dict]) -> Path:
    import polars

    frame = polars.DataFrame(rows, infer_schema_length=None)
    if len(rows) % 2:
        frame.write_ipc(path.with_suffix(".arrow"))
        return path.with_suffix(".arrow")
    frame.write_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def duckdb_itself(path: Path, rows: list[dict]) -> Path:
    import duckdb

    lines, path = write_jsonl(path, rows), path.with_suffix(".parquet")
    duckdb.sql(f"COPY (SELECT * FROM read_json('{lines}', format='newline_delimited')) TO '{path}'")
    return path


WRITERS = {
    "pandas": by_pandas,
    "pandas with categories": by_pandas_with_categories,
    "polars": as_polars,
    "polars, arrow file": as_polars_arrow(pa.ipc.new_file),
    "polars, arrow stream": as_polars_arrow(pa.ipc.new_stream),
    "spark": as_spark,
    "hub": as_on_the_hub,
    "datasets": by_datasets,
    "json column": with_json_column,
    "polars itself": polars_itself,
    "duckdb itself": duckdb_itself,
}


# --- files ---


def said_of(read_as: Counter) -> dict[str, int]:
    """Counts by what people are told."""
    return {str(reading): count for reading, count in read_as.items()}


def rows_with(prompt: st.SearchStrategy) -> st.SearchStrategy[list[dict]]:
    row = st.fixed_dictionaries(
        {
            "prompt": prompt,
            "answer": WORDS,
            "level": st.none() | st.integers(0, 9),
            "tools": st.none() | st.lists(TOOL, max_size=2),
        }
    )
    return st.lists(row, min_size=2, max_size=6)


def content(prompts: Prompts) -> list[tuple]:
    return [(one.prompt_id, one.prompt, one.tools) for one in prompts.rows]


@pytest.mark.soak
@pytest.mark.parametrize("writer", WRITERS)
@given(rows=rows_with(WORDS) | rows_with(CHAT))
@settings(MANY, max_examples=8 * ROUNDS if ROUNDS == 1 else 25 * ROUNDS)
def test_every_writer_gives_the_prompts_of_the_same_json_lines(writer, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    expected = read(write_jsonl(folder / "expected", rows))
    found = read(WRITERS[writer](folder / "given", rows))
    assert content(found) == content(expected)
    assert [one.reason for one in found.rejected] == [one.reason for one in expected.rejected]
    answers = [rows[one.row]["answer"] for one in expected.rows]
    assert found.columns["answer"].to_pylist() == answers


NAMES = st.text("aä _-=.$'", min_size=1, max_size=6) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20
)


@given(names=st.lists(NAMES, min_size=1, max_size=3))
@MANY
def test_a_file_is_read_whatever_the_folders_above_it_are_called(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths").joinpath(*(name.strip(".") or "x" for name in names))
    folder.mkdir(parents=True)
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    assert content(read(as_on_the_hub(folder / "d", rows))) == content(read(write_jsonl(folder / "p", rows)))


def test_a_folder_whose_folders_hold_several_sets_names_them(tmp_path):
    for name in ("main", "socratic"):
        write_parquet(tmp_path / name / "train-00000-of-00001.parquet", pa.table({"prompt": ["x"]}))
    with pytest.raises(
        PromptError, match="Parquet files in the folders 'main', 'socratic'; name one of them"
    ):
        read(tmp_path)
    assert len(read(tmp_path / "main").rows) == 1


def test_a_column_in_the_name_of_a_folder_is_not_lost_silently(tmp_path):
    write_parquet(tmp_path / "lang=en" / "part-0.parquet", pa.table({"prompt": ["x"]}))
    with pytest.raises(PromptError, match="in the folders 'lang=en'; name one of them"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    ['[{"prompt": "x"}]', '[\n  {\n    "prompt": "x"\n  }\n]\n', '[{"prompt": "x"},\n{"prompt": "y"}]'],
    ids=["one line", "indented", "an object on each line"],
)
def test_one_json_array_is_refused_with_the_way_to_json_lines(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(
        PromptError, match="one JSON array, and JSON Lines are wanted: an object on each line; jq"
    ):
        read(tmp_path / "p.json")


def test_one_json_object_on_several_lines_is_refused_with_what_is_wanted(tmp_path):
    (tmp_path / "p.json").write_text('{\n  "train": [{"prompt": "x"}]\n}\n')
    with pytest.raises(PromptError, match="one JSON object on several lines, and JSON Lines are wanted"):
        read(tmp_path / "p.json")


def test_a_column_of_json_type_is_its_values_or_their_text_where_they_differ(tmp_path):
    """As datasets stores mixed types (on_mixed_types="use_json")."""

    def column(*values: Any) -> pa.Array:
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in values]))

    table = pa.table(
        {"prompt": ["a", "b"], "alike": column({"x": 1}, {"x": 2}), "mixed": column({"x": 1}, "gold")}
    )
    found = read(write_parquet(tmp_path / "p.parquet", table))
    assert found.columns["alike"].to_pylist() == [{"x": 1}, {"x": 2}]
    assert found.columns["mixed"].to_pylist() == ['{"x": 1}', "gold"]
    assert said_of(found.read_as) == {"values of 'mixed', whose types differ, were read as text": 1}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "feather"])
def test_of_a_large_file_the_same_rows_are_looked_at_as_would_be_read(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.data.sources._SAMPLE_ROWS", 50)
    rows = [{"prompt": f"prompt {i}", "answer": str(i)} for i in range(1000)]
    write = {"jsonl": write_jsonl, "parquet": as_polars, "feather": by_pandas_with_categories}[suffix]
    path = write(tmp_path / "p", rows)
    whole, sample = read(path), read(path, is_sample=True)
    assert (sample.num_rows, sample.num_total, whole.num_rows) == (50, 1000, 1000)
    texts = {one.where: one.prompt for one in whole.rows}
    assert all(texts[one.where] == one.prompt for one in sample.rows)
    assert sample.columns["answer"].to_pylist() == [one.prompt.removeprefix("prompt ") for one in sample.rows]


def test_every_layout_of_a_column_is_the_same_values():
    import pyarrow.compute as pc

    from pipeline.data.arrow_types import plain

    views = pa.array(["a", None], pa.string_view())
    columns = {
        "runs": pc.run_end_encode(pa.array(["a", "a"])),
        "category": pa.DictionaryArray.from_arrays(pa.array([0, 1]), views),
        "list view": pa.array([["a"], None], pa.list_view(pa.string_view())),
        "map": pa.array([[("k", "v"), ("none", None)], None], pa.map_(pa.string(), pa.string_view())),
        "struct": pa.array([{"k": "v"}, {"other": 1}]),
    }
    table = plain(pa.table(columns))
    table.validate(full=True)
    assert [python_value(one) for column in table.columns for one in column] == [
        *("a", "a"),
        *("a", None),
        *(["a"], None),
        *({"k": "v", "none": None}, None),
        *({"k": "v"}, {"other": 1}),
    ]


@pytest.mark.parametrize("writer", ["polars, arrow file", "polars, arrow stream", "json column"])
def test_flipped_bytes_in_other_layouts_never_raise_anything_else(writer, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.data.sources._SAMPLE_ROWS", 10)
    rows = [{"prompt": f"a text beyond twelve bytes {i}", "answer": str(i) * 20} for i in range(40)]
    path = WRITERS[writer](tmp_path / "p", rows)
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for _ in range(100):
        broken = bytearray(whole)
        for place in generator.integers(0, len(whole), 3):
            broken[place] = generator.integers(0, 256)
        path.write_bytes(broken)
        for is_sample in (False, True):
            with contextlib.suppress(PromptError):
                read(path, is_sample=is_sample)


# --- messages ---

PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": WORDS | ANY}), max_size=2
)
LOOSE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "human"]) | ANY,
        "content": WORDS | PARTS | ANY,
        "tool_calls": st.lists(CALL, max_size=1) | ANY,
        "name": WORDS | ANY,
    },
)
LOOSE_ROW = st.fixed_dictionaries(
    {"prompt": CHAT | st.lists(LOOSE, max_size=3) | CHAT.map(json.dumps) | ANY},
    optional={
        "tools": st.lists(TOOL, max_size=1) | st.lists(TOOL, max_size=1).map(json.dumps) | ANY,
        "extra": ANY,
    },
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def config(inputs, tmp_path_factory):
    return config_of(inputs, tmp_path_factory.mktemp("run") / "run")


@pytest.mark.soak
@pytest.mark.parametrize("template", TEMPLATES)
@given(rows=st.lists(LOOSE_ROW, min_size=1, max_size=5))
@MANY
def test_what_validate_accepts_a_run_takes(template, rows, policy, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    path = write_jsonl(folder / "p", rows)
    with contextlib.suppress(PromptError):
        check_that_a_run_takes(read(path), path, template, policy, config)


def check_that_a_run_takes(found: Prompts, path: Path, template: str, policy: Path, config: Any) -> None:
    rows, folder = path.read_text().splitlines(), path.parent
    assert found.num_rows == len(rows)
    seen, ran = (
        judge("data.prompts", str(path), found, config, RENDERING, tokenizer)
        for tokenizer in tokenizers(policy, TEMPLATES[template])
    )
    assert (seen.kept, [str(row) for row in seen.rejected]) == (ran.kept, [str(row) for row in ran.rejected])
    assert [seen.texts[i] for i in seen.kept] == [ran.texts[i] for i in ran.kept]
    table = prompt_table(ran)
    write_in_chunks(RunPaths(folder), folder / "shard.arrow", table)
    with pa.ipc.open_file(str(folder / "shard.arrow")) as reader:
        stored = repeat(reader.read_all(), 3, plain=PROMPTS.names)
    assert values_of(stored["prompt_id"]) == [one for one in table["prompt_id"].to_pylist() for _ in range(3)]
    assert len(tools_of(stored)) == stored.num_rows == 3 * len(ran.kept)
    for name in found.columns.column_names:
        assert len(values_of(stored[name])) == stored.num_rows


def judged(policy: Path, config: Any, template: str, path: Path, rendering: Rendering = RENDERING):
    seen, _ = tokenizers(policy, template)
    return judge("data.prompts", str(path), read(path), config, rendering, seen)


CALLED = {
    "prompt": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "look it up",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ],
    "tools": [{"type": "function", "function": {"name": "w"}}],
}


def test_calls_tools_and_thoughts_reach_the_template(policy, config, tmp_path):
    path = write_jsonl(tmp_path / "p", [CALLED])
    found = judged(policy, config, TEMPLATES["tools and thinking"], path)
    assert found.texts == [
        '<tools>{"type": "function", "function": {"name": "w"}}</tools><user>weather?<assistant>'
        '<think>look it up</think><call>{"id": "c1", "type": "function", "function": {"name": "w", '
        '"arguments": "{}"}}</call><tool>rain(c1)'
    ]
    assert found.found.rows[0].prompt[1] == Message(
        "assistant", None, {key: CALLED["prompt"][1][key] for key in ("reasoning_content", "tool_calls")}
    )
    assert not found.left_out


def test_arguments_of_the_configuration_reach_the_policys_template(policy, config, tmp_path):
    path, given = write_jsonl(tmp_path / "p", [CALLED]), Rendering(0.0, {"enable_thinking": False})
    assert (
        judged(policy, config, TEMPLATES["tools and thinking"], path, given)
        .texts[0]
        .endswith("<think></think>")
    )


def test_a_template_that_leaves_out_calls_is_no_template_for_the_row(policy, config, tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
    named = {"prompt": [{"role": "user", "name": "Ann", "content": "Hi"}]}
    found = judged(policy, config, template, write_jsonl(tmp_path / "p", [CALLED, named]))
    (refused,) = found.rejected
    assert refused.reason == "bad_message"
    assert refused.detail == (
        "line 1: the policy's chat template leaves out tool_calls and tools, so that it would not read them"
    )
    assert found.left_out == {"the policy's chat template does not write name": 1}


def test_what_a_reward_model_does_not_read_of_a_prompt_is_counted(policy, config, tmp_path):
    """One without a chat template reads contents, a line each; a strict one refuses the row."""
    seen, _ = tokenizers(policy, TEMPLATES["tools and thinking"])
    path = write_jsonl(tmp_path / "p", [CALLED])
    plain, strict = read_tokenizer(policy), tokenizers(policy, TEMPLATES["strict"])[0]
    models = [
        ScoringTemplate(name, one, RENDERING) for name, one in {"plain": plain, "strict": strict}.items()
    ]
    found = judge("data.prompts", str(path), read(path), config, RENDERING, seen, models[:1])
    parts = ("reasoning_content", "tool_call_id", "tool_calls", "tools")
    assert found.left_out == {f"plain does not read {part}": 1 for part in parts}
    found = judge("data.prompts", str(path), read(path), config, RENDERING, seen, models)
    (refused,) = found.rejected
    assert refused.detail.startswith("line 1: the chat template of strict refuses it: ")


def test_messages_as_json_text_and_parts_of_text_are_read_and_counted(policy, config, tmp_path):
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]}
    ]
    rows = [{"prompt": text} for text in (json.dumps(chat), '[{"from": "me"}]', str(chat))]
    found = judged(policy, config, TEMPLATES["plain"], write_jsonl(tmp_path / "p", rows))
    assert found.texts == ["<user>What now?", '[{"from": "me"}]', str(chat)]
    assert said_of(found.read_as) == {
        "messages or tools written as JSON text were read as what it says": 1,
        "text parts of a message's content were joined": 1,
        "text that looks like chat messages, but is none in JSON (which has double "
        "quotes), is given to the policy as it is": 2,
    }


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": [{"type": "image", "image": "x.png"}]}, "only parts of text can be given"),
        ({"content": []}, "content is an empty list, not text"),
        ({"content": {"a": 1}}, "not text"),
        ({"content": "x", "weight": float("nan")}, "'weight' is float nan, which JSON does not hold"),
    ],
)
def test_a_message_that_no_template_takes_is_refused_by_row(message, why, tmp_path):
    (refused,) = read(write_jsonl(tmp_path / "p", [{"prompt": [{"role": "user", **message}]}])).rejected
    assert refused.reason == "bad_message"
    assert refused.detail.startswith("line 1: message 0: ")
    assert refused.detail.endswith(why)


def test_a_column_called_tools_that_holds_something_else_says_the_way_out(tmp_path):
    path = write_jsonl(tmp_path / "p", [{"prompt": [{"role": "user", "content": "Hi"}], "tools": ["hammer"]}])
    (refused,) = read(path).rejected
    assert (
        "not a list of tools, which are objects; give another column, or null, as data.tools_column"
        in refused.detail
    )
    assert read(path, tools_column=None).columns["tools"].to_pylist() == [["hammer"]]


def test_a_tools_column_that_was_named_is_there(tmp_path):
    path = write_jsonl(tmp_path / "p", [{"prompt": [{"role": "user", "content": "Hi"}], "functions": None}])
    with pytest.raises(PromptError, match=r"no column 'function' in any row; set data\.tools_column to"):
        read(path, tools_column="function")
    assert read(path).rows
    assert read(path, tools_column="functions").rows


def test_tools_reach_the_template_also_where_rules_get_other_columns_only(tmp_path):
    path = write_jsonl(tmp_path / "p", [{**CALLED, "answer": "x", "junk": [1, {}]}])
    found = read(path, columns=["answer"])
    assert found.rows[0].tools == tuple(CALLED["tools"])
    assert found.columns.to_pylist() == [{"answer": "x"}]
    twice = pa.table([["x"], [None], [None]], names=["prompt", "tools", "tools"])
    with pytest.raises(PromptError, match="several columns of the name 'tools'"):
        read(write_arrow(tmp_path / "twice.arrow", twice), columns=[])


def test_tools_beside_plain_text_are_counted_as_they_reach_no_template(tmp_path):
    rows = [{"prompt": "a", "tools": [{"name": "w"}]}, {"prompt": "b", "tools": []}, {"prompt": "c"}]
    said = "tools beside plain text, which no template makes a prompt of, are not given to the policy"
    assert said_of(read(write_jsonl(tmp_path / "p", rows)).read_as) == {said: 1}


def test_tools_of_every_kind_are_those_of_the_file_and_rules_get_them_too(tmp_path):
    """Descriptions of parameters differ from tool to tool, and would fit no column."""
    given = [[{"name": "a", "default": 1}], [{"name": "b", "default": {"x": "y"}}]]
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "tools": tools} for tools in given]
    found = read(write_jsonl(tmp_path / "p", rows))
    assert [list(one.tools) for one in found.rows] == given
    assert [json.loads(text) for text in found.columns["tools"].to_pylist()] == given
    assert said_of(found.read_as) == {"values of 'tools', whose types differ, were read as text": 2}


def test_the_date_of_a_template_is_that_of_the_run_on_whatever_node(policy, config, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "p", [{"prompt": [{"role": "user", "content": "Hi"}]}])
    for zone in ("Pacific/Kiritimati", "Pacific/Midway"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        texts = {
            tokenizer.__class__: judge("", "", read(path), config, Rendering(86_399.0), tokenizer).texts
            for tokenizer in tokenizers(policy, TEMPLATES["dated"])
        }
        assert [*texts.values()] == [["01 Jan 1970userHi"]] * 2
    monkeypatch.undo()
    time.tzset()


def test_sets_of_held_out_prompts_that_do_not_fit_are_refused_before_the_run(config, policy, tmp_path):
    """Text of Polars, with 64-bit offsets, is text; a number is none."""
    plain = [{"prompt": [{"role": "user", "content": str(i)}], "answer": "x"} for i in range(2)]
    files = {
        "jsonl": write_jsonl(tmp_path / "a", plain),
        "polars": as_polars(tmp_path / "b", plain),
        "number": write_jsonl(tmp_path / "c", [{**plain[0], "answer": 5}]),
    }
    sets = {name: judged(policy, config, TEMPLATES["plain"], path) for name, path in files.items()}
    sets = {name: replace(one, key=f"data.heldout.{name}") for name, one in sets.items()}
    check_sets([sets["jsonl"], sets["polars"]])
    tables = [prompt_table(sets["jsonl"]), prompt_table(sets["polars"])]
    assert joined(HELDOUT_SET, {"a": "x", "b": "x"}, tables).num_rows == 4
    with pytest.raises(PromptError, match=r"^data.heldout: the sets have columns .* rename one"):
        check_sets([sets["jsonl"], sets["number"]])


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def save_with_pipe(folder: Path) -> None:
    folder.mkdir()
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    os.mkfifo(folder / "data.arrow")


ODD_PATHS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "an empty folder": ("d", lambda path: path.mkdir()),
    "a folder called like a file": ("p.jsonl", lambda path: path.mkdir()),
    "a file in the way of Parquet": ("d", lambda path: (path / "x.parquet").mkdir(parents=True)),
    "a link to itself": ("p.jsonl", lambda path: path.symlink_to(path)),
    "a folder with a link to itself": ("d", lambda path: (path.mkdir(), (path / "l").symlink_to(path / "l"))),
    "a pipe": ("p.jsonl", make_fifo),
    "a pipe called Parquet": ("p.parquet", make_fifo),
    "a saved data set of a pipe": ("d", save_with_pipe),
    "a name of several lines": ("a\nb.jsonl", lambda path: path.write_text("x")),
    "a name that is too long": ("x" * 300 + ".jsonl", lambda path: None),
    "nothing but what Spark hides": ("d", lambda path: (path.mkdir(), (path / "_SUCCESS").touch())),
    "a Parquet file of no bytes": ("d", lambda path: (path.mkdir(), (path / "x.parquet").touch())),
    "text called Parquet": ("p.parquet", lambda path: path.write_text('{"prompt": "x"}\n')),
    "text called Arrow": ("p.arrow", lambda path: path.write_text('{"prompt": "x"}\n')),
    "a saved data set without its state": ("d", lambda path: (path / "data-0.arrow").mkdir(parents=True)),
    "a saved data set of nothing": ("d", lambda path: (path.mkdir(), (path / "state.json").write_text("[]"))),
}


@pytest.mark.parametrize("name", ODD_PATHS)
def test_whatever_lies_at_the_path_is_refused_in_one_line(name, tmp_path):
    file, make = ODD_PATHS[name]
    make(tmp_path / file)
    with pytest.raises(PromptError) as error:
        read(tmp_path / file, is_sample=True)
    assert "; " in str(error.value)
    assert "\n" not in str(error.value).replace(file, "")
