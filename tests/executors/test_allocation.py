"""Tasks as job steps of one allocation: what fits, and the srun command of each."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.decide.places import count, room_of
from pipeline.decide.staying import ALWAYS
from pipeline.executors.allocation import (
    NODES_VARIABLE,
    allocation_executor,
    allocation_limits,
    need_of_step,
    srun_words,
    step_of,
    worker_words,
)
from pipeline.executors.limits import Share, need_of
from slurm import allocation
from slurm.allocation import NodeShare, read_allocation
from tests.support.composed import composed_of
from tests.support.waiting import eventually

SHOWN = (
    "JobId=7 JobName=x NumNodes=3 NumCPUs=24 ReqNodeList=(null) NodeList=gpu[0-1],big ReqTRES=cpu=24"
    "   Nodes=gpu[0-1] CPU_IDs=0-3,8-11 Mem=4096 GRES=gpu:a100:2(IDX:0-1) "
    "  Nodes=big CPU_IDs=5 Mem=0 GRES=gpu:1(IDX:3),nic:2(IDX:0-1) Command=x"
)


def test_what_an_allocation_has_of_each_node(monkeypatch):
    def answer(command, retries):
        return SHOWN if command[1] == "-d" else "gpu0\ngpu1\n"

    monkeypatch.setattr(allocation, "run_command", answer)
    assert read_allocation("7") == [
        NodeShare("gpu0", 8, 4096, 2),
        NodeShare("gpu1", 8, 4096, 2),
        NodeShare("big", 1, 0, 1),
    ]


def test_a_job_that_does_not_run_has_nothing(monkeypatch):
    monkeypatch.setattr(allocation, "run_command", lambda command, retries: "JobId=7 NodeList=(null)")
    with pytest.raises(RuntimeError, match="job 7 has no nodes; it does not run"):
        read_allocation("7")


NODES = [NodeShare("n0", 8, 64_000, 2), NodeShare("n1", 8, 64_000, 2)]


@pytest.fixture
def configured(inputs, tmp_path):
    def make(*more: str):
        return resolve(composed_of(inputs, tmp_path / "run", "scheduler=allocation", *more))

    return make


def test_as_many_tasks_run_at_once_as_fit(configured):
    limits = allocation_limits(configured("scheduler.rollout.mem=40G"), "7", NODES)
    room = room_of(limits.nodes)
    assert count(room, limits.needs["rollout"], 9) == 2, "as much as memory is there"
    assert count(room, limits.needs["reward"], 9) == 4
    assert limits.most("update") == 1
    assert set(limits.linger.values()) == {0}, "not all kinds have their places at once"
    shares = (Share("n0"), Share("n1"))
    assert limits.show(shares) == {NODES_VARIABLE: "n0,n1"}


def test_where_all_workers_have_places_they_stay(configured):
    many = [NodeShare(f"n{number}", 8, 64_000, 2) for number in range(8)]
    assert set(allocation_limits(configured(), "7", many).linger.values()) == {ALWAYS}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scheduler.update.nodes=3"], "scheduler.update: a task asks for 3 nodes with 4 CPUs, 1 GPUs"),
        (
            ["scheduler.rollout.gpus_per_node=a100:4"],
            "scheduler.rollout: a task asks for 1 node with 4 CPUs, 4 GPUs",
        ),
        (["scheduler.prepare.cpus_per_task=9"], "scheduler.prepare: a task asks for 1 node with 9 CPUs;"),
        (
            ["scheduler.reward.mem=65G"],
            "scheduler.reward: a task asks for .* 66560 MiB; allocation 7 has n0 8 CPUs",
        ),
        (
            ["reward.components.rm.pool=big", "scheduler.pools.big.gpus_per_node=3"],
            "scheduler.pools.big: a task asks for",
        ),
    ],
)
def test_what_does_not_fit_is_refused(configured, words, said):
    with pytest.raises(ConfigError, match=said):
        allocation_limits(configured(*words), "7", NODES)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("scheduler.rollout.nodes=2", "scheduler.rollout.nodes=2: only the update runs on several"),
        (
            "+scheduler.update.options.overlap=true",
            "scheduler.update.options.overlap=True: is set by slurm-ppo",
        ),
        ("scheduler.rollout.partition=a", "unknown key 'partition'; legal: container, cpus_per_task"),
    ],
)
def test_mistakes_are_told(configured, word, said):
    with pytest.raises(ConfigError, match=said):
        configured(word)


def test_outside_of_an_allocation_nothing_starts(configured):
    with pytest.raises(ConfigError, match="this is not inside an allocation of Slurm"):
        allocation_executor(configured(), {})


def test_the_command_of_a_step():
    step = StepConfig(
        nodes=2,
        ntasks_per_node=2,
        gpus_per_node="a100:2",
        cpus_per_task=3,
        container="apptainer exec /images/ppo.sif",
        environment={"A": "b c"},
        options={"cpu-bind": "cores", "label": True, "quiet": False},
    )
    assert need_of_step(step) == need_of(2, 6, 0, 2)
    words = srun_words(step, "7", "update", "/home/me")
    assert words == [
        *("srun", "--jobid=7", "--job-name=update", "--exact", "--nodes=2", "--ntasks=4"),
        *("--ntasks-per-node=2", "--cpus-per-task=3", "--gres=gpu:a100:2", "--mem=0"),
        *("--nodelist={nodes}", "--chdir=/home/me", "--mpi=none", "--kill-on-bad-exit=1", "--wait=0"),
        *("--cpu-bind=cores", "--label"),
    ]
    given = AllocationConfig(update=step, environment={"A": "x", "Z": "1"}, python="/usr/bin/python3")
    assert worker_words(given, step_of(given, "update"), "/r", {"TOLD": "{}"}) == [
        *("env", "A=b c", "Z=1", "TOLD={}", "apptainer", "exec", "/images/ppo.sif"),
        *("/usr/bin/python3", "-P", "-m", "slurm.step", "/r", "stages.workers"),
    ]
    assert "--gres=none" in srun_words(StepConfig(), "7", "prepare", "/")
    assert math.isclose(need_of_step(StepConfig(mem="2G")).memory, 2048)


# --- the process that starts srun ---

STEP = """
import os, signal, sys, time
from pathlib import Path
record, what = Path(sys.argv[1]), sys.argv[2]
if what in ("warned", "rung"):
    assert sys.argv[3] == "n0,n1"
    number = {"warned": signal.SIGUSR2, "rung": signal.SIGUSR1}[what]
    signal.signal(number, lambda *_: sys.exit(5))
    record.touch()
    time.sleep(60)
else:
    sys.exit(int(what))
"""
DRIVER = """
import os, sys
from pipeline.executors.allocation import run_step
os.environ["STEP_NODES"] = "n0,n1"
sys.exit(run_step(sys.argv[1:]))
"""


@pytest.mark.parametrize(("what", "code"), [("4", 4), ("137", -9), ("143", -15), ("warned", 5), ("rung", 5)])
def test_a_step_ends_as_its_worker_does_and_hears_what_it_is_told(tmp_path, what, code):
    record = tmp_path / "record"
    command = [sys.executable, "-c", STEP, record, what, "{nodes}"]
    process = subprocess.Popen([sys.executable, "-c", DRIVER, *command])
    if what in ("warned", "rung"):
        assert eventually(record.exists, seconds=60)
        process.send_signal(signal.SIGTERM if what == "warned" else signal.SIGUSR1)
    assert process.wait(60) == code


def test_the_step_dies_with_the_process_that_started_it(tmp_path):
    file = tmp_path / "pid"
    script = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", DRIVER, sys.executable, "-c", script])
    assert eventually(lambda: file.exists() and file.read_text(), seconds=60)
    process.kill()
    process.wait()
    pid = file.read_text()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists(), seconds=60)
