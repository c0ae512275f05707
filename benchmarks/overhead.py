"""Share of an iteration's wall time that is not model compute, from the records of a finished run.

    python benchmarks/overhead.py RUN

Model compute of an iteration is the longest chain through it: the slowest shard's generation and scoring,
then the update's forward and backward passes. Everything else counts as overhead: starting processes,
loading weights, reading, hashing, committing, deciding. Medians over the iterations after the second.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import Record, require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.tasks import Stage, Task


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration."""

    wall: float
    compute: float
    by_stage: dict[Stage, tuple[float, float]]
    """Stage -> wall and compute of its slowest task."""


def measure(run: Run, iteration: int) -> Iteration:
    shards = range(run.plan.num_shards)
    rollouts = [require_record(run.paths, Task(iteration, Stage.ROLLOUT, s)) for s in shards]
    rewards = [require_record(run.paths, Task(iteration, Stage.REWARD, s)) for s in shards]
    update = require_record(run.paths, Task(iteration, Stage.UPDATE))
    previous = require_record(run.paths, Task(iteration - 1, Stage.UPDATE))
    chains = [compute(a) + compute(b) for a, b in zip(rollouts, rewards, strict=True)]
    by_stage = {
        stage: (max(r.ended - r.started for r in records), max(map(compute, records)))
        for stage, records in ((Stage.ROLLOUT, rollouts), (Stage.REWARD, rewards), (Stage.UPDATE, [update]))
    }
    return Iteration(update.ended - previous.ended, max(chains) + compute(update), by_stage)


def compute(record: Record) -> float:
    return record.metrics["compute_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    run = load_run(parser.parse_args().run)
    measured = [measure(run, iteration) for iteration in range(3, run.config.iterations + 1)]
    for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE):
        wall, model = (statistics.median(m.by_stage[stage][i] for m in measured) for i in (0, 1))
        print(f"{stage:<8} slowest task {wall:.3f} s, of it compute {model:.3f} s")
    share = statistics.median(1 - m.compute / m.wall for m in measured)
    wall = statistics.median(m.wall for m in measured)
    print(f"iteration {wall:.3f} s, not model compute {share:.1%}   (goal under 20 %)")


if __name__ == "__main__":
    main()
