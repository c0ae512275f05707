"""A look before training: what is shown of a small run, and that nothing is left of it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.cli.try_run import TryOptions, try_run
from pipeline.config.findings import Findings
from pipeline.config.issue import UserError
from pipeline.config.resolve import configure_what_can_be
from tests.support import tiny
from tests.support.tables import sample


def test_a_few_prompts_are_sampled_scored_and_trained_on_and_nothing_is_left(slurm_ppo, inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "runs" / "first", "rollout.samples_per_prompt=2")
    done = slurm_ppo("try", *words, "--prompts", 4, "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert (found["prompts"], found["responses"]) == (4, 8)
    assert [one["job_kind"] for one in found["stages"]] == ["prepare", "rollout", "reward", "update"]
    assert len({sample["prompt_id"] for sample in found["samples"]}) == 4
    assert all(set(sample["components"]) == {"rm"} for sample in found["samples"])
    outlook = {one["job_kind"]: one["tasks"] for one in found["outlook"]["stages"]}
    assert outlook == {"rollout": 2, "reward": 2, "update": 1}
    assert found["outlook"]["run"]["low"] > found["outlook"]["iteration"]["low"]
    assert list(tmp_path.iterdir()) == []


def test_its_responses_are_those_that_the_run_will_sample(slurm_ppo, inputs, complete_run, tmp_path):
    """The same seeds and prompts: what is looked at is what will be trained on."""
    found = json.loads(slurm_ppo("try", *tiny.overrides(inputs, tmp_path / "run"), "--json").stdout)
    lines = slurm_ppo("samples", f"{complete_run}@1", "--json", "--best", 8, "--full").stdout.splitlines()
    run = {one["prompt_id"]: one["response"] for one in map(json.loads, lines)}
    assert {one["prompt_id"]: one["response"] for one in found["samples"]} == run


def test_its_folder_can_be_kept_and_is_looked_at_as_any_run(slurm_ppo, inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "runs" / "run")
    done = slurm_ppo("try", *words, "--keep", "--prompts", 2)
    assert done.returncode in (0, 1), done.stderr
    (kept,) = (tmp_path / "runs").iterdir()
    assert f"kept: {kept}" in done.stderr
    assert slurm_ppo("status", kept).returncode == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "What the run would take: 2 iterations of 8 responses" in done.stdout
    assert f"measured in {kept.name}, median of 1 iterations" in slurm_ppo("plan", *words).stdout


def test_more_prompts_than_an_iteration_has_are_refused(slurm_ppo, inputs, tmp_path):
    done = slurm_ppo("try", *tiny.overrides(inputs, tmp_path / "run"), "--prompts", 9)
    assert done.returncode == 2
    assert "--prompts 9: an iteration of the run has data.prompts_per_iteration=8" in done.stderr


def test_where_run_would_be_refused_it_is_too_and_nothing_is_touched(
    slurm_ppo, inputs, complete_run, tmp_path
):
    (tmp_path / "file").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in complete_run.rglob("*") if "locks" not in path.parts}
    for place, said in (
        (complete_run, "already holds a run"),
        (tmp_path / "file", "is a file, not a directory"),
    ):
        done = slurm_ppo("try", *tiny.overrides(inputs, place))
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, said in line) == (2, True), done.stderr
    after = {path: path.stat().st_mtime_ns for path in complete_run.rglob("*") if "locks" not in path.parts}
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_task_that_fails_is_named_with_the_end_of_its_log(slurm_ppo, inputs, tmp_path):
    """And what a try has left here that was killed, which no later one takes away."""
    left = tmp_path / "run-try-0a1b2c"
    left.mkdir()
    (left / "weights").write_bytes(b"0" * 2048)
    unreadable = tmp_path / "run-try-0a1b2d"
    unreadable.mkdir()
    (unreadable / "locks").touch()
    (tmp_path / "strict.py").write_text(
        "def empty(responses, **more):\n    return [{'': 0.0}[r] for r in responses]\n"
    )
    rule = ("reward=rule", "reward.components.rule.function=strict:empty", "scheduler.max_attempts=1")
    done = slurm_ppo("try", *tiny.overrides(inputs, tmp_path / "run", *rule), "--prompts", 2, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "failed: iteration 1 reward shard 0, attempt 1 (error)" in done.stderr
    assert "its folder is removed; --keep leaves it, with all logs" in done.stderr
    told = f"left of a try that was kept or killed: 2.0 KiB; if none is running: rm -r {left}"
    assert told in done.stderr
    assert sorted(tmp_path.glob("run*")) == [left, unreadable]


# --- set-ups that cannot work ---

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}"
"""A chat template that writes no beginning of an answer."""


def no_generation_prompt(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    rows = [{"id": str(i), "prompt": [{"role": "user", "content": f"Q{i}"}]} for i in range(8)]
    tiny.write_jsonl(folder.parent / "chats.jsonl", rows)
    return [f"data.prompts={folder.parent / 'chats.jsonl'}"]


def no_end_token(folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        for key in ("eos_token", "eos_token_id"):
            content.pop(key, None)
        (folder / name).write_text(json.dumps(content))
    return []


def never_rewarded(folder):
    rows = [{"id": str(i), "prompt": f"prompt {i}", "answer": "7"} for i in range(8)]
    tiny.write_jsonl(folder.parent / "answers.jsonl", rows)
    rule = ("reward=rule", "reward.components.rule.function=regex_match")
    form = "reward.components.rule.arguments.pattern=boxed"
    return [f"data.prompts={folder.parent / 'answers.jsonl'}", *rule, form]


def long_prompts(folder):
    rows = [{"id": str(i), "prompt": f"{i} " + "word " * 20} for i in range(8)]
    tiny.write_jsonl(folder.parent / "long.jsonl", rows)
    return [f"data.prompts={folder.parent / 'long.jsonl'}"]


def other_tokenizer(folder):
    """One whose ids the model has no embedding for, in part."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    settings["model"]["vocab"] = {token: id_ + 90 * (id_ > 1) for token, id_ in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    return []


BROKEN = {
    no_generation_prompt: "its chat template has no generation prompt: an answer stands behind",
    no_end_token: "neither the model nor its tokenizer names an end token",
    never_rewarded: "the reward is never above 0, not even for the answers of the first look",
    long_prompts: "most are too_long",
    other_tokenizer: "it is not the model's own tokenizer",
}


class Begun(Exception):
    """The small run has begun: all that is to be said before has been."""


@pytest.fixture
def before_tasks(inputs, tmp_path, monkeypatch, capsys):
    """What ``try`` says before it starts anything: of a copy of the policy that a function has changed."""

    def begin(*given):
        raise Begun

    def said(breaks):
        folder = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
        words = tiny.overrides(inputs, tmp_path / "run", *breaks(folder), f"model.policy={folder}")
        monkeypatch.setattr("pipeline.cli.try_run._carried_out", begin)
        found, refused = Findings(), ""
        config = configure_what_can_be([*words, "model.tokenizer=null"], None, found)
        try:
            with pytest.raises(Begun):
                try_run(config, found, TryOptions(prompts=2))
        except UserError as error:
            refused = str(error)
        return " ".join(f"{capsys.readouterr().out} {refused}".split())

    return said


@pytest.mark.parametrize("breaks", sample(list(BROKEN), 0.4, lambda one: one.__name__))
def test_a_set_up_that_cannot_work_is_named_before_any_task(before_tasks, breaks):
    assert BROKEN[breaks] in before_tasks(breaks)


def test_a_sound_one_is_shown_as_the_policy_reads_it_without_a_warning(before_tasks):
    said = before_tasks(lambda folder: [])
    assert re.match(r"The first prompt as the policy reads it, \d+ tokens: say [ab]+\d+", said)
    assert "A response ends at: 1 '<eos>' (model, tokenizer)" in said
    assert "warning" not in said
