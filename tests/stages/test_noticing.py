"""What Linux tells of folders, and what is done where it tells nothing."""

import ctypes
import select
from types import SimpleNamespace

import pytest

from stages.workers.noticing import FolderEvents
from stages.workers.surroundings import Wakeup


def is_told(notices: FolderEvents) -> bool:
    """Whether something is told of, which is then taken as read."""
    told = bool(select.select(notices.descriptors, [], [], 0)[0])
    notices.forget()
    return told


@pytest.fixture
def notices() -> FolderEvents:
    return FolderEvents()


def test_a_name_that_is_new_in_a_watched_folder_is_told_of(tmp_path, notices):
    record, private = tmp_path / "record.json", tmp_path / ".private"
    private.write_text("")
    assert notices.watch([tmp_path])
    assert not is_told(notices)
    record.hardlink_to(private)
    assert is_told(notices)
    assert not is_told(notices)
    record.write_text("longer")
    assert not is_told(notices), "nothing is new"
    private.rename(tmp_path / "another")
    assert is_told(notices)


def test_a_folder_that_is_not_there_yet_is_told_of_and_then_what_is_new_in_it(tmp_path, notices):
    folder = tmp_path / "reward"
    assert notices.watch([folder])
    folder.mkdir()
    assert is_told(notices)
    assert notices.watch([folder])
    (folder / "record.json").touch()
    assert is_told(notices)


def test_what_is_not_watched_any_more_is_not_told_of(tmp_path, notices):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert notices.watch([first])
    assert notices.watch([second])
    notices.forget()
    (first / "record.json").touch()
    assert not is_told(notices)
    (second / "record.json").touch()
    assert is_told(notices)


def test_a_folder_that_came_after_another_of_its_name_is_watched(tmp_path, notices):
    """As when a run goes back: stages' folders are moved away, and made again."""
    folder = tmp_path / "update"
    folder.mkdir()
    assert notices.watch([folder])
    folder.rename(tmp_path / "superseded")
    folder.mkdir()
    assert notices.watch([folder])
    notices.forget()
    (tmp_path / "superseded" / "late.json").touch()
    assert not is_told(notices)
    (folder / "record.json").touch()
    assert is_told(notices)


@pytest.mark.parametrize("libc", [SimpleNamespace(), SimpleNamespace(inotify_init1=lambda flags: -1)])
def test_where_nothing_is_told_it_says_so(tmp_path, monkeypatch, libc):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    notices = FolderEvents()
    assert notices.descriptors == ()
    assert not notices.watch([tmp_path])


def test_a_wait_ends_with_what_is_told_and_only_a_signal_is_a_ring(tmp_path, notices):
    wakeup = Wakeup()
    assert notices.watch([tmp_path])
    (tmp_path / "record.json").touch()
    assert not wakeup.wait(60, notices)
    assert not is_told(notices)
    wakeup._wake(0, None)
    assert wakeup.wait(60, notices)
