"""What an iteration costs besides compute, by model size: a model of bytes and seconds, no measurement.

    python benchmarks/iteration_cost.py [--storage 2] [--queue 2] [--start-rollout 60] ...

Bytes per parameter are those that ``benchmarks/state.py`` measures for bf16; rates and start-up times are
arguments, since they belong to a site. Cold jobs: each stage of each iteration starts cold. A gang allocation
holds all GPUs all the time, keeps engines and optimizer states, and hands weights over in memory.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (0.5, 1.5, 7, 14, 32, 70)
"""Billions of parameters, of the policy and of the critic alike."""
POLICY = 2
"""Bytes per parameter of the policy's commit: bf16."""
MOMENTS_AND_MASTERS = 12
"""Bytes per parameter of an optimizer's state: two moments and the fp32 weights."""


@dataclass(frozen=True)
class Site:
    """Rates and times of a cluster."""

    storage: float
    """GB/s that all processes of a job together read or write."""
    queue: float
    """Seconds from a job's becoming ready to its start."""
    start_rollout: float
    """Seconds until an engine generates, without reading weights; the same for the others."""
    start_reward: float
    start_update: float
    handover: float
    """GB/s at which a gang hands the policy from trainer to engine."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one iteration in which no model computes, and bytes that it moves; GB."""

    written_first: float
    """What the next rollouts wait for."""
    written_behind: float
    """State that is written while they run."""
    read_by_update: float
    seconds: float
    """On the way from one iteration to the next."""
    seconds_before: float
    """The same if the state were written and read through one rank before the next rollout starts."""
    gang: float
    """The same of a gang allocation."""


def cost_of(billions: float, has_critic: bool, site: Site) -> Cost:
    """Compute the cost for a policy of so many billion parameters, in bf16."""
    first = POLICY * billions
    critic = (POLICY + MOMENTS_AND_MASTERS) * billions if has_critic else 0.0
    behind = MOMENTS_AND_MASTERS * billions + critic
    starts = 3 * site.queue + site.start_rollout + site.start_reward + site.start_update
    moved = first + first + (first + behind)  # written, read by the rollout, read by the update
    return Cost(
        written_first=first,
        written_behind=behind,
        read_by_update=first + behind,
        seconds=starts + moved / site.storage,
        seconds_before=starts + (moved + behind) / site.storage,
        gang=first / site.handover,
    )


def rows(site: Site) -> Iterator[str]:
    yield "| billions | written first, GB | behind, GB | read, GB | cold, s | one commit, s | gang, s |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for has_critic in (False, True):
        for size in SIZES:
            cost = cost_of(size, has_critic, site)
            name = f"{size:g} + {size:g}" if has_critic else f"{size:g}"
            yield (
                f"| {name} | {cost.written_first:.0f} | {cost.written_behind:.0f} "
                f"| {cost.read_by_update:.0f} | {cost.seconds:.0f} | {cost.seconds_before:.0f} "
                f"| {cost.gang:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--storage", type=float, default=2.0, help="GB/s")
    parser.add_argument("--queue", type=float, default=2.0, help="seconds")
    parser.add_argument("--start-rollout", type=float, default=60.0, help="seconds")
    parser.add_argument("--start-reward", type=float, default=30.0, help="seconds")
    parser.add_argument("--start-update", type=float, default=30.0, help="seconds")
    parser.add_argument("--handover", type=float, default=3.0, help="GB/s")
    print("\n".join(rows(Site(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
