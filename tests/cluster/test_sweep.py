"""A sweep on a real Slurm: killed at random moments, it ends in the runs that single commands make."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.run.submissions import run_id_of
from tests.cluster.scenario import CPU_ONLY, read_lines, results_of, room_on, take, wait_for
from tests.support import ROOT, tiny

RATES, SEEDS = ("1e-3", "3e-3"), 3


@pytest.fixture(scope="module")
def singles(inputs, slurm_ppo, tmp_path_factory) -> dict[tuple[str, int], Path]:
    """The six runs, each by a command of its own on this machine."""
    folder, found = tmp_path_factory.mktemp("singles"), {}
    for rate in RATES:
        for seed in range(SEEDS):
            root = folder / f"{rate}-{seed}"
            own = (f"update.learning_rate={rate}", f"seed={seed}")
            done = slurm_ppo("run", *without(tiny.overrides(inputs, root)), *own)
            assert done.returncode == 0, done.stderr
            found[rate, seed] = root
    return found


def without(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("update.learning_rate=")]


def test_a_sweep_of_two_by_three_killed_at_random_and_typed_again_makes_six_single_runs(
    cluster, inputs, environment, singles, tmp_path, chance
):
    root = room_on(cluster, tmp_path) / "sweep"
    env = environment | cluster.environment()
    words = without(
        tiny.overrides(inputs, root, "name=s", "scheduler=devcluster", *CPU_ONLY, *take("0.1", "update"))
    )
    asked = ["sweep", *words, f"update.learning_rate={','.join(RATES)}", "--seeds", str(SEEDS)]
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *asked],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(
            chance.uniform(1, 15)
        )  # anywhere: composing, writing the manifest, between two submissions
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *asked],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    names = [
        f"learning_rate_{rate}-seed_{seed}".replace("1e-3", "0.001").replace("3e-3", "0.003")
        for rate, seed in singles
    ]

    def rows() -> list[int]:
        return [len(read_lines(root / name / "metrics.jsonl")) for name in names]

    wait_for(lambda: rows() == [2] * 6, f"six runs: {rows()}", 500)
    for name, single in zip(names, singles.values(), strict=True):
        for policy in ("00001", "00002"):
            path = f"policy/{policy}/model.safetensors"
            assert (root / name / path).read_bytes() == (single / path).read_bytes()
        assert results_of(root / name) == results_of(single)
    shown = cluster.call("squeue", "-h", "--states=all", "-o", "%j").stdout.split()
    assert len({run_id_of(job) for job in shown if job.startswith("s-learning_rate_")}) == 6

    def is_idle() -> bool:
        return not [j for j in cluster.call("squeue", "-h", "-o", "%j").stdout.split() if j.startswith("s-")]

    wait_for(is_idle, "an empty queue", 200)
