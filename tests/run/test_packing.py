"""Packing: old iterations become one archive each, nothing is lost on the way, and everything reads it."""

import itertools
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.scheduler import LocalConfig
from pipeline.config.update import UpdateConfig
from pipeline.metrics.responses import read_samples
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.run import archiving, journal, packing
from pipeline.run.commits import (
    CorruptData,
    check_sizes,
    publish,
    read_record,
    require_record,
    verify_outputs,
)
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.packed import archives
from pipeline.run.packing import pack, pack_old, unpack
from pipeline.run.paths import BAND_PART, CARRIED_PART, PASSED_ON
from pipeline.run.plan import policy_maker
from pipeline.run.records import Frontier, Records, find_frontier
from pipeline.run.schemas import BAND, CARRIED, conform
from pipeline.run.shards import read_shard, write_shard
from pipeline.run.superseded import remove_losers
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.log_files import parse_choice
from pipeline.status.logs import describe_failed
from pipeline.status.plan import every_task
from pipeline.status.snapshot import read_status
from pipeline.tracking.tracker import Trackers
from tests.support import reportrun
from tests.support.composed import composed_of
from tests.support.killing import Killed, killed_at
from tests.support.tables import sample

NEWEST, SHARDS = 6, 3


def commit_update(run: Run, iteration: int) -> None:
    """Commit an update that passes tables on, which have as many rows as its number."""
    update, columns = policy_maker(iteration), {"prompt_index": range(iteration), "epoch": [0] * iteration}
    scored = {"mean_reward": [0.5] * iteration, "is_out": [False] * iteration}
    tables = {BAND_PART: conform({**columns, **scored}, BAND), CARRIED_PART: CARRIED.empty_table()}
    outputs = tuple(
        write_shard(run.paths, run.paths.task(update).data("one", part), table)
        for part, table in tables.items()
    )
    publish(run.paths, reportrun.record(update, outputs))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Six of seven iterations, with real shards and with logs, of which the newest two stay as files."""
    root = tmp_path_factory.mktemp("packing") / "run"
    update = UpdateConfig(keep_shards_last=2)
    run = reportrun.make_run(root, SHARDS, iterations=7, scheduler=LocalConfig(), update=update)
    publish(run.paths, reportrun.record(PREPARE))
    for iteration in range(1, NEWEST + 1):
        for shard in range(SHARDS):
            responses = [f"{iteration} {shard} {i}" for i in range(3)]
            reportrun.commit_shard(run, iteration, shard, responses=responses, rewards=[0.0, 1.0, 2.0])
        commit_update(run, iteration)
        for task in run.plan.tasks(iteration):
            log = run.paths.task(task).log(1)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"what {task} said\n")
    journal.rewrite(run.paths.metrics, ({"iteration": i} for i in range(1, NEWEST + 1)))
    return root


@pytest.fixture
def run(made, tmp_path) -> Run:
    return load_run(Path(shutil.copytree(made, tmp_path / "run")))


def files(run: Run, *below: str) -> dict[str, bytes]:
    """Every file, but for what drivers note."""
    folders = [run.paths.root / name for name in below] if below else [run.paths.root]
    found = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {
        run.paths.relative(path): path.read_bytes() for path in sorted(found) if path.name != "events.jsonl"
    }


def shards_of(run: Run, iteration: int) -> list[Task]:
    return [task for task in run.plan.tasks(iteration) if task.stage.is_sharded]


def check_all_reads(run: Run, original: Path) -> None:
    """That everybody finds what was there before anything was packed."""
    before = load_run(original)
    for iteration in range(1, NEWEST + 1):
        for task in run.plan.tasks(iteration):
            verify_outputs(run.paths, require_record(run.paths, task))
            assert read_record(run.paths, task) == read_record(before.paths, task)
        assert read_samples(run, iteration).rows == read_samples(before, iteration).rows != ()
        update = require_record(run.paths, policy_maker(iteration))
        assert read_shard(run.paths, update, BAND, BAND_PART).num_rows == iteration
    records = Records(run.paths)
    tasks = [task for i in range(1, NEWEST + 1) for task in run.plan.tasks(i)]
    records.refresh(tasks)
    assert (set(records.known), records.corrupt) == (set(tasks), {})


# --- what is packed, and who reads it ---


def test_old_iterations_become_an_archive_each_that_everybody_reads(run, made):
    before = files(run)
    assert list(pack_old(run, NEWEST)) == []
    for iteration in range(1, 5):
        left = [name for name in files(run) if f"/{iteration:05d}" in name]
        stem = f"iterations/{iteration:05d}/update"
        assert left == [f"{stem}/shard-00000.json", f"{stem}/shards.zip"]
        assert not run.paths.logs(Task(iteration, Stage.ROLLOUT)).exists()
        assert not run.paths.task(Task(iteration, Stage.ROLLOUT)).folder.exists()
    for iteration in (5, 6):
        kept = {name: data for name, data in before.items() if f"/{iteration:05d}" in name}
        assert kept == {name: data for name, data in files(run).items() if f"/{iteration:05d}" in name}
        assert len(kept) == 2 * 2 * SHARDS + 2 * SHARDS + 2 + len(PASSED_ON)
    check_all_reads(run, made)
    assert read_status(run).iterations_done == NEWEST
    assert {line.split(":")[0] for line in every_task(run)} >= {"iteration 7 update"}
    assert not any(f"iteration {i} " in line for line in every_task(run) for i in range(1, 7))


def test_any_unzip_reads_an_archive(run):
    list(pack_old(run, NEWEST))
    with zipfile.ZipFile(archives(run.paths, 2)[1]) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert (
            archive.read("logs/00002-rollout/attempt-1/shard-00001.log")
            == b"what iteration 2 rollout shard 1 said\n"
        )


def test_without_the_setting_nothing_is_packed(run, made):
    config = replace(run.config, update=replace(run.config.update, keep_shards_last=None))
    before = files(run)
    assert list(pack_old(replace(run, config=config), NEWEST)) == []
    assert files(run) == before


def test_of_a_long_run_all_but_the_newest_twenty_are_packed_unless_one_says_otherwise(tmp_path):
    run = reportrun.make_run(tmp_path / "run", iterations=25, scheduler=LocalConfig())
    for iteration in range(1, 23):
        reportrun.commit_shard(run, iteration, 0, responses=["a"], rewards=[0.0])
        publish(run.paths, reportrun.record(policy_maker(iteration)))
    assert list(pack_old(run, 22)) == []
    assert [i for i in range(1, 23) if archives(run.paths, i)[1].exists()] == [1, 2]


def test_of_many_that_are_due_some_are_packed_at_a_time(run, made, monkeypatch):
    monkeypatch.setattr(packing, "_MOST_AT_ONCE", 3)
    for newest in (3, 4):
        assert list(pack_old(run, NEWEST)) == []
        assert [archives(run.paths, i)[1].exists() for i in range(1, 5)] == [i <= newest for i in range(1, 5)]
    check_all_reads(run, made)


def test_a_pass_looks_at_one_packed_iteration_however_many_there_are(run, monkeypatch):
    list(pack_old(run, NEWEST))
    looked = []
    real = packing.archives
    monkeypatch.setattr(packing, "archives", lambda paths, i: looked.append(i) or real(paths, i))
    assert list(pack_old(run, NEWEST)) == []
    assert looked == [4]


def test_rows_that_are_written_anew_sweep_no_archive_away(run, made):
    list(pack_old(run, NEWEST))
    records = [require_record(run.paths, task) for task in run.plan.tasks(2)]
    remove_losers(run.paths, records)
    check_all_reads(run, made)


def test_one_as_file_is_too_few(inputs, tmp_path):
    with pytest.raises(ConfigError, match=r"keep_shards_last=1: .*give 2"):
        resolve(composed_of(inputs, tmp_path / "run", "update.keep_shards_last=1"))


# --- killed, full, corrupt, two at once ---


STEPS = ("fsync", "link", "unlink", "rename", "rmdir", "open")


def test_killed_at_any_step_nothing_is_lost_and_the_next_one_ends_the_same(run, made, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power is cut here
    _, steps = killed_at(0, STEPS, lambda: pack_old(run, 3))
    assert steps > 30
    for step in sample(range(1, steps + 1), 0.25):
        trial = load_run(Path(shutil.copytree(made, tmp_path / f"trial{step}")))
        assert killed_at(step, STEPS, lambda trial=trial: pack_old(trial, 3)) == (True, step)
        check_all_reads(trial, made)
        list(pack_old(trial, 3))
        assert files(trial) == files(run)
        shutil.rmtree(trial.paths.root)


def test_a_full_disk_leaves_the_files_and_is_told_until_it_is_over(run, made, monkeypatch):
    books = Publisher(run, Trackers())
    books.open()
    before = files(run, "iterations", "logs")

    def full(source, target=None):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(archiving, "hash_stream", full)
        (said,) = books.pack(NEWEST)
    assert "No space left on device" in said
    assert files(run, "iterations", "logs") == before
    (trouble,) = read_status(run).troubles
    assert trouble.startswith("old iterations cannot be packed, while training goes on, last ")
    books = Publisher(run, Trackers())
    books.open()
    assert list(books.pack(NEWEST)) == []
    assert read_status(run).troubles == ()
    check_all_reads(run, made)


def test_a_shard_that_is_corrupt_is_not_packed_and_is_named(run):
    path = next(run.paths.task(Task(2, Stage.REWARD)).folder.glob("shard-00001.*.arrow"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    before = {name: data for name, data in files(run).items() if "/00002" in name}
    (said,) = pack_old(run, NEWEST)
    assert said.startswith("iteration 2 is not packed: iteration 2 reward shard 1 is corrupt: ")
    assert path.name in said
    assert {name: data for name, data in files(run).items() if "/00002" in name} == before
    assert archives(run.paths, 3)[1].exists()


def test_a_table_that_an_update_passed_on_is_compared_before_it_is_packed_and_may_be_gone(run):
    bad, gone = (next(run.paths.task(policy_maker(i)).folder.glob("*.band.*")) for i in (2, 3))
    bad.write_bytes(bad.read_bytes()[:-1] + b"\0")
    gone.unlink()
    (said,) = pack_old(run, NEWEST)
    assert said.startswith("iteration 2 is not packed: iteration 2 update is corrupt: ")
    assert bad.name in said
    assert [archives(run.paths, i)[1].exists() for i in range(1, 5)] == [True, False, True, True]
    with pytest.raises(CorruptData, match=rf"{gone.name} is gone"):
        check_sizes(run.paths, require_record(run.paths, policy_maker(3)))


def test_what_the_disk_does_not_give_back_as_it_was_written_is_not_believed(run, monkeypatch):
    real = archiving._write

    def spoils(file, originals):
        digests = real(file, originals)
        file.seek(200)
        file.write(b"\xff" * 8)
        return digests

    monkeypatch.setattr(archiving, "_write", spoils)
    before = files(run, "iterations/00001", "logs")
    said = list(pack_old(run, 3))
    assert len(said) == 1
    assert files(run, "iterations/00001", "logs") == before


@pytest.mark.parametrize("place", [0.05, 0.3, 0.5, 0.7])
def test_a_flipped_bit_in_an_archive_is_named_by_whoever_reads_it(run, place):
    list(pack_old(run, NEWEST))
    path = archives(run.paths, 3)[1]
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.startswith("iterations")]
    info = members[int(place * len(members))]
    data = bytearray(path.read_bytes())
    data[data.index(info.filename.encode(), info.header_offset) + len(info.filename) + 40] ^= 4
    path.write_bytes(data)
    found = []
    for task in shards_of(run, 3):
        try:
            verify_outputs(run.paths, require_record(run.paths, task))
        except CorruptData as error:
            found.append(str(error))
    assert len(found) == 1
    assert Path(info.filename).name in found[0]
    assert len(read_samples(run, 3).rows) == 3 * (SHARDS - 1)


def test_an_archive_without_its_end_is_named(run):
    list(pack_old(run, NEWEST))
    path = archives(run.paths, 3)[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptData, match=r"00003/update/shards.zip cannot be read"):
        require_record(run.paths, Task(3, Stage.ROLLOUT))
    assert read_samples(run, 3).rows == ()


def test_every_task_of_an_archive_without_its_end_is_named_as_corrupt(run):
    list(pack_old(run, NEWEST))
    path = archives(run.paths, 3)[1]
    path.write_bytes(path.read_bytes()[:-100])
    named = [line for line in every_task(run) if "00003/update/shards.zip cannot be read" in line]
    assert len(named) == 2 * SHARDS + 1


def test_what_failed_shows_the_end_of_its_packed_log(run):
    list(pack_old(run, NEWEST))
    event = journal.event_row("failed", task="2/reward/1", attempt=1, kind="error", message="no")
    said = list(describe_failed(run.paths, [event], parse_choice(None, run.plan), 20))
    assert f"{run.paths.task(Task(2, Stage.REWARD, 1)).log(1)} (packed)" in said
    assert "  | what iteration 2 reward shard 1 said" in said
    archives(run.paths, 2)[1].write_bytes(b"PK")
    said = list(describe_failed(run.paths, [event], parse_choice(None, run.plan), 20))
    assert any("00002/update/shards.zip cannot be read" in line for line in said)


def test_an_archive_leads_nowhere_else(run, tmp_path):
    list(pack_old(run, NEWEST))
    with zipfile.ZipFile(archives(run.paths, 3)[1], "a") as archive:
        archive.writestr("../outside", "x")
    with pytest.raises(RunError, match=r"'../outside', which packing never writes"):
        unpack(run.paths, 3)
    assert not (tmp_path / "outside").exists()


def test_two_at_once_do_no_harm(run, made, monkeypatch):
    real = packing._verify

    def another_is_faster(*arguments):
        real(*arguments)
        monkeypatch.setattr(packing, "_verify", real)
        pack(run, 1)

    monkeypatch.setattr(packing, "_verify", another_is_faster)
    pack(run, 1)
    check_all_reads(run, made)
    assert [path.name for path in sorted(archives(run.paths, 1)[1].parent.iterdir())] == [
        "shard-00000.json",
        "shards.zip",
    ]


# --- going back ---


def test_going_back_to_an_update_of_a_packed_iteration_makes_its_shards_files_again(run, made):
    before = files(load_run(made), "iterations/00003/rollout", "iterations/00003/reward")
    list(pack_old(run, NEWEST))
    folder = go_back(run, parse_point("update@3"))
    assert files(run, "iterations/00003/rollout", "iterations/00003/reward") == before
    assert find_frontier(run.plan, run.paths) == Frontier(2, 0)
    assert not list(run.paths.task(policy_maker(3)).folder.iterdir())
    assert len(list((folder / "iterations/00003/update").glob("*.arrow"))) == len(PASSED_ON)
    update = require_record(run.paths, policy_maker(2))
    assert read_shard(run.paths, update, BAND, BAND_PART).num_rows == 2, "which the update reads"
    assert (folder / "iterations/00004/update/shards.zip").exists()
    assert Records(run.paths).get(Task(4, Stage.ROLLOUT)) is None


def test_going_back_to_a_reward_leaves_the_rollouts(run):
    list(pack_old(run, NEWEST))
    go_back(run, parse_point("reward@3"))
    records = Records(run.paths)
    records.refresh(run.plan.tasks(3))
    assert {task.stage for task in records.known} == {Stage.ROLLOUT}
    assert len(records.known) == SHARDS


def test_going_back_to_a_rollout_moves_the_archive_aside(run):
    list(pack_old(run, NEWEST))
    folder = go_back(run, parse_point("rollout@2"))
    assert (folder / "iterations/00002/update/shards.zip").exists()
    assert all(Records(run.paths).get(task) is None for task in run.plan.tasks(2))
    assert read_samples(run, 1).rows


def test_where_the_archive_is_corrupt_the_way_out_is_named_and_works(run):
    list(pack_old(run, NEWEST))
    path = archives(run.paths, 3)[1]
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"iteration 3 is packed, and .* is damaged .*go back to rollout@3"):
        go_back(run, parse_point("update@3"))
    assert go_back(run, parse_point("rollout@3"))
    assert find_frontier(run.plan, run.paths) == Frontier(2, 0)


def test_unpacking_that_is_killed_is_finished_by_the_next(run, made, monkeypatch):
    list(pack_old(run, NEWEST))
    real, counter = packing._restore, itertools.count()

    def dies(*arguments):
        if next(counter) == 7:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_restore", dies)
        with pytest.raises(Killed):
            unpack(run.paths, 4)
    check_all_reads(run, made)
    twin = load_run(Path(shutil.copytree(run.paths.root, run.paths.root.with_name("twin"))))
    list(pack_old(twin, NEWEST))
    assert archives(twin.paths, 4)[1].exists()
    check_all_reads(twin, made)
    unpack(run.paths, 4)
    assert files(run, "iterations/00004", "logs/00004-rollout") == files(
        load_run(made), "iterations/00004", "logs/00004-rollout"
    )


def test_a_driver_that_slept_while_the_run_went_back_packs_what_was_moved_aside(run, monkeypatch):
    """It wakes with its archive written, when the iteration has been made again."""
    real = packing._verify

    def sleeps(*arguments):
        real(*arguments)
        monkeypatch.setattr(packing, "_verify", real)
        go_back(run, parse_point("rollout@2"))
        for shard in range(SHARDS):
            reportrun.commit_shard(run, 2, shard, responses=["new"], rewards=[9.0])

    monkeypatch.setattr(packing, "_verify", sleeps)
    pack(run, 2)
    check_sizes(run.paths, require_record(run.paths, Task(2, Stage.ROLLOUT)))
    assert [sample.response for sample in read_samples(run, 2).rows] == ["new"] * SHARDS
    (folder,) = run.paths.superseded.iterdir()
    assert (folder / "iterations/00002/update/shards.zip").exists()
