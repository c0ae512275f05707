"""What identifies a run is kept twice, and outlives a purge; its jobs can be cancelled without it."""

import os
import pwd
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import slurm.commands
from pipeline.cli.lost import cancel_whatever_is_left
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError, identity_text
from pipeline.run.kept import identifying, keep
from pipeline.run.owner import Owner
from pipeline.run.place import settle
from slurm.commands import SlurmError
from tests.support.damage import cut, flip_bit
from tests.support.killing import events
from tests.support.tables import sample
from tests.support.toyworld import Luck, make_world

DAY = 86_400


@pytest.fixture
def resting(copied_run) -> Path:
    """A run that has an iteration to do."""
    for stage in ("update", "evaluate"):
        (copied_run / f"iterations/00002/{stage}/shard-00000.json").unlink()
    settle(load_run(copied_run))  # a run that was moved, and no copy
    return copied_run


@pytest.mark.parametrize(
    "gone", sample([("run.json",), ("config.yaml",), ("run.json", "config.copy.yaml")], 0.1)
)
def test_what_is_gone_is_read_from_the_copy_and_written_again(resting, slurm_ppo, gone):
    kept = {path.name: path.read_bytes() for path in identifying(load_run(resting).paths)[:4]}
    for name in gone:
        (resting / name).unlink()
    assert "1/2 iterations" in slurm_ppo("status", resting).stdout
    assert "1 run: 1 complete" in slurm_ppo("ls", resting.parent).stdout
    done = slurm_ppo("resume", resting)
    assert done.returncode == 0, done.stderr
    assert f"{gone[0]}: gone or corrupt, and written again" in done.stderr
    config = {name: data for name, data in kept.items() if name.startswith("config")}
    assert {name: (resting / name).read_bytes() for name in config} == config
    assert load_run(resting).identity.id in (resting / "run.json").read_text()
    assert (resting / "run.json").read_text() == (resting / "run.copy.json").read_text()
    assert events(resting, "identity_kept")


@pytest.mark.parametrize(
    "spoil", [flip_bit, cut, lambda path: path.write_bytes(b"")], ids=["bit", "cut", "empty"]
)
@pytest.mark.parametrize("name", ["run.json", "run.copy.json"])
def test_what_is_spoilt_is_read_from_the_other_and_written_again(resting, name, spoil):
    """A bit that has flipped, and what a full disk leaves."""
    whole = (resting / name).read_bytes()
    run = load_run(resting)
    spoil(resting / name)
    assert load_run(resting) == run
    assert keep(run) == ["run.json"][: name == "run.json"]
    assert (resting / name).read_bytes() == whole


def test_a_copy_that_says_what_was_before_is_written_again(resting):
    """Whoever gave a copied run an id of its own was killed between the two."""
    run = load_run(resting)
    (resting / "run.copy.json").write_text(identity_text(replace(run.identity, id="0123456789ab")))
    assert keep(run) == []
    assert (resting / "run.copy.json").read_text() == (resting / "run.json").read_text()


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_where_both_are_gone_what_is_left_is_said(resting, slurm_ppo, name):
    stem, _, ending = name.partition(".")
    for one in (name, f"{stem}.copy.{ending}"):
        (resting / one).unlink()
    done = slurm_ppo("resume", resting)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"held a run, and its {name} and the copy of it are gone" in said
    assert "policies up to policy/00002." in said


def test_the_times_of_what_identifies_a_run_are_renewed_and_of_nothing_else(resting):
    old = time.time() - 20 * DAY
    for path in resting.rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
    run = load_run(resting)
    assert keep(run) == []
    renewed = {path for path in resting.rglob("*") if path.is_file() and path.stat().st_mtime > old + DAY}
    assert renewed == {path for path in identifying(run.paths) if path.exists()}
    before = {path: path.stat().st_mtime_ns for path in renewed}
    keep(run)
    assert before == {path: path.stat().st_mtime_ns for path in renewed}, "once an hour is enough"


def test_a_driver_writes_again_what_a_purge_takes_while_it_runs(resting):
    run = load_run(resting)
    for path in identifying(run.paths)[:4]:
        path.unlink()
    assert keep(run) == ["run.json", "config.yaml"]
    assert load_run(resting) == run


@pytest.fixture
def submitted(tmp_path, monkeypatch, clock):
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    assert live(world)
    return world


def live(world) -> list:
    return [element for element in world.slurm.elements() if not element.has_ended]


@pytest.mark.parametrize("left", ["no config", "no identity", "submissions", "the id"])
def test_jobs_are_cancelled_without_what_identifies_the_run(submitted, left):
    paths = submitted.run.paths
    run, config = [paths.run_json, paths.run_copy], [paths.config_yaml, paths.config_copy]
    for path in {"no config": config, "no identity": run, "submissions": run + config}.get(left, []):
        path.unlink()
    word = Path(submitted.run.identity.id) if left == "the id" else paths.root
    with pytest.raises(RunError):
        load_run(word)
    said = cancel_whatever_is_left(word)
    assert not live(submitted)
    assert f"jobs that have its id, {submitted.run.identity.id}, in their names" in said


@pytest.mark.parametrize("is_known", [True, False], ids=["by its owner", "by accounting"])
def test_jobs_on_another_cluster_are_found_there(submitted, monkeypatch, is_known):
    """What is left of the run names the cluster; else each that accounting knows is asked."""
    paths, asked = submitted.run.paths, []
    run_once, control = slurm.commands._run_once, read_control(paths)
    owner = Owner(pwd.getpwuid(os.getuid()).pw_name, os.getuid(), "far")
    write_control(paths, replace(control, owner=owner))
    for path in identifying(paths)[:4]:
        path.unlink()

    def run_at(arguments, *more):
        if arguments[0] == "sacctmgr":
            return "far\nnear\naway\n"
        asked.append((arguments[0], cluster := slurm.commands._named.get()))
        if cluster == "away":
            raise SlurmError(arguments, 1, "no route to it")
        return run_once(arguments, *more) if cluster == "far" else ""

    monkeypatch.setattr("slurm.commands._run_once", run_at)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "near")
    said = cancel_whatever_is_left(paths.root if is_known else Path(submitted.run.identity.id))
    assert not live(submitted)
    assert "cluster far was asked" in said
    assert ("cluster away cannot be asked from here" in said) is not is_known
    assert {where for _, where in asked} == ({"far"} if is_known else {"", "far", "away"})


def test_a_cluster_that_cannot_be_asked_from_here_is_named_and_nothing_is_changed(submitted, monkeypatch):
    paths = submitted.run.paths
    owner = Owner(pwd.getpwuid(os.getuid()).pw_name, os.getuid(), "far")
    write_control(paths, replace(read_control(paths), owner=owner))
    for path in identifying(paths)[:4]:
        path.unlink()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "near")
    before = read_control(paths)

    def refuse(arguments, *more):
        raise SlurmError(arguments, 1, "No cluster 'far' known by database.")

    monkeypatch.setattr("slurm.commands._run_once", refuse)
    with pytest.raises(RunError, match=r"cluster far cannot be asked .* on one of its machines"):
        cancel_whatever_is_left(paths.root)
    assert read_control(paths) == before


def test_of_a_copy_without_identity_the_originals_jobs_are_left_alone(submitted, tmp_path):
    copy = Path(shutil.copytree(submitted.run.paths.root, tmp_path / "copy", symlinks=True))
    for name in ("run.json", "run.copy.json", "config.yaml", "config.copy.yaml"):
        (copy / name).unlink()
    with pytest.raises(RunError, match="is a copy"):
        cancel_whatever_is_left(copy)
    assert live(submitted)


def test_a_folder_or_word_that_is_no_run_is_refused_as_ever(tmp_path):
    for word in (tmp_path, Path("0123456789"), tmp_path / "0123456789ab"):
        with pytest.raises(RunError, match="is not a run directory"):
            cancel_whatever_is_left(word)
