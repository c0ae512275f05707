"""Entry point of the workers that test_processes.py starts."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.run.environment import COMMITTED, PARENT_PIPE, RELEASED


def main(words: list[str]) -> int:
    """What a worker does: ``exit CODE``, ``signal N``, ``sleep SECONDS``, ``environment NAME``, ..."""
    what, *values = words
    if what != "quiet":
        print(f"{what} {' '.join(values)}", flush=True)
    return int(ACTIONS[what](*values) or 0)


def note_pid(file: str, deaf: str = "") -> None:
    """Sleep for long with a child; both pids go to the file. ``deaf``: neither listens to SIGTERM."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    Path(file + ".tmp").write_text(f"{os.getpid()} {child.pid}")
    Path(file + ".tmp").rename(file)
    child.wait()
    time.sleep(60)


def leave_child(file: str) -> None:
    """End at once, but leave a process behind."""
    child = subprocess.Popen(["sleep", "60"])
    Path(file).write_text(str(child.pid))


def by_rank(*whats: str) -> object:
    """Each rank does one of them, e.g. ``"exit 0"``."""
    what, *values = whats[int(os.environ["RANK"])].split()
    return ACTIONS[what](*values)


def after(file: str, what: str, *values: str) -> object:
    """Do something when a file is there."""
    until = time.monotonic() + 30
    while not Path(file).exists():
        assert time.monotonic() < until, f"{file} did not come"
        time.sleep(0.01)
    return ACTIONS[what](*values)


def release(file: str) -> None:
    """Say that the result is committed and the devices are free, and end when a file is there."""
    os.write(int(os.environ[PARENT_PIPE]), COMMITTED + RELEASED)
    after(file, "exit", "0")


def commit(file: str) -> None:
    """Say that the result is committed, and use the devices until a file is there."""
    os.write(int(os.environ[PARENT_PIPE]), COMMITTED)
    Path(file + ".rung").touch()
    after(file, "exit", "0")


ACTIONS = {
    "quiet": lambda: 0,
    "after": after,
    "release": release,
    "commit": commit,
    "ranks": by_rank,
    "exit": int,
    "signal": lambda number: os.kill(os.getpid(), int(number)),
    "raise": lambda text: exec(f"raise RuntimeError({text!r})"),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "environment": lambda *names: print(*map(os.environ.get, names), sep="\n", flush=True),
    "start method": lambda: print(multiprocessing.get_start_method(), flush=True),
    "stdin": lambda: print(repr(sys.stdin.read()), flush=True),
    "pid": note_pid,
    "leave": leave_child,
}
