"""A student that learns from a teacher alone, in a pool of its own, held by a reference that follows it, on
prompts of two files by weight."""

import json
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.killing import events, hooked, policy_bytes

WORDS = (
    "reward=teacher",
    "reward.teachers.teacher.pool=big",
    "algorithm=reinforce_plus_plus",
    "algorithm.kl.sync_every=1",
    "algorithm.kl.sync_weight=0.5",
    "rollout.num_shards=1",
    "scheduler.slots=1",
)


@pytest.fixture(scope="module")
def words(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    teacher = tiny.make_policy(folder / "model", seed=5)
    rows = [{"id": i, "prompt": f"say it {i} times"} for i in range(9)]
    files = {"some": models / "prompts.jsonl", "more": tiny.write_jsonl(folder / "more.jsonl", rows)}
    given = [*WORDS, f"reward.teachers.teacher.path={teacher}", "data.weights={some: 3, more: 1}"]
    given += [f"data.prompts.{name}={path}" for name, path in files.items()]

    def words_of(run_dir: Path) -> list[str]:
        known = tiny.overrides(models, run_dir, *given)
        return [word for word in known if not word.startswith("data.prompts=")]

    return words_of


@pytest.fixture(scope="module")
def undisturbed(slurm_ppo, words, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("taught") / "run"
    done = slurm_ppo("run", *words(run_dir))
    assert done.returncode == 0, done.stderr
    return run_dir


def average_bytes(run_dir: Path) -> bytes:
    return (run_dir / "reference" / "00002" / "model.safetensors").read_bytes()


def inputs_of(run_dir: Path, task: str) -> set[str]:
    return set(json.loads((run_dir / "iterations" / task / "shard-00000.json").read_text())["inputs"])


def test_it_comes_nearer_to_its_teacher_and_each_iteration_reads_the_reference_of_the_one_before(undisturbed):
    first, second = (json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines())
    assert first["policy/ratio_error_first"] == second["policy/ratio_error_first"] == 0
    assert first["reward/mean"] == second["reward/mean"] == 0
    assert 0 < second["teacher/kl_per_token"] < first["teacher/kl_per_token"]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4), (
        "the reference is the model that it began with"
    )
    assert second["objective/kl"] > 1e-3, "half of the way back"
    assert "1/update/0" in inputs_of(undisturbed, "00002/reward")
    assert "1/update/0" not in inputs_of(undisturbed, "00002/score-big")


@pytest.mark.trial(1 / 2)
def test_killed_before_its_commit_and_taken_back_it_ends_in_the_same_bytes(
    undisturbed, words, slurm_ppo, environment, tmp_path
):
    run_dir, point = tmp_path / "run", "before-link:iterations/00002/update/shard-00000.json"
    done = slurm_ppo("run", *words(run_dir), env=hooked(environment, tmp_path, point))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    assert len(events(run_dir, "failed")) == 1
    assert policy_bytes(run_dir) == policy_bytes(undisturbed)
    assert average_bytes(run_dir) == average_bytes(undisturbed)
    again = slurm_ppo("resume", run_dir, "--from", "score-big@2")
    assert again.returncode == 0, again.stderr
    assert policy_bytes(run_dir) == policy_bytes(undisturbed)
    assert average_bytes(run_dir) == average_bytes(undisturbed)
