"""Runs whose engines fail as GPUs do: what is tried again and with what, as a user sees it."""

import json
import os
import shutil

import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.endings import read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage, Task
from tests.support import tiny
from tests.support.fault_texts import TEXTS, cuda
from tests.support.faulty import FAULT, FITS, IN_REWARD, KILLS, WORDS
from tests.support.tables import LONG

SHAPE = (
    "iterations=1",
    "rollout.num_shards=2",
    "rollout.tokens_per_batch=4000",
    "reward.tokens_per_batch=4000",
)
OUT_OF_MEMORY = TEXTS[0][0]
ROLLOUT, REWARD = Task(1, Stage.ROLLOUT), Task(1, Stage.REWARD)


def attempts(run: Run) -> list[FailureKind | None]:
    return [ending.kind for ending in read_endings(run.paths, [1]).values()]


def halvings(run: Run, stage: Stage) -> list[int]:
    return [read_record(run.paths, Task(1, stage, shard)).halvings for shard in (0, 1)]


def policy(run: Run) -> bytes:
    return (run.paths.policies / "00001/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, tmp_path_factory) -> Run:
    """A run whose rollouts fit with a quarter of their budget."""
    root = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT, OUT_OF_MEMORY)
        patch.setenv(FITS, "1000")
        done = called(slurm_ppo, "run", *tiny.overrides(inputs, root, *SHAPE), *WORDS)
    assert done.returncode == 0, done.stderr
    (root / "said.txt").write_text(done.stderr)
    return load_run(root)


def called(slurm_ppo, *words: object):
    """Run a command with this process's variables."""
    return slurm_ppo(*words, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"})


def test_what_lacked_memory_is_tried_with_half_and_a_quarter_of_the_budget(whole):
    assert halvings(whole, Stage.ROLLOUT) == [2, 2]
    assert halvings(whole, Stage.REWARD) == [0, 0]
    assert attempts(whole) == [FailureKind.DEVICE_MEMORY] * 4
    log = whole.paths.task(ROLLOUT).log(3).read_text()
    assert "is tried with 1/4 of the batch budget (rollout.tokens_per_batch=1000 instead of 4000)" in log
    claims = sorted(whole.paths.task(ROLLOUT).folder.glob("shard-00000.claim-*"))
    assert not claims, "they go with a finished iteration: the record has it"


def test_both_the_run_and_its_journal_say_so_in_a_line(whole, slurm_ppo):
    failed = [
        e for e in map(json.loads, whole.paths.events.read_text().splitlines()) if e["event"] == "failed"
    ]
    assert len(failed) == 4
    for event in failed:
        assert event["message"].startswith("the GPU's memory did not suffice (")
        assert (
            "the next try has half of the batch budget; to save the first: lower rollout.tokens_per_batch"
            in (event["message"])
        )


def test_a_repetition_has_the_same_budget_from_the_first(whole, slurm_ppo, tmp_path):
    """Neither has what went back to be tried in vain again, nor does it give other bytes."""
    root = shutil.copytree(whole.paths.root, tmp_path / "run", symlinks=True)
    run, before = load_run(root), policy(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT, OUT_OF_MEMORY)
        patch.setenv(FITS, "1000")
        done = called(slurm_ppo, "resume", root, "--from", "rollout@1")
    assert done.returncode == 0, done.stderr
    assert halvings(run, Stage.ROLLOUT) == [2, 2]
    assert set(attempts(run)) <= {None}
    assert policy(run) == before


def test_a_commit_that_is_lost_is_made_again_with_its_budget(whole, slurm_ppo, tmp_path):
    root = shutil.copytree(whole.paths.root, tmp_path / "run", symlinks=True)
    run = load_run(root)
    (entry,) = read_record(run.paths, ROLLOUT).outputs
    (root / entry.path).write_bytes(b"spoilt")
    for stage in ("update",):
        run.paths.task(Task(1, Stage(stage))).record.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT, OUT_OF_MEMORY)
        patch.setenv(FITS, "1000")
        done = called(slurm_ppo, "resume", root)
    assert done.returncode == 0, done.stderr
    assert halvings(run, Stage.ROLLOUT) == [2, 2]
    assert attempts(run).count(FailureKind.DEVICE_MEMORY) == 4, "no more than before"


def test_scoring_is_tried_with_half_of_its_own_budget(inputs, slurm_ppo, tmp_path, monkeypatch):
    monkeypatch.setenv(FAULT, cuda("out of memory"))
    monkeypatch.setenv(FITS, "2000")
    monkeypatch.setenv(IN_REWARD, "1")
    done = called(slurm_ppo, "run", *tiny.overrides(inputs, tmp_path / "run", *SHAPE), *WORDS)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert (halvings(run, Stage.ROLLOUT), halvings(run, Stage.REWARD)) == ([0, 0], [1, 1])


@LONG
@pytest.mark.parametrize(
    ("text", "is_killed", "code", "kind", "tries", "said"),
    [
        (
            cuda("no kernel image is available for execution on the device"),
            False,
            2,
            FailureKind.CONFIG,
            1,
            "another try would not help: choose another kind of GPU (scheduler.rollout.partition",
        ),
        (cuda("uncorrectable ECC error encountered"), False, 1, FailureKind.DEVICE, 3, "the GPU is broken"),
        (TEXTS[-3][0], True, 1, FailureKind.ERROR, 3, "a rank waited in vain for another"),
    ],
    ids=["hopeless", "of its node", "aborted"],
)
def test_what_ends_a_run_says_what_it_means_and_what_to_change(
    inputs, slurm_ppo, tmp_path, monkeypatch, text, is_killed, code, kind, tries, said
):
    monkeypatch.setenv(FAULT, text)
    if is_killed:
        monkeypatch.setenv(KILLS, "1")
    words = tiny.overrides(inputs, tmp_path / "run", *SHAPE, "rollout.num_shards=1")
    done = called(slurm_ppo, "run", *words, *WORDS)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert attempts(load_run(tmp_path / "run")) == [kind] * tries
    assert said in called(slurm_ppo, "status", tmp_path / "run").stdout
