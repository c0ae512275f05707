"""A worker in a container asks its batch script, outside, for what needs Slurm's commands: by real shells."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.job_kinds import DRIVER
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import array_of, driver_submission, stage_submissions
from pipeline.run.tasks import Stage, Task
from slurm.requests import REQUESTS, find_requests, request_pass_outside, request_ring
from slurm.submission import render
from tests.support import ROOT
from tests.support.scripted import imagined_run
from tests.support.waiting import wait_for

NOTES = """#!/bin/sh
printf '%s\\n' "$*" >> "$FOUND/{name}"
"""
PYTHON = """#!/bin/sh
case "$*" in
  *advance*) printf '%s\\n' "$OURS$CUDA_VISIBLE_DEVICES|$*" >> "$FOUND/pass";;
  *) exec "$REAL" "$FOUND/task.py";;
esac
"""
ASKS = """
import os, sys, time
from pathlib import Path
from slurm.requests import find_requests
from slurm.ringing import ring
from pipeline.run.pass_requests import start_pass
from pipeline.run.paths import RunPaths

found, fifo = Path(os.environ["FOUND"]), find_requests()
said = ring(["9_0", "10_3"])
with fifo.open("w") as lines:
    for line in ("ring 5; touch came", "ring $(touch came)", "ring -u me", "`touch came`", "passing", "ring",
                 "ring 7" + " 7" * 3000, "", "\\0\\1 pass"):
        lines.write(line + "\\n")
child = start_pass(RunPaths(Path("/nowhere")))
until = time.monotonic() + 60
while time.monotonic() < until and not all((found / name).exists() for name in ("pass", "scancel")):
    time.sleep(0.02)
sys.exit(7 if (said, child) == ("", None) else 1)
"""


@pytest.fixture
def bench(tmp_path) -> Path:
    """Where scripts run: commands that note how they were called, and an empty working directory."""
    texts = {"our python": PYTHON, "scancel": NOTES.format(name="scancel")}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("found", "empty", "temporary"):
        (tmp_path / name).mkdir()
    return tmp_path


def script_of(bench: Path, container: str | None = "env IN_IMAGE=1") -> str:
    """The batch script of a rollout that stays, in a run with a name that a shell would take apart."""
    stage = {"linger": 60, "python": str(bench / "our python"), "container": container}
    driver = {"setup": ["OURS='driver '", "export OURS # ours"], "python": str(bench / "our python")}
    run = imagined_run(f"{bench}/a $(touch came) 'b'", {"rollout": stage, "driver": driver})
    (submission,) = stage_submissions(run, 1, 1, [Task(1, Stage.ROLLOUT)], 1000)
    return render(array_of(run, run.config.scheduler, submission, Escalation(), None))


def run_script(bench: Path, text: str, task: str) -> tuple[int, str]:
    """The exit code, and what was printed until the last process that the script had started was gone."""
    (bench / "script.sh").write_text(text)
    (bench / "found" / "task.py").write_text(task)
    environment = {
        **{"PATH": f"{bench}:{os.environ['PATH']}", "HOME": "/nowhere", "PYTHONPATH": str(ROOT)},
        **{"FOUND": str(bench / "found"), "REAL": sys.executable, "TMPDIR": str(bench / "temporary")},
    }
    with (bench / "output").open("w") as output:
        command = ["bash", bench / "script.sh"]
        where = {"cwd": bench / "empty", "env": environment, "stdin": subprocess.DEVNULL}
        code = subprocess.run(command, **where, stdout=output, stderr=output, timeout=100).returncode
    wait_for(lambda: not any(bench.glob("temporary/*")), "the end of the loop")
    return code, (bench / "output").read_text()


def test_a_ring_and_a_pass_are_carried_out_and_whatever_else_is_refused(bench):
    code, said = run_script(bench, script_of(bench), ASKS)
    assert code == 7, said
    assert (bench / "found/scancel").read_text() == "--batch --signal=USR1 9_0 10_3\n"
    (call,) = (bench / "found/pass").read_text().splitlines()
    assert call == f"driver |-P -m pipeline advance {bench}/a $(touch came) 'b' --asked"
    assert said.count("refused a request that is none") >= 7
    assert list((bench / "empty").iterdir()) == []


def test_a_task_that_asks_for_nothing_ends_with_its_own_code_and_nothing_is_left(bench):
    assert run_script(bench, "set -eu\n" + script_of(bench), "raise SystemExit(3)") == (3, "")


def test_where_there_is_no_temporary_folder_the_task_runs_all_the_same(bench):
    (bench / "temporary").rmdir()
    code, said = run_script(bench, script_of(bench), "raise SystemExit(3)")
    assert (code, "mktemp" in said) == (3, True)


def test_only_workers_that_may_lack_slurms_commands_ask(bench):
    assert REQUESTS in script_of(bench)
    plain = imagined_run("/runs/r1", {"rollout": {"linger": 60}})
    contained = imagined_run("/runs/r1", {"driver": {"container": "env A=1"}})
    (worker,) = stage_submissions(plain, 1, 1, [Task(1, Stage.ROLLOUT)], 1000)
    for run, submission in ((plain, worker), (contained, driver_submission(contained, 1, DRIVER, 1))):
        assert "attend" not in render(array_of(run, run.config.scheduler, submission, Escalation(), None))
    other = imagined_run("/runs/r1", {"rollout": {"linger": 60, "python": "/images/python"}})
    (submission,) = stage_submissions(other, 1, 1, [Task(1, Stage.ROLLOUT)], 1000)
    assert "attend" in render(array_of(other, other.config.scheduler, submission, Escalation(), None))


def test_nobody_waits_where_nobody_reads(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "does not attend" in request_pass_outside(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    elements = [f"4711_{index}" for index in range(1000)]
    assert request_ring(fifo, elements) == ""
    lines = os.read(reader, 1 << 20).decode().splitlines()
    assert [word for line in lines for word in line.split()[1:]] == elements
    assert max(map(len, lines)) <= 1000
    assert "is behind" in request_ring(fifo, 100 * elements)
    os.close(reader)


def test_a_fifo_that_the_container_does_not_show_is_none(tmp_path):
    assert find_requests({}) is None
    assert find_requests({REQUESTS: ""}) is None
    assert find_requests({REQUESTS: str(tmp_path / "elsewhere")}) is None
    (tmp_path / "file").touch()
    assert find_requests({REQUESTS: str(tmp_path / "file")}) is None
    os.mkfifo(tmp_path / "fifo")
    assert find_requests({REQUESTS: str(tmp_path / "fifo")}) == tmp_path / "fifo"
