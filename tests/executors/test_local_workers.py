"""Workers of this machine in whole runs: what they keep, and what becomes of those that die."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support import ROOT, tiny
from tests.support.killing import assert_same_end, events
from tests.support.waiting import wait_for


def records(run_dir: Path, stage: str) -> list[dict]:
    paths = run_dir.glob(f"iterations/*/{stage}/shard-?????.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


def words(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    return tiny.overrides(
        inputs, run_dir, f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1", *more
    )


def test_a_run_is_done_by_few_processes_and_ends_as_with_one_for_each_task(
    inputs, complete_run, slurm_ppo, tmp_path
):
    for stage, most in (("rollout", 2), ("reward", 2), ("update", 1), ("evaluate", 1)):
        by_process = Counter(record["pid"] for record in records(complete_run, stage))
        assert len(by_process) <= most < sum(by_process.values())
    cold = [f"scheduler.{stage}.linger=0" for stage in ("rollout", "reward", "update", "evaluate")]
    done = slurm_ppo("run", *words(inputs, tmp_path / "cold", *cold))
    assert done.returncode == 0, done.stderr
    for stage in ("rollout", "reward", "update"):
        pids = [record["pid"] for record in records(tmp_path / "cold", stage)]
        assert len({*pids}) == len(pids)
    assert_same_end(tmp_path / "cold", complete_run)


def test_a_process_killed_while_the_run_goes_on_without_it_is_replaced(
    inputs, complete_run, environment, tmp_path
):
    """It has rolled out, and waits for the update, which takes its time."""
    run_dir = tmp_path / "run"
    slow = environment | {"LIGHT_STATE_SECONDS": "0", "LIGHT_SECONDS": "0.1"}
    command = [sys.executable, "-m", "pipeline", "run", *words(inputs, run_dir)]
    driver = subprocess.Popen(command, env=slow, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(records(run_dir, "rollout")) == 2, "two shards")
        killed = {record["pid"] for record in records(run_dir, "rollout")}
        wait_for(lambda: records(run_dir, "reward"), "a score")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        _, said = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    assert events(run_dir, "failed") == []
    assert not killed & {record["pid"] for record in records(run_dir, "rollout")[2:]}
    assert_same_end(run_dir, complete_run)
