"""What is old is removed beside the run."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.orchestrate.tidying import Tidying, Work
from tests.support import ROOT, tiny
from tests.support.killing import events

SLOW = """
import os, sys, time
from pathlib import Path

unlink = os.unlink

def slowly(path, *, dir_fd=None):
    folder = None if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
    is_weights = path == "model.safetensors" and folder is not None and folder.parent.name == "policy"
    began = time.time()
    if is_weights:
        time.sleep(2)
    unlink(path, dir_fd=dir_fd)
    if is_weights:
        with open(os.environ["REMOVED"], "a") as file:
            file.write(f"{folder.name[:5]} {began} {time.time()}\\n")

if "REMOVED" in os.environ:
    os.unlink = slowly
    os.supports_dir_fd.add(slowly)
"""
"""A disk that takes two seconds to remove weights."""


def test_who_is_beside_goes_on_while_it_is_at_work_and_the_last_that_was_asked_for_is_done():
    begun, gate, done, tidying = threading.Event(), threading.Event(), list[str](), Tidying(is_beside=True)

    def first() -> list[str]:
        begun.set()
        gate.wait(60)
        done.append("first")
        return ["the first could not remove all"]

    tidying.begin(first)
    assert begun.wait(60)
    for name in ("second", "third"):
        tidying.begin(lambda name=name: done.append(name) or [])
    assert (done, list(tidying.said())) == ([], [])
    gate.set()
    assert tidying.finish()
    assert done == ["first", "third"]
    assert list(tidying.said()) == ["the first could not remove all"]
    assert not tidying.finish()


@pytest.mark.parametrize("is_beside", [True, False])
def test_what_ends_the_work_is_raised_where_it_is_asked_for(is_beside):
    tidying = Tidying(is_beside)
    with pytest.raises(ZeroDivisionError):
        do(tidying, lambda: [str(1 // 0)])
    assert do(tidying, lambda: ["said"]) == ["said"]


def do(tidying: Tidying, work: Work) -> list[str]:
    tidying.begin(work)
    tidying.finish()
    return list(tidying.said())


def test_what_is_ready_starts_while_old_weights_are_removed(inputs, environment, tmp_path):
    """On one GPU the stages take turns, each of which a pass decides."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/sitecustomize.py").write_text(SLOW)
    paths, removed = f"{tmp_path / 'hooks'}:{ROOT}", tmp_path / "removed"
    given = environment | {"PYTHONPATH": paths, "REMOVED": str(removed)}
    words = ("iterations=5", "update.keep_last=2", "scheduler.gpus=[0]")
    command = [sys.executable, "-m", "pipeline", "run", *tiny.overrides(inputs, tmp_path / "run", *words)]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    launched = {event["task"]: event["time"] for event in events(tmp_path / "run", "launched")}
    spans = [line.split() for line in removed.read_text().splitlines()]
    assert [int(name) for name, *_ in spans] == [1, 2, 3]
    inside = [
        task for task, at in launched.items() for _, began, ended in spans if float(began) < at < float(ended)
    ]
    assert {task.split("/")[1] for task in inside} >= {"rollout", "reward"}, launched
    assert left(tmp_path / "run") == ["00004", "00005"]


def left(root: Path) -> list[str]:
    return sorted({path.name[:5] for path in (root / "policy").iterdir() if path.name[0] == "0"})
