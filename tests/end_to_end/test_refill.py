"""Prompts whose samples all score the same are replaced, and spare ones wait: through the command line."""

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.run.commits import read_record, verify_outputs
from pipeline.run.directory import load_run
from pipeline.run.paths import CARRIED_PART
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import CARRIED
from pipeline.run.shards import read_shard
from tests.support import tiny
from tests.support.damage import flip_bit
from tests.support.killing import run_killed_once
from tests.support.tables import LONG, sample

ITERATIONS, WANTED = 4, 2
RULES = """
from zlib import crc32

def half(*, responses, answer, **columns):
    return [0.5 if a % 2 else crc32(r.encode()) % 997 / 997 for a, r in zip(answer, responses)]
"""
"""Prompts with odd answers score the same whatever one says."""
SETTINGS = (
    "reward=rule",
    "reward.components.rule.function=my_rules:half",
    "algorithm=grpo",
    "algorithm.shaping.filter_groups=true",
    "algorithm.correction.level=token",
    "seed=3",
    "rollout.samples_per_prompt=3",
    f"data.prompts_per_iteration={WANTED}",
    "rollout.oversample=2",
    "rollout.max_new_tokens=6",
    "update.minibatches=1",
    f"iterations={ITERATIONS}",
)
BANDED = {False: (), True: ("data.limit=8", "data.band={lowest: 0.45, highest: 0.55}")}
"""An epoch is two iterations, and the second one leaves prompts out."""
_TIMING = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/")


@pytest.fixture(scope="module")
def room(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("refill")
    (folder / "my_rules.py").write_text(RULES)
    return folder


def words(models: Path, run_dir: Path, *more: str) -> list[str]:
    return tiny.overrides(models, run_dir, *SETTINGS, *more)


@pytest.fixture(scope="module")
def undisturbed(models, slurm_ppo, room) -> Callable[[bool], Path]:
    """Undisturbed runs, with and without a band, which tests copy and must not change."""

    @functools.cache
    def make(is_banded: bool) -> Path:
        run_dir = room / f"whole-{is_banded}"
        done = slurm_ppo("run", *words(models, run_dir, *BANDED[is_banded]), cwd=room)
        assert done.returncode == 0, done.stderr
        assert any(row.get("epoch_left_out") for row in rows_of(run_dir)) is is_banded
        return run_dir

    return make


@pytest.fixture(scope="module")
def whole(undisturbed) -> Path:
    return undisturbed(False)


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(_TIMING)} for row in rows]


def carried(run_dir: Path, version: int) -> list[dict]:
    paths = load_run(run_dir).paths
    return read_shard(paths, read_record(paths, policy_maker(version)), CARRIED, CARRIED_PART).to_pylist()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_same_end(run_dir: Path, complete: Path) -> None:
    last = f"policy/{ITERATIONS:05d}"
    assert files_of(run_dir / last) == files_of(complete / last)
    assert rows_of(run_dir) == rows_of(complete)
    for version in range(1, ITERATIONS + 1):
        assert carried(run_dir, version) == carried(complete, version)


def test_rows_account_for_every_group_and_spare_ones_fill_the_next_update(whole, slurm_ppo):
    rows, waiting = rows_of(whole), 0.0
    for row in rows:
        mixed = 2 * WANTED - row["refill/flat"]
        assert row["refill/taken"] + row["refill/missing"] == WANTED
        assert row["refill/taken"] == min(WANTED, mixed + waiting), "full as long as there are groups"
        assert row["refill/carried"] == max(0, row["refill/taken"] - mixed), "its own come first"
        assert mixed + waiting == row["refill/taken"] + row["refill/spare"] + row["refill/dropped"]
        assert row["reward/frac_zero_std"] == row["refill/flat"] / (2 * WANTED)
        waiting = row["refill/spare"]
    assert rows[-1]["samples"] == ITERATIONS * 2 * WANTED * 3
    for name in ("refill/flat", "refill/spare", "refill/carried", "refill/missing"):
        assert any(row[name] for row in rows), f"else this shows nothing of {name}"
    for version, row in enumerate(rows, 1):
        found = carried(whole, version)
        assert len({one["prompt_id"] for one in found}) == row["refill/spare"]
        assert {one["iteration"] for one in found} <= {version}
    shown = slurm_ppo("samples", f"{whole}@1")
    assert f"the update learned from {rows[0]['refill/taken']:.0f} of " in shown.stdout, shown.stdout


POINTS = [
    *(
        f"{when}-link:iterations/0000{i}/update/shard-00000.json"
        for i in (1, 2, 4)
        for when in ("before", "after")
    ),
    *(f"before-fsync:iterations/0000{i}/update/shard-00000.carried" for i in (1, 3)),
    "before-link:iterations/00003/rollout/shard-00001.json",
    "driver:17",
]


CASES = list(itertools.product(POINTS, BANDED))


@pytest.mark.parametrize(("point", "is_banded"), sample(CASES, 1 / len(CASES)))
def test_killed_anywhere_the_run_learns_from_the_same_groups(
    point, is_banded, models, undisturbed, room, slurm_ppo, environment, tmp_path
):
    given = words(models, tmp_path / "run", *BANDED[is_banded])
    run_killed_once(slurm_ppo, given, point, environment, room, tmp_path)
    assert_same_end(tmp_path / "run", undisturbed(is_banded))


def copy(run_dir: Path, target: Path) -> Path:
    return Path(shutil.copytree(run_dir, target, symlinks=True))


def test_going_back_finds_the_groups_that_waited_then_or_makes_a_damaged_file_again(
    whole, room, slurm_ppo, tmp_path
):
    """Its update is made again, from its shards, and with it what came of it."""
    run_dir = copy(whole, tmp_path / "run")
    go_back(load_run(run_dir), parse_point("update@3"))
    flip_bit(next((run_dir / "iterations/00002/update").glob("*.carried.*.arrow")))
    done = slurm_ppo("resume", run_dir, cwd=room)
    assert done.returncode == 0, done.stderr
    assert "iteration 2 update is corrupt" in done.stderr
    assert_same_end(run_dir, whole)
    record = read_record(load_run(run_dir).paths, policy_maker(2))
    verify_outputs(load_run(run_dir).paths, record)


@LONG
def test_a_lost_state_is_learned_again_from_shards_and_groups_that_waited(whole, room, slurm_ppo, tmp_path):
    run_dir = copy(whole, tmp_path / "run")
    go_back(load_run(run_dir), parse_point("update@4"))
    for path in (run_dir / "state").glob("0000[23]*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    done = slurm_ppo("resume", run_dir, cwd=room)
    assert done.returncode == 0, done.stderr
    logs = (run_dir / "logs/00004-update").rglob("*")
    log = "".join(path.read_text() for path in logs if path.is_file())
    assert re.search(r"iteration 3 learned again: its weights differ .* by 0.0e\+00", log), log
    assert_same_end(run_dir, whole)


@LONG
def test_a_fork_begins_with_nothing_carried_and_says_so(whole, room, slurm_ppo, tmp_path):
    version = next(i for i, row in enumerate(rows_of(whole), 1) if row["refill/spare"])
    made = slurm_ppo("fork", f"{whole}@{version}", tmp_path / "fork", cwd=room)
    assert made.returncode == 0, made.stderr
    assert f"no groups wait for iteration {version + 1} (rollout.carry)" in made.stdout
    done = slurm_ppo("resume", tmp_path / "fork", cwd=room)
    assert done.returncode == 0, done.stderr
    first = rows_of(tmp_path / "fork")[0]
    assert first["refill/carried"] == 0
    assert first["refill/flat"] == rows_of(whole)[version]["refill/flat"], "of the same prompts"
