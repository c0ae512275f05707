"""Seconds of an iteration with responses of older policies, on a practice cluster, beside the least possible.

    python benchmarks/slurm_staleness.py [--staleness 0,1,2] [--seconds 12,6,12] [--iterations 12]
        [--shards 2] [--keep FOLDER]

Light tasks that sleep, so that it may run beside other work: each rollout, reward and update takes so many
seconds. Each stage has a partition and nodes of its own, with a place for every shard; workers stay as they
do by default (``linger: auto``). A run of each staleness, on a cluster of its own, all at once. The least is
the longest of rollout, reward and update, or their sum divided by 1 + staleness. The first iterations, in
which nothing is known, are left out. What workers held is the sum of their lives, as they count them.
"""

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.slurm_runs import STAGES, Runner, layout_of, noop_words  # noqa: E402
from pipeline.run.commits import Record, require_record  # noqa: E402
from pipeline.run.directory import Run  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.workers.beats import Beat, Reason, read_beats  # noqa: E402
from pipeline.workers.summary import Spent, spent_by  # noqa: E402
from slurm.devcluster import start  # noqa: E402
from tests.support import light  # noqa: E402

FIRST = 5
"""First iteration that counts: before it workers start up, and nothing is known of what comes when."""
_RESPONSES = 2
"""Of a shard: a task that is warned could stop between them."""
_GOAL, _MOST_HELD = 1.15, 1.25


@dataclass(frozen=True)
class Case:
    """A run, and the seconds of its stages' tasks."""

    staleness: int
    seconds: Sequence[float]
    """Of a rollout, of a reward and of an update."""
    shards: int
    iterations: int

    @property
    def least(self) -> float:
        """Seconds from one policy to the next, at least."""
        return max(*self.seconds, sum(self.seconds) / (1 + self.staleness))

    def words(self, inputs: Path) -> list[str]:
        """Return the words of the run."""
        parts = (_RESPONSES, _RESPONSES, 1)
        given = [
            f"scheduler.{stage}.environment={{{light.SECONDS}: '{seconds / number:g}'}}"
            for stage, seconds, number in zip(STAGES, self.seconds, parts, strict=True)
        ]
        common = noop_words(inputs, self.iterations, self.shards, _RESPONSES * self.shards)
        given += ["update.epochs=1", "update.minibatches=1", "scheduler=devcluster"]
        stale = [f"rollout.staleness={self.staleness}", "algorithm.correction.level=token"]
        return [*common, *given, *stale, *(f"scheduler.{stage}.time='1:00:00'" for stage in STAGES)]


def carry_out(case: Case, inputs: Path, folder: Path) -> Run:
    """Carry a run out on a cluster that is there for it alone."""
    cluster = start(folder / "cluster", layout_of(case.shards))
    try:
        return Runner(cluster).carry_out(case.words(inputs), folder / "run")
    finally:
        cluster.stop()


# --- what it took ------------------------------------------------------------------------------------------


def periods(run: Run) -> list[float]:
    """Return the seconds from one policy to the next, of all iterations but the first."""
    ends = [require_record(run.paths, policy_maker(k)).ended for k in range(1, run.plan.iterations + 1)]
    return [later - earlier for earlier, later in pairwise(ends)]


def records_of(run: Run, iteration: int, stage: str) -> list[Record]:
    tasks = [task for task in run.plan.tasks(iteration) if task.stage == stage]
    return [require_record(run.paths, task) for task in tasks]


def gaps(run: Run, iteration: int) -> Iterator[tuple[str, float]]:
    """Yield stages with the longest wait of a task of an iteration: from when its inputs and its stage's
    task before it were there."""
    for stage in STAGES:
        before = records_of(run, iteration - 1, stage)
        waits = [record.started - _ready(run, record, before) for record in records_of(run, iteration, stage)]
        yield stage, max(waits)


def _ready(run: Run, record: Record, before: Sequence[Record]) -> float:
    """Return when a task could begin: once its inputs are there, and a worker of its stage is free."""
    inputs = (require_record(run.paths, source).ended for source in run.plan.inputs(record.task))
    free = min(one.ended for one in before)
    return max(free, *inputs)


def told(case: Case, run: Run) -> Iterator[str]:
    """Yield lines that say how a run fared."""
    each, beats = periods(run), [b for b in read_beats(run.paths).values() if b.job_kind in STAGES]
    counted = each[FIRST - 2 :]
    times = statistics.fmean(counted) / case.least
    yield (
        f"staleness {case.staleness}: {statistics.fmean(counted):.2f} s an iteration (median "
        f"{statistics.median(counted):.2f}, longest {max(counted):.2f}), least {case.least:g} s: "
        f"{times:.3f} times{_over(times, _GOAL)}"
    )
    yield f"    iterations from the second on: {' '.join(f'{seconds:.1f}' for seconds in each)}"
    yield held_line(beats)
    found = [dict(gaps(run, k)) for k in range(FIRST, run.plan.iterations + 1)]
    waits = {stage: [gap[stage] for gap in found] for stage in STAGES}
    shown = ", ".join(f"{s} {statistics.median(w):.2f} (at most {max(w):.2f})" for s, w in waits.items())
    yield f"    seconds from free and ready to begun, of each iteration's last: {shown}"
    tasks = ", ".join(f"{stage} {statistics.median(_took(run, stage)):.2f}" for stage in STAGES)
    left = ", ".join(f"{b.job_kind} {b.reason}" for b in beats if b.reason is not Reason.DONE)
    yield f"    seconds of a task, median: {tasks}; left before the end: {left or 'none'}"


def held_line(beats: Sequence[Beat]) -> str:
    """Say for what workers held their places, and how many times what was needed."""
    spent = functools.reduce(Spent.plus, map(spent_by, beats), Spent())
    needed = spent.busy + spent.startup
    times = spent.total / needed
    return (
        f"    {len(beats)} workers held {spent.total:.0f} s: busy {spent.busy:.0f}, starting up "
        f"{spent.startup:.0f}, waiting {spent.waiting:.0f}: {times:.3f} times busy and start-up"
        f"{_over(times, _MOST_HELD)}"
    )


def _over(times: float, most: float) -> str:
    return f", over {most:g}" if times > most else ""


def _took(run: Run, stage: str) -> list[float]:
    every = range(FIRST, run.plan.iterations + 1)
    return [record.ended - record.started for k in every for record in records_of(run, k, stage)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", default="0,1,2")
    parser.add_argument("--seconds", default="12,6,12", help="of a rollout, a reward and an update")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder that the runs are left in")
    given = parser.parse_args()
    seconds = [float(word) for word in given.seconds.split(",")]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        folder = given.keep or Path(scratch)
        inputs = light.make_inputs(Path(scratch) / "inputs")
        cases = [
            Case(int(word), seconds, given.shards, given.iterations) for word in given.staleness.split(",")
        ]
        rooms = [folder / f"staleness-{case.staleness}" for case in cases]
        for case, run in zip(cases, pool.map(carry_out, cases, [inputs] * len(cases), rooms), strict=True):
            print("\n".join(told(case, run)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
