"""``slurm-ppo samples``: responses in the terminal, which obeys nothing that a model wrote."""

import json
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.samples import as_json, as_text, wrapped
from pipeline.config.scheduler import LocalConfig
from pipeline.metrics.samples import Sample, Samples, Turn
from pipeline.run.commits import publish
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support import reportrun


@pytest.fixture
def run(tmp_path):
    """A run in which two iterations are scored, with a response each that is meant to fool a terminal."""
    run = reportrun.make_run(tmp_path / "run", 2, iterations=9, scheduler=LocalConfig())
    for task in (PREPARE, Task(1, Stage.UPDATE)):
        assert publish(run.paths, reportrun.record(task))
    for iteration in (1, 2):
        for shard in range(2):
            names = [f"{iteration}.{shard}.{i}" for i in range(4)]
            rewards = [shard + i / 4 for i in range(4)]
            ids = ["one", "one", "two", "two"] if shard else None
            reportrun.commit_shard(
                run,
                iteration,
                shard,
                responses=names,
                rewards=rewards,
                prompt_ids=ids,
                sample_index=[0, 1, 0, 1],
            )
    return run


def texts(lines: list[str]) -> list[str]:
    """Responses that are shown."""
    return [lines[i + 1].strip() for i, line in enumerate(lines) if line.strip() == "response:"]


def test_without_a_word_two_of_each_of_the_newest_iteration(run, slurm_ppo):
    done = slurm_ppo("samples", run.paths.root)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "iteration 2, by policy 1: 6 of 8 responses, mean reward 0.875" in " ".join(lines[:3])
    assert texts(lines)[:4] == ["2.1.3", "2.1.2", "2.0.0", "2.0.1"]
    assert "best: reward 1.750 (rm 1.750, brevity 0.875), 5 tokens, stop, prompt two, sample" in lines
    assert max(map(len, lines)) <= 80


def test_what_is_asked_for_of_an_earlier_iteration(run, slurm_ppo):
    done = slurm_ppo("samples", f"{run.paths.root}@1", "--best", "1", "--worst", "2")
    assert texts(done.stdout.splitlines()) == ["1.1.3", "1.0.0", "1.0.1"]
    drawn = slurm_ppo("samples", run.paths.root, "--random", "4").stdout
    assert drawn == slurm_ppo("samples", run.paths.root, "--random", "4").stdout
    others = {slurm_ppo("samples", run.paths.root, "--random", 4, "--seed", seed).stdout for seed in range(4)}
    assert len(others) > 1


def test_all_responses_of_one_prompt(run, slurm_ppo):
    done = slurm_ppo("samples", run.paths.root, "--prompt", "one")
    assert texts(done.stdout.splitlines()) == ["2.1.0", "2.1.1"]
    best = slurm_ppo("samples", run.paths.root, "--prompt", "one", "--best", "1")
    assert texts(best.stdout.splitlines()) == ["2.1.1"]


def test_json_lines_have_stable_keys(run, slurm_ppo):
    done = slurm_ppo("samples", run.paths.root, "--best", "2", "--json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert list(first) == [
        *("choice", "iteration", "prompt_id", "sample_index", "prompt", "response", "reward"),
        *("components", "kl", "length", "finish_reason", "num_turns", "turns"),
    ]
    assert (first["choice"], first["response"], second["response"]) == ("best", "2.1.3", "2.1.2")


def test_spoilt_shards_are_named_beside_the_others(run, slurm_ppo):
    path = run.paths.task(Task(2, Stage.ROLLOUT, 1)).data("one")
    path.write_bytes(path.read_bytes()[::-1])
    done = slurm_ppo("samples", run.paths.root, "--best", "1")
    assert done.returncode == 0
    assert texts(done.stdout.splitlines()) == ["2.0.3"]
    assert done.stderr.startswith(
        "left out: iteration 2 rollout shard 1: iterations/00002/rollout/shard-00001"
    )
    (run.paths.root / "iterations/00002/reward/shard-00000.json").write_text("{")
    done = slurm_ppo("samples", run.paths.root)
    assert done.returncode == 2
    assert "error: none of the responses of iteration 2" in done.stderr.splitlines()[-1]


MISTAKES = [
    (["ROOT@7"], "iteration 7 of ROOT has no rewards yet; how far it is: slurm-ppo status ROOT"),
    (["ROOT@0"], "ROOT has iterations 1 to 9, and no iteration 0"),
    (["ROOT@best"], "ROOT has no best policy: none was evaluated"),
    (["ROOT", "--prompt", "prompt 1"], "2 prompts of iteration 2 have the text 'prompt 1'; give one's id"),
    (["ROOT", "--prompt", "three"], "iteration 2 has no prompt with the id 'three', nor one with that text"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes_are_one_line_with_the_way_out(run, slurm_ppo, words, said):
    root = str(run.paths.root)
    done = slurm_ppo("samples", *(word.replace("ROOT", root) for word in words))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said.replace("ROOT", root) in line


def test_before_anything_is_scored_one_line_says_so(tmp_path, slurm_ppo):
    run = reportrun.make_run(tmp_path / "run", scheduler=LocalConfig())
    done = slurm_ppo("samples", run.paths.root)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has no responses with rewards yet; how far it is: slurm-ppo status" in line


# --- how they are shown ---


def shown(width: int = 60, longest: int | None = None, **content: object) -> list[str]:
    given = {"prompt_id": "p", "sample_index": 0, "prompt": "Why?", "response": "So.", "reward": 0.5}
    sample = Sample(3, **(given | content))
    return list(as_text(Samples(3, (sample,), (None,), 1, 0.5), "runs/first", width, longest))


def test_what_a_terminal_would_obey_is_spelled_out():
    evil = "\x1b]52;c;aGk=\x07red\x1b[31m\x9b2J\rdone\u202eback\x00"
    lines = shown(response=evil, prompt=evil, prompt_id=evil, finish_reason=evil, components={evil: 1.0})
    for line in lines:
        assert line.isprintable(), line
    assert "⟨U+001B⟩[31m" in "".join(lines)
    assert "⟨U+202E⟩back" in "".join(lines)


def test_the_turns_of_a_conversation_are_told_apart():
    turns = (Turn("assistant", "<calc>1+1</calc>"), Turn("tool", "2"), Turn("assistant", "It is 2.\nYes."))
    lines = shown(80, turns=turns, num_turns=2, response="not shown", finish_reason="stop")
    assert lines[2:] == [
        "sample: reward 0.500, 0 tokens, 2 turns, stop, prompt p, sample 0",
        "  prompt:",
        "    Why?",
        "  assistant:",
        "    <calc>1+1</calc>",
        "  tool:",
        "    2",
        "  assistant:",
        "    It is 2.",
        "    Yes.",
    ]


def test_conversations_are_read_from_shards(tmp_path, slurm_ppo):
    run = reportrun.make_run(tmp_path / "run", scheduler=LocalConfig())
    said = json.dumps([{"role": "assistant", "content": "2+2"}, {"role": "tool", "content": "\x1b[1m4"}])
    assert publish(run.paths, reportrun.record(PREPARE))
    reportrun.commit_shard(run, 1, 0, responses=["2+24"], rewards=[1.0], messages=[said])
    lines = slurm_ppo("samples", run.paths.root).stdout.splitlines()
    assert [line.strip() for line in lines[-4:]] == ["assistant:", "2+2", "tool:", "⟨U+001B⟩[1m4"]


def test_of_long_texts_the_middle_is_left_out():
    text = "\n".join(str(i) for i in range(100))
    lines = shown(response=text, longest=12)
    assert lines[-5:] == ["    [88 lines left out; --full shows them]", *(f"    {i}" for i in range(96, 100))]
    assert len(shown(response=text)) > 100


def test_numbers_that_json_does_not_have_are_null():
    sample = Sample(1, "p", 0, "x", "y", float("nan"), {"rm": float("inf")}, kl=None)
    (line,) = as_json(Samples(1, (sample,), (None,), 1, float("nan")))
    assert json.loads(line)["reward"] is None
    assert json.loads(line)["components"] == {"rm": None}


def columns(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.category(letter) == "Mn" for letter in text)


@given(st.text(st.sampled_from("ab c  字\u0301é-"), max_size=80), st.integers(20, 40))
def test_lines_fit_and_nothing_but_spaces_is_lost(text, width):
    pieces = wrapped(text, width)
    assert all(columns(piece) <= width for piece in pieces)
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_a_terminal_without_the_letters_gets_them_spelled_out(run, environment):
    assert publish(run.paths, reportrun.record(Task(2, Stage.UPDATE)))
    reportrun.commit_shard(run, 3, 0, responses=["字\x1b"], rewards=[1.0])
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "samples", str(run.paths.root)],
        env=environment | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u5b57" in done.stdout
