"""Files of a run that are older than a purge's days are gone, while it rests and while it runs: it goes on to
the same bytes, or says in one message what is lost and from where it can go on. Runs of light tasks, whose
seconds stand for days.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.decide.reconcile import Observation, reconcile
from pipeline.orchestrate.lost_states import find_lost
from pipeline.orchestrate.rewind import Point, go_back
from pipeline.run.ages import files_below
from pipeline.run.directory import load_run
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.kept import identifying
from pipeline.run.place import settle
from pipeline.run.plan import policy_maker
from pipeline.run.records import Records
from pipeline.run.tasks import Stage
from tests.cluster.scenario import policy_of
from tests.support import ROOT, light, tiny
from tests.support.killing import events
from tests.support.tables import LONG, sample
from tests.support.waiting import wait_for

ITERATIONS, RESTS_AT = 8, 6
WORDS = (f"iterations={ITERATIONS}", "evaluate.every=2")
SEEDS = list(range(50))


@dataclass(frozen=True)
class Chance:
    """A purge by chance."""

    seed: int
    is_refreshed: bool
    """Whether drivers have renewed what identifies the run, as they do each hour of its days."""
    moment: float
    """From which on files are kept, as a share of them."""
    save_every: int

    @staticmethod
    def of(seed: int) -> "Chance":
        chance = random.Random(f"purge {seed}")
        return Chance(seed, chance.random() < 0.8, chance.uniform(-0.02, 1.05), chance.choice([1, 1, 3]))


def words(inputs: Path, root: Path, save_every: int) -> list[str]:
    heldout = f"data.heldout={inputs / 'heldout.jsonl'}"
    return tiny.overrides(inputs, root, *WORDS, heldout, f"update.save_every={save_every}")


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, tmp_path_factory):
    """Return, for a setting, an undisturbed run."""
    made: dict[int, Path] = {}

    def of(save_every: int) -> Path:
        if save_every not in made:
            root = made[save_every] = tmp_path_factory.mktemp("whole") / "run"
            done = slurm_ppo("run", *words(inputs, root, save_every))
            assert done.returncode == 0, done.stderr
        return made[save_every]

    return of


@pytest.fixture(scope="module")
def resting(whole, tmp_path_factory):
    """Return, for a setting, a run that rests in mid-way."""
    made: dict[int, Path] = {}

    def of(save_every: int) -> Path:
        if save_every not in made:
            root = made[save_every] = tmp_path_factory.mktemp("resting") / "run"
            shutil.copytree(whole(save_every), root, symlinks=True)
            go_back(load_run(root), Point(Stage.ROLLOUT, RESTS_AT + 1))
            shutil.rmtree(root / "superseded")
        return made[save_every]

    return of


def purge(root: Path, before: float) -> list[str]:
    """Remove every file last written before a moment (unix time). Returns their names."""
    gone = []
    for path in list(files_below(root)):
        try:
            if path.lstat().st_mtime < before:
                path.unlink()
                gone.append(str(path.relative_to(root)))
        except FileNotFoundError:  # the run has removed it meanwhile
            continue
    return gone


def refresh(root: Path) -> None:
    """Renew what drivers renew each hour, and their lease."""
    paths = load_run(root).paths
    for path in (*identifying(paths), *paths.locks.glob("*.json")):
        if path.exists():
            os.utime(path)


def copied(source: Path, target: Path) -> Path:
    """Return a copy that takes itself for the run: it was moved."""
    shutil.copytree(source, target, symlinks=True)
    settle(load_run(target))
    return target


def moment_of(root: Path, share: float) -> float:
    times = sorted(path.lstat().st_mtime for path in files_below(root))
    place = round(share * len(times))
    return times[place] if place in range(len(times)) else times[-1 if place > 0 else 0] + (place > 0)


def assert_told(said: str, root: Path) -> None:
    assert "Traceback" not in said, said
    told = " ".join(said.split())
    assert f"{root} cannot go on: " in told or "held a run, and its" in told or "not a run directory" in told
    assert "what is left: " in told or "it holds no run.json" in told, told


@pytest.mark.parametrize("seed", sample(SEEDS, 3 / len(SEEDS)))
def test_purged_while_it_rests_a_run_goes_on_or_says_what_is_lost(seed, whole, resting, slurm_ppo, tmp_path):
    given = Chance.of(seed)
    source = resting(given.save_every)
    root = copied(source, tmp_path / "run")
    for name in ("run.json", "run.copy.json"):
        shutil.copystat(source / name, root / name)
    if given.is_refreshed:
        refresh(root)
    gone = purge(root, moment_of(root, given.moment))
    done = slurm_ppo("resume", root)
    print(given, len(gone), "gone; exit code", done.returncode, done.stderr.count("\n"), "lines")
    assert done.returncode in (0, 2), done.stderr
    if done.returncode == 2:
        assert_told(done.stderr, root)
        if "--from rollout@1" not in done.stderr:
            return
        done = slurm_ppo("resume", root, "--from", "rollout@1")
        assert done.returncode == 0, done.stderr
    assert policy_of(root, ITERATIONS) == policy_of(whole(given.save_every), ITERATIONS)
    failed = events(root, "failed")
    assert len(failed) <= 2, failed


@LONG
@pytest.mark.parametrize("seed", sample(SEEDS, 1 / len(SEEDS)))
def test_purged_while_it_runs_a_run_goes_on_or_says_what_is_lost(
    seed, inputs, whole, slurm_ppo, environment, tmp_path
):
    given, root = Chance.of(1000 + seed), tmp_path / "run"
    chance = random.Random(f"when {seed}")
    command = [sys.executable, "-m", "pipeline", "run", *words(inputs, root, given.save_every)]
    said = (tmp_path / "said").open("w+")
    slow = environment | {light.SECONDS: "0.05"}
    process = subprocess.Popen(command, env=slow, cwd=ROOT, stdout=said, stderr=said)
    try:
        at = chance.randint(1, ITERATIONS - 1)
        policy = root / f"policy/{at:05d}"
        wait_for(lambda: policy.is_symlink() or process.poll() is not None, f"policy {at}", 60)
        time.sleep(chance.uniform(0, 0.5))
        if given.is_refreshed:
            refresh(root)
        gone = purge(root, moment_of(root, max(0.0, min(given.moment, 0.98))))
        code = process.wait(100)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    told = Path(said.name).read_text()
    print(given, at, len(gone), "gone; exit code", code)
    assert "Traceback" not in told, told
    if code not in (0, 2):  # it was stopped in the middle of something: a person types resume
        done = slurm_ppo("resume", root)
        code, told = done.returncode, done.stderr
    assert code in (0, 2), told
    if code == 2:
        assert_told(told, root)
    else:
        assert policy_of(root, ITERATIONS) == policy_of(whole(given.save_every), ITERATIONS)


def test_where_weights_are_gone_one_look_finds_the_newest_point(resting, whole, slurm_ppo, tmp_path):
    """Records are there, weights of the newest iterations are not: they are not tried one by one."""
    root = copied(resting(1), tmp_path / "run")
    for version in range(3, RESTS_AT + 1):
        for folder in (*root.glob(f"policy/{version:05d}.*"), *root.glob(f"state/{version:05d}.*")):
            shutil.rmtree(folder)
    done = slurm_ppo("resume", root)
    assert done.returncode == 0, done.stderr
    told = [
        line for line in done.stderr.splitlines() if "the newest from which the run can go on is 2" in line
    ]
    assert len(told) == 1, done.stderr
    assert f"iteration 3 update to iteration {RESTS_AT} update will be computed again: " in told[0]
    assert policy_of(root, ITERATIONS) == policy_of(whole(1), ITERATIONS)
    assert not events(root, "failed")
    launched = [event["task"] for event in events(root, "launched")]
    assert [launched.count(f"4/{stage}/0") for stage in ("rollout", "reward", "update")] == [1, 1, 2]


def test_a_driver_takes_back_what_it_remembers_where_records_went_with_the_weights(resting, tmp_path):
    """All of a first iteration is gone while the second is at its update: nothing else is left to do."""
    run = load_run(copied(resting(1), tmp_path / "run"))
    go_back(run, Point(Stage.ROLLOUT, 2))
    first, second = policy_maker(1), policy_maker(2)
    records = Records(run.paths)
    records.refresh([first])
    for name in ("data", "iterations", "policy", "state"):
        shutil.rmtree(run.paths.root / name)
    failures = {second: [Failure(second, 1, FailureKind.INPUTS, "prepare is not committed")]}
    seen = Observation((second,), dict(records.known), {}, (), failures)
    lost = find_lost(run, seen, records, updated=1)
    assert lost is not None
    assert "the newest from which the run can go on is 0" in lost.why
    assert [one.task for one in reconcile(run.plan, replace(seen, lost=lost), 3).retract] == [first]


def test_prompts_and_old_records_that_are_gone_do_not_set_a_run_back(resting, whole, slurm_ppo, tmp_path):
    root = copied(resting(1), tmp_path / "run")
    old = [root / f"iterations/{iteration:05d}" for iteration in range(1, RESTS_AT)]
    # what the next evaluation comes after, without reading it
    evaluated = root / f"iterations/{RESTS_AT:05d}/evaluate"
    for folder in (root / "data", *old, evaluated):
        shutil.rmtree(folder)
    done = slurm_ppo("resume", root)
    assert done.returncode == 0, done.stderr
    assert policy_of(root, ITERATIONS) == policy_of(whole(1), ITERATIONS)
    launched = [event["task"] for event in events(root, "launched")]
    once = ("1/rollout/0", "2/evaluate/0", f"{RESTS_AT}/evaluate/0")
    assert [launched.count(task) for task in ("0/prepare/0", *once)] == [2, 1, 1, 1]


def test_where_nothing_learnt_is_left_the_way_out_is_said_and_nothing_begins_by_itself(
    resting, slurm_ppo, tmp_path
):
    root = copied(resting(1), tmp_path / "run")
    for parent in ("policy", "state"):
        shutil.rmtree(root / parent)
    before = (root / "events.jsonl").read_bytes()
    done = slurm_ppo("resume", root)
    assert done.returncode == 2
    assert_told(done.stderr, root)
    assert f"what is left: rows up to iteration {RESTS_AT}" in done.stderr
    assert done.stderr.endswith(f"slurm-ppo resume {root} --from rollout@1; nothing was changed\n")
    assert (root / "events.jsonl").read_bytes() == before
