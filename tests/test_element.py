"""What every array element runs, as a process: it finds its task, tells starts and ranks apart, and stops."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import imagined_run

from pipeline.arrays import stage_submissions
from pipeline.submissions import Ledger
from pipeline.tasks import Stage, Task

ROOT = Path(__file__).parent.parent

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
    (made,) = stage_submissions(run, 1, 3, [Task(2, Stage.ROLLOUT, shard) for shard in (1, 4)], 1000)
    Ledger(run.paths).begin(made)
    path = Ledger(run.paths).file(made)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"module": "told", "max_restarts": 5}))
    (tmp_path / "told.py").write_text(MODULE)
    return path


def element(tasks: Path, index: int, *more: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index), "PATH": "/usr/bin:/bin"}
    environment |= {name: str(value) for name, value in variables.items()}
    environment["PYTHONPATH"] = f"{ROOT}:{tasks.parents[3]}"
    command = [sys.executable, "-m", "slurm.element", str(tasks), *more]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def told(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_element_runs_its_own_task_in_its_own_process(tasks):
    found = told(element(tasks, 4))
    run_dir = str(tasks.parents[2])
    assert found["name"] == "__main__"
    assert found["argv"][1:] == [
        *("rollout", "--run-dir", run_dir, "--iteration", "2", "--attempt", "3-77r0", "--shard", "4"),
        *("--failure-file", f"{run_dir}/logs/00002-rollout/attempt-3/shard-00004.failure.json"),
    ]
    assert found["RANK"] is None


def test_every_start_of_a_job_is_an_attempt_of_its_own(tasks):
    done = element(tasks, 1, SLURM_RESTART_COUNT=2)
    assert told(done)["argv"][7] == "3-77r2"
    assert "restart 2 of job 77_1" in done.stdout


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
