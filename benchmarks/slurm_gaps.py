"""Workers that may leave against workers that never do: ``benchmarks/slurm_iterations.py --gaps``."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from benchmarks.slurm_runs import STAGES, Runner, noop_words
from pipeline.run.commits import require_record
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker
from pipeline.run.submissions import is_job_of, job_kind_of
from pipeline.workers.beats import read_beats
from pipeline.workers.summary import spent_by
from slurm.devcluster import Layout, PracticeCluster, start
from tests.support import light

FIRST = 3
"""First iteration that counts: the ones before it fill caches."""
_STARTUP, _GAP, _WORK = 10, 30, 5
"""Seconds."""
_ACCOUNTED = 5.0
"""Seconds until accounting has the end of a job."""


def gap_words(linger: object) -> list[str]:
    """Return settings of light tasks that start up for 10 s, and of an update that takes 30 s."""
    words = ["scheduler=devcluster", "rollout.num_shards=2", "data.prompts_per_iteration=2"]
    for stage in STAGES:
        seconds = _GAP if stage == "update" else _WORK
        words += [
            f"scheduler.{stage}.gpus_per_node=null",
            f"scheduler.{stage}.setup=[sleep {_STARTUP}]",
            f"scheduler.{stage}.environment={{{light.SECONDS}: '{seconds}'}}",
            f"scheduler.{stage}.linger={linger}",
            f"scheduler.{stage}.start_early=true",
            f"scheduler.{stage}.time='2:00:00'",
        ]
    return words if linger == "auto" else [*words, "scheduler.linger_max=86400"]


def gaps(given: argparse.Namespace, scratch: Path, layout: Layout) -> None:
    """Compare workers that may leave with workers that never do, both at once: they mostly sleep."""
    inputs = light.make_inputs(scratch / "inputs")
    cluster = start(scratch / "cluster", layout, accounting=True)
    folder = given.keep or scratch

    def one(name: str, linger: object) -> str:
        words = [*noop_words(inputs, given.iterations, 2, 2), *gap_words(linger)]
        run = Runner(cluster).carry_out(words, folder / name.replace(" ", "-"))
        time.sleep(_ACCOUNTED)
        return gap_line(name, run, held_seconds(cluster, run))

    try:
        with ThreadPoolExecutor() as pool:
            for line in pool.map(one, ("may leave", "never leave"), ("auto", 86400)):
                print(line, flush=True)
    finally:
        cluster.stop()


def gap_line(name: str, run: Run, held: float) -> str:
    """Say how long iterations took, and what was held for them, of what was needed."""
    ends = [require_record(run.paths, policy_maker(k)).ended for k in range(1, run.plan.iterations + 1)]
    each = [after - before for before, after in pairwise(ends)]
    spent = [spent_by(beat) for beat in read_beats(run.paths).values()]
    needed = sum(one.busy + one.startup for one in spent)
    waited = sum(one.waiting for one in spent)
    return (
        f"{name:<12} {sum(each[FIRST - 2 :]):7.1f} s after the first {FIRST - 1} iterations "
        f"{[round(seconds, 1) for seconds in each]}; {len(spent)} workers held {held:.1f} s: "
        f"{needed:.1f} s busy and starting up, {waited:.1f} s waiting; "
        f"cold tasks would need {needed_seconds(run):.1f} s"
    )


def held_seconds(cluster: PracticeCluster, run: Run) -> float:
    """Return the seconds that the elements of the run's stages ran, as sacct has them."""
    shown = cluster.call("sacct", "-a", "-D", "-X", "-n", "-P", "--format=ElapsedRaw,JobName").stdout
    rows = (line.split("|") for line in shown.splitlines())
    named = [(float(elapsed), name) for elapsed, name in rows if is_job_of(run.identity.id, name)]
    return sum(elapsed for elapsed, name in named if job_kind_of(name) in STAGES)


def needed_seconds(run: Run) -> float:
    """Return the seconds of all tasks, and one start-up for each."""
    tasks = [task for k in range(1, run.plan.iterations + 1) for task in run.plan.tasks(k)]
    records = [require_record(run.paths, task) for task in tasks]
    return sum(r.ended - r.started for r in records) + _STARTUP * len(records)
