"""The process of vLLM's engine ends with the task, however that ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.tables import LONG

WITH_VLLM = """
import os, sys, time
from pathlib import Path
from pipeline.run.environment import TASK_ENVIRONMENT

os.environ.update(TASK_ENVIRONMENT)

if __name__ == "__main__":
    from stages.engines import make_generator
    from tests.support.processes import config_of

    inputs, words = Path(sys.argv[1]), ["rollout=vllm", "rollout.vllm.own_process=true"]
    words += ["rollout.vllm.enforce_eager=true", "rollout.vllm.kv_cache_gib=0.1"]
    config = config_of(inputs, inputs / "run", *words)
    made = make_generator(config, config.model.policy)
    print(made._engine._call("facts")[0]["pid"], flush=True)
    time.sleep(300)
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended. One that waits to be reaped, by a parent that does not, has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def killed(parent: "subprocess.Popen[str]") -> int:
    """Kill a process when it has said which one it started. Returns that one's id."""
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    return pid


def assert_gone(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.02)


@LONG
def test_the_engine_of_vllm_ends_where_its_task_is_killed(models, environment, tmp_path):
    script = tmp_path / "task.py"
    script.write_text(WITH_VLLM)
    command = [sys.executable, str(script), str(models)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}
    ) as parent:
        assert_gone(killed(parent), 30)
