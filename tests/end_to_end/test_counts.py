"""What of a user's prompts and rewards was left out, cut, masked or read otherwise is in every row of a run,
as ``validate`` has said it before. Runs of light tasks.
"""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pipeline.run.directory import load_run
from tests.support import light, tiny
from tests.support.killing import events

SPECIALS = (*light.SPECIALS, "<s>")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RULES = """
import json
from pathlib import Path


def picky(*, responses, answer, **columns):
    bad = json.loads(Path(__file__).with_name("bad.json").read_text())
    if answer[0] in bad:
        raise ValueError(f"hard: {answer[0]}")
    return [1.0] * len(responses)
"""


@pytest.fixture
def odd(inputs, tmp_path) -> Path:
    """Inputs of which much is not as it should be: a policy padded to 300 ids, whose tokenizer begins texts
    with ``<s>``, and prompts of every kind that is read otherwise than it is written."""
    folder = tmp_path / "inputs"
    policy = light.make_directory(folder / "policy", 0, specials=SPECIALS, chat_template=TEMPLATE)
    shutil.copytree(inputs / "reward_model", folder / "reward_model")
    shutil.copy(inputs / "words.json", folder)
    settings = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(settings | {"vocab_size": 300}))
    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(policy / "tokenizer.json"))

    def said(content: object, **more: object) -> list[dict]:
        return [{"role": "user", "content": content, **more}]

    prompts = [
        *(f"say {i}" for i in range(4)),
        "<s>as a template wrote it",
        "<s>and another",
        json.dumps(said("as text")),
        said([{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]),
        said("by a name", name="Ann"),
        said("with a null", name=None),
        said("far too long for a policy of a few tokens " * 2),
        {"not": "a prompt"},
        "no answer",
    ]
    rows = [{"id": i, "prompt": prompt, "answer": i} for i, prompt in enumerate(prompts)]
    rows[0] |= {"answer": "0", "tools": [{"name": "beside text"}]}
    rows[-1]["answer"] = None
    light.write_jsonl(folder / "prompts.jsonl", rows)
    light.write_jsonl(folder / "heldout.jsonl", [{"id": "h", "prompt": "<s>held out", "answer": "7"}])
    return folder


IN_EVERY_ROW = {
    "data/prompts": 11,
    "data/rejected": 2,
    "data/rejected/not_text": 1,
    "data/rejected/bad_answer": 1,
    "data/truncated": 1,
    "data/read_as/json_text": 1,
    "data/read_as/joined_parts": 1,
    "data/read_as/null_keys": 1,
    "data/read_as/unused_tools": 1,
    "data/read_as/values_as_text": 10,
    "data/read_as/one_begin_token": 3,
    "data/left_out": 2,
    "data/masked_ids": 300 - 256 - len(SPECIALS),
}
IN_WORDS = (
    "data.prompts: 11 usable rows in ",
    "; 2 rows cannot be used: 1 bad_answer, 1 not_text",
    "  1 prompts truncated to their last 52 tokens",
    "  1 rows: messages or tools written as JSON text were read as what it says",
    "  1 rows: text parts of a message's content were joined",
    "  1 rows: keys of a message that are null were left out",
    "  1 rows: tools beside plain text, which no template makes a prompt of, are not given to the policy",
    "  10 rows: values of 'answer', whose types differ, were read as text",
    "  2 rows: text that begins with the token that the tokenizer adds by itself was given no second one",
    "  1 rows: the policy's chat template does not write name",
    "policy: 41 ids that its tokenizer has no token for are never written",
)


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_what_was_left_out_cut_masked_or_read_otherwise_is_said_before_a_run_and_in_each_of_its_rows(
    odd, slurm_ppo, tmp_path
):
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "bad.json").write_text(json.dumps([*map(str, range(10))]))
    failing = "{kind: rule, function: my_rules:picky, on_error: score, max_failed: 1, trial: false}"
    words = tiny.overrides(
        odd,
        tmp_path / "run",
        f"+reward.components.mine={failing}",
        "+reward.components.sum={kind: rule, function: numeric_match, arguments: {column: answer}}",
        "data.long_prompts=truncate",
        f"data.heldout={odd / 'heldout.jsonl'}",
        "evaluate.every=2",
    )
    seen = slurm_ppo("validate", *words, "model.tokenizer=null", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert [text for text in IN_WORDS if text not in seen.stdout] == []
    done = slurm_ppo("run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert {name: value for name, value in row.items() if name.startswith("data/")} == IN_EVERY_ROW
        assert row["reward/unscored"] == 0
        assert row["reward/mine/failed"] > 0
    # A reward model with a tokenizer of its own reads the whole message, the policy the end of it.
    assert sum(row["reward/rm/truncated"] for row in rows) >= 1
    assert rows[-1]["evaluate/reward/mine/failed"] == 1


@pytest.fixture
def picky(inputs, slurm_ppo, tmp_path):
    """``slurm-ppo run`` of an iteration of 16 responses in two shards; its rule raises at some answers."""
    (tmp_path / "my_rules.py").write_text(RULES)
    rule = "{kind: rule, function: my_rules:picky, on_error: score, trial: false}"

    def call(bad: list[int], *more: str):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        given = ("iterations=1", "data.prompts_per_iteration=16", "data.shuffle=false")
        words = tiny.overrides(inputs, tmp_path / "run", *given, f"+reward.components.mine={rule}", *more)
        return slurm_ppo("run", *words, cwd=tmp_path)

    return call


def test_a_rule_may_fail_at_its_share_of_an_iteration_however_it_is_divided_among_shards(picky, tmp_path):
    """One of 8 in a shard is more than a tenth; of the iteration's 16 it is less."""
    done = picky([3])
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "run")[0]["reward/mine/failed"] == 1


def test_a_rule_that_fails_at_more_of_an_iteration_ends_it_and_goes_on_once_it_is_mended(
    picky, slurm_ppo, tmp_path
):
    """No shard alone has more than a tenth of 16."""
    done = picky([0, 9])
    assert done.returncode == 2, done.stderr
    assert (
        "reward component 'mine' (my_rules:picky) failed at 2 of 16 responses of iteration 1, a larger share "
        "than max_failed=0.1; slurm-ppo logs RUN reward@1 shows the first of each shard (most, 1, are in "
        "shard 0); fix the rule and go on with slurm-ppo resume RUN --from reward@1"
    ) in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "bad.json").write_text("[]")
    mended = slurm_ppo("resume", tmp_path / "run", "--from", "reward@1", cwd=tmp_path)
    assert mended.returncode == 0, mended.stderr
    assert rows_of(tmp_path / "run")[0]["reward/mine/failed"] == 0


def test_a_shard_that_has_more_than_its_iteration_may_ends_in_its_own_task(picky, tmp_path):
    done = picky([0, 1])
    assert done.returncode != 0
    said = "failed at 2 of 8 responses, a larger share than max_failed=0.1 of the 16 of the iteration"
    assert said in done.stderr
    tasks = {event["task"] for event in events(load_run(tmp_path / "run").paths.root, "failed")}
    assert all("reward" in task for task in tasks)
