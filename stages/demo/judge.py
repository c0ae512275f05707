"""Has the run learnt? Judges a finished run by its own reward and by the rule that the pipeline never saw.

    python -m stages.demo.judge RUN

Prints, for the reward-model score and for the hidden rule, the mean over the first and the last three
iterations and their difference in standard deviations of the first three. Exit code 1 unless both gained
at least half a standard deviation.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from stages.demo.hidden_rule import hidden_rule

WINDOW = 3
LEAST_GAIN = 0.5


@dataclass(frozen=True)
class JudgedScores:
    """Per response: what the reward model said, and what the hidden rule says."""

    reward: list[float]
    rule: list[float]


def read_scores(run: Run, iterations: range) -> JudgedScores:
    """JudgedScores of every response of some iterations, from their verified shards."""
    reward: list[float] = []
    rule: list[float] = []
    for iteration in iterations:
        for shard in range(run.plan.num_shards):
            rollout = require_record(run.paths, Task(iteration, Stage.ROLLOUT, shard))
            scored = require_record(run.paths, Task(iteration, Stage.REWARD, shard))
            rows = (
                read_shard(run.paths, rollout, ROLLOUT).select(["prompt_text", "response_text"]).to_pylist()
            )
            rule += [hidden_rule(row["prompt_text"], row["response_text"]) for row in rows]
            reward += read_shard(run.paths, scored, REWARD)["reward"].to_pylist()
    return JudgedScores(reward, rule)


def gain(first: list[float], last: list[float]) -> float:
    """Difference of the means in standard deviations of the first."""
    return (statistics.fmean(last) - statistics.fmean(first)) / statistics.stdev(first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    run = load_run(parser.parse_args().run)
    total = run.config.iterations
    if total < 2 * WINDOW:
        parser.error(f"the run has {total} iterations; at least {2 * WINDOW} are needed")
    first = read_scores(run, range(1, WINDOW + 1))
    last = read_scores(run, range(total - WINDOW + 1, total + 1))
    print(f"{'':22}{'first 3':>10}{'last 3':>10}{'gain in std':>13}")
    gains = []
    for name, before, after in (
        ("reward-model score", first.reward, last.reward),
        ("hidden rule", first.rule, last.rule),
    ):
        gains.append(gain(before, after))
        means = f"{statistics.fmean(before):>10.3f}{statistics.fmean(after):>10.3f}"
        print(f"{name:<22}{means}{gains[-1]:>13.2f}")
    if min(gains) >= LEAST_GAIN:
        return 0
    print(f"the run has not learned: both were to gain {LEAST_GAIN} standard deviations", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
