"""A sweep on a real Slurm: killed at random moments, it ends in the runs that single commands make."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.run.submissions import run_id_of
from slurm.devcluster import Cluster
from tests.cluster.scenario import CPU_ONLY, read_lines, results_of, room_on, wait_for
from tests.support import ROOT, tiny

TEMPERATURES, SEEDS = ("0.8", "1.0"), 3
"""What light tasks compute depends on both."""
WEIGHTS = "policy/00001/model.safetensors"


def words_of(inputs: Path, root: Path, *more: str) -> list[str]:
    return tiny.overrides(inputs, root, *more, "iterations=1")


@pytest.fixture(scope="module")
def singles(inputs, slurm_ppo, tmp_path_factory) -> dict[str, Path]:
    """The six runs, each by a command of its own on this machine, by their names in the sweep."""
    folder, found = tmp_path_factory.mktemp("singles"), {}
    for temperature in TEMPERATURES:
        for seed in range(SEEDS):
            name = f"temperature_{temperature}-seed_{seed}"
            own = (f"rollout.temperature={temperature}", f"seed={seed}")
            done = slurm_ppo("run", *words_of(inputs, folder / name, *own))
            assert done.returncode == 0, done.stderr
            found[name] = folder / name
    return found


def test_a_sweep_of_two_by_three_killed_at_random_and_typed_again_makes_six_single_runs(
    cluster, inputs, environment, singles, tmp_path, chance
):
    root = room_on(cluster, tmp_path) / "sweep"
    more = ["name=s", "scheduler=devcluster", *CPU_ONLY, f"rollout.temperature={','.join(TEMPERATURES)}"]
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "sweep",
        *words_of(inputs, root, *more),
        "--seeds",
        str(SEEDS),
    ]
    settings: dict = {"env": environment | cluster.environment(), "cwd": ROOT, "stdin": subprocess.DEVNULL}
    for _ in range(3):
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, **settings)
        time.sleep(chance.uniform(1, 20))  # anywhere: composing, the manifest, in or between two submissions
        process.kill()
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **settings)
    assert done.returncode == 0, done.stderr + done.stdout
    wait_for(lambda: all(read_lines(root / n / "metrics.jsonl") for n in singles), "six runs", 600)
    for name, single in singles.items():
        assert (root / name / WEIGHTS).read_bytes() == (single / WEIGHTS).read_bytes()
        assert results_of(root / name) == results_of(single)
    assert len({(single / WEIGHTS).read_bytes() for single in singles.values()}) == 6
    wait_for(lambda: not jobs_of(cluster), "an empty queue", 300)
    assert len(set(map(run_id_of, jobs_of(cluster, "--states=all")))) == 6, "no run was begun twice"


def jobs_of(cluster: Cluster, *filters: str) -> list[str]:
    """Names of the sweep's jobs."""
    shown = cluster.call("squeue", "-h", "-o", "%j", *filters)
    assert shown.returncode == 0, shown.stderr
    return [name for name in shown.stdout.split() if name.startswith("s-temperature_")]
