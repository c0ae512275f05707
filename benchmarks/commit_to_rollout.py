"""Seconds from a policy to the start of the next iteration's first rollout, on a real Slurm at its defaults.

    python benchmarks/commit_to_rollout.py [--iterations 6] [--state-seconds 10] [--rounds 2] [--horizon 2]

Light tasks on a cluster that is brought up for the purpose. The trainer's state takes ``--state-seconds`` to
be written. Two runs take turns:

    before   policy and state are one commit, and rollouts wait for the end of the update's job
    after    the policy is committed first; the update's job releases the rollouts, then writes the state

Of each iteration but the first: from the policy's files being durable to the first rollout's process having
begun, and the part of it after the commit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.run.commits import Record, read_record  # noqa: E402
from pipeline.run.directory import Run, load_run  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.run.tasks import Stage, Task  # noqa: E402
from slurm.devcluster import Cluster, start  # noqa: E402
from tests.support import light, light_training, tiny  # noqa: E402

TRAINERS = {"before": "make_trainer_at_once", "after": "make_trainer"}
_LIMIT = 900.0


class Gap(NamedTuple):
    """Seconds until the next iteration's first rollout had begun."""

    from_files: float
    """Since the policy's last file was written."""
    from_commit: float
    """Since the policy was committed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--state-seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--horizon", type=int, default=2, help="scheduler.horizon; 1: no rollout waits queued"
    )
    given = parser.parse_args()
    gaps: dict[str, list[Gap]] = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = light.make_inputs(Path(scratch) / "inputs")
        cluster = start(Path(scratch) / "cluster")
        try:
            for number in range(given.rounds):
                for name in TRAINERS:
                    root = Path(scratch) / f"{name}-{number}"
                    carry_out(cluster, words(inputs, root, name, given), given.iterations, root)
                    gaps[name] += gaps_of(load_run(root))
        finally:
            cluster.stop()
    for name, found in gaps.items():
        print(row(name, found))


def words(inputs: Path, root: Path, name: str, given: argparse.Namespace) -> list[str]:
    stages = ("rollout", "reward", "update", "evaluate")
    return tiny.overrides(
        inputs,
        root,
        "scheduler=devcluster",
        "scheduler.workers=false",
        f"iterations={given.iterations}",
        f"scheduler.horizon={given.horizon}",
        f"update.engine=tests.support.light:{TRAINERS[name]}",
        f"scheduler.update.environment={{{light_training.STATE_SECONDS}: '{given.state_seconds}'}}",
        *(f"scheduler.{stage}.gpus_per_node=null" for stage in stages),
    )


def carry_out(cluster: Cluster, given: list[str], iterations: int, root: Path) -> None:
    """Submit a run and wait for its last row, and until the queue is empty."""
    environment = os.environ | cluster.environment()
    command = [sys.executable, "-m", "pipeline", "submit", *given]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    until = time.monotonic() + _LIMIT
    while num_rows(root) < iterations or cluster.call("squeue", "-h").stdout.strip():
        if time.monotonic() > until:
            raise TimeoutError(f"{root} has {num_rows(root)} rows after {_LIMIT:g} s")
        time.sleep(1)


def num_rows(root: Path) -> int:
    path = root / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def gaps_of(run: Run) -> Iterator[Gap]:
    for version in range(1, run.plan.iterations):
        update = record_of(run, policy_maker(version))
        shards = range(run.plan.num_shards)
        began = min(record_of(run, Task(version + 1, Stage.ROLLOUT, shard)).started for shard in shards)
        paths = [run.paths.root / entry.path for entry in update.outputs]
        written = max(path.stat().st_mtime for path in paths if path.is_relative_to(run.paths.policies))
        yield Gap(began - written, began - update.ended)


def record_of(run: Run, task: Task) -> Record:
    record = read_record(run.paths, task)
    assert record is not None, f"{task} is not committed"
    return record


def row(name: str, gaps: list[Gap]) -> str:
    medians = Gap(*(statistics.median(column) for column in zip(*gaps, strict=True)))
    worst = Gap(*(max(column) for column in zip(*gaps, strict=True)))
    return (
        f"{name:<8} from the policy's files {medians.from_files:6.2f} s (at most {worst.from_files:.2f}), "
        f"from its commit {medians.from_commit:6.2f} s (at most {worst.from_commit:.2f}); {len(gaps)} gaps"
    )


if __name__ == "__main__":
    main()
