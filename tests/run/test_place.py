"""A run that is copied, moved or put back: whose it is, and what a copy leaves alone."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.copied import as_own
from pipeline.cli.queue import cancel_run, driver_job
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError, write_identity
from pipeline.run.lease import acquire, hold
from pipeline.run.place import original_of
from pipeline.status.listing import find_places, read_entries
from pipeline.status.snapshot import read_status
from pipeline.tracking.sync import sync
from tests.cluster.scenario import Hold, wait_for
from tests.support import ROOT, light, tiny
from tests.support.copying import TOOLS, copied
from tests.support.tables import LONG, sample
from tests.support.toyworld import Luck, make_world


def id_of(root: Path) -> str:
    return load_run(root).identity.id


@pytest.fixture
def original(complete_run, tmp_path) -> Path:
    """A run of two iterations, of which the second is to be made again."""
    root = tmp_path / "original"
    shutil.copytree(complete_run, root, symlinks=True)
    run = load_run(root)
    write_identity(run.paths, replace(run.identity, id="0123456789ab", root=str(root)))
    for stage in ("update", "evaluate"):
        (root / f"iterations/00002/{stage}/shard-00000.json").unlink()
    return root


@pytest.mark.parametrize("tool", sample(list(TOOLS), 1 / len(TOOLS)))
def test_a_copy_goes_on_as_a_run_of_its_own_and_says_so(original, tmp_path, slurm_ppo, tool):
    copy = copied(original, tmp_path / "copy", tool)
    (copy / "wandb/offline-run-1").mkdir(parents=True)
    before = (original / "run.json").read_bytes(), (original / "events.jsonl").read_bytes()
    assert json.loads(slurm_ppo("status", "--json", copy).stdout)["copy_of"] == str(original)
    done = slurm_ppo("resume", copy)
    assert done.returncode == 0, done.stderr
    assert f"{copy} is a copy of {original}, and goes on as a run of its own, with id" in done.stderr
    assert id_of(copy) not in ("0123456789ab", "")
    assert load_run(copy).identity.root == str(copy)
    assert [path.name for path in copy.glob("superseded/*/wandb/*")] == ["offline-run-1"]
    assert not list(copy.glob(".own-*"))
    assert before == ((original / "run.json").read_bytes(), (original / "events.jsonl").read_bytes())
    assert original_of(load_run(copy)) is None


def test_a_run_that_is_moved_or_put_back_is_the_same_run(original, tmp_path, slurm_ppo):
    moved = original.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    assert original_of(load_run(tmp_path / "link")) is None
    done = slurm_ppo("resume", moved)
    assert done.returncode == 0, done.stderr
    assert "copy" not in done.stderr
    assert id_of(moved) == "0123456789ab"
    assert load_run(moved).identity.root == str(moved)
    assert original_of(load_run(tmp_path / "link")) is None
    archive = copied(moved, tmp_path / "archive", "cp -r")
    shutil.rmtree(moved)
    copied(archive, moved, "tar")
    assert original_of(load_run(moved)) is None
    assert original_of(load_run(archive)) == moved


def test_an_archive_that_is_put_back_leaves_the_jobs_of_the_run_alone_that_goes_on_elsewhere(
    tmp_path, monkeypatch, clock
):
    """It was moved by a copy, went on there, and an older archive is now in its former place."""
    world = make_world(tmp_path / "moved here", monkeypatch, 0, Luck())
    former = load_run(Path(shutil.copytree(world.run.paths.root, tmp_path / "former", symlinks=True)))
    write_identity(former.paths, replace(former.identity, root=str(former.paths.root)))
    world.submit()
    jobs = [element for element in world.slurm.elements() if not element.has_ended]
    assert jobs
    for act in (cancel_run, as_own):
        with pytest.raises(RunError, match=r"former has the id .* submitted from .*moved here \(") as refused:
            act(load_run(former.paths.root))
        assert "slurm-ppo status" in str(refused.value)
        assert "slurm-ppo fork" in str(refused.value)
    assert not any(element.has_ended for element in jobs)
    assert "cancelled" in cancel_run(world.run)
    assert all(element.has_ended for element in jobs)


def test_another_run_in_the_place_of_a_moved_one_is_no_original(original, tmp_path):
    moved = original.rename(tmp_path / "moved")
    copied(moved, original, "cp -r")
    run = load_run(original)
    write_identity(run.paths, replace(run.identity, id="ba9876543210"))
    assert original_of(load_run(moved)) is None


def test_what_may_not_be_looked_at_is_taken_to_be_there(original, tmp_path, monkeypatch):
    """A colleague copies a run that he may read out of a folder that he may not enter any more."""
    copy = load_run(copied(original, tmp_path / "copy", "cp -r"))
    stat = Path.stat

    def refused(path, **options):
        if path == original:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert original_of(copy) == original
    assert as_own(copy).identity.id != "0123456789ab"


def test_a_copy_of_a_run_that_is_at_work_is_refused_at_once(original, tmp_path, slurm_ppo):
    """Its lease was copied, and its holder lives: nobody waits for it."""
    with hold(original / "locks"):
        copy = copied(original, tmp_path / "copy", "cp -a")
        begun = time.monotonic()
        done = slurm_ppo("resume", copy)
        assert time.monotonic() - begun < 5
        assert done.returncode == 2, done.stderr
        assert f"{copy} is a copy of {original}, which is active (a driver holds its lease)" in done.stderr
        assert f"slurm-ppo fork {original}@ITERATION NEW_RUN" in done.stderr
        assert done.stderr.endswith("nothing was changed\n")
        assert id_of(copy) == "0123456789ab"
        shown = " ".join(slurm_ppo("status", copy).stdout.split())
        assert f"a copy of {original}" in shown
        assert "a driver is active" not in shown
    assert as_own(load_run(copy)).identity.id != "0123456789ab"


def test_a_copy_whose_lease_is_held_is_cleaned_as_a_run_of_its_own(original, tmp_path, slurm_ppo):
    copy = copied(original, tmp_path / "copy", "cp -a")
    acquire(copy / "locks")
    (copy / "superseded/from").mkdir(parents=True)
    (copy / "superseded/from/file").write_text("moved aside")
    done = slurm_ppo("clean", copy, "--yes", "--only", "superseded")
    assert done.returncode == 0, done.stderr
    assert not (copy / "superseded/from").exists()
    assert id_of(copy) != "0123456789ab"


@pytest.fixture
def submitted(tmp_path, monkeypatch, clock):
    """A run on Slurm with jobs in the queue, and a copy of it."""
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    return world, Path(shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True))


def live(world) -> set[str]:
    return {str(element.job.id) for element in world.slurm.elements() if not element.has_ended}


def test_jobs_of_a_run_on_slurm_are_not_those_of_its_copy(submitted):
    world, copy = submitted
    jobs, run = live(world), load_run(copy)
    assert jobs
    with pytest.raises(RunError, match=f"slurm-ppo cancel {world.run.paths.root}"):
        cancel_run(run)
    for act in (lambda: driver_job(copy), lambda: sync(run, 1.0, None, print)):
        with pytest.raises(RunError, match="is a copy"):
            act()
    with pytest.raises(RunError, match=r"is active \(\d+ of its jobs are in the queue\)"):
        as_own(run)
    assert live(world) == jobs
    assert not read_control(run.paths).cancelled
    status = read_status(run)
    assert (status.slurm.jobs_running, status.slurm.jobs_waiting) == (0, 0)
    assert status.state == "stopped"
    live_ids = frozenset({run.identity.id})
    states = {entry.run: entry.state for entry in read_entries(find_places(copy.parent), lambda _: live_ids)}
    assert states == {str(world.run.paths.root): "running", str(copy): "stopped"}


def test_a_copy_on_slurm_goes_on_without_the_originals_submissions(submitted):
    world, copy = submitted
    cancel_run(world.run)
    own = as_own(load_run(copy))
    assert own.identity.id != world.run.identity.id
    control = read_control(own.paths)
    assert not control.cancelled
    assert control.emptied == control.invocation
    assert not (copy / "locks").exists()
    (event,) = [e for e in journal.read(own.paths.events) if e["event"] == "copied"]
    assert event["original"] == str(world.run.paths.root)
    world.run = own
    world.submit()
    world.live_on()
    assert world.outcome == "complete", world.story
    assert not [e for e in journal.read(own.paths.events) if e["event"] == "failed"]


def test_of_two_copies_of_a_run_that_is_gone_one_acts_on_its_own_jobs_alone(submitted, tmp_path):
    """Both are taken to have been moved. The first to go on has jobs that the other does not know."""
    world, first = submitted
    cancel_run(world.run)
    second = Path(shutil.copytree(first, tmp_path / "second", symlinks=True))
    shutil.rmtree(world.run.paths.root)
    world.run = load_run(first)
    world.submit()
    jobs = live(world)
    for act in (cancel_run, as_own):
        with pytest.raises(RunError, match=r"submitted from .*\(\d+ of them are in the queue\)"):
            act(load_run(second))
    assert live(world) == jobs
    assert as_own(load_run(first)).identity.id == world.run.identity.id
    assert cancel_run(load_run(first)).startswith("cancelled ")


@LONG
def test_tasks_stop_when_their_run_is_not_where_it_was(inputs, environment, slurm_ppo, tmp_path):
    root, moved, hold = tmp_path / "run", tmp_path / "moved", Hold(tmp_path / "hold")
    hold.begin()
    command = [sys.executable, "-m", "pipeline", "run", *tiny.overrides(inputs, root, "iterations=2")]
    held = environment | {light.HOLD: str(hold.file), light.SECONDS: "0.1"}
    said = (tmp_path / "said").open("w+")
    process = subprocess.Popen(command, env=held, cwd=ROOT, stdout=said, stderr=said)
    wait_for(lambda: list(tmp_path.glob("hold.*")), "tasks at work", 60)
    root.rename(moved)
    hold.end()
    try:
        code = process.wait(60)
    finally:
        process.kill()
    told = Path(said.name).read_text()
    assert not root.exists(), sorted(root.rglob("*"))
    assert code == 2, told
    assert told.count("\n") < 20, told
    assert f"{root}/events.jsonl: No such file or directory" in told
    done = slurm_ppo("resume", moved)
    assert done.returncode == 0, done.stderr
