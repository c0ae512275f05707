"""Our own time, and Slurm's commands, for one iteration of many shards.

    python benchmarks/slurm_scale.py [--shards 1000 100 10]

For each number of shards: a first pass that plans and submits everything (prepare is committed already), and
a second one after all rollouts were committed, which reads 1,000 records and the queue and decides. "own" is
wall time without what was spent in Slurm's commands. No task runs: the partition is down.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.noop import make_record  # noqa: E402
from pipeline.config.compose import compose  # noqa: E402
from pipeline.config.resolve import resolve  # noqa: E402
from pipeline.executors.slurm.passes import make_pass  # noqa: E402
from pipeline.run.commits import publish  # noqa: E402
from pipeline.run.control import begin_invocation  # noqa: E402
from pipeline.run.directory import Run, create_run  # noqa: E402
from pipeline.run.tasks import PREPARE, Stage, Task  # noqa: E402
from pipeline.status.progress import Lines  # noqa: E402
from slurm import commands  # noqa: E402
from slurm.devcluster import start  # noqa: E402
from tests.support import tiny  # noqa: E402

WORDS = (
    "scheduler=devcluster",
    "update.minibatches=1",
    *(f"scheduler.{stage}.gpus_per_node=null" for stage in ("rollout", "reward", "update", "evaluate")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 100, 10])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / "inputs"
        inputs.mkdir()
        tiny.make_inputs(inputs)
        rows = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(max(given.shards))]
        tiny.write_jsonl(inputs / "prompts.jsonl", rows)
        cluster = start(Path(scratch) / "cluster")
        try:
            commands.os.environ.update(cluster.environment())
            for partition in ("rollout", "reward", "update", "cpu"):
                cluster.call("scontrol", "update", f"PartitionName={partition}", "State=DOWN")
            for shards in given.shards:
                measure(inputs, Path(scratch) / f"run{shards}", shards)
        finally:
            cluster.stop()


def measure(inputs: Path, root: Path, shards: int) -> None:
    words = [f"rollout.num_shards={shards}", f"data.prompts_per_iteration={shards}", "iterations=2"]
    run = create_run(resolve(compose(tiny.overrides(inputs, root, *WORDS, *words))))
    publish(run.paths, make_record(PREPARE))
    begin_invocation(run.paths)
    for what in ("submitted", "reconciled"):
        own, slurm, calls = timed_pass(run)
        print(
            f"{shards:>6} shards {what:<11} own {own:5.2f} s   Slurm {slurm:5.2f} s   {dict(calls)}",
            flush=True,
        )
        for shard in range(shards):
            publish(run.paths, make_record(Task(1, Stage.ROLLOUT, shard)))


def timed_pass(run: Run) -> tuple[float, float, Counter]:
    """Own seconds, seconds in Slurm's commands, and the commands, of one pass."""
    commands.calls.clear()
    inside, real = [0.0], commands._run_once

    def timed(*arguments):
        began = time.perf_counter()
        try:
            return real(*arguments)
        finally:
            inside[0] += time.perf_counter() - began

    commands._run_once = timed
    began = time.perf_counter()
    make_pass(run, Lines(run.plan, sys.stderr))
    wall = time.perf_counter() - began
    commands._run_once = real
    return wall - inside[0], inside[0], Counter(commands.calls)


if __name__ == "__main__":
    main()
