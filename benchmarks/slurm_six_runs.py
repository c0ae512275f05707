"""Six runs of one user that share few places: ``benchmarks/slurm_iterations.py --six-runs``.

Six commands on the two GPUs of one node, and a sweep of six on four of them, of light tasks that sleep: two
cores carry no four places of real ones. The total, from the first command to the last policy, is compared
with the sum of the work over the places.
"""

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import slurm_costs
from benchmarks.slurm_runs import STAGES, Runner, layout_of, noop_words, on_one_node
from pipeline.run.commits import require_record
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.plan import policy_maker
from slurm.devcluster import start
from tests.support import light
from tests.support.counting import put_in_front

RUNS = 6


def six_runs(given: argparse.Namespace, scratch: Path) -> None:
    """Carry both out, one after the other, and print what they took."""
    inputs = light.make_inputs(scratch / "inputs")
    sleeps = [f"scheduler.{s}.environment={{{light.SECONDS}: '{given.task_seconds}'}}" for s in STAGES]
    places = on_one_node(1, STAGES)
    words = [*noop_words(inputs, given.iterations, given.shards, given.shards), "update.epochs=1"]
    words = [*words, "update.minibatches=1", "scheduler=devcluster", *places, *sleeps]
    for name, count in (("six runs", 2), ("a sweep of six", 4)):
        folder = (given.keep or scratch) / name.replace(" ", "-")
        cluster = start(scratch / f"cluster{count}", layout_of(count))
        runner = Runner(cluster, put_in_front(folder.with_suffix(".calls"), os.environ["PATH"]))
        try:
            begun = time.time()
            runs = (submit if name == "six runs" else sweep)(runner, words, folder)
            runner.wait_for(runs)
        finally:
            cluster.stop()
        print("\n".join(told(f"{name} on {count} places", runs, count, begun, runner)), flush=True)


def submit(runner: Runner, words: Sequence[str], folder: Path) -> list[Run]:
    """Submit six runs, as many at once as a sweep does."""
    roots = [folder / f"run{number}" for number in range(RUNS)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda root: runner.command("submit", *words, f"run_dir={root}"), roots))
    return [load_run(root) for root in roots]


def sweep(runner: Runner, words: Sequence[str], folder: Path) -> list[Run]:
    """Submit a sweep over six seeds."""
    runner.command("sweep", *words, f"run_dir={folder}", f"--seeds={RUNS}")
    return [load_run(root) for root in sorted(folder.iterdir()) if root.is_dir() and is_run(root)]


def told(name: str, runs: Sequence[Run], places: int, begun: float, runner: Runner) -> list[str]:
    """Say how long it took, of what the work alone would have."""
    assert len(runs) == RUNS, runs
    assert runner.counting is not None
    cost = slurm_costs.cost_of(runs, runner.counting.calls(), runner.submitted)
    last = max(require_record(run.paths, policy_maker(run.plan.iterations)).ended for run in runs)
    work, start_ups, total = cost.spent.busy, cost.spent.startup, last - begun
    head = (
        f"{name}: {total:.1f} s; {work:.1f} s of work over {places} places is {work / places:.1f} s: "
        f"{total * places / work:.2f} of it, {total * places / (work + start_ups):.2f} with start-ups"
    )
    return [head, *(f"  {line}" for line in slurm_costs.in_words(cost))]
