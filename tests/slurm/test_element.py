"""What every array element runs, as a process: it finds its task, tells starts and ranks apart, and stops."""

import json
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import sealed, unsealed
from tests.support import ROOT
from tests.support.scripted import imagined_run

MODULE = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RENDEZVOUS_FILE")
print(json.dumps({"argv": sys.argv, "name": __name__} | {n: os.environ.get(n) for n in names}))
sys.exit(int(os.environ.get("EXIT", "0")))
"""


@pytest.fixture
def tasks(tmp_path) -> Path:
    """The task list of an array of two shards, whose module only says how it was called."""
    run = imagined_run(tmp_path / "run")
    run.paths.root.mkdir()
    (made,) = stage_submissions(run, 1, 3, [Task(2, Stage.ROLLOUT, shard) for shard in (1, 4)], 1000)
    Ledger(run.paths).begin(made)
    path = Ledger(run.paths).file(made)
    path.write_text(sealed(unsealed(path.read_bytes()) | {"module": "told", "max_restarts": 5}))
    (tmp_path / "told.py").write_text(MODULE)
    return path


def element(
    tasks: Path, index: int, *more: str, log: int | IO[str] = subprocess.PIPE, **variables: object
) -> subprocess.CompletedProcess[str]:
    process = begin(tasks, index, *more, log=log, **variables)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def begin(
    tasks: Path, index: int, *more: str, log: int | IO[str] = subprocess.PIPE, **variables: object
) -> subprocess.Popen[str]:
    environment = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index), "SLURM_JOB_ID": "78"}
    environment["PATH"] = f"{tasks.parents[3]}:/usr/bin:/bin"
    environment |= {name: str(value) for name, value in variables.items()}
    environment["PYTHONPATH"] = f"{ROOT}:{tasks.parents[3]}"
    command = [sys.executable, "-m", "slurm.element", str(tasks), *more]
    return subprocess.Popen(command, env=environment, cwd="/", stdout=log, stderr=subprocess.PIPE, text=True)


def told(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_element_runs_its_own_task_in_its_own_process(tasks):
    found = told(element(tasks, 4))
    run_dir = str(tasks.parents[2])
    assert found["name"] == "__main__"
    assert found["argv"][1:] == [
        *("rollout", "--run-dir", run_dir, "--iteration", "2", "--attempt", "3-77_4r0"),
        *("--patience", "30", "--shard", "4"),
        *("--failure-file", f"{run_dir}/logs/00002-rollout/attempt-3/shard-00004.failure.json"),
    ]
    assert found["RANK"] is None


def test_every_start_of_a_job_is_an_attempt_of_its_own(tasks):
    done = element(tasks, 1, SLURM_RESTART_COUNT=2)
    assert told(done)["argv"][7] == "3-77_1r2"
    assert "restart 2 of job 77_1" in done.stdout


def test_a_job_that_starts_again_while_the_disk_of_its_log_is_full_goes_on(tasks):
    came = tasks.parents[3] / "came"
    (tasks.parents[3] / "told.py").write_text(f"open({str(came)!r}, 'w')")
    with Path("/dev/full").open("w") as full:
        element(tasks, 1, log=full, SLURM_RESTART_COUNT=1)
    assert came.exists()


def test_a_job_that_never_comes_to_an_end_is_not_started_for_ever(tasks):
    assert element(tasks, 1, SLURM_RESTART_COUNT=5).returncode == 0
    done = element(tasks, 1, SLURM_RESTART_COUNT=6)
    assert done.returncode == 1
    assert "started 6 times without coming to an end" in done.stderr
    assert "argv" not in done.stdout


def test_the_tasks_exit_code_is_the_jobs(tasks):
    assert element(tasks, 1, EXIT=4).returncode == 4


def test_ranks_are_told_their_places_and_where_to_meet(tasks):
    variables = {"SLURM_PROCID": 5, "SLURM_LOCALID": 1, "SLURM_NTASKS": 8}
    found = told(element(tasks, 1, "--rank", **variables))
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("5", "1", "8")
    again = told(element(tasks, 1, "--rank", SLURM_RESTART_COUNT=1, **variables))
    other = told(element(tasks, 4, "--rank", **variables))
    meeting = {Path(each["RENDEZVOUS_FILE"]) for each in (found, again, other)}
    assert len(meeting) == 3  # no start meets ranks of another
    assert {path.parent for path in meeting} == {tasks.parent}
    assert told(element(tasks, 1, "--rank", **variables))["RENDEZVOUS_FILE"] == found["RENDEZVOUS_FILE"]


def test_an_index_that_is_not_in_the_list_is_an_error(tasks):
    done = element(tasks, 2)
    assert done.returncode == 1
    assert "KeyError" in done.stderr


def test_a_bit_that_flips_in_the_task_list_runs_nothing(tasks):
    """A shard's number that is still a number: only the checksum sees it."""
    before = tasks.read_text()
    tasks.write_text(before.replace('"--shard", "4"', '"--shard", "5"'))
    assert tasks.read_text() != before
    done = element(tasks, 4)
    assert done.returncode == 1
    assert "argv" not in done.stdout
    assert f"{tasks} is corrupt" in done.stderr
    assert "slurm-ppo submit RUN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("returns", "has_folder", "comes_back"), [(0, True, True), (3, True, False), (3, False, True)]
)
def test_a_job_whose_file_was_forgotten_does_not_come_back_for_ever(
    tasks, tmp_path, returns, has_folder, comes_back
):
    """A node may see a new file late; a file server may be away for hours."""
    tasks.unlink()
    if not has_folder:
        tasks.parent.rename(tmp_path / "away")
    done = element(tasks, 1, SLURM_RESTART_COUNT=returns, SLURM_JOB_ID="77", SLURM_PROCID="0")
    assert done.returncode == 1
    assert ("this job waits in the queue once more" in done.stdout) == comes_back
    assert "Nothing was run" in done.stderr


SCONTROL = """#!/bin/sh
echo "$@" >> {told}
exit {code}
"""


@pytest.fixture
def scontrol(tmp_path):
    """Makes a scontrol that notes how it was called, and gives what it was told."""

    def make(code: int = 0) -> Path:
        told = tmp_path / "told.txt"
        (tmp_path / "scontrol").write_text(SCONTROL.format(told=told, code=code))
        (tmp_path / "scontrol").chmod(0o755)
        return told

    return make


def test_a_job_whose_list_cannot_be_read_waits_in_the_queue_once_more(tasks, scontrol):
    """The file server is away for minutes: no driver job may be the last because of it."""
    told, content = scontrol(), tasks.read_bytes()
    tasks.unlink()
    done = element(tasks, 1)
    assert done.returncode == 1
    assert told.read_text().splitlines()[-1] == "requeue 78"
    assert "this job waits in the queue once more" in done.stdout
    tasks.write_bytes(content)
    assert told_of_again(tasks) == "3-77_1r1"


def told_of_again(tasks: Path) -> str:
    """The attempt of the next start."""
    return told(element(tasks, 1, SLURM_RESTART_COUNT=1))["argv"][7]


def test_but_not_for_ever_nor_from_every_rank(tasks, scontrol):
    said = scontrol()
    tasks.unlink()
    for variables in ({"SLURM_RESTART_COUNT": 100}, {"SLURM_PROCID": 3}):
        done = element(tasks, 1, **variables)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "slurm-ppo submit RUN" in done.stderr
    assert not said.exists()


def test_where_it_may_not_its_exit_code_says_that_it_failed(tasks, scontrol):
    scontrol(code=1)
    tasks.unlink()
    done = element(tasks, 1)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


# --- workers ---


def test_a_worker_knows_what_was_tried_and_since_when_it_could_start_and_no_hint_ends_it(tasks):
    """A hint may come while it imports: SIGUSR1 would end a process that does not handle it."""
    module = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(os.environ['SLURM_PPO_ELIGIBLE'], os.environ['SLURM_PPO_KNOWN'])"
    )
    (tasks.parents[3] / "told.py").write_text(module)
    content = unsealed(tasks.read_bytes()) | {"created": 50.0}
    earlier = {"begins": 70.0, "known": {"1": 3}}
    for more, expected in (({}, ["50.0", "0"]), (earlier, ["70.0", "3"])):
        tasks.write_text(sealed(content | more))
        done = element(tasks, 1)
        assert (done.returncode, done.stdout.split()) == (0, expected)
