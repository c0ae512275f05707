"""The server that workers are forked from is killed: another one is started, or the run says why not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, tiny
from tests.support.waiting import eventually

DYING = """
import os, signal
from pathlib import Path
lives = Path({lives!r})
left = int(lives.read_text())
lives.write_text(str(left - 1))
if left > 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A module that a server imports, whose first ones it kills, as for want of memory."""
STARTS = """
import os, sys
from pathlib import Path
from pipeline.executors.forking import Rank, fork, preload
folder = Path(sys.argv[1])
preload(["dying"])
ranks = [Rank(("exit", "0"), dict(os.environ), folder / f"log{rank}") for rank in "01"]
processes, bell = fork("tests.support.scheduled:main", ranks)
for process in processes:
    process.join()
sys.exit(max(process.exitcode for process in processes))
"""


def start_two(folder: Path, deaths: int) -> subprocess.CompletedProcess[str]:
    """Have two processes forked from servers of which so many die before they can."""
    lives = folder / "lives"
    lives.write_text(str(deaths))
    (folder / "dying.py").write_text(DYING.format(lives=str(lives)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, "-c", STARTS, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_server_that_is_killed_while_it_imports_is_followed_by_another(tmp_path):
    done = start_two(tmp_path, deaths=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lives").read_text() == "-1"
    assert [(tmp_path / f"log{rank}").read_text() for rank in "01"] == ["exit 0\n"] * 2


def test_servers_that_are_always_killed_end_with_the_reason_and_the_way_out(tmp_path):
    done = start_two(tmp_path, deaths=9)
    last = done.stderr.splitlines()[-1]
    assert "UnfinishedError: " in last
    assert "was killed by signal 9, 3 times, before one was there" in last
    assert "run slurm-ppo resume with the run directory: nothing that was committed is lost" in last
    assert (tmp_path / "lives").read_text() == "6"


# --- a run ---


def server_of(process: subprocess.Popen[str]) -> int | None:
    """Process id of the server of a run."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next((int(c) for c in children if b"forkserver" in Path(f"/proc/{c}/cmdline").read_bytes()), None)


def test_a_run_whose_server_is_killed_before_its_first_worker_goes_on(inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "run", "iterations=1")
    command = [sys.executable, "-m", "pipeline", "run", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert eventually(lambda: run.poll() is not None or server_of(run) is not None, 120)
        server = server_of(run)
        assert server is not None
        os.kill(server, signal.SIGKILL)
        _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert "Aborted" not in said
