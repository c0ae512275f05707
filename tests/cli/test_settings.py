"""Settings that people change while a run goes on: noted, shown, the same bytes; others name the fork."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.settings import change_settings, check_change
from pipeline.config.compose import compose
from pipeline.run.changes import read_changes
from pipeline.run.control import begin_invocation
from pipeline.run.directory import load_run
from pipeline.run.lease import hold
from pipeline.run.paths import RunPaths
from pipeline.run.twofold import why_spoilt
from tests.support import tiny
from tests.support.changed import REFUSED, fork_words
from tests.support.tables import sample
from tests.support.toyworld import Luck, World, is_driver, make_world, trials

TIMES = ("scheduler.max_attempts=7", "scheduler.rollout.slots=1")


@pytest.fixture(scope="module")
def changed_run(complete_run, slurm_ppo, tmp_path_factory) -> Path:
    """A run that was moved, and went on from its second update with other settings, and with others yet."""
    root = tmp_path_factory.mktemp("changed") / "run"
    whole = root.with_name("whole")
    shutil.copytree(complete_run, whole, symlinks=True)
    own = slurm_ppo("fork", f"{whole}@1", root)  # a run of its own, and no copy
    assert own.returncode == 0, own.stderr
    for words in (TIMES, ("scheduler.max_attempts=8",)):
        done = slurm_ppo("resume", root, *words)
        assert done.returncode == 0, done.stderr
        assert "changed from iteration 2: scheduler.max_attempts" in done.stderr
    return root


def test_a_change_leaves_the_bytes_and_the_frozen_settings_as_they_were(changed_run, complete_run):
    name = "policy/00002/model.safetensors"
    assert (changed_run / name).read_bytes() == (complete_run / name).read_bytes()
    assert load_run(changed_run, settings=0).config.scheduler.max_attempts == 3
    assert load_run(changed_run, settings=1).config.scheduler.max_attempts == 7
    now = load_run(changed_run).config.scheduler
    assert (now.max_attempts, now.rollout.slots) == (8, 1)


def test_what_was_changed_is_shown_with_who_when_and_from_where(changed_run, slurm_ppo):
    first, second = slurm_ppo("config", changed_run, "--history").stdout.splitlines()
    assert "from iteration 2: scheduler.max_attempts 3 -> 7, scheduler.rollout.slots auto -> 1" in first
    assert "scheduler.max_attempts 7 -> 8" in second
    assert "max_attempts: 8" in slurm_ppo("config", changed_run).stdout
    status = slurm_ppo("status", changed_run).stdout
    assert "settings were changed 2 times" in " ".join(status.split())
    said = json.loads(slurm_ppo("status", changed_run, "--json").stdout)["settings_changed"]
    assert "scheduler.max_attempts 7 -> 8" in said
    report = Path(slurm_ppo("report", changed_run, "--out", changed_run.parent / "r.html").stdout.strip())
    assert "Changed while the run went on: 3 settings" in report.read_text()


def test_a_run_of_which_nothing_was_changed_says_so(complete_run, slurm_ppo):
    assert slurm_ppo("config", complete_run, "--history").stdout == "its settings are as it began\n"
    assert "settings were changed" not in slurm_ppo("status", complete_run).stdout


def test_a_fork_has_the_settings_as_they_are_and_no_history(changed_run, slurm_ppo, tmp_path):
    done = slurm_ppo("fork", f"{changed_run}@2", tmp_path / "fork", "iterations=3")
    assert done.returncode == 0, done.stderr
    fork = load_run(tmp_path / "fork")
    assert (fork.config.scheduler.max_attempts, fork.changes) == (8, ())


def test_the_same_value_again_is_no_change(changed_run, slurm_ppo):
    before = (changed_run / "settings.json").read_bytes()
    done = slurm_ppo("resume", changed_run, "scheduler.max_attempts=8")
    assert done.returncode == 0, done.stderr
    assert "the run has these settings already" in done.stderr
    assert (changed_run / "settings.json").read_bytes() == before


def test_inputs_that_are_gone_since_keep_no_setting_from_changing(inputs, slurm_ppo, tmp_path):
    """As a purge of scratch takes them: the run has its own copy of what it needs."""
    own = Path(shutil.copytree(inputs, tmp_path / "inputs"))
    run = tmp_path / "run"
    assert slurm_ppo("run", *tiny.overrides(own, run, "iterations=1")).returncode == 0
    (own / "prompts.jsonl").unlink()
    done = slurm_ppo("resume", run, "notify.stall_after=60")
    assert done.returncode == 0, done.stderr
    assert "notify.stall_after" in slurm_ppo("config", run, "--history").stdout
    refused = slurm_ppo("resume", run, "data.prompts=/nowhere/prompts.jsonl")
    assert refused.returncode == 2
    assert "/nowhere/prompts.jsonl: no such file" in refused.stderr


def test_another_scheduler_is_one_line_with_the_fork(changed_run, slurm_ppo):
    for word in ("scheduler.kind=slurm", "scheduler=slurm"):
        done = slurm_ppo("resume", changed_run, word)
        assert done.returncode == 2
        (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
        assert f"instead: slurm-ppo fork {changed_run} NEW_RUN {word}" in line


def test_one_of_the_two_files_may_be_spoilt_and_both_may_not(changed_run, slurm_ppo, tmp_path):
    root = Path(shutil.copytree(changed_run, tmp_path / "run", symlinks=True))
    (root / "settings.json").write_text("{}")
    assert load_run(root).config.scheduler.max_attempts == 8
    (root / "settings.copy.json").write_text("{}")
    done = slurm_ppo("status", root)
    assert done.returncode == 2
    assert "settings.copy.json cannot be read" in done.stderr


def test_while_another_drives_the_run_a_change_is_refused(changed_run, slurm_ppo):
    before = read_changes(RunPaths(changed_run))
    with hold(RunPaths(changed_run).locks):
        done = slurm_ppo("resume", changed_run, "scheduler.max_attempts=9")
    assert done.returncode != 0
    assert "nothing was changed" in done.stderr
    assert read_changes(RunPaths(changed_run)) == before


FEW = sample([word for _, word in REFUSED], 1 / 12)


@pytest.mark.parametrize("word", FEW)
def test_what_results_depend_on_is_refused_with_a_fork_command_that_works(
    word, changed_run, slurm_ppo, tmp_path
):
    before = {path: path.stat().st_mtime_ns for path in changed_run.rglob("*") if "locks" not in path.parts}
    done = slurm_ppo("resume", changed_run, word)
    assert done.returncode == 2, done.stderr
    assert f"{word.partition('=')[0]}=" in done.stderr
    assert "cannot change while the run goes on" in done.stderr
    assert "nothing was changed" in done.stderr
    after = {path: path.stat().st_mtime_ns for path in changed_run.rglob("*") if "locks" not in path.parts}
    assert after == before
    words = fork_words(done.stderr)
    new = Path(words[2])
    try:
        made = slurm_ppo(*words)
        assert made.returncode == 0, made.stderr
        assert "forked from policy" in made.stdout
    finally:
        shutil.rmtree(new, ignore_errors=True)


def test_a_word_that_may_change_beside_one_that_may_not_changes_nothing(changed_run, slurm_ppo):
    before = (changed_run / "settings.json").read_bytes()
    done = slurm_ppo("resume", changed_run, "scheduler.max_attempts=11", "seed=3")
    assert done.returncode == 2
    assert "scheduler.max_attempts=11 seed=3" in done.stderr, "the fork has both"
    assert (changed_run / "settings.json").read_bytes() == before


# --- on Slurm: what waits, and passes of others ---


@pytest.fixture(autouse=True)
def _no_models_nor_cluster(request, monkeypatch) -> None:
    """The models of a toy run are not there, nor what a cluster is asked for."""
    if "clock" in request.fixturenames:
        monkeypatch.setattr("pipeline.cli.settings.configure_what_can_be", changed_alone)
        monkeypatch.setattr("pipeline.cli.settings.resolve_what_can_be", lambda config, found: config)
        monkeypatch.setattr("pipeline.checks.cluster.check_cluster", lambda config: [])


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    return make_world(tmp_path / "run", monkeypatch, 1, Luck())


def changed_alone(words, folder, found, base):
    return compose(words, folder, base)


def waiting(world: World) -> dict[str, str]:
    """Batch scripts of the arrays of stages that wait, by their ids."""
    elements = [e for e in world.slurm.elements() if e.is_pending and not is_driver(e)]
    return {e.job.id: e.job.script.read_text() for e in elements}


def drivers(world: World) -> dict[str, str]:
    """The same of driver jobs."""
    elements = [e for e in world.slurm.elements() if e.is_pending and is_driver(e)]
    return {e.job.id: e.job.script.read_text() for e in elements}


def change(world: World, *words: str) -> None:
    run = world.run.with_newest_settings()
    change_settings(run, check_change(run, words), hold(run.paths.locks), words)


def test_jobs_that_wait_are_submitted_again_with_the_new_settings(world):
    world.submit()
    before = waiting(world)
    assert before
    assert all("#SBATCH --time=4:00:00" in script for script in before.values())
    change(world, "scheduler.prepare.time=0:20:00", "scheduler.rollout.time=0:20:00")
    world.submit()  # with the run as it was opened before: passes look what was changed since
    after = waiting(world)
    assert after
    assert not before.keys() & after.keys()
    assert all("#SBATCH --time=0:20:00" in script for script in after.values())
    world.live_on()
    assert not [event for event in events(world) if event["event"] == "failed"]


def test_jobs_that_a_change_does_not_concern_stay_in_the_queue(world):
    world.submit()
    before = waiting(world)
    change(world, "scheduler.update.time=0:20:00", "scheduler.max_attempts=50", "update.keep_last=9")
    world.submit()
    assert waiting(world).keys() == before.keys()


def test_driver_jobs_that_wait_are_submitted_again_too(world):
    world.submit()
    before = drivers(world)
    change(world, "scheduler.driver.time=0:07:00")
    world.submit()
    after = drivers(world)
    assert not before.keys() & after.keys()
    assert len(after) >= len(before) > 1
    assert all("#SBATCH --time=0:07:00" in script for script in after.values())
    world.live_on()
    world.check_is_complete()


def test_who_is_killed_right_after_a_change_has_made_it(world):
    world.submit()
    before = waiting(world)
    change(world, "scheduler.prepare.time=0:20:00", "scheduler.rollout.time=0:20:00")
    world.advance("a driver job that was there before")
    assert all("0:20:00" in script for script in waiting(world).values())
    assert not before.keys() & waiting(world).keys()
    begin_invocation(world.run.paths)
    world.live_on()


@pytest.mark.parametrize("taken", range(4))
def test_a_full_disk_takes_a_change_as_a_whole_or_not_at_all(world, monkeypatch, capfd, taken):
    """``taken``: of what a change writes (two files, and two lines of the journal) so much."""
    world.submit()
    monkeypatch.setattr(os, "fsync", full_after(taken, below=world.run.paths.root, but="locks"))
    is_told = False
    try:
        change(world, "scheduler.prepare.time=0:20:00")
    except OSError as error:
        is_told = error.errno == errno.ENOSPC
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    paths = world.run.paths
    is_made = load_run(paths.root).config.slurm.prepare.time == "0:20:00"
    assert is_made is not is_told
    assert is_made is (taken > 0)
    assert ("changed from iteration 1: scheduler.prepare.time" in capfd.readouterr().err) is is_made
    world.submit()
    times = {text.partition("--time=")[2].split()[0] for text in waiting(world).values()}
    assert times == ({"0:20:00", "4:00:00"} if is_made else {"4:00:00"})
    assert why_spoilt(paths.settings, lambda content: content) is None, "a pass has mended the copy"
    world.live_on()
    world.check_is_complete()


def full_after(taken: int, below: Path, but: str) -> Callable[[int], None]:
    """A disk that takes so many files, and then none."""
    left = iter([None] * taken)

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_file_of_run = path.is_relative_to(below) and but not in path.parts and path.is_file()
        if is_file_of_run and next(left, "full") == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return fsync


@pytest.mark.parametrize("seed", range(trials(3)))
def test_whatever_is_changed_whenever_and_whatever_fails_the_run_comes_to_its_end(
    seed, tmp_path, monkeypatch, clock
):
    world = make_world(tmp_path / "run", monkeypatch, seed, Luck(mishaps=3, disturbances=4))
    world.submit()
    for hours in range(5, 13):  # 4 is the default
        for _ in range(world.chance.randrange(12)):
            if world.outcome is None:
                world.happen()
        stage = world.chance.choice(["prepare", "rollout", "reward", "update", "driver"])
        change(world, f"scheduler.{stage}.time={hours}:00:00")
        if world.chance.random() < 0.7:  # else the command was killed
            world.submit()
    world.submit()
    world.live_on()
    world.check_is_complete()
    world.check_failures_are_told()
    assert len(world.run.with_newest_settings().changes) == 8


def events(world: World) -> list[dict]:
    return [json.loads(line) for line in world.run.paths.events.read_text().splitlines()]
