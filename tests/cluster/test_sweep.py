"""A sweep on a real Slurm: disturbed and cancelled, it ends in the runs that single commands make."""

import contextlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.paths import RunPaths
from pipeline.run.submissions import run_id_of
from pipeline.run.tasks import PREPARE
from slurm.devcluster import PracticeCluster
from slurm.sharedfiles import is_there
from tests.cluster.scenario import (
    Job,
    kill_job,
    policy_of,
    queue_of,
    read_lines,
    results_of,
    room_on,
    wait_for,
)
from tests.support import ROOT, light_training, tiny
from tests.support.tables import IS_SOAK, ON_CLUSTER

TEMPERATURES, SEEDS = ("0.8", "1.0"), 3 if IS_SOAK else 2
"""What light tasks compute depends on both: six runs, in the suite four."""
ITERATIONS = 2
SMALL = (f"iterations={ITERATIONS}", "rollout.num_shards=1")


@dataclass(frozen=True)
class SlurmSweep:
    """A sweep, and the words it was made with."""

    cluster: PracticeCluster
    root: Path
    words: Sequence[str]
    environment: dict[str, str]

    def command(self, *arguments: str) -> str:
        """Wait for a command to end well. Returns what it says."""
        done = subprocess.run(**self._call(*arguments), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    @contextlib.contextmanager
    def killed_command(self, *arguments: str) -> Iterator[None]:
        """kill -9 of a command when the block ends."""
        process = subprocess.Popen(
            **self._call(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def _call(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "pipeline", *arguments]
        return {"args": command, "env": self.environment, "cwd": ROOT, "stdin": subprocess.DEVNULL}

    def jobs(self, *filters: str) -> list[Job]:
        return [
            job for job in queue_of(self.cluster, *filters) if job.name.startswith("slurm-ppo.s-temperature_")
        ]

    def begun(self) -> set[tuple[str, str]]:
        """Names and ids of its runs that have had jobs, whatever became of them."""
        names = [job.name for job in self.jobs("--states=all")]
        return {(name.rsplit(".", 5)[0].removeprefix("slurm-ppo.s-"), run_id_of(name)) for name in names}

    def kill_one(self, chance: random.Random) -> bool:
        """kill -9 of one of its running jobs. False if none has processes."""
        running = self.jobs("--states=RUNNING")
        return any(map(kill_job, chance.sample(running, len(running))))


@pytest.fixture(scope="module")
def singles(inputs, slurm_ppo, tmp_path_factory) -> dict[str, Path]:
    """The runs, each by a command of its own on this machine, by their names in the sweep."""
    folder, found = tmp_path_factory.mktemp("singles"), {}
    for temperature in TEMPERATURES:
        for seed in range(SEEDS):
            name = f"temperature_{temperature}-seed_{seed}"
            own = (f"rollout.temperature={temperature}", f"seed={seed}", *SMALL)
            done = slurm_ppo("run", *tiny.overrides(inputs, folder / name, *own))
            assert done.returncode == 0, done.stderr
            found[name] = folder / name
    return found


@pytest.fixture
def gate(tmp_path) -> Path:
    """A file without which no run of the sweep makes its last update."""
    return tmp_path / "gate"


@pytest.fixture
def sweep(cluster, inputs, environment, gate, tmp_path) -> SlurmSweep:
    root = room_on(cluster, tmp_path) / "sweep"
    waits = f"scheduler.update.environment={{{light_training.GATE}: '{ITERATIONS}:{gate}'}}"
    more = ["name=s", "scheduler=devcluster", waits, *SMALL]
    words = tiny.overrides(inputs, root, *more, f"rollout.temperature={','.join(TEMPERATURES)}")
    return SlurmSweep(cluster, root, [*words, f"--seeds={SEEDS}"], environment | cluster.environment())


@ON_CLUSTER
def test_a_sweep_that_is_disturbed_and_cancelled_and_typed_again_makes_the_runs_of_single_commands(
    sweep, singles, gate, chance
):
    """Its command is killed anywhere: while it composes, makes the manifest, in or between two submissions.
    So are jobs of its runs."""
    for _ in range(2):
        with sweep.killed_command("sweep", *sweep.words):
            time.sleep(chance.uniform(1, 8))
        sweep.kill_one(chance)
    with sweep.killed_command("sweep", *sweep.words):
        wait_for(lambda: sweep.kill_one(chance), "a job that can be killed", 100)

    *lines, last = sweep.command("cancel", str(sweep.root)).splitlines()
    assert [line.partition(":")[0] for line in lines] == list(singles)
    counts = [re.search(r": (?:cancelled (\d+) jobs|it has not begun)$", line) for line in lines]
    assert all(counts), lines
    assert any(found[1] for found in counts), lines
    assert last.endswith(f"to continue: slurm-ppo sweep {sweep.root}")
    wait_for(lambda: not sweep.jobs(), "an empty queue after the cancellation", 100)
    assert not any(is_complete(sweep.root / name) for name in singles)
    begun = sweep.begun()
    assert len({name for name, _ in begun}) == len(begun), "no run was begun twice"
    kept = {(name, run_id) for name, run_id in begun if has_committed(sweep.root / name)}

    gate.touch()
    sweep.command("sweep", *sweep.words)
    wait_for(lambda: all(is_complete(sweep.root / name) for name in singles), "all runs", 600)
    for name, single in singles.items():
        assert policy_of(sweep.root / name) == policy_of(single)
        assert results_of(sweep.root / name) == results_of(single)
    assert len({policy_of(single)["policy"] for single in singles.values()}) == len(singles)
    wait_for(lambda: not sweep.jobs(), "an empty queue", 300)
    begun_anew = sweep.begun() - begun
    assert not {name for name, _ in kept} & {name for name, _ in begun_anew}, "what is committed is kept"
    assert len({name for name, _ in begun_anew}) == len(begun_anew)


def has_committed(run: Path) -> bool:
    """One that has not may be started over, with another id."""
    return is_there(RunPaths(run).task(PREPARE).record)


def is_complete(run: Path) -> bool:
    return len(read_lines(run / "metrics.jsonl")) == ITERATIONS
