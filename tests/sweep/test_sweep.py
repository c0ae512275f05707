"""Sweeps as people type them: killed and typed again, extended, side by side, with a run that fails."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import open_run
from pipeline.run.directory import load_run
from pipeline.sweep.manifest import read_sweep
from tests.support import ROOT, noting, tiny
from tests.support.killing import events
from tests.support.mirrored import family, kill_all
from tests.support.tables import LONG
from tests.support.waiting import wait_for


def words(inputs: Path, root: Path, *more: str) -> list[str]:
    """Of runs like the ``complete_run`` fixture, whose seed is 0."""
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    return tiny.overrides(inputs, root, *heldout, "name=s", *more)


def weights(root: Path) -> bytes:
    return (root / "policy/00002/model.safetensors").read_bytes()


def begin(environment: dict[str, str], *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipeline", "sweep", *map(str, arguments)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=quiet, stderr=quiet)


@LONG
def test_a_sweep_that_is_killed_at_any_time_goes_on_by_the_same_command(
    inputs, complete_run, environment, slurm_ppo, tmp_path
):
    """Once its command alone, whose runs end with it, and once everything, as when a machine goes down."""
    root, chance = tmp_path / "s", random.Random()
    command = words(inputs, root, "seed=0,1", "rollout.temperature=1.0")
    for kill in ("command", "all"):
        process = begin(environment, *command)
        journals = [root / f"seed_{seed}" / "events.jsonl" for seed in (0, 1)]
        before = sum(map(lines_of, journals))
        wait_for(lambda: sum(map(lines_of, journals)) > before + 2, "tasks")  # noqa: B023
        time.sleep(chance.random() / 2)
        if kill == "all":
            kill_all(family(process.pid), signal.SIGKILL)
        process.kill()
        process.wait()
    again = slurm_ppo("sweep", root)
    assert again.returncode == 0, again.stderr
    assert "2 runs: 2 complete" in again.stdout
    assert weights(root / "seed_0") == weights(complete_run)
    assert weights(root / "seed_1") != weights(complete_run)
    done = slurm_ppo("sweep", *command)
    assert (done.returncode, "0 of 2 runs to do" in done.stderr) == (0, True)

    for word, said in (("resume", "is a sweep, and one run is wanted"), ("cancel", "end that with Ctrl-C")):
        refused = slurm_ppo(word, root)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    dropped = slurm_ppo("sweep", root, "--drop", "seed_1")
    assert dropped.returncode == 0
    assert read_sweep(root).names == ("seed_0",)
    assert (root / "seed_1/run.json").exists()


@dataclass(frozen=True)
class SideBySide:
    """A sweep of three runs, two at once, on two GPUs that are only pretended."""

    root: Path
    words: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def side_by_side(inputs, environment, slurm_ppo, tmp_path_factory) -> SideBySide:
    folder = tmp_path_factory.mktemp("side_by_side")
    given = tiny.overrides(inputs, folder / "s", "name=s", *noting.WORDS, "scheduler.gpus=[0,1]")
    short = ["iterations=1" if word == "iterations=2" else word for word in given]
    made = SideBySide(folder / "s", short, environment | {noting.FILE: str(folder / "notes")})
    done = slurm_ppo("sweep", *short, "--seeds", 3, "--at-once", 2, env=made.environment)
    assert done.returncode == 0, done.stderr
    return made


def test_runs_side_by_side_have_gpus_of_their_own_and_no_more_go_on_than_are_asked_for(side_by_side):
    notes = Path(side_by_side.environment[noting.FILE])
    noted = [one for stage in ("rollout", "reward", "update") for one in noting.read(notes, stage)]
    seen = [{one["sees"] for one in noted if one["run"] == f"seed_{seed}"} for seed in range(3)]
    assert [len(gpus) for gpus in seen] == [1, 1, 1], seen
    assert seen[0] | seen[1] == seen[0] | seen[1] | seen[2] == {"0", "1"}, "the first two were begun together"
    assert most_at_once(side_by_side.root) <= 2


def test_more_seeds_are_added_by_the_same_words_and_the_runs_that_are_there_stay(side_by_side, slurm_ppo):
    root = side_by_side.root
    before = {path: path.read_bytes() for path in root.glob("seed_[012]/**/*") if path.is_file()}
    more = slurm_ppo("sweep", *side_by_side.words, "--seeds", 4, env=side_by_side.environment)
    assert more.returncode == 0, more.stderr
    assert "1 of 4 runs to do" in more.stderr
    assert "4 runs: 4 complete" in more.stdout
    assert read_sweep(root).names == ("seed_0", "seed_1", "seed_2", "seed_3")
    after = {path: path.read_bytes() for path in root.glob("seed_[012]/**/*") if path.is_file()}
    assert after == before


def test_where_a_run_is_named_a_sweep_may_be_and_its_best_run_is_chosen_and_named(
    side_by_side, slurm_ppo, tmp_path
):
    root = side_by_side.root
    found = json.loads(slurm_ppo("status", root, "--json").stdout)
    rewards = {Path(entry["run"]).name: entry["reward"] for entry in found["runs"]}
    best = max(rewards, key=rewards.get)
    assert (found["state"], found["best"]["name"]) == ("complete", best)

    told = slurm_ppo("status", root)
    assert told.returncode == 0
    for name in rewards:
        assert re.search(rf"^{name} +complete +1/1 ", told.stdout, re.MULTILINE), told.stdout
    assert f"best so far: {best}, the best of {len(rewards)} by" in told.stdout
    assert told.stdout.endswith(f"next: slurm-ppo report {root}\n")

    chosen = f"of the sweep {root}: {best}, the best of {len(rewards)} by "
    shown = slurm_ppo("samples", root, "--best", 1, "--json")
    assert shown.stdout == slurm_ppo("samples", root / best, "--best", 1, "--json").stdout
    assert shown.stderr.startswith(chosen)
    copied = slurm_ppo("export", f"{root}@1", tmp_path / "policy")
    assert copied.stderr.startswith(chosen)
    weights_of_best = (root / best / "policy/00001/model.safetensors").read_bytes()
    assert (tmp_path / "policy/model.safetensors").read_bytes() == weights_of_best
    opened = open_run(root)
    assert opened.path == root / best
    assert opened.chosen.startswith(f"{best}, the best of {len(rewards)} by ")
    assert opened.chosen in repr(opened)
    assert open_run(root / best).chosen == ""


def test_a_sweep_that_is_complete_is_told_at_once_and_changes_nothing(side_by_side, slurm_ppo):
    root = side_by_side.root
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    done = slurm_ppo("watch", root)
    assert done.returncode == 0
    assert "seed_0: complete, 1/1 iterations, reward" in done.stdout
    assert done.stdout.endswith(f"next: slurm-ppo report {root}\n")
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_runs_and_sweeps_are_compared_on_one_page(side_by_side, complete_run, slurm_ppo, tmp_path):
    page = tmp_path / "both.html"
    done = slurm_ppo("report", complete_run, side_by_side.root, side_by_side.root / "seed_1", "--out", page)
    assert (done.returncode, done.stdout) == (0, f"{page}\n"), done.stderr
    text = page.read_text()
    names = [
        load_run(complete_run).identity.name,
        *(f"s-{name}" for name in read_sweep(side_by_side.root).names),
    ]
    assert all(f">{name}</th>" in text for name in names)


def most_at_once(root: Path) -> int:
    """The most drivers that were at work at the same time."""
    moves = [
        (event["time"], step)
        for run in root.glob("seed_*")
        for kind, step in (("driver_started", 1), ("driver_ended", -1))
        for event in events(run, kind)
    ]
    return max(itertools.accumulate(step for _, step in sorted(moves)))


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@LONG
def test_a_run_that_fails_does_not_stop_the_others_and_is_said(inputs, slurm_ppo, tmp_path):
    """One of three files has too few prompts at first."""
    root, few, good = tmp_path / "s", tmp_path / "few.jsonl", (inputs / "prompts.jsonl").read_text()
    few.write_text("".join(good.splitlines(keepends=True)[:3]))
    (tmp_path / "other.jsonl").write_text(good)
    files = f"data.prompts={inputs / 'prompts.jsonl'},{few},{tmp_path / 'other.jsonl'}"
    given = [w for w in words(inputs, root) if not w.startswith(("data.prompts=", "iterations="))]
    done = slurm_ppo("sweep", *given, "iterations=1", files)
    assert done.returncode == 1, done.stderr
    assert "3 runs: 2 complete, 1 not begun" in done.stdout
    assert "prompts_few.jsonl failed: data.prompts=" in done.stdout
    assert f"log: {root / 'logs' / 'prompts_few.jsonl.log'}" in done.stdout
    few.write_text(good)
    again = slurm_ppo("sweep", root)
    assert again.returncode == 0, again.stderr
    assert "1 of 3 runs to do" in again.stderr


def test_what_is_wrong_with_all_is_said_before_anything_is_made(inputs, slurm_ppo, tmp_path):
    root = tmp_path / "s"
    given = [w for w in words(inputs, root) if not w.startswith("update.engine=")]
    broken = slurm_ppo("sweep", *given, "seed=0,1", "update.engine=no.such:thing")
    assert broken.returncode == 2
    assert "no module 'no'" in broken.stderr
    listed = slurm_ppo("sweep", *given, "--seeds", 2, "--dry-run")
    assert listed.returncode == 0, listed.stderr
    assert f"2 runs in {root}; nothing was started" in listed.stdout
    assert not root.exists()


def test_ctrl_c_ends_the_runs_in_order(inputs, environment, slurm_ppo, tmp_path):
    root = tmp_path / "s"
    slow = environment | {"LIGHT_SECONDS": "5"}
    process = begin(slow, *words(inputs, root, "seed=0,1"), "--at-once", 2)
    logs = [root / f"seed_{seed}/events.jsonl" for seed in (0, 1)]
    wait_for(lambda: all(lines_of(log) > 1 for log in logs), "both runs")
    refused = slurm_ppo("sweep", root)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 3
    assert refused.returncode == 2
    assert "a driver is active" in refused.stderr
    assert all('"outcome": "interrupted"' in log.read_text() for log in logs)
    states = slurm_ppo("ls", root).stdout
    assert states.count("incomplete  ") == 2
