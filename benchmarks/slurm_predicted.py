"""Seconds of an iteration as the simulator predicts them, beside those of a practice cluster.

    python benchmarks/slurm_predicted.py [--rounds 2] [--iterations 8]

Six configurations of light tasks that sleep, with fewer places than shards, with evaluation, with stages that
share places or take turns. What tasks, start-ups, passes and the queue take is read from the runs of the five
others; then the sixth is simulated, by the rules that passes and workers go by, and compared.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.slurm_runs import STAGES, Runner, layout_of, noop_words, on_one_node  # noqa: E402
from pipeline.decide import estimates  # noqa: E402
from pipeline.decide.measuring import measures_policies  # noqa: E402
from pipeline.decide.places import Need  # noqa: E402
from pipeline.executors.slurm.crew import needs_of  # noqa: E402
from pipeline.run.commits import require_record  # noqa: E402
from pipeline.run.directory import Run, slurm_settings  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.simulate.plant import Plant, PlantKind, PlantNode, PlantPartition, PlantRequest, Slurm  # noqa: E402
from pipeline.simulate.simulation import simulate  # noqa: E402
from pipeline.workers.beats import Beat, read_beats  # noqa: E402
from slurm.devcluster import Layout, start  # noqa: E402
from tests.support import light  # noqa: E402

EACH = (*STAGES, "evaluate")
RESPONSES = 2
"""Of a shard, in every configuration: its tasks take as long in all."""
SECONDS = {"rollout": "0.6", "reward": "0.4", "update": "2", "evaluate": "0.1"}
"""Seconds of a response, a score, an update."""
FIRST = 3
"""First iteration that counts: before it nothing is known of what takes how long."""


@dataclass(frozen=True)
class Configuration:
    """A run on a cluster of its own."""

    name: str
    places: int
    """GPUs of the nodes of rollouts and of rewards."""
    shards: int
    words: tuple[str, ...] = ()
    evaluates: bool = False


CONFIGURATIONS = (
    Configuration("1 place for 4 shards", 1, 4),
    Configuration("2 places for 4 shards", 2, 4),
    Configuration("4 places for 4 shards", 4, 4),
    Configuration("2 places for 8 shards, evaluated", 2, 8, evaluates=True),
    Configuration("three stages share 4 places", 4, 4, tuple(on_one_node(1, EACH))),
    Configuration("three stages take turns", 2, 4, tuple(on_one_node(2, EACH))),
)


@dataclass(frozen=True)
class Measured:
    """What one run took, in seconds."""

    configuration: Configuration
    run: Run
    iterations: Sequence[float]
    """From one policy to the next, of those that count."""

    @property
    def beats(self) -> list[Beat]:
        return list(read_beats(self.run.paths).values())

    @property
    def middle(self) -> float:
        return statistics.median(self.iterations)


def measure(configuration: Configuration, iterations: int, inputs: Path, folder: Path) -> Measured:
    """Carry a run out on a cluster that is there for it alone."""
    layout = layout_of(configuration.places)
    cluster = start(folder / "cluster", layout)
    sleeps = [f"scheduler.{s}.environment={{{light.SECONDS}: '{SECONDS[s]}'}}" for s in EACH]
    common = noop_words(inputs, iterations, configuration.shards, RESPONSES * configuration.shards)
    if configuration.evaluates:
        common += [f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=2"]
    words = [*common, "update.epochs=1", "update.minibatches=1", "scheduler=devcluster", *sleeps]
    try:
        run = Runner(cluster).carry_out([*words, *configuration.words], folder / "run")
    finally:
        cluster.stop()
    ends = [
        require_record(run.paths, policy_maker(k)).ended for k in range(FIRST - 1, run.plan.iterations + 1)
    ]
    return Measured(configuration, run, [later - earlier for earlier, later in pairwise(ends)])


def predict(configuration: Configuration, run: Run, layout: Layout, others: Sequence[Measured]) -> float:
    """Simulate a run by what others took. Returns the median of its iterations that count, in seconds."""
    settings = slurm_settings(run)
    evaluated = ("evaluate",) if run.plan.evaluate_every else ()
    needs = needs_of(settings, ["prepare", *run.plan.job_kinds, *evaluated, "driver"])
    default = next(partition.name for partition in layout.partitions if partition.default)
    beats = [beat for one in others for beat in one.beats]
    plant = Plant(
        run.plan,
        tuple(PlantNode(n.name, n.cpus, n.gpus, n.memory_mb) for n in layout.nodes),
        tuple(PlantPartition(p.name, p.nodes) for p in layout.partitions),
        {kind: kind_of(kind, need, default, beats) for kind, need in needs.items()},
        slurm=Slurm(queue_of(beats), tried_after=0.0, backfill=layout.backfill_interval),
        crowding=0.0,
        check_seconds=60.0 * settings.check_minutes,
        measures=measures_policies(run.config),
    )
    return statistics.median(simulate(plant).iterations[FIRST - 1 :])


def kind_of(job_kind: str, need: Need, default: str, beats: Sequence[Beat]) -> PlantKind:
    """Return jobs of a kind, with medians of what workers of it said."""
    mine = [beat for beat in beats if beat.job_kind == job_kind]
    seconds = estimates.task_seconds(beats, job_kind)
    startup = estimates.startup(mine, job_kind)
    request = PlantRequest(need.cpus, need.gpus, need.memory, need.num_nodes)
    partitions = tuple(name or default for name in need.partitions)
    found = PlantKind(
        *(1.0 if seconds is None else seconds, partitions, request),
        startup=startup.median if startup else 2.0,
    )
    if job_kind == "evaluate":
        return replace(found, start_early=False)
    return found if job_kind in STAGES else replace(found, linger=0, start_early=False)


def queue_of(beats: Iterable[Beat]) -> float:
    """Return the seconds that Slurm takes where nothing is in a job's way: less than four of five waited."""
    waited = sorted(beat.queued_seconds for beat in beats if beat.queued_seconds is not None)
    return waited[len(waited) // 5]


def told(found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Say what was measured, what was predicted, and how far that is off."""
    lines, errors = [], []
    for name, pairs in found.items():
        measured, predicted = (statistics.median(side) for side in zip(*pairs, strict=True))
        errors.append(abs(predicted / measured - 1))
        lines.append(f"{name:<33} measured {measured:6.2f} s, predicted {predicted:6.2f} s: {errors[-1]:.0%}")
    lines.append(f"off by {statistics.median(errors):.0%} (median), {max(errors):.0%} (at worst)")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = light.make_inputs(Path(scratch) / "inputs")
        for number in range(given.rounds):
            runs = [
                measure(each, given.iterations, inputs, Path(scratch) / f"{number}-{index}")
                for index, each in enumerate(CONFIGURATIONS)
            ]
            for one in runs:
                others = [other for other in runs if other is not one]
                each = one.configuration
                predicted = predict(each, one.run, layout_of(each.places), others)
                found.setdefault(each.name, []).append((one.middle, predicted))
                print(f"{each.name}: {[round(s, 2) for s in one.iterations]}", flush=True)
    print(told(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
