"""Gangs and staged jobs, in turn and with staleness, from published stage times: a model, no measurement.

    python -m benchmarks.gang [--storage 2] [--exponent 0.85] [--picture docs/explanation/gang.svg]

Prints the tables of docs/explanation/gang.md and draws its picture. A gang holds all GPUs all the time. What
is published of one is taken as it is; everything else is computed from it, with the assumptions that ``Case``
and ``Site`` name. An engine batches continuously: a step gives each running response a token and takes
``step_seconds + per_running * running``. It is scaled so that the published time of generation comes out with
the published number of GPUs; only its shape, tail and batches, says what fewer GPUs take.
"""

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean

from benchmarks.gang_cases import CASES, PUBLISHED_REWARD_GPUS, Case
from benchmarks.gang_picture import picture
from benchmarks.iteration_cost import MOMENTS_AND_MASTERS, POLICY

SEEDS = range(3)
PARTS = 16
"""A split gives one of so many equal parts, or several, to generation."""
HELD = 1.19
"""Held by workers that may leave, in times of busy and starting up; from docs/explanation/benchmarks.md."""


@dataclass(frozen=True)
class Site:
    """Rates and times of a cluster, in GB/s and seconds."""

    storage: float = 2.0
    """Of all processes of a job together."""
    exponent: float = 0.85
    """With g of G GPUs training takes (G/g) to this power times as long."""
    queue: float = 2.0
    start_rollout: float = 60.0
    start_reward: float = 45.0
    start_update: float = 40.0
    load: float = 3.0
    """To give an engine that stays new weights, after reading them."""
    handover: float = 5.0
    """Of weights within a gang."""
    notice: float = 1.5
    """Until stages see their inputs, in one iteration."""
    save_every: int = 10
    """Iterations from one trainer state to the next."""


@dataclass(frozen=True)
class Outcome:
    """What an iteration takes, against the published gang."""

    wall: float
    gpu_time: float

    def __str__(self) -> str:
        wall, gpu_time = f"{self.wall:.2f}", f"{self.gpu_time:.2f}"
        return wall if wall == gpu_time else f"{wall} / {gpu_time}"


# --- seconds of a stage ---


@cache
def response_lengths(case: Case, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    mean = math.log(case.mean_tokens) - case.sigma**2 / 2
    drawn = (int(generator.lognormvariate(mean, case.sigma)) for _ in range(case.responses))
    return tuple(max(1, min(case.longest_tokens, length)) for length in drawn)


def ends(lengths: Sequence[int], case: Case, most_running: int) -> list[float]:
    """When each response ends that one engine makes, in order, before scaling; first come, first served."""
    waiting, running = list(reversed(lengths)), []
    tokens, now, found = 0, 0.0, []
    while waiting or running:
        while waiting and len(running) < most_running:
            heapq.heappush(running, tokens + waiting.pop())
        number, first = len(running), heapq.heappop(running)
        now += (first - tokens) * (case.step_seconds + case.per_running * number)
        tokens = first
        found.append(now)
    return found


def slowest(case: Case, gpus: int) -> float:
    """Seconds of the slowest of the engines that fit ``gpus``, before scaling; mean over seeds."""
    engines = max(1, gpus // case.replica_gpus)
    drawn = [response_lengths(case, seed) for seed in SEEDS]
    shares = [[lengths[i::engines] for i in range(engines)] for lengths in drawn]
    return fmean(max(ends(share, case, case.most_running)[-1] for share in one) for one in shares)


@cache
def scale(case: Case) -> float:
    return case.generation / slowest(case, case.gpus)


@cache
def rollout(case: Case, gpus: int) -> float:
    """Seconds until the last response of an iteration has ended."""
    return scale(case) * slowest(case, gpus)


@cache
def stream(case: Case, gpus: int) -> float:
    """Seconds for as many responses from engines that never run empty: the middle of six batches."""
    engines = max(1, gpus // case.replica_gpus)
    batch = max(1, min(case.most_running, case.responses // engines))
    many = response_lengths(replace(case, responses=6 * batch), 7)
    found = ends(many, case, batch)
    first, last = len(many) // 4, 3 * len(many) // 4
    each = (found[last] - found[first]) / (last - first)
    return scale(case) * each * case.responses / engines


def training(case: Case, gpus: int, site: Site, with_log_probs: bool = True) -> float:
    seconds = case.training + (case.log_probs if with_log_probs else 0.0)
    return seconds * (case.gpus / gpus) ** site.exponent


@dataclass(frozen=True)
class Moves:
    """Seconds that files of an iteration take."""

    policy: float
    """To write or to read it."""
    state: float
    """To write the trainer's state, divided by the iterations from one to the next."""
    resume: float
    """To read policy and state."""


def moves(case: Case, site: Site) -> Moves:
    state = MOMENTS_AND_MASTERS + (POLICY + MOMENTS_AND_MASTERS if case.has_critic else 0)
    per_byte = case.billions / site.storage
    return Moves(POLICY * per_byte, state * per_byte / site.save_every, (POLICY + state) * per_byte)


# --- ways to run it ---


def splits(case: Case) -> Iterator[int]:
    """GPUs that generation may have; training has at least an eighth."""
    unit = max(case.replica_gpus, case.gpus // PARTS)
    yield from (gpus for gpus in range(unit, case.gpus, unit) if case.gpus - gpus >= case.gpus / 8)


def best_split(case: Case, seconds: Callable[[int], float]) -> tuple[float, int]:
    return min((seconds(gpus), gpus) for gpus in splits(case))


def held(case: Case, seconds: float) -> Outcome:
    """All GPUs, and those of the reward model, for the whole iteration."""
    wall = seconds / case.step
    return Outcome(wall, wall * (case.gpus + case.reward_gpus) / case.gpus)


def one_step_off(case: Case, site: Site, gpus: int) -> float:
    """A gang that generates for the next step while it trains."""
    return site.handover + max(
        rollout(case, gpus) + case.reward_seconds, training(case, case.gpus - gpus, site)
    )


def fully_async(case: Case, site: Site, gpus: int) -> float:
    """A gang whose engines never run empty; without a critic no log-probs are made again."""
    return 3.0 + max(stream(case, gpus), training(case, case.gpus - gpus, site, case.has_critic))


def staleness_one(case: Case, site: Site, gpus: int) -> float:
    """Workers that stay, on a split of the gang's GPUs; the state is written in the update's task."""
    files = moves(case, site)
    fetch = files.policy + site.load
    update = training(case, case.gpus - gpus, site) + files.policy + files.state
    around = fetch + rollout(case, gpus) + case.reward_seconds + update + site.notice
    return max(fetch + rollout(case, gpus), case.reward_seconds, update, around / 2)


def in_turn(case: Case, site: Site) -> float:
    """Workers at staleness 0, each stage with as many GPUs as the gang."""
    files = moves(case, site)
    before = files.policy + site.load + case.generation + case.reward_seconds
    late = max(0.0, files.state - before)  # the state is written while others work
    return before + training(case, case.gpus, site) + files.policy + site.notice + late


def leaving(case: Case, site: Site) -> Outcome:
    """Workers that leave while others work, and start again in time."""
    files, gpus = moves(case, site), case.gpus
    roll = (site.start_rollout + files.policy + site.load + case.generation) * gpus
    reward = (site.start_reward + case.reward_seconds) * case.reward_gpus
    update = (site.start_update + files.resume + training(case, gpus, site) + files.policy) * gpus
    return Outcome(in_turn(case, site) / case.step, HELD * (roll + reward + update) / gpus / case.step)


def ways(case: Case, site: Site) -> dict[str, Outcome]:
    """Every way to run the case, with the best split that the model finds, for peers and for us."""
    split = {"one step off": one_step_off, "fully async": fully_async, "staleness 1": staleness_one}
    best = {
        name: held(case, best_split(case, lambda gpus, way=way: way(case, site, gpus))[0])
        for name, way in split.items()
    }
    return best | {"workers that leave": leaving(case, site)}


COLUMNS = ("one step off", "fully async", "workers that leave", "staleness 1")


def compared(cases: Sequence[Case], site: Site) -> list[str]:
    head = [f"| the gang | {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|"]
    found = [(case.name, ways(case, site)) for case in cases]
    return head + [f"| {name} | {' | '.join(str(one[c]) for c in COLUMNS)} |" for name, one in found]


def of_ppo(site: Site) -> list[str]:
    """PPO at staleness 1, by responses of a step and GPUs for rewards; their seconds go as the inverse."""
    head = ["| | responses | rewards on 8 GPUs | on as many as published |", "|---|---:|---:|---:|"]
    for case, fewer in zip(CASES[-2:], PUBLISHED_REWARD_GPUS, strict=True):
        for responses in (1024, 4096):
            cells = [
                _at_staleness_one(replace(case, responses=responses), gpus, site)
                for gpus in (case.reward_gpus, fewer)
            ]
            head.append(f"| {case.name.split(',')[0]} | {responses} | {cells[0]} | {cells[1]} |")
    return head


def _at_staleness_one(case: Case, reward_gpus: int, site: Site) -> Outcome:
    seconds = case.reward_seconds * case.reward_gpus / reward_gpus
    return ways(replace(case, reward_seconds=seconds, reward_gpus=reward_gpus), site)["staleness 1"]


def sensitivity(site: Site) -> list[str]:
    """Geometric means over all cases, by assumption."""
    halved = [replace(case, sigma=case.sigma / 2) for case in CASES]
    settings = [
        ("as above", CASES, site),
        ("training with 1", CASES, replace(site, exponent=1.0)),
        ("with 0.7", CASES, replace(site, exponent=0.7)),
        ("10 GB/s", CASES, replace(site, storage=10.0)),
        ("sigma halved", halved, site),
    ]
    found = [[ways(case, there) for case in cases] for _, cases, there in settings]
    cells = [str(_mean([one["staleness 1"] for one in each])) for each in found]
    head = [f"| | {' | '.join(name for name, *_ in settings)} |", "|---" + "|---:" * len(settings) + "|"]
    return [*head, f"| staleness 1 | {' | '.join(cells)} |"]


def _mean(found: Sequence[Outcome]) -> Outcome:
    return Outcome(geometric_mean(one.wall for one in found), geometric_mean(one.gpu_time for one in found))


def errors(site: Site) -> list[str]:
    """The model against published asynchronous gangs, at their split and at its own best one."""
    head = ["| | published | the model at that split | at its best |", "|---|---:|---:|---:|"]
    for case in CASES:
        if peer := case.peer:
            way = one_step_off if peer.kind == "one step off" else fully_async
            best, gpus = best_split(case, lambda gpus, case=case, way=way: way(case, site, gpus))
            there = way(case, site, peer.rollout_gpus)
            cells = [_against(there, peer.seconds), f"{_split(case, gpus)}: {_against(best, peer.seconds)}"]
            published = f"{_split(case, peer.rollout_gpus)}: {case.step:.0f} to {peer.seconds:.0f}"
            head.append(f"| {case.name}, {peer.kind} | {published} | {' | '.join(cells)} |")
    return head


def _split(case: Case, gpus: int) -> str:
    return f"{gpus}:{case.gpus - gpus}"


def _against(seconds: float, published: float) -> str:
    return f"{seconds:.0f} ({seconds / published - 1:+.0%})"


def drawn(site: Site) -> str:
    found = {case.name: {name: one.wall for name, one in ways(case, site).items()} for case in CASES}
    return picture(found, ("workers that leave", "one step off", "staleness 1"))


def tables(site: Site) -> list[list[str]]:
    """The tables of the page, in its order; of the third it has the extremes."""
    return [compared(CASES, site), of_ppo(site), errors(site), sensitivity(site)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--storage", type=float, default=Site.storage, help="GB/s")
    parser.add_argument("--exponent", type=float, default=Site.exponent, help="of training over GPUs")
    parser.add_argument("--picture", type=Path, help="SVG file to draw")
    given = parser.parse_args()
    site = Site(storage=given.storage, exponent=given.exponent)
    print("\n\n".join("\n".join(table) for table in tables(site)))
    if given.picture:
        given.picture.write_text(drawn(site))


if __name__ == "__main__":
    main()
