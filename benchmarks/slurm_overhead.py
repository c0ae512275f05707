"""Wall time of a run whose tasks do nothing, through ``slurm-ppo submit`` and through a chain of sbatch.

    python benchmarks/slurm_overhead.py [--iterations 10] [--shards 8] [--seconds 0.2] [--rounds 5]

Both run the same script for every task on the same cluster, which is brought up for the purpose, in turn:
the chain orders the same arrays with the same dependencies, commits the same records, and knows nothing else.
Also counts the Slurm commands that each pass of a driver made.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.noop import write_noops  # noqa: E402
from pipeline.config.compose import compose  # noqa: E402
from pipeline.run.paths import RunPaths  # noqa: E402
from pipeline.run.tasks import Stage, Task  # noqa: E402
from slurm.devcluster import Cluster, start  # noqa: E402
from tests.support import tiny  # noqa: E402

CHAIN = """set -eu
noop=$1 run=$2 iterations=$3 last=$4
job() {{ # iteration stage array dependency
    sbatch --parsable -p all -t 10 -o /dev/null --array="$3" ${{4:+-d "$4"}} -J "chain-$1-$2" <<END
#!/bin/sh
exec $noop -P -m slurm.element $run/slurm/$1/$2-1-0.json
END
}}
update=$(job 00000 prepare 0 "")
for k in $(seq "$iterations"); do
    i=$(printf %05d "$k")
    rollout=$(job $i rollout 0-$last afterok:$update)
    reward=$(job $i reward 0-$last aftercorr:$rollout)
    update=$(job $i update 0 afterok:$reward)
done
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--horizon", type=int, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / "inputs"
        inputs.mkdir()
        tiny.make_inputs(inputs)
        cluster = start(Path(scratch) / "cluster")
        try:
            results = [
                one_round(cluster, inputs, Path(scratch) / f"round{i}", given) for i in range(given.rounds)
            ]
        finally:
            cluster.stop()
    for name in ("chain", "submit"):
        print(
            f"{name:<8}{statistics.median(r[name] for r in results):8.2f} s",
            [round(r[name], 2) for r in results],
        )
    ratios = [r["submit"] / r["chain"] for r in results]
    print(f"ratio   {statistics.median(ratios):8.3f}   {[round(r, 3) for r in ratios]}")
    calls = [r["calls"] for r in results]
    print("slurm-ppo's Slurm commands per run:", calls[-1])


def one_round(cluster: Cluster, inputs: Path, folder: Path, given: argparse.Namespace) -> dict:
    """Seconds of the chain and of slurm-ppo, one after the other."""
    folder.mkdir()
    environment = os.environ | cluster.environment()
    horizon = given.horizon or given.iterations
    words = tiny.overrides(
        inputs,
        folder / "run",
        "scheduler=slurm",
        "scheduler.workers=false",
        f"iterations={given.iterations}",
        f"rollout.num_shards={given.shards}",
        f"data.prompts_per_iteration={given.shards}",
        "update.minibatches=1",
        f"scheduler.horizon={horizon}",
        *(f"scheduler.{stage}.gpus_per_node=null" for stage in ("rollout", "reward", "update", "evaluate")),
        *(f"scheduler.{stage}.cpus_per_task=1" for stage in ("rollout", "reward", "update", "evaluate")),
        *(
            f"scheduler.{stage}.partition=all"
            for stage in ("prepare", "rollout", "reward", "update", "driver")
        ),
        f"scheduler.driver.python={sys.executable}",
    )
    config = compose(words)
    took = {}
    chain_run = folder / "chain"
    script = write_noops(folder / "chain-noops", config, chain_run, given.seconds)
    started = time.time()
    arguments = [str(script), str(chain_run), str(given.iterations), str(given.shards - 1)]
    subprocess.run(
        ["bash", "-c", CHAIN.replace("{{", "{").replace("}}", "}"), "chain", *arguments],
        env=environment,
        check=True,
    )
    took["chain"] = wait_for_end(chain_run, given.iterations) - started
    script = write_noops(folder / "noops", config, folder / "run", given.seconds)
    words.append(f"scheduler.python={script}")
    started = time.time()
    subprocess.run(
        [sys.executable, "-m", "pipeline", "submit", *words],
        env=environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    took["submit"] = wait_for_end(folder / "run", given.iterations) - started
    while (
        not (folder / "run" / "metrics.jsonl").exists()
        or len((folder / "run" / "metrics.jsonl").read_text().splitlines()) < given.iterations
    ):
        time.sleep(0.2)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    took["calls"] = sum(e["event"] == "submitted" for e in events)
    return took


def wait_for_end(run_dir: Path, iterations: int, limit: float = 300.0) -> float:
    """When the last update was committed, unix seconds."""
    path = RunPaths(run_dir).task(Task(iterations, Stage.UPDATE)).record
    until = time.monotonic() + limit
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear in {limit:g} s")
        time.sleep(0.05)
    return path.stat().st_ctime


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
