"""What the simulator predicts of runs on a practice cluster, beside what they took.

    python benchmarks/slurm_predicted.py [--only light|real] [--runs FOLDER]

Eight configurations, that differ in shards, places, how workers stay, staleness, failures, the queue, and of
which two are of real models (the quickstart's); the others are light tasks that sleep. What tasks, start-ups
and the queue take is read from the runs of the other configurations of its kind (light, or real); then a
configuration is simulated, by the rules of passes and workers. It compares the seconds of an iteration (the
mean, from the third on) and the GPU-seconds that Slurm gave jobs of each stage. Two facts come from the
configuration itself: which share of its attempts fails, and how long jobs wait in the queue of its cluster.
With ``--runs`` run directories are kept in a folder, and those that are there are not repeated.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import slurm_faults  # noqa: E402
from benchmarks.slurm_iterations import make_demo  # noqa: E402
from benchmarks.slurm_runs import STAGES, Runner, layout_of, noop_words, on_one_node  # noqa: E402
from pipeline.decide import estimates  # noqa: E402
from pipeline.decide.measuring import measures_policies  # noqa: E402
from pipeline.decide.places import Need  # noqa: E402
from pipeline.executors.slurm.crew import needs_of  # noqa: E402
from pipeline.run.commits import require_record  # noqa: E402
from pipeline.run.directory import Run, load_run, slurm_settings  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.run.submissions import is_job_of, job_kind_of  # noqa: E402
from pipeline.simulate.plant import Plant, PlantKind, PlantNode, PlantPartition, PlantRequest, Slurm  # noqa: E402
from pipeline.simulate.results import SimulationResult  # noqa: E402
from pipeline.simulate.simulation import simulate  # noqa: E402
from pipeline.workers.beats import Beat, Reason, read_beats  # noqa: E402
from slurm.devcluster import Layout, PracticeCluster, start  # noqa: E402
from slurm.limits import parse_duration  # noqa: E402
from tests.support import light  # noqa: E402

RESPONSES = 2
"""Of a shard of light tasks, in every configuration: they take as long in all."""
SECONDS = {"rollout": 2.0, "reward": 1.0, "update": 3.0}
"""Seconds of a light task of each stage."""
REAL_RESPONSES = 768
FIRST = 3
"""First iteration that counts: before it nothing is known of what takes how long."""
HELD = "held.json"
"""File beside a run: GPU-seconds that Slurm gave its jobs, by job kind."""
_KEPT_SECONDS = 3600
_COLD = tuple(f"scheduler.{stage}.{word}" for stage in STAGES for word in ("linger=0", "start_early=false"))


def stale(staleness: int) -> tuple[str, ...]:
    return (f"rollout.staleness={staleness}", "algorithm.correction.level=token")


@dataclass(frozen=True)
class Configuration:
    """A run on a cluster of its own."""

    name: str
    places: int
    """GPUs of the nodes of rollouts and of rewards."""
    shards: int
    words: tuple[str, ...] = ()
    iterations: int = 8
    failures: float = 0.0
    """Share of attempts that fail."""
    slurm: tuple[str, ...] = ()
    """Lines of slurm.conf by which jobs wait in the queue though there is room."""
    is_real: bool = False

    @property
    def layout(self) -> Layout:
        """Layout of its cluster, which remembers all of its jobs."""
        return replace(layout_of(self.places), more=self.slurm, min_job_age=_KEPT_SECONDS)

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


CONFIGURATIONS = (
    Configuration("4 shards, 2 places", 2, 4),
    Configuration("4 shards, 4 places, staleness 1", 4, 4, stale(1), 10),
    Configuration("6 shards, 2 places, staleness 2", 2, 6, stale(2), 10),
    Configuration("2 shards, stages take turns", 2, 2, tuple(on_one_node(2, STAGES)), 5),
    Configuration(
        "2 shards, a job a task, a queue", 2, 2, _COLD, 5, slurm=("SchedulerParameters=batch_sched_delay=5",)
    ),
    Configuration("4 shards, staleness 1, failures", 2, 4, (*stale(1), *slurm_faults.WORDS), 10, 0.1),
    Configuration("real models", 1, 1, iterations=6, is_real=True),
    Configuration("real models, staleness 1", 1, 1, stale(1), 6, is_real=True),
)


def words_of(given: Configuration, inputs: Path) -> list[str]:
    """Return the words of a configuration's run, but for its directory."""
    if given.is_real:
        return [
            *(
                "experiment=quickstart",
                f"iterations={given.iterations}",
                f"rollout.num_shards={given.shards}",
            ),
            *(f"data.prompts_per_iteration={REAL_RESPONSES}", f"model.policy={inputs / 'policy'}"),
            *(f"data.prompts={inputs / 'prompts.jsonl'}", "data.heldout=null", "evaluate.every=0"),
            *(
                f"reward.components.rm.path={inputs / 'reward_model'}",
                "tracking=none",
                "scheduler=devcluster",
            ),
            *given.words,
        ]
    parts = {"rollout": RESPONSES, "reward": RESPONSES, "update": 1}
    sleeps = [
        f"scheduler.{stage}.environment={{{light.SECONDS}: '{SECONDS[stage] / parts[stage]:g}'}}"
        for stage in STAGES
    ]
    common = noop_words(inputs, given.iterations, given.shards, RESPONSES * given.shards)
    once = ("update.epochs=1", "update.minibatches=1", "scheduler=devcluster")
    return [*common, *once, *sleeps, *given.words]


# --- measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    configuration: Configuration
    run: Run
    held: Mapping[str, float]
    """GPU-seconds by stage."""

    @property
    def beats(self) -> list[Beat]:
        return list(read_beats(self.run.paths).values())

    @property
    def iterations(self) -> list[float]:
        """Seconds from one policy to the next, of those that count."""
        last = self.run.plan.iterations
        ends = [require_record(self.run.paths, policy_maker(k)).ended for k in range(FIRST - 1, last + 1)]
        return [later - earlier for earlier, later in pairwise(ends)]


def measure(given: Configuration, inputs: Path, folder: Path) -> Measured:
    """Carry a run out on a cluster that is there for it alone, unless it was."""
    root, kept = folder / "run", folder / HELD
    if not kept.exists():
        cluster = start(folder / "cluster", given.layout)
        try:
            with slurm_faults.failing(root, given.failures, SECONDS):
                run = Runner(cluster).carry_out(words_of(given, inputs), root)
            kept.write_text(json.dumps(gpu_seconds(cluster, run)))
        finally:
            cluster.stop()
    return Measured(given, load_run(root), json.loads(kept.read_text()))


def gpu_seconds(cluster: PracticeCluster, run: Run) -> dict[str, float]:
    """Return the GPU-seconds that Slurm gave a run's jobs of each stage, as squeue has them."""
    needs, found = needs_of(slurm_settings(run), STAGES), dict.fromkeys(STAGES, 0.0)
    shown = cluster.call("squeue", "-r", "-h", "--states=all", "-o", "%j|%M").stdout
    for name, used in (line.split("|") for line in shown.splitlines()):
        if is_job_of(run.identity.id, name) and (stage := job_kind_of(name)) in found:
            found[stage] += needs[stage].gpus * needs[stage].num_nodes * (parse_duration(used) or 0.0)
    return found


# --- predicted ---------------------------------------------------------------------------------------------


def predict(one: Measured, others: Sequence[Measured]) -> SimulationResult:
    """Simulate a run by what the other runs of its kind took."""
    given, run, settings = one.configuration, one.run, slurm_settings(one.run)
    needs = needs_of(settings, ["prepare", *run.plan.job_kinds, "evaluate", "driver"])
    beats = [beat for other in others for beat in other.beats]
    layout = given.layout
    default = next(partition.name for partition in layout.partitions if partition.default)
    kinds = {kind: kind_of(kind, need, default, beats) for kind, need in needs.items()}
    if given.words == _COLD:
        kinds |= {stage: replace(kinds[stage], linger=0, start_early=False) for stage in STAGES}
    return simulate(
        Plant(
            run.plan,
            tuple(PlantNode(n.name, n.cpus, n.gpus, n.memory_mb) for n in layout.nodes),
            tuple(PlantPartition(p.name, p.nodes) for p in layout.partitions),
            kinds,
            slurm=Slurm(
                queue_of(one.beats if given.slurm else beats, 0.5 if given.slurm else 0.2),
                tried_after=0.0,
                backfill=layout.backfill_interval,
            ),
            maker_startup=maker_startup_of(beats),
            failures=given.failures,
            check_seconds=60.0 * settings.check_minutes,
            measures=measures_policies(run.config),
        )
    )


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
    return found if job_kind in STAGES else replace(found, linger=0, start_early=False)


def queue_of(beats: Iterable[Beat], share: float) -> float:
    """Return the seconds that a share of the workers waited in the queue at most: a small share where that is
    to be what Slurm takes though nothing is in a job's way."""
    waited = sorted(beat.queued_seconds for beat in beats if beat.queued_seconds is not None)
    return waited[int(share * (len(waited) - 1))]


def maker_startup_of(beats: Iterable[Beat]) -> float:
    """Return the seconds until a process makes a pass that a worker starts for it: what workers that leave
    after one task, as those of prepare do, waited until one had seen it."""
    return statistics.median(beat.waiting_seconds for beat in beats if beat.reason is Reason.ONE)


# --- both --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A measured number and what was predicted."""

    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def text(self) -> str:
        return f"{self.measured:.1f} / {self.predicted:.1f} ({self.error:+.0%})"


def compare(one: Measured, others: Sequence[Measured]) -> tuple[Comparison, ...]:
    """Return the seconds of an iteration, then the GPU-seconds of each stage in one."""
    found, number = predict(one, others), one.run.plan.iterations
    if found.why:
        raise RuntimeError(f"{one.configuration.name}: the simulated run did not end: {found.why}")
    seconds = Comparison(statistics.fmean(one.iterations), statistics.fmean(found.iterations[FIRST - 1 :]))
    held = {stage: sum(j.gpus * j.held for j in found.jobs if j.job_kind == stage) for stage in STAGES}
    each = (Comparison(one.held[stage] / number, held[stage] / number) for stage in STAGES)
    return (seconds, *each)


def table(found: Mapping[str, tuple[Comparison, ...]]) -> Iterator[str]:
    """Yield a table in Markdown, measured / predicted, and how far predictions are off."""
    yield "| | s an iteration | GPU-s of rollouts | of rewards | of updates |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in found.items():
        yield f"| {name} | {' | '.join(one.text for one in row)} |"
    for what, some in (("s an iteration", slice(0, 1)), ("GPU-seconds of a stage", slice(1, None))):
        errors = [abs(one.error) for row in found.values() for one in row[some]]
        yield f"\n{what}: off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (at worst)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("light", "real"), help="configurations of this sort")
    parser.add_argument("--runs", type=Path, help="folder of runs, which stay")
    given = parser.parse_args()
    found: dict[str, tuple[Comparison, ...]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for is_real in (False, True):
            chosen = [one for one in CONFIGURATIONS if one.is_real == is_real]
            if given.only and (given.only == "real") != is_real:
                continue
            inputs = Path(scratch) / ("demo" if is_real else "inputs")
            make_demo(inputs) if is_real else light.make_inputs(inputs)
            runs = []
            for one in chosen:
                runs.append(measure(one, inputs, folder / one.folder))
                print(f"{one.name}: {[round(s, 2) for s in runs[-1].iterations]}", flush=True)
            for run in runs:
                found[run.configuration.name] = compare(run, [other for other in runs if other is not run])
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
