"""A run directory that is moved while tasks are at work: they stop, and make nothing in its place."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.scenario import Hold, wait_for
from tests.support import ROOT, light, tiny


def test_tasks_stop_when_their_run_is_not_where_it_was(inputs, environment, slurm_ppo, tmp_path):
    root, moved, hold = tmp_path / "run", tmp_path / "moved", Hold(tmp_path / "hold")
    hold.begin()
    command = [sys.executable, "-m", "pipeline", "run", *tiny.overrides(inputs, root, "iterations=2")]
    held = environment | {light.HOLD: str(hold.file), light.SECONDS: "0.1"}
    said = (tmp_path / "said").open("w+")
    process = subprocess.Popen(command, env=held, cwd=ROOT, stdout=said, stderr=said)
    wait_for(lambda: list(tmp_path.glob("hold.*")), "tasks at work", 60)
    root.rename(moved)
    hold.end()
    try:
        code = process.wait(60)
    finally:
        process.kill()
    told = Path(said.name).read_text()
    assert not root.exists(), sorted(root.rglob("*"))
    assert code == 2, told
    assert told.count("\n") < 20, told
    assert f"{root}/events.jsonl: No such file or directory" in told
    done = slurm_ppo("resume", moved)
    assert done.returncode == 0, done.stderr
