"""Logs of shards become an archive with their iteration's row: nothing is lost, and everything reads them."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pipeline.config.scheduler import LocalConfig
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.run import archiving, journal, packing
from pipeline.run.cleaning import LeftoverKind, find_removable
from pipeline.run.commits import publish, require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.failures import FailureKind, last_attempt_number, read_said
from pipeline.run.packed import log_archives, read_file
from pipeline.run.packing import pack_logs
from pipeline.run.plan import policy_maker
from pipeline.run.superseded import remove_losers
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.log_files import end_of, find_logs, parse_choice
from pipeline.status.logs import Follower, describe_failed, describe_logs, log_to_show
from tests.support import reportrun
from tests.support.killing import killed_at

SHARDS, NEWEST = 3, 2
STEPS = ("fsync", "link", "unlink", "rmdir", "open")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two iterations that are done, and a log of every attempt: shard 1 of each reward was tried twice."""
    root = tmp_path_factory.mktemp("logs") / "run"
    run = reportrun.make_run(root, SHARDS, iterations=3, scheduler=LocalConfig())
    publish(run.paths, reportrun.record(PREPARE))
    for iteration in range(1, NEWEST + 1):
        for shard in range(SHARDS):
            reportrun.commit_shard(run, iteration, shard, responses=["a"], rewards=[0.0])
        publish(run.paths, reportrun.record(policy_maker(iteration)))
        for task in run.plan.tasks(iteration):
            write_log(run, task, 1)
        again = Task(iteration, Stage.REWARD, 1)
        write_log(run, again, 2)
        run.paths.task(again).failure(1).write_text('{"kind": "error", "message": "no"}')
    journal.rewrite(run.paths.metrics, ({"iteration": i} for i in range(1, NEWEST + 1)))
    return root


def write_log(run: Run, task: Task, number: int) -> None:
    log = run.paths.task(task).log(number)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"what {task} said, attempt {number}\n")


@pytest.fixture
def run(made, tmp_path) -> Run:
    return load_run(Path(shutil.copytree(made, tmp_path / "run")))


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    monkeypatch.setattr(packing, "MANY", 2 * SHARDS)
    monkeypatch.setattr(packing, "_FEWEST", 2)


def left(run: Run, iteration: int) -> list[str]:
    """Files in the folders of an iteration's logs."""
    found = run.paths.log_root.glob(f"{iteration:05d}-*/*/*")
    return sorted(path.relative_to(run.paths.log_root).as_posix() for path in found)


def every_log(run: Run, made: Path) -> Iterator[tuple[bytes, bytes]]:
    """What was there, and what is read now."""
    for path in sorted((made / "logs").rglob("*.*")):
        iteration = int(path.relative_to(made / "logs").parts[0][:5])
        yield path.read_bytes(), read_file(run.paths, iteration, run.paths.root / path.relative_to(made))


# --- what is packed, and who reads it ---


def test_logs_of_shards_become_an_archive_with_the_row_and_shards_stay_files(run, made):
    assert list(pack_logs(run, NEWEST)) == []
    for iteration in (1, 2):
        assert left(run, iteration) == [f"{iteration:05d}-update/attempt-1/shard-00000.log"]
        assert [path.name for path in log_archives(run.paths, iteration)] == ["logs-1.zip"]
        assert len(list(run.paths.root.glob(f"iterations/{iteration:05d}/*/*.arrow"))) == 2 * SHARDS
    assert all(before == now for before, now in every_log(run, made))
    assert not run.paths.logs(Task(1, Stage.REWARD)).exists()
    assert [e["files"] for e in journal.read(run.paths.events) if e["event"] == "logs_packed"] == [8, 8]


def test_a_run_of_few_shards_keeps_its_logs_as_files(run, made, monkeypatch):
    monkeypatch.setattr(packing, "MANY", 2 * SHARDS + 1)
    assert list(pack_logs(run, NEWEST)) == []
    assert len(left(run, 1)) == 2 * SHARDS + 3
    assert not log_archives(run.paths, 1)


def test_of_very_many_logs_some_are_packed_at_a_time(run, made, monkeypatch):
    monkeypatch.setattr(packing, "_MOST", 5)
    for names in (["logs-1.zip"], ["logs-2.zip", "logs-1.zip"]):
        assert list(pack_logs(run, 1)) == []
        assert [path.name for path in log_archives(run.paths, 1)] == names
    assert left(run, 1) == ["00001-update/attempt-1/shard-00000.log"]
    assert all(before == now for before, now in every_log(run, made))


def test_logs_shows_them_as_before(run):
    def shown(words: str) -> list[str]:
        return list(describe_logs(run, parse_choice(words, run.plan), 20))

    before = {words: shown(words) for words in ("rollout@1", "reward", "reward@2", "update@1")}
    list(pack_logs(run, NEWEST))
    for words, said in before.items():
        assert [line.removesuffix(" (packed)") for line in shown(words)] == said
    assert f"==> rollout@1 0: {run.paths.task(Task(1, Stage.ROLLOUT)).log(1)} (packed)" in shown("rollout@1")


def test_what_failed_is_shown_with_the_end_of_its_log_and_judged_by_its_own_word(run):
    list(pack_logs(run, NEWEST))
    event = journal.event_row("failed", task="1/reward/1", attempt=1, kind="error", message="no")
    said = list(describe_failed(run.paths, [event], parse_choice(None, run.plan), 20))
    assert "  | what iteration 1 reward shard 1 said, attempt 1" in said
    assert read_said(run.paths, Task(1, Stage.REWARD, 1), 1).kind is FailureKind.ERROR
    shown = log_to_show(run.paths, 1, "reward", [event], has_failed=True)
    assert shown.path == run.paths.task(Task(1, Stage.REWARD, 1)).log(1)
    assert log_to_show(run.paths, 1, "reward", [], has_failed=False).attempt == 2
    assert last_attempt_number(run.paths, Task(1, Stage.REWARD, 1)) == 2, "or the next gets its log"


def test_who_follows_gets_what_was_written_before_it_was_packed(run):
    out = io.StringIO()
    follower = Follower(run, parse_choice("reward", run.plan), out)
    follower.read()
    log = run.paths.task(Task(2, Stage.REWARD, 2)).log(1)
    with log.open("a") as file:
        file.write("a last line\nand the rest")
    list(pack_logs(run, NEWEST))
    assert not log.exists()
    follower.read()
    follower.read()
    told = [line for line in out.getvalue().splitlines() if line.startswith("reward@2 2 |")]
    assert told == [
        "reward@2 2 | what iteration 2 reward shard 2 said, attempt 1",
        "reward@2 2 | a last line",
        "reward@2 2 | and the rest",
    ]


def test_a_log_that_is_packed_after_it_was_found_is_read_all_the_same(run):
    found = find_logs(run.paths, parse_choice("reward@1", run.plan))
    (log,) = (one for one in found if one.attempt == 2)
    list(pack_logs(run, NEWEST))
    assert end_of(run.paths, log, 5) == ["what iteration 1 reward shard 1 said, attempt 2"]


def test_clean_offers_archives_of_logs_with_the_logs(run):
    list(pack_logs(run, NEWEST))
    found = {run.paths.relative(item.path) for item in find_removable(run) if item.kind is LeftoverKind.LOGS}
    assert found == {
        *(f"logs/0000{i}-update" for i in (1, 2)),
        *(f"iterations/0000{i}/update/logs-1.zip" for i in (1, 2)),
    }


def test_a_row_that_is_written_again_removes_no_archive_of_logs(run, made):
    list(pack_logs(run, NEWEST))
    remove_losers(run.paths, [require_record(run.paths, task) for task in run.plan.tasks(1)])
    assert all(before == now for before, now in every_log(run, made))


# --- what is still written ---


def test_what_a_job_still_writes_stays_a_file_until_the_job_is_gone(run, made):
    folder = run.paths.logs(Task(1, Stage.ROLLOUT)) / "worker-1"
    folder.mkdir()
    for shard in range(SHARDS):
        (folder / f"shard-0000{shard}.log").write_text(f"worker {shard}\n")
    in_use = {run.paths.relative(folder / f"shard-0000{shard}.log") for shard in range(SHARDS)}
    list(pack_logs(run, NEWEST, lambda: in_use))
    assert len([name for name in left(run, 1) if "worker-1" in name]) == SHARDS
    list(pack_logs(run, NEWEST, lambda: {min(in_use)}))
    assert [name for name in left(run, 1) if "worker-1" in name] == ["00001-rollout/worker-1/shard-00000.log"]
    assert [path.name for path in log_archives(run.paths, 1)] == ["logs-2.zip", "logs-1.zip"]
    assert read_file(run.paths, 1, folder / "shard-00002.log") == b"worker 2\n"
    assert all(before == now for before, now in every_log(run, made))


# --- killed, full, two at once ---


def test_killed_at_any_step_nothing_is_lost_and_the_next_one_ends_it(run, made, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power is cut here
    is_killed, step = True, 0
    while is_killed:
        step += 1
        trial = load_run(Path(shutil.copytree(made, tmp_path / f"trial{step}")))
        is_killed, _ = killed_at(step, STEPS, lambda trial=trial: pack_logs(trial, 1))
        assert all(before == now for before, now in every_log(trial, made))
        list(pack_logs(trial, 1))
        assert len(left(trial, 1)) <= 2, "one alone is not worth another archive"
        assert all(before == now for before, now in every_log(trial, made))
        shutil.rmtree(trial.paths.root)
    assert step > 21


def test_a_full_disk_leaves_the_files(run, made):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(archiving, "hash_stream", full), pytest.raises(OSError, match="No space left"):
        list(pack_logs(run, NEWEST))
    assert len(left(run, 1)) == 2 * SHARDS + 3
    assert list(pack_logs(run, NEWEST)) == []
    assert all(before == now for before, now in every_log(run, made))


def test_of_two_at_once_one_packs(run, made, monkeypatch):
    real = packing.link_archive

    def another_is_faster(*arguments):
        monkeypatch.setattr(packing, "link_archive", real)
        list(pack_logs(run, 1))
        real(*arguments)

    monkeypatch.setattr(packing, "link_archive", another_is_faster)
    assert list(pack_logs(run, 1)) == []
    assert [path.name for path in log_archives(run.paths, 1)] == ["logs-1.zip"]
    assert all(before == now for before, now in every_log(run, made))


# --- going back ---


def test_going_back_into_the_iteration_makes_its_logs_files_again_and_numbers_go_on(run, made):
    list(pack_logs(run, NEWEST))
    go_back(run, parse_point("reward@2"))
    assert last_attempt_number(run.paths, Task(2, Stage.REWARD, 1)) == 2
    assert not log_archives(run.paths, 2)
    assert all(before == now for before, now in every_log(run, made))


def test_going_back_to_a_rollout_moves_the_archive_aside(run):
    list(pack_logs(run, NEWEST))
    folder = go_back(run, parse_point("rollout@2"))
    assert (folder / "iterations/00002/update/logs-1.zip").exists()
    assert not log_archives(run.paths, 2)
