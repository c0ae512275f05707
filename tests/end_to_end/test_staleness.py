"""Responses of older policies: the same bytes whatever is killed, damaged, lost or taken back."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.run.directory import load_run
from pipeline.run.records import Records
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from tests.support import light, tiny
from tests.support.damage import flip_bit
from tests.support.killing import events, hooked
from tests.support.tables import LONG, sample

VERSIONS = {0: [0, 1, 2, 3, 4, 5], 1: [0, 0, 1, 2, 3, 4], 2: [0, 0, 0, 1, 2, 3]}
"""Of the policies of six iterations' responses, by staleness."""
_TIMING = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/")


def words(inputs: Path, run_dir: Path, staleness: int, *more: str) -> list[str]:
    given = (f"rollout.staleness={staleness}", "algorithm.correction.level=token", "iterations=6")
    return tiny.overrides(inputs, run_dir, *given, *more)


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, tmp_path_factory):
    """Return an undisturbed run of a staleness, which tests copy and must not change."""
    found: dict[int, Path] = {}

    def get(staleness: int) -> Path:
        if staleness not in found:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            done = slurm_ppo("run", *words(inputs, run_dir, staleness))
            assert done.returncode == 0, done.stderr
            found[staleness] = run_dir
        return found[staleness]

    return get


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(_TIMING)} for row in rows]


def assert_same_end(run_dir: Path, complete: Path, may_lose_state: bool = False) -> None:
    last = Path("policy/00006")
    assert files_of(run_dir / last) == files_of(complete / last)
    state = files_of(run_dir / "state/00006")
    assert state == files_of(complete / "state/00006") or (may_lose_state and not state)
    assert rows_of(run_dir) == rows_of(complete)


def assert_made_of_each_other(run_dir: Path) -> None:
    """Each commit names what it was made from, as the plan has it, and that is what there is now."""
    run = load_run(run_dir)
    records = Records(run.paths)
    for task in run.plan.all_tasks():
        read = records.get(task).inputs
        names = {task_key(source) for source in run.plan.inputs(task) if source != run.plan.earlier(task)}
        mine = {name: one for name, one in read.items() if re.fullmatch(r"\d+/[a-z-]+/\d+", name)}
        assert names <= mine.keys()
        there = {name: records.get(parse_task(name)).fingerprint for name in mine if "state" not in name}
        assert there == {name: one for name, one in mine.items() if name in there}, task


@pytest.mark.parametrize("staleness", sample([0, 1, 2], 1 / 3))
def test_responses_are_of_the_versions_that_the_plan_says_and_rows_tell_the_lag(whole, slurm_ppo, staleness):
    run = load_run(whole(staleness))
    records = Records(run.paths)
    rollouts = [[records.get(Task(i, Stage.ROLLOUT, shard)) for shard in (0, 1)] for i in range(1, 7)]
    assert [[r.policy_version for r in of_iteration] for of_iteration in rollouts] == [
        [version, version] for version in VERSIONS[staleness]
    ]
    lags = [row.get("staleness/lag") for row in rows_of(run.paths.root)]
    expected = [i - 1 - version for i, version in enumerate(VERSIONS[staleness], 1)]
    assert lags == (expected if staleness else [None] * 6)
    worth = [row["mismatch/effective_samples"] for row in rows_of(run.paths.root)]
    assert [row.get("staleness/effective_samples") for row in rows_of(run.paths.root)] == [
        samples / worth[0] if lag else None for samples, lag in zip(worth, lags, strict=True)
    ]
    assert_made_of_each_other(run.paths.root)
    shown = slurm_ppo("samples", f"{run.paths.root}@4")
    assert f"iteration 4, by policy {VERSIONS[staleness][3]}" in shown.stdout, shown.stderr


LINKS = [(when, i) for when in ("before", "after") for i in (1, 3, 4, 6)]
BOUNDARIES = [
    *(f"before-fsync:iterations/{i:05d}/rollout/shard-00001" for i in (2, 4)),
    *(f"{when}-link:iterations/{i:05d}/rollout/shard-00000.json" for when, i in LINKS),
    *(f"{when}-link:iterations/{i:05d}/reward/shard-00001.json" for when, i in LINKS),
    *(f"{when}-link:iterations/{i:05d}/update/shard-00000.json" for when, i in LINKS),
    *(f"before-fsync:policy/0000{i}." for i in (2, 5)),
    *(f"before-link:iterations/{i:05d}/state/shard-00000.json" for i in (2, 4)),
    *(f"driver:{number}" for number in (9, 23, 40, 61)),
]
KILLS = [(staleness, point) for staleness in (0, 1, 2) for point in BOUNDARIES]


@pytest.mark.parametrize(("staleness", "point"), sample(KILLS, 1 / 48))
def test_killed_at_any_boundary_the_run_ends_in_the_same_bytes(
    staleness, point, whole, inputs, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    done = slurm_ppo("run", *words(inputs, run_dir, staleness), env=hooked(environment, tmp_path, point))
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    if point.startswith("driver"):
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = slurm_ppo("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, whole(staleness), may_lose_state="00006" in point or "driver" in point)
    assert_made_of_each_other(run_dir)


BACK = [(staleness, point) for staleness in (1, 2) for point in ("rollout@4", "reward@3", "update@4")]


@pytest.mark.parametrize(("staleness", "point"), sample(BACK, 1 / 6))
def test_going_back_moves_what_depends_on_it_and_ends_the_same(staleness, point, whole, slurm_ppo, tmp_path):
    run_dir = Path(shutil.copytree(whole(staleness), tmp_path / "run", symlinks=True))
    before = Records(load_run(run_dir).paths)
    kept = [Task(5, Stage.ROLLOUT, 1)] if point == "update@4" else []
    kept += [Task(3, Stage.ROLLOUT, 0)] if point == "reward@3" else []
    attempts = [before.get(task).attempt for task in kept]
    done = slurm_ppo("resume", run_dir, "--from", point)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, whole(staleness))
    after = Records(load_run(run_dir).paths)
    assert [after.get(task).attempt for task in kept] == attempts, "of an older policy: not made again"


DAMAGED = [(staleness, version) for staleness in (1, 2) for version in (2, 3, 4) if version >= 4 - staleness]


@LONG
@pytest.mark.parametrize(("staleness", "version"), DAMAGED)
def test_a_damaged_policy_that_responses_are_of_is_made_again(staleness, version, whole, slurm_ppo, tmp_path):
    """Later ones are committed already: the run goes back for it, and passes over them."""
    run_dir = Path(shutil.copytree(whole(staleness), tmp_path / "run", symlinks=True))
    take_back(run_dir, "rollout@5")
    flip_bit(run_dir / f"policy/{version:05d}/model.safetensors")
    done = slurm_ppo("resume", run_dir, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"iteration {version} update is corrupt" in done.stderr
    assert_same_end(run_dir, whole(staleness))
    assert_made_of_each_other(run_dir)


def take_back(run_dir: Path, point: str) -> None:
    go_back(load_run(run_dir), parse_point(point))


@LONG
@pytest.mark.parametrize(("staleness", "version"), DAMAGED)
def test_where_tasks_give_other_results_each_time_all_is_made_of_what_there_is(
    staleness, version, whole, slurm_ppo, environment, tmp_path
):
    run_dir = Path(shutil.copytree(whole(staleness), tmp_path / "run", symlinks=True))
    take_back(run_dir, "rollout@5")
    flip_bit(run_dir / f"policy/{version:05d}/model.safetensors")
    done = slurm_ppo("resume", run_dir, env=environment | {light.DICE: "1"}, timeout=200)
    assert done.returncode == 0, done.stderr
    assert_made_of_each_other(run_dir)
    updates = [Records(load_run(run_dir).paths).get(Task(i, Stage.UPDATE)).metrics for i in range(1, 7)]
    losses = [update["policy/loss"] for update in updates]
    assert [row["policy/loss"] for row in rows_of(run_dir)] == losses


@LONG
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_lost_state_is_learned_again_from_responses_of_older_policies(
    staleness, whole, slurm_ppo, tmp_path
):
    run_dir = Path(shutil.copytree(whole(staleness), tmp_path / "run", symlinks=True))
    take_back(run_dir, "update@5")
    for path in (run_dir / "state").glob("00004*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    done = slurm_ppo("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, whole(staleness))
    assert [e["task"] for e in events(run_dir, "retracted")] in (["4/state/0"], [])


@LONG
def test_a_fork_fills_again_and_says_so(whole, slurm_ppo, tmp_path):
    fork = tmp_path / "fork"
    made = slurm_ppo("fork", f"{whole(1)}@3", fork)
    assert made.returncode == 0, made.stderr
    assert "responses of iterations 4 to 5 are of policy 3 (rollout.staleness)" in made.stdout
    done = slurm_ppo("resume", fork)
    assert done.returncode == 0, done.stderr
    records = Records(load_run(fork).paths)
    assert [records.get(Task(i, Stage.ROLLOUT, 0)).policy_version for i in (4, 5, 6)] == [3, 3, 4]


@LONG
def test_with_few_policies_kept_none_is_removed_that_is_read(whole, inputs, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    done = slurm_ppo("run", *words(inputs, run_dir, 2, "update.keep_last=2", "update.keep_shards_last=2"))
    assert done.returncode == 0, done.stderr
    assert files_of(run_dir / "policy/00006") == files_of(whole(2) / "policy/00006")
    kept = {int(path.name) for path in (run_dir / "policy").iterdir() if path.name.isdigit()}
    assert kept == {3, 4, 5, 6}
    back = slurm_ppo("resume", run_dir, "--from", "rollout@4")
    assert back.returncode == 2
    assert "policies 1 to 3 (rollout.staleness), of which one was pruned" in back.stderr, back.stderr
