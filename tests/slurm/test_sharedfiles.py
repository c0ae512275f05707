"""Files that other machines make and replace: an answer from a client's memory is not believed at once.

Two mounts of a real one are in tests/cluster/test_network.py; here its answers are made up.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import app as cli
from pipeline.run.control import Control, read_control, write_control
from pipeline.run.durable import link_once, read_in, replace_durably
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import (
    WAITS,
    FileServerError,
    NotAFile,
    is_there,
    make_folder,
    names_in,
    opened_file,
    persistently,
    read_newest,
    read_shared,
    size_of,
)
from tests.support import ROOT, tiny
from tests.support.damage import DAMAGES
from tests.support.tables import LONG

HOOKS = ROOT / "tests/support/hooks"


def policy_of(run: Path, iteration: int) -> dict[str, bytes]:
    folders = {"policy": f"policy/{iteration:05d}", "critic": f"state/{iteration:05d}/critic"}
    return {part: (run / path / "model.safetensors").read_bytes() for part, path in folders.items()}


def failing(times: int, number: int, then: Callable = lambda: "done") -> tuple[Callable, list]:
    calls: list[int] = []

    def act():
        calls.append(1)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return then()

    return act, calls


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN])
@pytest.mark.parametrize("times", [0, 1, len(WAITS)])
def test_what_passes_is_waited_for(tmp_path, clock, number, times):
    began = clock[0]
    act, calls = failing(times, number)
    assert persistently(tmp_path / "file", act) == "done"
    assert len(calls) == times + 1
    assert clock[0] - began == pytest.approx(sum(WAITS[:times]))


def test_what_does_not_pass_ends_with_the_file_and_how_long_was_waited(tmp_path, clock):
    act, calls = failing(100, errno.ESTALE)
    with pytest.raises(FileServerError, match=r"still after 9 tries in 13 s; look at the mount") as caught:
        persistently(tmp_path / "control.json", act)
    assert caught.value.errno == errno.ESTALE
    assert caught.value.filename == str(tmp_path / "control.json")
    assert len(str(caught.value)) < 300
    assert len(calls) == len(WAITS) + 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_other_errors_are_told_at_once(tmp_path, clock, number):
    began = clock[0]
    act, calls = failing(1, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        persistently(tmp_path / "file", act)
    assert (caught.value.errno, len(calls), clock[0]) == (number, 1, began)


def test_what_may_have_been_done_is_not_done_again(tmp_path, clock, monkeypatch):
    """A renaming is repeated when a handle was stale: that says that it was not carried out."""
    for number, wanted in ((errno.ESTALE, "new"), (errno.EIO, "old")):
        path = tmp_path / str(number)
        replace_durably(path, "old")
        with monkeypatch.context() as patch:
            fail_once(patch, "os.replace", number)
            with contextlib.suppress(OSError):
                replace_durably(path, "new")
        assert path.read_text() == wanted
        assert [found.name for found in tmp_path.glob(".*")] == [], "no private copy is left"


def fail_once(patch: pytest.MonkeyPatch, name: str, number: int) -> list:
    """The function raises ``number`` on its first call. Returns a list with an item for each call."""
    module, _, attribute = name.rpartition(".")
    owner = {"os": os, "Path": Path}[module]
    original, calls = getattr(owner, attribute), []

    def replacement(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    patch.setattr(owner, attribute, replacement)
    return calls


def test_a_file_that_is_listed_and_not_found_is_looked_for_again(tmp_path, clock, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("{}")
    for look in (read_shared, read_newest):
        with monkeypatch.context() as patch:
            fail_once(patch, "os.open", errno.ENOENT)
            assert look(path) == b"{}"
    with monkeypatch.context() as patch:
        fail_once(patch, "Path.stat", errno.ENOENT)
        assert size_of(path) == 2


def test_a_file_that_is_not_listed_is_missing_at_once(tmp_path, clock):
    began = clock[0]
    for look in (read_shared, read_newest, size_of):
        with pytest.raises(FileNotFoundError):
            look(tmp_path / "none" / "at all")
    assert not is_there(tmp_path / "none")
    assert names_in(tmp_path / "none") == set()
    assert names_in(Path("none") / "relative") == set()
    assert clock[0] == began


def test_a_name_that_is_said_to_be_taken_by_nobody_is_asked_for_again(tmp_path, clock, monkeypatch):
    """The client remembers a file that another machine has removed."""
    with monkeypatch.context() as patch:
        calls = fail_once(patch, "os.link", errno.EEXIST)
        assert link_once(tmp_path / "shard.json", "mine") is True
    assert len(calls) == 2
    assert link_once(tmp_path / "shard.json", "another's") is False
    assert (tmp_path / "shard.json").read_text() == "mine"


def test_a_lost_answer_to_a_link_that_was_made_is_no_loss(tmp_path, monkeypatch):
    link = os.link

    def linked_but_said_not(*arguments, **options):
        link(*arguments, **options)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", linked_but_said_not)
    assert link_once(tmp_path / "shard.json", "mine") is True


def test_a_folder_that_the_client_only_remembers_is_made(tmp_path, clock, monkeypatch):
    """It was moved away by another machine: mkdir says that it exists, the listing that it does not."""
    folder, mkdir, calls = tmp_path / "rows", Path.mkdir, []

    def remembered_twice(self, *arguments, **options):
        calls.append(self)
        if len(calls) > 2:
            mkdir(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", remembered_twice)
    make_folder(folder)
    assert (folder.is_dir(), len(calls)) == (True, 3)


def test_names_in_an_open_folder_are_those_of_the_folder_wherever_it_is(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        assert read_in(descriptor, "one") is None
        folder.rename(tmp_path / "aside")
        (tmp_path / "aside" / "one").write_text("1")
        assert read_in(descriptor, "one") == b"1"
    finally:
        os.close(descriptor)


def test_a_stale_control_file_is_not_taken_for_a_spoilt_one(tmp_path, clock, monkeypatch):
    paths = RunPaths(tmp_path)
    write_control(paths, Control(invocation=3, cancelled=True))
    fail_once(monkeypatch, "os.open", errno.ESTALE)
    assert read_control(paths) == Control(invocation=3, cancelled=True)


@pytest.mark.parametrize("damage", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for_and_named(tmp_path, damage):
    path = tmp_path / "file"
    path.write_text("x")
    DAMAGES[damage](path)
    for read in (read_shared, read_newest, opened_file):
        with pytest.raises(NotAFile, match=f"{path} is a .*, where a file belongs"):
            read(path)


def test_a_link_to_nothing_is_missing_at_once(tmp_path, clock):
    (tmp_path / "file").symlink_to(tmp_path / "nothing")
    begun = time.time()
    with pytest.raises(FileNotFoundError):
        read_newest(tmp_path / "file")
    assert time.time() == begun


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["resume"], ["report"]])
def test_a_file_server_that_does_not_come_back_is_one_line(complete_run, clock, monkeypatch, capsys, command):
    def stale(path, folder=None):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("slurm.sharedfiles.read_plainly", stale)
    monkeypatch.setattr("sys.argv", ["slurm-ppo", *command, str(complete_run)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == cli.EXIT_FAILED
    assert line.startswith(
        "error: [Errno 116] Stale file handle, still after 9 tries in 13 s; look at the mount"
    )
    assert str(complete_run / "run.json") in line


@LONG
def test_a_run_ends_the_same_where_handles_are_stale_at_first(
    inputs, environment, slurm_ppo, complete_run, tmp_path
):
    """In each process, every third file of the run that is opened fails once as for a stale handle."""
    run = tmp_path / "run"
    path = os.pathsep.join([str(HOOKS), environment["PYTHONPATH"]])
    told = tmp_path / "stale"
    stale = environment | {"PYTHONPATH": path, "STALE_BELOW": str(run), "STALE_TOLD": str(told)}
    done = slurm_ppo("run", *tiny.overrides(inputs, run, "iterations=1"), env=stale)
    assert done.returncode == 0, done.stderr
    for command in ("status", "doctor", "report", "logs"):
        said = slurm_ppo(command, run, env=stale)
        assert said.returncode == 0, said.stderr + said.stdout
    assert policy_of(run, 1) == policy_of(complete_run, 1)
    assert "failed" not in (run / "events.jsonl").read_text()
    opened = told.read_text().splitlines()
    assert str(run / "run.json") in opened
    assert len(set(opened)) > 20, opened
