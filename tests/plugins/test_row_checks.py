"""Answers are checked before anything is generated: a run does not end at row 8 of 8."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.checks.prompts import as_read
from pipeline.config.reward import OnError, RuleConfig
from pipeline.data import sources
from pipeline.data.prompts import read_prompts
from pipeline.plugins.load import PluginError
from pipeline.plugins.row_checks import CHUNK_ROWS, chunks_of, row_problems
from pipeline.plugins.sandbox import open_calls
from pipeline.plugins.trial import OpenRule, plugin_of
from pipeline.run.commits import read_record
from pipeline.run.tasks import PREPARE
from tests.support import tiny
from tests.support.processes import Done, make_run, stage

RULES = """
def check(rows, *, longest, **arguments):
    return ["too long" if len(row["answer"]) > longest else None for row in rows]

def short(*, responses, answer, longest, **columns):
    return [0.0 for _ in responses]

def other(*, responses, **columns):
    return [0.0 for _ in responses]

def fragile(*, responses, **columns):
    return [1 / len(r) for r in responses]

short.check = check
other.check = lambda rows: ["no"]
"""


@pytest.fixture
def problems(tmp_path, monkeypatch) -> Callable[..., list[tuple[int, str]]]:
    """Problems of a prompt file's columns, by a rule."""
    (tmp_path / f"{tmp_path.name}_checks.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def find(function: str, arguments: dict | None = None, **columns: list) -> list[tuple[int, str]]:
        name = function if "_match" in function else f"{tmp_path.name}_checks:{function}"
        rule = RuleConfig(function=name, arguments=arguments or {})
        with open_calls(plugin_of("rule", rule), 1) as calls:
            opened = OpenRule("rule", rule, calls)
            return list(row_problems([opened], chunks_of(pa.table(columns)), "data.prompts=p.jsonl"))

    return find


def test_ready_rules_name_every_row_without_an_answer(problems):
    of_text = {"ground_truth": ["1", None, "x", ""]}
    assert problems("exact_match", **of_text) == [(1, "reward rule: 'ground_truth' is missing or null")]
    assert problems("numeric_match", **of_text) == [
        (1, "reward rule: 'ground_truth' is missing or null"),
        (2, "reward rule: 'ground_truth' holds no number: 'x'"),
        (3, "reward rule: 'ground_truth' holds no number: ''"),
    ]
    of_lists = {"right": [["1"], [], ["1", None], ["1", "x"]]}
    assert problems("numeric_match", {"column": "right"}, **of_lists) == [
        (1, "reward rule: 'right' is an empty list"),
        (2, "reward rule: 'right' has a null among its answers"),
        (3, "reward rule: 'right' holds no number: 'x'"),
    ]


def test_rows_of_every_chunk_are_checked(problems):
    values = ["1"] * (2 * CHUNK_ROWS + 1)
    values[CHUNK_ROWS] = values[-1] = None
    assert [index for index, _ in problems("exact_match", ground_truth=values)] == [
        CHUNK_ROWS,
        2 * CHUNK_ROWS,
    ]


def test_a_rule_of_the_users_own_may_check_rows_and_most_have_no_check(problems):
    assert problems("short", {"longest": 2}, answer=["ab", "abc"]) == [(1, "reward rule: too long")]
    assert problems("fragile", answer=["ab", None]) == []
    with pytest.raises(PluginError, match=r"function=.*:other: its check of data.prompts=p.jsonl returned 1"):
        problems("other", answer=["ab", "abc"])
    with pytest.raises(PluginError, match=r"rows; one entry for each row is wanted: None, or text"):
        problems("other", answer=["ab", "abc"])
    with pytest.raises(
        PluginError, match=r"cannot be called with rows, x: .* write it as check\(rows, \*\*arg"
    ):
        problems("other", {"x": 1}, answer=["ab"])
    with pytest.raises(PluginError, match=r"its check of data.prompts=p.jsonl raised TypeError: object"):
        problems("short", {"longest": 2}, answer=["ab", None])


@pytest.fixture
def validate(inputs, tmp_path, slurm_ppo) -> Callable[..., Done]:
    """``slurm-ppo validate`` of a run with numeric_match over a prompt file."""

    def call(prompts: Path, *more: str, function: str = "numeric_match") -> Done:
        words = [word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("reward")]
        words += ["reward=rule", f"reward.components.rule.function={function}", f"data.prompts={prompts}"]
        done = slurm_ppo("validate", *words, *more, cwd=tmp_path, timeout=60)
        return Done(done.returncode, done.stdout + done.stderr)

    return call


COLUMN = "reward.components.rule.arguments.column=answer"


def lines(path: Path, answers: list) -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": i, "prompt": f"say {i}", "answer": one}) + "\n" for i, one in enumerate(answers)
        )
    )
    return path


def test_validate_and_prepare_leave_out_the_row_whose_answer_is_missing(validate, inputs, tmp_path):
    prompts = lines(tmp_path / "p.jsonl", ["1"] * 8 + [None])
    done = validate(prompts, COLUMN)
    assert done.code == 0, done.log
    assert "8 usable rows" in done.log
    assert "bad_answer: line 9: reward rule: 'answer' is missing or null" in done.log
    refused = validate(prompts, COLUMN, "data.max_dropped=0")
    assert refused.code == 2
    assert "1 of 9 rows (11%) cannot be used, most are bad_answer" in refused.log
    rule = "+reward.components.rule={kind: rule, function: numeric_match, arguments: {column: answer}}"
    run = make_run(inputs, tmp_path / "run", rule, f"data.prompts={prompts}")
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    record = read_record(run.paths, PREPARE)
    assert record is not None
    assert record.metrics["rejected"] == 1.0


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_validate_checks_all_rows_of_a_file_of_which_it_tokenises_a_sample(validate, tmp_path, suffix):
    answers = ["1"] * 25_000
    answers[13] = answers[20_017] = None
    prompts = lines(tmp_path / "p.jsonl", answers)
    if suffix == ".parquet":
        count = range(len(answers))
        rows = {"id": count, "prompt": [f"say {i}" for i in count], "answer": answers}
        prompts = tmp_path / "p.parquet"
        pq.write_table(pa.table(rows), prompts)
    done = validate(prompts, COLUMN)
    assert done.code == 0, done.log
    assert "2 of all 25,000 rows are bad_answer, the first " in done.log
    assert f"{'line 14' if suffix == '.jsonl' else 'row 13'}: reward rule: 'answer' is miss" in done.log


def test_a_column_that_the_file_lacks_is_one_error(validate, tmp_path):
    done = validate(lines(tmp_path / "p.jsonl", ["1"] * 8))
    assert done.code == 2
    assert "the prompt file has no column 'ground_truth'; it has: answer; see arguments.column" in done.log
    assert done.log.count("error: ") == 1


def test_a_rule_that_fails_at_an_empty_response_is_a_warning_where_it_has_a_score(validate, tmp_path):
    (tmp_path / "my_checks.py").write_text(RULES)
    prompts = lines(tmp_path / "p.jsonl", ["1"] * 8)
    done = validate(prompts, f"reward.components.rule.on_error={OnError.SCORE}", function="my_checks:fragile")
    assert done.code == 0, done.log
    assert "warning: reward.components.rule.function=my_checks:fragile: raised ZeroDivisionError" in done.log
    assert "it gets error_score=0" in done.log


def test_a_scan_reads_what_a_file_has_and_skips_what_is_no_row(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\nbroken\n[1]\n{"b": 2}\n{"a": 3, "b": null}')
    found = list(sources.scan(path, "train", ["a", "b"], 2))
    assert found == [
        (["line 1", "line 5"], {"a": [1, None], "b": [None, 2]}),
        (["line 6"], {"a": [3], "b": [None]}),
    ]


@pytest.mark.parametrize("answers", [["1", 42, 2.5, None, True], [1, 2, None], [["1"], None]])
def test_a_scan_gives_rules_what_reading_the_whole_file_does(tmp_path, answers):
    path = lines(tmp_path / "p.jsonl", answers * 4)
    read = read_prompts(
        path, prompt_column="prompt", id_column=None, split="train", columns=["answer"]
    ).columns
    (_, values), *_ = sources.scan(path, "train", ["answer"], 100)
    assert as_read(values, read.schema)["answer"] == read["answer"].to_pylist()
