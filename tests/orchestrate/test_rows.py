"""Rows: once each, whoever writes them; without what is lost, and saying so; never in the way of training."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli.run import resume_run
from pipeline.orchestrate import driver as orchestration
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.orchestrate.row_writer import RowWriter, differing
from pipeline.run import journal
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.paths import RunPaths
from tests.support.damage import flip_bit
from tests.support.killing import events
from tests.support.waiting import wait_for


def iterations(run: Path) -> list[int]:
    return [row["iteration"] for row in journal.read(run / "metrics.jsonl")]


def without_rows(run: Path) -> None:
    """As if every driver had been lost after the last commit."""
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rows")
    (run / "best.json").unlink()
    for version in ("00001", "00002"):
        (run / "policy" / version).unlink()


# --- a run is complete when its rows are ---


def test_a_run_without_its_rows_is_not_complete(copied_run, slurm_ppo):
    without_rows(copied_run)
    status = slurm_ppo("status", copied_run)
    assert status.returncode == 3
    assert "incomplete, 2/2 iterations" in status.stdout
    assert "every update is committed; rows not written yet: 2" in status.stdout
    assert "everything is committed, but 2 rows are not written" in slurm_ppo("doctor", copied_run).stdout
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert slurm_ppo("status", copied_run).returncode == 0
    assert iterations(copied_run) == [1, 2]
    found = [
        (copied_run / "policy" / version / "model.safetensors").exists() for version in ("00001", "00002")
    ]
    assert found == [True, True], "of each iteration, though one pass saw both"


@pytest.mark.parametrize(
    ("record", "damage"),
    [
        ("rollout/shard-00001", flip_bit),
        ("reward/shard-00000", Path.unlink),
        ("update/shard-00000", flip_bit),
        ("evaluate/shard-00000", flip_bit),
    ],
)
def test_a_row_is_written_without_a_record_that_is_lost_and_says_so(copied_run, slurm_ppo, record, damage):
    without_rows(copied_run)
    stage = record.partition("/")[0]
    lost = copied_run / "iterations/00001" / f"{record}.json"
    data = sorted(lost.parent.glob("*.arrow"))
    damage(lost)
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert f"row 1 is written without what a lost record knew: iteration 1 {stage}" in done.stderr
    first, second = journal.read(copied_run / "metrics.jsonl")
    assert (first["iteration"], first["records_lost"]) == (1, 1)
    assert second["iteration"] == 2
    assert "records_lost" not in second
    assert ("reward/mean" in first) == (stage != "update")
    (event,) = events(copied_run, "row_without")
    assert [task.split("/")[1] for task in event["tasks"]] == [stage]
    assert json.loads((copied_run / "best.json").read_text())["iteration"] in (1, 2)
    assert sorted(lost.parent.glob("*.arrow")) == data
    assert slurm_ppo("report" if stage == "reward" else "status", copied_run).returncode == 0


def test_an_update_that_is_gone_before_its_row_is_made_again(copied_run, slurm_ppo):
    """The next policy stands: it was made from the same bytes."""
    policy = (copied_run / "policy/00002").readlink()
    without_rows(copied_run)
    (copied_run / "iterations/00001/update/shard-00000.json").unlink()
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert iterations(copied_run) == [1, 2]
    assert all(row["seconds/iteration"] > 0 for row in journal.read(copied_run / "metrics.jsonl"))
    assert (copied_run / "policy/00002").readlink() == policy


# --- no two drivers write a row twice ---


def test_a_driver_that_slept_writes_nothing_twice(tmp_path):
    """It lost its lease between its look and its row; the others have gone on."""
    paths = RunPaths(tmp_path)
    sleeper, other = RowWriter.open(paths, 1), RowWriter.open(paths, 1)
    sleeper.add({"iteration": 1, "by": 1})
    for number in (1, 2, 3):
        other.add({"iteration": number, "by": 2})
    assert sleeper.add({"iteration": 2, "by": 1}) == {"iteration": 2, "by": 2}
    assert [(row["iteration"], row["by"]) for row in journal.read(paths.metrics)] == [(1, 1), (2, 2), (3, 2)]


def test_what_it_writes_after_a_going_back_belongs_to_what_was_taken_back(copied_run):
    run = load_run(copied_run)
    sleeper = RowWriter.open(run.paths, 1)
    folder = go_back(run, parse_point("rollout@2"))
    sleeper.add({"iteration": 3})
    assert iterations(copied_run) == [1]
    assert not list(copied_run.glob("rows/*"))
    assert (folder / "rows" / "00003.json").exists()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_however_drivers_alternate_each_row_is_there_once(tmp_path_factory, steps):
    paths = RunPaths(tmp_path_factory.mktemp("rows"))
    books: dict[int, RowWriter] = {}
    for driver, is_new in steps:
        if is_new or driver not in books:
            books[driver] = RowWriter.open(paths, 1)
        before = journal.read(paths.metrics)
        books[driver].add({"iteration": books[driver].newest + 1, "by": driver})
        after = journal.read(paths.metrics)
        assert after[: len(before)] == before
        assert [row["iteration"] for row in after] == list(range(1, len(after) + 1))


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_line_that_a_kill_cut_is_completed_from_what_was_published(tmp_path, cut):
    paths = RunPaths(tmp_path)
    book = RowWriter.open(paths, 1)
    for number in (1, 2):
        book.add({"iteration": number, "reward/mean": number / 3})
    whole = paths.metrics.read_bytes()
    paths.metrics.write_bytes(whole[: max(0, len(whole) - cut)])
    assert RowWriter.open(paths, 1).newest == 2
    assert paths.metrics.read_bytes() == whole


def test_a_spoilt_line_comes_back_and_so_does_a_spoilt_row(tmp_path):
    paths = RunPaths(tmp_path)
    book = RowWriter.open(paths, 1)
    for number in (1, 2, 3):
        book.add({"iteration": number})
    whole = paths.metrics.read_bytes()
    paths.metrics.write_bytes(whole.replace(b'{"iteration": 2}', b'{"iteration": 7}'))
    flip_bit(paths.rows / "00003.json")
    book = RowWriter.open(paths, 1)
    assert book.newest == 2
    book.add({"iteration": 3})
    assert paths.metrics.read_bytes() == whole
    assert RowWriter.open(paths, 1).newest == 3


# --- what people see never stops what trains ---


def test_rows_that_cannot_be_written_stop_no_training(copied_run, slurm_ppo):
    """They are written as soon as they can be, by the same driver."""
    policy = (copied_run / "policy/00002/model.safetensors").read_bytes()
    go_back(load_run(copied_run), parse_point("rollout@1"))
    (copied_run / "rows").rmdir()
    (copied_run / "rows").write_text("in the place of a folder")
    ended = []
    resumed = threading.Thread(target=lambda: ended.append(slurm_ppo("resume", copied_run)))
    resumed.start()
    wait_for((copied_run / "iterations/00002/evaluate/shard-00000.json").exists, "the last evaluation")
    status = slurm_ppo("status", copied_run)
    assert status.returncode == 3
    assert "rows cannot be written, while training goes on" in status.stdout
    assert "FileExistsError" in " ".join(status.stdout.split())
    (copied_run / "rows").unlink()
    resumed.join(timeout=120)
    assert [done.returncode for done in ended] == [0], ended[0].stderr
    assert "rows cannot be written: FileExistsError" in ended[0].stderr
    assert iterations(copied_run) == [1, 2]
    assert (copied_run / "policy/00002/model.safetensors").read_bytes() == policy
    assert len(events(copied_run, "rows_recovered")) == 1
    assert "rows cannot" not in slurm_ppo("status", copied_run).stdout


def test_rows_that_something_is_in_the_way_of_are_waited_for_shortly(copied_run, monkeypatch):
    """Nothing but they is left to do, and waiting removes no folder."""
    monkeypatch.setattr(orchestration, "BLOCKED_PATIENCE", 0.5)
    (copied_run / "metrics.jsonl").unlink()
    (copied_run / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"everything is committed, but its rows .*IsADirectoryError.*; fix"):
        resume_run(load_run(copied_run), watch=True)


# --- a bit that flips in a line that stays one ---


def test_a_digit_that_flipped_is_found_and_mended(copied_run, slurm_ppo):
    """metrics.jsonl is what report, status and W&B show; what was published has a checksum."""
    metrics = copied_run / "metrics.jsonl"
    whole = metrics.read_bytes()
    rows = journal.read(metrics)
    text = f'"reward/mean": {rows[0]["reward/mean"]}'.encode()
    assert text in whole
    metrics.write_bytes(whole.replace(text, text[:-1] + bytes([text[-1] ^ 1]), 1))
    assert journal.read(metrics)[0]["reward/mean"] != rows[0]["reward/mean"]
    doctor = " ".join(slurm_ppo("doctor", copied_run).stdout.split())
    assert "row 1 is not what was published" in doctor
    assert f"it is written again by: slurm-ppo resume {copied_run}" in doctor
    status = " ".join(slurm_ppo("status", copied_run).stdout.split())
    assert "complete" in status
    assert f"row 1 of metrics.jsonl is not what was published: slurm-ppo resume {copied_run} writes" in status
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "row 1 was not what was published" in done.stderr
    assert metrics.read_bytes() == whole
    assert [e["iteration"] for e in events(copied_run, "rows_mended")] == [1]
    assert differing(RunPaths(copied_run), 1) == [], "what the doctor asks"
    assert "is not what was published" not in slurm_ppo("status", copied_run).stdout


def test_a_published_row_that_is_spoilt_is_written_anew(tmp_path):
    paths = RunPaths(tmp_path)
    book = RowWriter.open(paths, 1)
    for number in range(1, 31):
        book.add({"iteration": number, "reward/mean": number / 7})
    whole, published = paths.metrics.read_bytes(), (paths.rows / "00029.json").read_bytes()
    flip_bit(paths.rows / "00029.json")
    assert differing(paths, 1) == [29]
    assert RowWriter.open(paths, 1).mended is None
    assert (paths.rows / "00029.json").read_bytes() == published
    assert differing(paths, 1) == []
    old = whole.replace(b'"iteration": 2, "reward/mean": 0.2', b'"iteration": 2, "reward/mean": 0.3')
    paths.metrics.write_bytes(old)
    assert RowWriter.open(paths, 1).mended is None  # a driver reads a few files, not thousands
    assert differing(paths, 1) == [2]
    assert RowWriter.open(paths, 1, compared=1000).mended == 2
    assert paths.metrics.read_bytes() == whole
