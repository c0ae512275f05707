"""Elements of a node verify a policy once; whatever is wrong with their note of it, it is verified again."""

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from pipeline.run.commits import CorruptData, Record, hash_tree
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from stages.files import verification
from tests.support.records import make_record

UPDATE = Task(3, Stage.UPDATE)


class Node:
    """A node's temporary folder, a committed policy, and which of its files were hashed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths, self.temporary = RunPaths(folder / "run"), folder / "tmp"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.policy = self.paths.task(UPDATE).policy("1-aa")
        (self.policy / "adapter").mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "adapter/model.safetensors"):
            (self.policy / name).write_bytes(os.urandom(5000))
        self.record: Record = make_record(UPDATE, outputs=hash_tree(self.paths, self.policy))
        self.hashed: list[str] = []
        digest = verification.digest_file

        def watched(path: Path) -> tuple[int, str]:
            self.hashed.append(path.name)
            return digest(path)

        monkeypatch.setattr(verification, "digest_file", watched)

    def verify(self) -> int:
        """What an element does that needs the policy. Returns how many files it hashed."""
        before = len(self.hashed)
        verification.verify_once(self.paths, self.record, self.record.outputs)
        return len(self.hashed) - before

    @property
    def notes(self) -> list[Path]:
        """Notes, and folders of notes."""
        found = self.temporary.rglob("*")
        return [path for path in found if path.suffix != ".lock" and path.name != "swept"]

    @property
    def note(self) -> Path:
        (note,) = (path for path in self.notes if path.is_file())
        return note


@pytest.fixture
def node(tmp_path, monkeypatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_the_second_element_of_a_node_hashes_nothing(node):
    assert [node.verify() for _ in range(3)] == [3, 0, 0]


def test_another_commit_is_hashed_though_the_files_are_the_same(node):
    node.verify()
    other = hash_tree(node.paths, node.policy)[0]
    node.record = make_record(UPDATE, outputs=(other,))
    assert node.verify() == 1


@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_file_that_was_changed_since_is_found(node, keeps_times):
    """Times of modification can be set back; the kernel's own of the last change cannot."""
    node.verify()
    path, status = node.policy / "model.safetensors", (node.policy / "model.safetensors").stat()
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    if keeps_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptData, match=r"model\.safetensors has xxh3_128"):
        node.verify()
    with pytest.raises(CorruptData):  # for the next one as well
        node.verify()


def test_a_file_that_was_replaced_by_the_same_bytes_is_hashed_again(node):
    node.verify()
    path = node.policy / "config.json"
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    new.rename(path)
    assert [node.verify(), node.verify()] == [3, 0]


def test_a_note_with_a_flipped_bit_is_not_believed(node):
    node.verify()
    good = node.note.read_bytes()
    for place in range(0, len(good), 7):
        node.note.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert node.verify() == 3
        assert node.note.read_bytes() == good  # which writes it again


@pytest.mark.parametrize("mode", [0o622, 0o606])
def test_a_note_that_others_could_have_written_is_not_believed(node, mode):
    node.verify()
    node.note.chmod(mode)
    assert [node.verify(), node.verify()] == [3, 0]


def test_a_link_in_place_of_a_note_is_not_followed(node):
    node.verify()
    note = node.note
    elsewhere = note.rename(node.paths.root / "elsewhere")
    note.symlink_to(elsewhere)
    assert node.verify() == 3


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o703])
def test_a_folder_that_others_can_enter_has_no_notes(node, mode):
    node.verify()
    node.note.parent.chmod(mode)
    assert [node.verify(), node.verify()] == [3, 3]


def test_a_folder_of_notes_that_is_a_link_or_a_file_is_left_alone(node):
    node.verify()
    folder = node.note.parent
    moved = folder.rename(node.paths.root / "moved")
    folder.symlink_to(moved)
    assert [node.verify(), node.verify()] == [3, 3]
    folder.unlink()
    folder.write_text("")
    assert [node.verify(), node.verify()] == [3, 3]


def test_without_a_temporary_folder_everyone_hashes(node, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(node.temporary / "not there"))
    assert [node.verify(), node.verify()] == [3, 3]


def test_elements_that_begin_together_wait_for_the_first(node, monkeypatch):
    """Each waits until the first has read, says so, and then reads nothing."""
    number = 4
    waiting, all_wait, digest = [], threading.Event(), verification.digest_file

    def told(line: str) -> None:
        waiting.append(line)
        if len(waiting) == number - 1:
            all_wait.set()

    def slow(path: Path) -> tuple[int, str]:
        assert all_wait.wait(60)
        return digest(path)

    monkeypatch.setattr(verification.log, "info", told)
    monkeypatch.setattr(verification, "digest_file", slow)
    elements = [threading.Thread(target=node.verify) for _ in range(number)]
    for element in elements:
        element.start()
    for element in elements:
        element.join(60)
    assert len(node.hashed) == 3
    assert {line.split(": waiting")[0] for line in waiting} == {
        "another task of this node verifies policy/00003.1-aa"
    }


def test_whoever_has_waited_long_enough_reads_as_well(node, monkeypatch):
    monkeypatch.setattr(verification, "_PATIENCE", 0.0)
    monkeypatch.setattr(verification, "_SLOWEST", float("inf"))
    said: list[str] = []
    monkeypatch.setattr(verification.log, "warning", said.append)
    node.verify()
    node.note.unlink()
    with verification._lock(next(node.temporary.rglob("*.lock")).with_suffix(""), 1.0, "") as is_held:
        assert is_held
        assert [node.verify(), node.verify()] == [3, 3]
    assert len(said) == 2
    assert "still verifies policy/00003.1-aa" in said[0]
    assert [node.verify(), node.verify()] == [3, 0]  # whatever the first one did, its lock is gone


def test_old_notes_are_removed_also_those_of_earlier_boots(node):
    node.verify()
    note, folder, old = node.note, node.note.parent, time.time() - 2 * 24 * 3600
    earlier = folder.with_name(f"{folder.name.partition('.')[0]}.an-earlier-boot")
    earlier.mkdir(mode=0o700)
    of_others = node.temporary / "somebody-elses"
    files = [folder / "of-a-run-that-is-over", earlier / "note", of_others]
    for path in files:
        path.write_text("")
    for path in (*files, earlier):
        os.utime(path, (old, old))
    note.unlink()
    assert node.verify() == 3
    assert len(node.notes) == 6  # they were looked for a moment ago
    os.utime(folder / "swept", (old, old))
    note.unlink()
    assert node.verify() == 3
    assert set(node.notes) == {folder, note, of_others}
