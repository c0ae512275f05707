"""Prepare: whatever is wrong with the user's prompts shows before the first rollout, with a way out."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from pipeline.run.commits import read_record
from pipeline.run.directory import Run
from pipeline.run.schemas import PROMPTS
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE
from stages.context import Context, UserError
from stages.tasks import prepare
from tests.support import tiny
from tests.support.processes import Done, config_of, make_run, stage

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prepared(models: Path, folder: Path, rows: list[dict], *more: str) -> tuple[Run, Done]:
    """A run on these rows plus eight good ones."""
    good = [{"id": f"good{i}", "prompt": f"good {i}"} for i in range(8)]
    path = tiny.write_jsonl(folder / "mine.jsonl", [*rows, *good])
    run = make_run(models, folder / "run", f"data.prompts={path}", *more)
    return run, stage(run, "prepare")


def table(run: Run, part: str = ""):
    return read_shard(run.paths, read_record(run.paths, PREPARE), PROMPTS, part)


def listed(run: Run) -> dict[str | None, str]:
    (path,) = run.paths.data.glob("prompts.rejected.*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["prompt_id"]: row["reason"] for row in rows}


def policy_with(models: Path, folder: Path, **changes: object) -> Path:
    """The policy with another tokenizer configuration."""
    tiny.make_policy(folder, chat_template=changes.pop("chat_template", None))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "added" in changes:
        tokenizer.add_tokens([changes["added"]])
    if "normalizer" in changes:
        tokenizer.backend_tokenizer.normalizer = changes["normalizer"]
    tokenizer.save_pretrained(folder)
    return folder


BAD = [
    {"id": "empty", "prompt": "  "},
    {"id": "long", "prompt": "x" * 53},
    {"id": "just", "prompt": "x" * 52},
    {"id": "twice", "prompt": "one"},
    {"id": "twice", "prompt": "two"},
    {"id": "null", "prompt": None},
]


def test_unusable_rows_are_left_out_counted_and_listed(models, tmp_path):
    run, done = prepared(models, tmp_path, BAD)
    assert done.code == 0, done.log
    assert table(run)["prompt_id"].to_pylist() == ["just", "twice", *(f"good{i}" for i in range(8))]
    assert listed(run) == {"empty": "empty", "long": "too_long", "twice": "duplicate_id", "null": "null"}
    assert "4 rows cannot be used" in done.log
    assert read_record(run.paths, PREPARE).metrics["rejected"] == 4


def test_unusable_rows_can_be_fatal(models, tmp_path):
    run, done = prepared(models, tmp_path, BAD, "data.bad_rows=fatal")
    assert done.code == 2
    assert "Traceback" not in done.log
    assert "4 rows cannot be used" in done.log
    assert "data.bad_rows=fatal" in done.log
    assert set(listed(run)) == {"empty", "long", "twice", "null"}
    assert read_record(run.paths, PREPARE) is None


def test_a_prompt_of_no_tokens_cannot_be_used(models, tmp_path):
    policy = policy_with(models, tmp_path / "policy", normalizer=normalizers.Replace("~", ""))
    run, done = prepared(models, tmp_path, [{"id": "tilde", "prompt": "~~"}], f"model.policy={policy}")
    assert done.code == 0, done.log
    assert listed(run) == {"tilde": "no_tokens"}


def test_tools_calls_and_arguments_reach_the_policy_and_what_was_read_otherwise_is_counted(models, tmp_path):
    template = (
        "{% if tools %}{{ tools[0].name }}{% endif %}{% for m in messages %}"
        "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% endfor %}{% endfor %}{{ mode }}"
    )
    policy = policy_with(models, tmp_path / "policy", chat_template=template)
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    said = [{"role": "user", "name": "Ann", "content": [{"type": "text", "text": "q"}]}]
    rows = [
        {"id": "a", "prompt": [*said, called, {"role": "tool", "content": "r"}], "tools": [{"name": "t"}]},
        {"id": "b", "prompt": json.dumps(said)},
    ]
    more = (f"model.policy={policy}", "model.chat_template_arguments={mode: brief}")
    run, done = prepared(models, tmp_path, rows, *more)
    assert done.code == 0, done.log
    found = table(run).slice(0, 2)
    assert found["prompt_text"].to_pylist() == ["t<user>q<assistant>f<tool>rbrief", "<user>qbrief"]
    assert found["prompt_tools"].to_pylist() == ['[{"name": "t"}]', None]
    assert json.loads(found["prompt_messages"][0].as_py())[1] == called
    metrics = read_record(run.paths, PREPARE).metrics
    assert "1 rows: messages or tools written as JSON text were read as what it says" in done.log
    assert "2 rows: the policy's chat template does not write name" in done.log
    assert (metrics["read_as/joined_parts"], metrics["read_as/json_text"]) == (2, 1)
    assert metrics["left_out"] == 2 + 2 + 1 + 1  # the name, and what a model without a template does not read


def test_too_few_usable_rows_stop_the_run(models, tmp_path):
    _, done = prepared(models, tmp_path, BAD[:1], "data.prompts_per_iteration=10")
    assert done.code == 2
    assert "has 8 usable rows, fewer than data.prompts_per_iteration=10" in done.log
    assert "unusable rows are listed in" in done.log


def test_the_users_own_columns_are_kept(models, tmp_path):
    run, done = prepared(models, tmp_path, [{"id": "a", "prompt": "hello", "answer": 42, "tags": ["x", "y"]}])
    assert done.code == 0, done.log
    row = table(run).slice(0, 1).to_pylist()[0]
    assert (row["answer"], row["tags"]) == (42, ["x", "y"])
    assert row["prompt_tokens"] == AutoTokenizer.from_pretrained(models / "policy")("hello")["input_ids"]


def test_chat_messages_go_through_the_policys_template(models, tmp_path):
    policy = policy_with(models, tmp_path / "policy", chat_template=CHAT)
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"id": "chat", "prompt": messages}]
    path = tiny.write_jsonl(tmp_path / "mine.jsonl", rows * 1)
    run = make_run(
        models,
        tmp_path / "run",
        f"data.prompts={path}",
        f"model.policy={policy}",
        "data.prompts_per_iteration=1",
        "rollout.num_shards=1",
        "update.minibatches=1",
    )
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    (row,) = table(run).to_pylist()
    assert row["prompt_text"] == "<user>hi<assistant>"
    assert json.loads(row["prompt_messages"]) == messages
    assert row["prompt_tokens"] == AutoTokenizer.from_pretrained(policy)("<user>hi<assistant>")["input_ids"]


def test_messages_that_the_template_refuses_are_unusable_rows(models, tmp_path):
    policy = policy_with(models, tmp_path / "policy", chat_template=CHAT)
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    good = [{"id": f"c{i}", "prompt": [{"role": "user", "content": str(i)}]} for i in range(8)]
    path = tiny.write_jsonl(tmp_path / "mine.jsonl", [{"id": "system", "prompt": turns}, *good])
    run = make_run(models, tmp_path / "run", f"data.prompts={path}", f"model.policy={policy}")
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    assert listed(run) == {"system": "bad_message"}
    (path,) = run.paths.data.glob("prompts.rejected.*.jsonl")
    assert "no system here" in path.read_text()


SCORED = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("bad_rows", ["drop", "fatal"])
def test_messages_that_a_reward_models_template_refuses_are_unusable_rows(models, tmp_path, bad_rows):
    """Else the run would end in its first reward task, after a rollout."""
    policy = policy_with(models, tmp_path / "policy", chat_template=CHAT)
    judge = tiny.make_reward_model(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = SCORED
    tokenizer.save_pretrained(judge)
    turns = [{"role": "tool", "content": "42"}, {"role": "user", "content": "hi"}]
    good = [{"id": f"c{i}", "prompt": [{"role": "user", "content": str(i)}]} for i in range(8)]
    path = tiny.write_jsonl(tmp_path / "mine.jsonl", [{"id": "tool", "prompt": turns}, *good])
    words = [f"model.policy={policy}", f"reward.components.rm.path={judge}", f"data.bad_rows={bad_rows}"]
    run = make_run(models, tmp_path / "run", f"data.prompts={path}", *words)
    done = stage(run, "prepare")
    assert done.code == (2 if bad_rows == "fatal" else 0), done.log
    assert listed(run) == {"tool": "bad_message"}
    (path,) = run.paths.data.glob("prompts.rejected.*.jsonl")
    assert (
        f"the chat template of reward.components.rm.path={judge} refuses it: no tools here"
        in path.read_text()
    )


def test_chat_messages_without_a_template_stop_the_run(models, tmp_path):
    path = tiny.write_jsonl(
        tmp_path / "mine.jsonl", [{"id": "c", "prompt": [{"role": "user", "content": "hi"}]}]
    )
    run = make_run(models, tmp_path / "run", f"data.prompts={path}")
    done = stage(run, "prepare")
    assert done.code == 2
    assert "tokenizer has no chat template" in done.log


def test_a_prompt_with_an_id_beyond_the_models_vocabulary_is_left_out(models, tmp_path):
    policy = policy_with(models, tmp_path / "policy", added="<extra>")
    run, done = prepared(
        models, tmp_path, [{"id": "a", "prompt": "an <extra> word"}], f"model.policy={policy}"
    )
    assert done.code == 0, done.log
    assert listed(run) == {"a": "unknown_token"}


def test_a_tokenizer_that_is_not_the_models_own_stops_the_run(models, tmp_path):
    policy = policy_with(models, tmp_path / "policy", added="<extra>")
    rows = [{"id": f"a{i}", "prompt": f"an <extra> word {i}"} for i in range(9)]
    _, done = prepared(models, tmp_path, rows, f"model.policy={policy}")
    assert done.code == 2
    assert "in 9 prompts its tokenizer gives ids that the model has no embedding for" in done.log


def test_heldout_prompts_are_prepared_too(models, tmp_path):
    heldout = tiny.write_jsonl(
        tmp_path / "heldout.jsonl", [{"id": f"h{i}", "prompt": f"h {i}"} for i in range(5)]
    )
    run, done = prepared(
        models, tmp_path, [], f"data.heldout={heldout}", "evaluate.every=1", "evaluate.num_prompts=3"
    )
    assert done.code == 0, done.log
    assert table(run, "heldout")["prompt_id"].to_pylist() == ["h0", "h1", "h2"]


def test_heldout_prompts_of_which_none_can_be_used_stop_the_run(models, tmp_path):
    heldout = tiny.write_jsonl(tmp_path / "heldout.jsonl", [{"id": "h", "prompt": " "}])
    _, done = prepared(models, tmp_path, [], f"data.heldout={heldout}", "evaluate.every=1")
    assert done.code == 2
    assert f"data.heldout={heldout} has no usable row" in done.log


@pytest.mark.parametrize("name", ["prompts", "responses"])
def test_a_column_that_would_clash_with_a_rules_arguments_is_refused(models, tmp_path, name):
    rule = ("+reward.components.r={kind: rule, function: 'operator:add'}",)
    _, done = prepared(models, tmp_path, [{"id": "a", "prompt": "a", name: "x"}], *rule)
    assert done.code == 2
    assert f"reserved names: {name!r}" in done.log or f"reserved names: {name}" in done.log


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("json:no_such", "has no 'no_such'"),
        ("json:__doc__", "not a function"),
    ],
)
def test_a_rule_that_cannot_be_imported_stops_the_run_before_the_first_rollout(
    models, tmp_path, function, why
):
    _, done = prepared(models, tmp_path, [], f"+reward.components.r={{kind: rule, function: '{function}'}}")
    assert done.code == 2
    assert f"reward.components.r.function={function}" in done.log
    assert why in done.log
    assert "Traceback" not in done.log


def test_lora_of_layers_that_the_policy_lacks_stops_the_run_before_the_first_rollout(models, tmp_path):
    _, done = prepared(models, tmp_path, [], "+update.lora={target_modules: [q_proj, c_attn]}")
    assert done.code == 2
    assert "update.lora.target_modules: the policy has no linear layer 'c_attn'; it has down_proj" in done.log
    assert "Traceback" not in done.log


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj, mlp.up_proj]"])
def test_lora_that_fits_the_policy_is_found_good_without_its_weights(models, tmp_path, targets):
    config = config_of(models, tmp_path / "run", f"+update.lora={{target_modules: {targets}}}")
    policy = Path(shutil.copytree(models / "policy", tmp_path / "policy"))
    (policy / "model.safetensors").write_bytes(b"no weights")
    prepare.check_lora(replace(config, model=replace(config.model, policy=str(policy))))


def test_without_peft_a_run_with_lora_stops_before_the_first_rollout(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    run = make_run(models, tmp_path / "run", "+update.lora={rank: 4}")
    with pytest.raises(UserError, match=r"update\.lora needs peft: pip install \"slurm-ppo\[train\]\""):
        prepare.run(PREPARE, Context(run.paths, run.config, PREPARE, "1-ab"))


def test_what_the_run_was_made_from_is_recorded_with_its_hash(models, tmp_path):
    run, done = prepared(models, tmp_path, [])
    assert done.code == 0, done.log
    recorded = read_record(run.paths, PREPARE).inputs
    for path in (
        tmp_path / "mine.jsonl",
        models / "policy/model.safetensors",
        models / "reward_model/config.json",
    ):
        digest, size, _ = recorded[f"file:{path}"].split(":")
        assert (len(digest), int(size)) == (32, path.stat().st_size)


def test_preparing_twice_gives_the_same_prompts(models, tmp_path):
    tables = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run, done = prepared(models, tmp_path / name, BAD)
        assert done.code == 0, done.log
        record = read_record(run.paths, PREPARE)
        tables.append([(entry.bytes, entry.xxh3_128) for entry in record.outputs if ".arrow" in entry.path])
    assert tables[0] == tables[1]


def test_validate_says_what_prepare_says(models, tmp_path, slurm_ppo):
    """Counts, reasons and examples, of text and of chats; prepare has transformers, validate only files."""
    policy = policy_with(
        models, tmp_path / "policy", chat_template=CHAT, normalizer=normalizers.Replace("~", "")
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
    begin = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(policy)
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    settings |= {"add_bos_token": False, "sep_token": "<sep>"}
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"id": f"x{i}", "prompt": "x" * i} for i in range(46, 56)]
    rows += [{"id": f"c{i}", "prompt": [{"role": "user", "content": "y" * i}]} for i in range(30, 40)]
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows += [
        {"id": "system", "prompt": system},
        {"id": "sep", "prompt": "a<sep>"},
        {"id": "null", "prompt": None},
    ]
    run, done = prepared(models, tmp_path, rows, f"model.policy={policy}")
    assert done.code == 0, done.log
    assert set(listed(run).values()) == {"too_long", "bad_message", "unknown_token", "null"}
    (tmp_path / "other").mkdir()
    words = tiny.overrides(models, tmp_path / "other/run", f"model.policy={policy}")
    said = slurm_ppo("validate", *words, f"data.prompts={tmp_path / 'mine.jsonl'}")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("data.prompts: "))
    end = next(i for i, line in enumerate(lines) if line.startswith("warning: data.prompts"))
    logged = [re.sub(r"^\S+ \S+ INFO ", "", line) for line in done.log.splitlines()]
    logged = [re.sub(r"^\S+ \S+ WARNING ", "warning: ", line) for line in logged]
    assert "\n".join(lines[begin : end + 1]) in "\n".join(logged)


def test_more_dropped_rows_than_allowed_stop_the_run_before_its_first_rollout(models, tmp_path):
    rows = [{"id": f"l{i}", "prompt": "x" * 60} for i in range(9)]
    run, done = prepared(models, tmp_path, rows)
    assert done.code == 2
    assert "9 of 17 rows (53%) cannot be used, most are too_long; lower rollout.max_new_tokens" in done.log
    assert "or set data.max_dropped=1; unusable rows are listed in" in done.log
    assert len(listed(run)) == 9
    allowed = make_run(
        models, tmp_path / "other", f"data.prompts={tmp_path / 'mine.jsonl'}", "data.max_dropped=0.6"
    )
    done = stage(allowed, "prepare")
    assert done.code == 0, done.log
    assert "WARNING data.prompts: 9 of 17 rows (53%) cannot be used" in done.log


LONG = [{"id": "long", "prompt": "-" * 40 + "the end of a long one"}, {"id": "empty", "prompt": ""}]


def test_a_prompt_that_is_too_long_can_be_truncated_on_the_left(models, tmp_path):
    more = ("data.max_prompt_tokens=21", "data.long_prompts=truncate")
    run, done = prepared(models, tmp_path, LONG, *more)
    assert done.code == 0, done.log
    rows = {row["prompt_id"]: row for row in table(run).to_pylist()}
    assert rows["long"]["prompt_text"] == "the end of a long one"
    assert len(rows["long"]["prompt_tokens"]) == 21
    assert rows["good1"]["prompt_text"] == "good 1"
    assert "1 prompts truncated to their last 21 tokens" in done.log
    assert read_record(run.paths, PREPARE).metrics["truncated"] == 1
    assert listed(run) == {"empty": "empty"}


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("data.long_prompts=drop", "data.bad_rows=drop"), 0),
        (("data.long_prompts=fatal", "data.bad_rows=drop"), 2),
        (("data.bad_rows=fatal",), 2),
    ],
)
def test_or_dropped_or_fatal(models, tmp_path, overrides, code):
    run, done = prepared(models, tmp_path, LONG[:1], "data.max_prompt_tokens=21", *overrides)
    assert done.code == code, done.log
    assert listed(run) == {"long": "too_long"}
    assert code == 0 or f"1 row cannot be used: 1 too_long ({overrides[0]}); listed in" in done.log
