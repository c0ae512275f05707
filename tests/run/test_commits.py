"""Done means committed: one winner, durable files, records that say what they name."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.commits import (
    CorruptData,
    FileEntry,
    NotCommitted,
    Record,
    check_sizes,
    hash_file,
    hash_tree,
    publish,
    read_record,
    require_record,
    verify_outputs,
)
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import checksum
from tests.support import ROOT
from tests.support.damage import DAMAGES
from tests.support.records import TASK, in_child_with_small_disk, make_record


def commit(paths: RunPaths, text: str = "data", attempt: str = "1-aa") -> Record:
    data = paths.task(TASK).data(attempt)
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(text)
    record = make_record(attempt=attempt, outputs=(hash_file(paths, data),))
    assert publish(paths, record)
    return record


# --- one winner ---

RACER = """
import sys
from pathlib import Path
from pipeline.run.commits import FileEntry, Record, hash_tree, publish
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
paths, name = RunPaths(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:
    task = Task(int(line), Stage.UPDATE)
    folder = paths.task(task).trainer(name)
    (folder / "rank").mkdir(parents=True)
    (folder / "state.json").write_text(name)
    (folder / "rank" / "0.bin").write_text(name)
    record = Record(task, name, hash_tree(paths, folder), {}, 1, 1, 1, "s", 0, 0, "h", 1, "")
    print(int(publish(paths, record)), flush=True)
"""


def test_of_two_racing_attempts_exactly_one_wins_and_the_other_leaves_nothing(tmp_path):
    paths = RunPaths(tmp_path)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name in ("1-aa", "2-bb")
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    winners = set()
    for number in range(1, 151):
        for racer in racers:
            racer.stdin.write(f"{number}\n")
            racer.stdin.flush()
        won = [racer.stdout.readline() == "1\n" for racer in racers]
        assert sum(won) == 1
        task = Task(number, Stage.UPDATE)
        record = require_record(paths, task)
        verify_outputs(paths, record)
        assert record.attempt == ("1-aa", "2-bb")[won.index(True)]
        left = [path.name for path in paths.trainers.glob(f"{number:05d}.*")]
        assert left == [f"{number:05d}.{record.attempt}"]
        assert [path.name for path in paths.task(task).folder.iterdir()] == ["shard-00000.json"]
        winners.add(record.attempt)
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0
    assert winners == {"1-aa", "2-bb"}  # else the two never met, and nothing was tested


def test_a_late_attempt_does_not_replace_a_commit(tmp_path):
    paths = RunPaths(tmp_path)
    first = commit(paths, "first")
    data = paths.task(TASK).data("2-bb")
    data.write_text("second")
    assert not publish(paths, make_record(attempt="2-bb", outputs=(hash_file(paths, data),)))
    assert read_record(paths, TASK) == first
    assert not data.exists()
    verify_outputs(paths, first)


def test_a_link_whose_answer_was_lost_counts_as_won(tmp_path, monkeypatch):
    """NFS repeats a request whose answer was lost; the repetition finds the name taken - by ourselves."""
    real = os.link

    def link_twice(source, target, **folders):
        real(source, target, **folders)
        real(source, target, **folders)

    monkeypatch.setattr(os, "link", link_twice)
    assert link_once(tmp_path / "record.json", "ours")
    assert (tmp_path / "record.json").read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_link_once_says_when_another_was_first(tmp_path):
    assert link_once(tmp_path / "record.json", "first")
    assert not link_once(tmp_path / "record.json", "second")
    assert (tmp_path / "record.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


# --- readers ---


def test_an_input_that_is_not_committed_is_named(tmp_path):
    with pytest.raises(NotCommitted, match=r"iteration 3 rollout shard 1 is not committed.*shard-00001.json"):
        require_record(RunPaths(tmp_path), TASK)


def elsewhere(text: str, path: str) -> str:
    """A record with a checksum that is right, of a file that lies elsewhere."""
    data = json.loads(text)
    del data["checksum"]
    data["outputs"][0]["path"] = path
    return json.dumps(data | {"checksum": checksum(data)})


@pytest.mark.parametrize("damage", ["pipe", "folder"])
def test_what_is_no_file_in_a_records_place_is_corrupt_and_not_waited_for(tmp_path, damage):
    paths = RunPaths(tmp_path)
    commit(paths)
    DAMAGES[damage](paths.task(TASK).record)
    with pytest.raises(CorruptData, match=r"its record .*shard-00001.json is .*, where a file belongs"):
        read_record(paths, TASK)


@pytest.mark.parametrize("damage", ["pipe", "folder", "link to nothing", "gone"])
def test_what_is_no_file_in_the_place_of_data_is_corrupt(tmp_path, damage):
    paths = RunPaths(tmp_path)
    record = commit(paths)
    DAMAGES[damage](tmp_path / record.outputs[0].path)
    with pytest.raises(CorruptData):
        verify_outputs(paths, record)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[1, 2]", "cannot be read"),
        (lambda text: "7", "cannot be read"),
        (lambda text: "null", "cannot be read"),
        (lambda text: '"text"', "cannot be read"),
        (lambda text: "\x00" * 40, "cannot be read"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "record version 2.*reads 1"),
        (lambda text: text.replace('"version": 1,', "").replace(',\n "version": 1', ""), "version"),
        (lambda text: text.replace('"3/rollout/1"', '"4/rollout/1"'), "checksum"),
        (lambda text: text.replace('"seed": ', '"seed": 1'), "checksum"),
        (lambda text: text.replace('"3/rollout/1"', "5"), "cannot be read"),
        (lambda text: text.replace('"attempt": "1-aa"', '"attempt": 5'), "cannot be read"),
        (lambda text: text.replace('"rows"', '"lines"'), "cannot be read"),
        (lambda text: text.replace('"bytes"', '"bites"'), "cannot be read"),
        (lambda text: text.replace('"rows": 1', '"rows": "many"'), "cannot be read"),
        (lambda text: text.replace('"outputs": [', '"outputs": [3, '), "cannot be read"),
        (lambda text: text.replace('"metrics": {', '"metrics": [], "metrics2": {'), "cannot be read"),
        (lambda text: "[" * 100_000, "nested too deeply"),
        (lambda text: elsewhere(text, "/etc/passwd"), "'/etc/passwd', which is not below the run directory"),
        (lambda text: elsewhere(text, "../run2/x"), "'../run2/x', which is not below the run directory"),
    ],
)
def test_a_record_that_is_not_one_is_corrupt_and_named(tmp_path, change, said):
    paths = RunPaths(tmp_path)
    commit(paths)
    record = paths.task(TASK).record
    before = record.read_text()
    record.write_text(change(before))
    assert record.read_text() != before
    with pytest.raises(CorruptData, match=said) as caught:
        read_record(paths, TASK)
    assert caught.value.task == TASK
    assert str(record) in str(caught.value)


def test_a_record_in_another_tasks_place_is_corrupt(tmp_path):
    paths, other = RunPaths(tmp_path), TASK._replace(iteration=4)
    commit(paths)
    place = paths.task(other).record
    place.parent.mkdir(parents=True)
    place.write_bytes(paths.task(TASK).record.read_bytes())
    with pytest.raises(CorruptData, match="belongs to iteration 3 rollout shard 1"):
        read_record(paths, other)


def test_a_record_of_raw_bytes_is_corrupt(tmp_path):
    paths = RunPaths(tmp_path)
    commit(paths)
    paths.task(TASK).record.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(CorruptData, match="cannot be read"):
        read_record(paths, TASK)


def test_missing_cut_and_changed_files_are_named(tmp_path):
    paths = RunPaths(tmp_path)
    record = commit(paths, "0123456789")
    data = paths.root / record.outputs[0].path
    data.write_text("0123456780")
    check_sizes(paths, record)  # one stat each: it cannot see this
    with pytest.raises(CorruptData, match=r"shard-00001\.1-aa\.arrow has xxh3_128"):
        verify_outputs(paths, record)
    data.write_text("01234")
    with pytest.raises(CorruptData, match="has 5 bytes instead of 10"):
        check_sizes(paths, record)
    data.unlink()
    with pytest.raises(CorruptData, match="is gone"):
        verify_outputs(paths, record)


# --- records ---

names = st.text("abcXYZ019._-", min_size=1, max_size=12)
entries = st.builds(FileEntry, names.filter("..".__ne__), st.integers(0, 2**60), names)
numbers = st.floats(allow_nan=False)
tasks = st.builds(Task, st.integers(0, 10**6), st.sampled_from(Stage), st.integers(0, 10**5)).map(
    lambda task: task._replace(pool="big" if task.stage is Stage.SCORE else "")
)
records = st.builds(
    Record,
    task=tasks,
    attempt=names,
    outputs=st.lists(entries, max_size=4).map(tuple),
    inputs=st.dictionaries(names, names, max_size=3),
    policy_version=st.integers(0, 10**6),
    seed=st.integers(0, 2**63),
    rows=st.integers(0, 2**40),
    schema=st.text(max_size=10),
    started=numbers,
    ended=numbers,
    host=st.text(max_size=10),
    pid=st.integers(1, 2**22),
    job_id=st.text(max_size=10),
    metrics=st.dictionaries(st.text(max_size=8), numbers, max_size=4),
)


@given(records)
def test_a_record_survives_the_disk(record):
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


@given(records, names)
def test_the_fingerprint_tells_attempts_apart_by_their_bytes_only(record, other):
    def as_if(attempt):
        outputs = tuple(
            dataclasses.replace(entry, path=f"policy/{i}.{attempt}/f")
            for i, entry in enumerate(record.outputs)
        )
        return dataclasses.replace(record, attempt=attempt, outputs=outputs, started=0.0, pid=1)

    assert as_if(f"1-{record.attempt}").fingerprint == as_if(f"2-{other}").fingerprint


@given(records, st.data())
def test_the_fingerprint_changes_with_name_size_or_bytes(record, data):
    if not record.outputs:
        return
    index = data.draw(st.integers(0, len(record.outputs) - 1))
    entry = record.outputs[index]
    field, value = data.draw(
        st.sampled_from(
            [("path", f"{entry.path}x"), ("bytes", entry.bytes + 1), ("xxh3_128", f"{entry.xxh3_128}0")]
        )
    )
    outputs = list(record.outputs)
    outputs[index] = dataclasses.replace(entry, **{field: value})
    assert dataclasses.replace(record, outputs=tuple(outputs)).fingerprint != record.fingerprint


def test_the_fingerprint_does_not_depend_on_the_order_of_files():
    one, two = FileEntry("a", 1, "x"), FileEntry("b", 2, "y")
    assert make_record(outputs=(one, two)).fingerprint == make_record(outputs=(two, one)).fingerprint


# --- files ---


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077])
def test_files_get_the_mode_that_the_umask_says(tmp_path, mask):
    previous = os.umask(mask)
    try:
        for name in ("model.safetensors", "sub/state.bin"):
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
            path.chmod(0o600)  # as safetensors does
        hash_tree(RunPaths(tmp_path), tmp_path / "tree")
        link_once(tmp_path / "tree/record.json", "{}")
        replace_durably(tmp_path / "tree/run.json", "{}")
        found = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "tree").rglob("*") if p.is_file()}
        assert found == {0o666 & ~mask}
        assert os.umask(mask) == mask  # put back
    finally:
        os.umask(previous)


@pytest.mark.parametrize("call", ["replace_durably", "link_once"])
def test_a_full_disk_leaves_the_old_file_and_no_debris(tmp_path, call):
    old = tmp_path / "best.json"
    if call == "replace_durably":
        old.write_text("old")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    body = f"""
import sys
from pathlib import Path
from pipeline.run.durable import {call}
#LIMIT
{call}(Path(sys.argv[1]), "x" * 100_000)
"""
    done = in_child_with_small_disk(4096, body, old)
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert "best.json" in done.stderr.splitlines()[-1]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_every_file_and_folder_of_a_tree_is_flushed(tmp_path, monkeypatch):
    """What a power cut may take must not be named by a commit record."""
    tree = tmp_path / "policy" / "00001.1-aa"
    (tree / "part").mkdir(parents=True)
    files = [tree / "weights", tree / "part" / "more"]
    for file in files:
        file.write_text("data")
    flushed = set()
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.add(Path(f"/proc/self/fd/{fd}").readlink()))
    hash_tree(RunPaths(tmp_path), tree)
    assert flushed == {*files, tree, tree / "part", tree.parent}
