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


def policy_with(folder: Path, chat_template: str | None = None, added: tuple[str, ...] = ()) -> Path:
    """The policy with another tokenizer, to which a tilde is nothing."""
    tiny.make_policy(folder, chat_template=chat_template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(added))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    tokenizer.save_pretrained(folder)
    return folder


BAD = [
    {"id": "empty", "prompt": "  "},
    {"id": "long", "prompt": "x" * 53},
    {"id": "just", "prompt": "x" * 52},
    {"id": "twice", "prompt": "one"},
    {"id": "twice", "prompt": "two"},
    {"id": "null", "prompt": None},
    {"id": "tilde", "prompt": "~~"},
]


@pytest.fixture(scope="module")
def usual(models, tmp_path_factory) -> tuple[Run, Done]:
    rows = [{"id": "a", "prompt": "hello", "answer": 42, "tags": ["x", "y"]}, *BAD]
    folder = tmp_path_factory.mktemp("usual")
    run, done = prepared(models, folder, rows, f"model.policy={policy_with(folder / 'policy')}")
    assert done.code == 0, done.log
    return run, done


def test_unusable_rows_are_left_out_counted_and_listed(usual):
    run, done = usual
    assert table(run)["prompt_id"].to_pylist() == ["a", "just", "twice", *(f"good{i}" for i in range(8))]
    reasons = {"empty": "empty", "long": "too_long", "twice": "duplicate_id", "null": "null"}
    assert listed(run) == reasons | {"tilde": "no_tokens"}
    assert "5 rows cannot be used" in done.log
    assert read_record(run.paths, PREPARE).metrics["rejected"] == 5


def test_the_users_own_columns_are_kept(usual):
    row = table(usual[0]).slice(0, 1).to_pylist()[0]
    policy = usual[0].config.model.policy
    assert (row["answer"], row["tags"]) == (42, ["x", "y"])
    assert row["prompt_tokens"] == AutoTokenizer.from_pretrained(policy)("hello")["input_ids"]


def test_what_the_run_was_made_from_is_recorded_with_its_hash(models, usual):
    run, _ = usual
    recorded = read_record(run.paths, PREPARE).inputs
    policy = Path(run.config.model.policy) / "model.safetensors"
    for path in (Path(run.config.data.prompts), policy, models / "reward_model/config.json"):
        digest, size, _ = recorded[f"file:{path}"].split(":")
        assert (len(digest), int(size)) == (32, path.stat().st_size)


def test_preparing_twice_gives_the_same_prompts(models, usual, tmp_path):
    words = (f"data.prompts={usual[0].config.data.prompts}", f"model.policy={usual[0].config.model.policy}")
    run = make_run(models, tmp_path / "run", *words)
    assert stage(run, "prepare").code == 0
    first, second = (read_record(made.paths, PREPARE).outputs for made in (usual[0], run))
    arrow = [[one.xxh3_128 for one in outputs if ".arrow" in one.path] for outputs in (first, second)]
    assert arrow[0] == arrow[1]


STOPPING = {
    # rows beside the good ones, settings, what the log says
    "too few": (
        BAD[:1],
        ("data.prompts_per_iteration=10",),
        ("has 8 usable rows, fewer than data.prompts_per_iteration=10", "unusable rows are listed in"),
    ),
    "chats without a template": (
        [{"id": "c", "prompt": [{"role": "user", "content": "hi"}]}],
        (),
        ("tokenizer has no chat template",),
    ),
    "another tokenizer than the model's": (
        [{"id": f"a{i}", "prompt": f"an <extra> word {i}"} for i in range(9)],
        ("model.policy=FOLDER/policy",),
        ("in 9 prompts its tokenizer gives ids that the model has no embedding for",),
    ),
    "nothing held out": (
        [],
        ("data.heldout=FOLDER/heldout.jsonl", "evaluate.every=1"),
        ("/heldout.jsonl has no usable row",),
    ),
    "columns named as a rule's arguments": (
        [{"id": "a", "prompt": "a", "prompts": "x", "responses": "x"}],
        ("+reward.components.r={kind: rule, function: 'operator:add'}",),
        ("reserved names: 'prompts', 'responses'",),
    ),
    "a rule that cannot be imported": (
        [],
        ("+reward.components.r={kind: rule, function: 'json:no_such'}",),
        ("reward.components.r.function=json:no_such", "has no 'no_such'"),
    ),
    "adapters of other layers": (
        [],
        ("+update.lora={target_modules: [q_proj, c_attn]}",),
        ("update.lora.target_modules: the policy has no linear layer 'c_attn'; it has down_proj",),
    ),
}


@pytest.mark.parametrize("name", STOPPING)
def test_what_stops_a_run_before_its_first_rollout(name, models, tmp_path):
    rows, words, said = STOPPING[name]
    if "FOLDER/policy" in "".join(words):
        policy_with(tmp_path / "policy", added=("<extra>",))
    tiny.write_jsonl(tmp_path / "heldout.jsonl", [{"id": "h", "prompt": " "}])
    _, done = prepared(models, tmp_path, rows, *(word.replace("FOLDER", str(tmp_path)) for word in words))
    assert done.code == 2
    assert [part for part in said if part not in done.log] == [], done.log
    assert "Traceback" not in done.log


def test_chat_messages_go_through_the_templates_of_the_policy_and_of_reward_models(models, tmp_path):
    """A row that one of them refuses is left out: else the run would end in its first reward task."""
    policy = policy_with(tmp_path / "policy", CHAT)
    judge = tiny.make_reward_model(tmp_path / "judge", chat_template=CHAT.replace("system", "tool"))
    asked = {"role": "user", "content": "hi"}
    rows = [{"id": role, "prompt": [{"role": role, "content": "42"}, asked]} for role in ("system", "tool")]
    rows += [{"id": f"c{i}", "prompt": [{"role": "user", "content": str(i)}]} for i in range(8)]
    words = (f"model.policy={policy}", f"reward.components.rm.path={judge}")
    prompts = tiny.write_jsonl(tmp_path / "mine.jsonl", rows)
    run = make_run(models, tmp_path / "run", f"data.prompts={prompts}", *words)
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    row = table(run).slice(0, 1).to_pylist()[0]
    assert row["prompt_text"] == "<user>0<assistant>"
    assert json.loads(row["prompt_messages"]) == rows[2]["prompt"]
    assert row["prompt_tokens"] == AutoTokenizer.from_pretrained(policy)("<user>0<assistant>")["input_ids"]
    assert listed(run) == {"system": "bad_message", "tool": "bad_message"}
    (path,) = run.paths.data.glob("prompts.rejected.*.jsonl")
    said = path.read_text()
    assert "the policy's chat template refuses it: no system here" in said
    assert f"the chat template of reward.components.rm.path={judge} refuses it: no tool here" in said


def test_tools_calls_and_arguments_reach_the_policy_and_what_was_read_otherwise_is_counted(models, tmp_path):
    template = (
        "{% if tools %}{{ tools[0].name }}{% endif %}{% for m in messages %}"
        "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% endfor %}{% endfor %}{{ mode }}"
    )
    policy = policy_with(tmp_path / "policy", template)
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


def test_heldout_prompts_are_prepared_too(models, tmp_path):
    heldout = tiny.write_jsonl(
        tmp_path / "heldout.jsonl", [{"id": f"h{i}", "prompt": f"h {i}"} for i in range(5)]
    )
    run, done = prepared(
        models, tmp_path, [], f"data.heldout={heldout}", "evaluate.every=1", "evaluate.num_prompts=3"
    )
    assert done.code == 0, done.log
    assert table(run, "heldout")["prompt_id"].to_pylist() == ["h0", "h1", "h2"]


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


def test_validate_says_what_prepare_says(models, tmp_path, slurm_ppo):
    """Counts, reasons and examples, of text and of chats; prepare has transformers, validate only files."""
    policy = policy_with(tmp_path / "policy", CHAT)
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
