"""The rules of workers on plants at random, beside simple strategies: what is wrong, and a summary.

    python -m benchmarks.plants --count 500
    python -m benchmarks.plants --count 20 --overlap     staleness, with places for all stages

The seed is the commit that is checked out, unless another is given: no rule can have been fitted to it.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pool
from pathlib import Path

from pipeline.simulate.overlap import judge_overlap
from pipeline.simulate.plants import (
    MOST_IN_VAIN,
    MOST_TIMES,
    PlantVerdict,
    in_words,
    judge,
    plant_of,
    size_of,
)

_SUMMARY_EACH = 50
"""Plants after which a summary is printed: all 500 may take hours."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="plants (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="number of the first plant (default: 0)")
    parser.add_argument("--seed", default="", help="text (default: the hash of the commit)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="plants of pipeline/simulate/overlap.py")
    parser.add_argument("--small-first", action="store_true", help="those with the fewest tasks first")
    given = parser.parse_args()
    seed = given.seed or commit()
    numbers = [(seed, number) for number in range(given.first, given.first + given.count)]
    if given.overlap:
        return overlap(numbers)
    if given.small_first:
        numbers.sort(key=lambda numbered: size_of(plant_of(*numbered)))
    print(f"seed {seed}")
    with Pool(given.processes) as pool:
        found = list(told(seed, pool.imap(_judge, numbers)))
    print(summary(found))
    return any(verdict.wrong for verdict in found)


def overlap(numbers: Iterable[tuple[str, int]]) -> int:
    """Print how near runs with staleness come to the least that an iteration can take, and the worst."""
    found = [judge_overlap(*numbered) for numbered in numbers]
    for verdict in found:
        plan, kinds = verdict.plant.plan, verdict.plant.kinds
        work = ", ".join(f"{kind} {kinds[kind].seconds:.0f} s" for kind in plan.job_kinds)
        print(
            f"plant {verdict.number}: staleness {plan.staleness}, {plan.num_shards} shards, {work}: "
            f"{verdict.times:.3f} times the least, held {verdict.held:.2f}; "
            f"{'; '.join(verdict.wrong) or 'ok'}"
        )
    print(f"worst: {max(v.times for v in found):.3f} times the least, held {max(v.held for v in found):.2f}")
    return any(verdict.wrong for verdict in found)


def commit() -> str:
    """Return the hash of the commit that is checked out."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _judge(numbered: tuple[str, int]) -> PlantVerdict:
    return judge(*numbered)


def told(seed: str, verdicts: Iterable[PlantVerdict]) -> Iterable[PlantVerdict]:
    """Print what is wrong with each plant, as it comes, and now and then a summary so far."""
    found = list[PlantVerdict]()
    for verdict in verdicts:
        found.append(verdict)
        if len(found) % _SUMMARY_EACH == 0:
            print(summary(found), flush=True)
        if verdict.wrong:
            print(f"plant {verdict.number}: {'; '.join(verdict.wrong)}")
            print(f"    {in_words(plant_of(seed, verdict.number))}", flush=True)
        yield verdict


def summary(found: list[PlantVerdict]) -> str:
    starts = sum(verdict.result.starts for verdict in found)
    in_vain = sum(verdict.result.without_task for verdict in found)
    times = sorted(v.times for v in found if v.result.is_complete)
    slow = sum(one > MOST_TIMES for one in times)
    return (
        f"{len(found)} plants, {sum(bool(v.wrong) for v in found)} with something wrong\n"
        f"times the best strategy: median {times[len(times) // 2]:.2f}, worst {times[-1]:.2f}, "
        f"{slow} over {MOST_TIMES}\n"
        f"starts without a task: {in_vain} of {starts} ({in_vain / starts:.1%}; at most {MOST_IN_VAIN:.0%})\n"
        f"not ended: {sum(not v.result.is_complete for v in found)}, "
        f"runs whose hours do not add up: {sum(not v.result.adds_up for v in found)}"
    )


if __name__ == "__main__":
    sys.exit(main())
