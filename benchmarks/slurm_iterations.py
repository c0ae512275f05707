"""Seconds of an iteration on Slurm as it is shipped, and what they cost, in turn with this machine.

    python benchmarks/slurm_iterations.py [--places 1,2,4] [--rounds 3] [--iterations 6] [--shards 4]
        [--evaluate 2] [--pools] [--one-partition] [--foreign-every 20] [--accounting]
    python benchmarks/slurm_iterations.py --places all --variants cold,workers,local,process
        [--responses 256] [--rollout vllm] [--tuned] [--noop] [--foreign-jobs 300]
    python benchmarks/slurm_iterations.py --six-runs
    python benchmarks/slurm_iterations.py --gaps

The quickstart's models, on a practice cluster as ``slurm-ppo devcluster up`` and ``scheduler=devcluster``
give it: two GPUs on the node of the rollouts and of the rewards, so that two of four shards have a place at a
time. ``--places`` has other numbers of GPUs there, each on a cluster of its own; with ``all`` no job asks for
a GPU, so that every shard has a place, and Slurm's settings are its own defaults unless ``--tuned``.
``--one-partition`` has every stage ask for both GPUs of one node, so that they take turns. Run after run, in
turn, of:

    local        processes of this machine, as they are by default
    workers      jobs of Slurm that stay and start early, as they are by default
    cold         jobs of Slurm, each of which starts, does one task and ends
    local-fresh  processes of this machine, each of which does one task
    process      benchmarks/in_process.py, on the run before

An iteration lasts from one policy's commit to the next; the first two are left out. What is not compute is
the share of it in which no model computed in any task. Calls of Slurm's commands are counted by wrappers on
PATH, which jobs inherit. ``--noop`` takes light tasks that compute nothing; ``--foreign-jobs`` leaves so many
jobs of others pending for a node that one of them holds; with ``--foreign-every`` one of another user comes
every so many seconds for a GPU of the rollouts or rewards. ``--six-runs`` is benchmarks/slurm_six_runs.py;
``--gaps`` takes light tasks with a start-up of 10 s and gaps of 30 s, and compares workers that may leave
with workers that never do.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import slurm_costs, slurm_gaps, slurm_six_runs, slurm_waits  # noqa: E402
from benchmarks.slurm_costs import Cost, accounted_gpu_seconds, cost_of, worst_costs  # noqa: E402
from benchmarks.slurm_runs import (  # noqa: E402
    STAGES,
    Runner,
    fill_queue,
    layout_of,
    noop_words,
    on_one_node,
    others,
)
from benchmarks.slurm_waits import computing, covered, waits_of  # noqa: E402
from pipeline.run.commits import require_record  # noqa: E402
from pipeline.run.directory import Run  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from slurm.devcluster import Layout, PracticeCluster, start  # noqa: E402
from tests.support import light  # noqa: E402
from tests.support.counting import put_in_front  # noqa: E402

VARIANTS = ("local", "workers", "cold", "local-fresh", "process")
ON_SLURM = ("workers", "cold")
FIRST = 3
"""First iteration that counts: the ones before it fill caches."""
ALL = "all"
EACH = (*STAGES, "evaluate")
DEFAULTS = Layout(
    cred_expire=120,
    kill_wait=30,
    more=("SchedulerParameters=batch_sched_delay=3,bf_interval=30",),
)
"""Slurm's own settings, where a practice cluster has quicker ones."""
_MEDIAN, _HAND_OVER = 1.5, 1.0
"""What stages that take turns may take: so many times this machine's iteration, and for each hand-over a
start-up and so many seconds."""


@dataclass(frozen=True)
class Setup:
    """A cluster, and further settings of the runs on it."""

    name: str
    """Name after that of the variant, such as ``/2``; empty for this machine."""
    layout: Layout | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Iteration:
    """An iteration that counts."""

    seconds: float
    computed: float
    """Seconds in which a model computed in some task."""
    begin: float = 0.0
    """Unix time of the policy before."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the last input of a stage to the first computing in it, by stage."""


@dataclass
class Measured:
    """What was measured of one variant, in all rounds."""

    rounds: list[list[Iteration]] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    @property
    def iterations(self) -> list[Iteration]:
        return [one for some in self.rounds for one in some]

    @property
    def waits(self) -> dict[str, list[float]]:
        """Seconds from the last input of a stage to its first computing, by stage."""
        found: dict[str, list[float]] = {}
        for stage, seconds in (pair for one in self.iterations for pair in one.waits.items()):
            found.setdefault(stage, []).append(seconds)
        return found

    @property
    def middle(self) -> float:
        return statistics.median(one.seconds for one in self.iterations)


# --- words ---------------------------------------------------------------------------------------------


def quickstart_words(given: argparse.Namespace, demo: Path) -> list[str]:
    """Return the settings that all variants share, of real models."""
    is_vllm = given.rollout == "vllm"
    return [
        f"experiment=quickstart{'_vllm' if is_vllm else ''}",
        f"iterations={given.iterations}",
        f"rollout.num_shards={given.shards}",
        f"data.prompts_per_iteration={given.responses}",
        f"model.policy={demo / 'policy'}",
        f"data.prompts={demo / 'prompts.jsonl'}",
        f"data.heldout={demo / 'heldout.jsonl' if given.evaluate else 'null'}",
        f"evaluate.every={given.evaluate}",
        f"reward.components.rm.path={demo / 'reward_model'}",
        "tracking=none",
    ]


def light_words(given: argparse.Namespace, inputs: Path) -> list[str]:
    """Return the settings that all variants share, of light tasks."""
    prompts = max(given.shards, 8) // given.shards * given.shards
    more = [f"data.heldout={inputs / 'heldout.jsonl'}", f"evaluate.every={given.evaluate}"]
    return [*noop_words(inputs, given.iterations, given.shards, prompts), *(more if given.evaluate else ())]


def variant_words(variant: str, setup: Setup, has_pool: bool) -> list[str]:
    """Return the settings of a variant: what is not said is as it is shipped."""
    is_slurm = variant in ON_SLURM
    words = [f"scheduler={'devcluster' if is_slurm else 'local'}"]
    if has_pool:
        words.append("reward.components.rm.pool=models")
        if is_slurm:
            words.append("+scheduler.pools.models={partition: reward, gpus_per_node: 1, time: '0:10:00'}")
    if variant in ("cold", "local-fresh"):
        stages = (*EACH, "pools.models") if has_pool and is_slurm else EACH
        words += [f"scheduler.{stage}.linger=0" for stage in stages]
        words += [f"scheduler.{stage}.start_early=false" for stage in stages if is_slurm]
    return [*words, *setup.words]


def setups(given: argparse.Namespace) -> list[Setup]:
    """Return the clusters that runs are carried out on, by the options."""
    stages = (*EACH, "pools.models") if given.pools else EACH
    if given.one_partition:
        return [Setup("/turns", network(given, Layout()), tuple(on_one_node(2, stages)))]
    found = []
    for places in given.places.split(","):
        if places == ALL:
            words = tuple(f"scheduler.{stage}.gpus_per_node=null" for stage in stages)
            found.append(Setup("/all", network(given, Layout() if given.tuned else DEFAULTS), words))
        else:
            found.append(Setup(f"/{places}", network(given, layout_of(int(places)))))
    return found


def network(given: argparse.Namespace, layout: Layout) -> Layout:
    return replace(layout, network_filesystem=given.network_filesystem)


# --- iterations ------------------------------------------------------------------------------------------


def iterations_of(run: Run) -> Iterator[Iteration]:
    """Yield the iterations that count."""
    for iteration in range(FIRST, run.plan.iterations + 1):
        begin, end = (require_record(run.paths, policy_maker(k)).ended for k in (iteration - 1, iteration))
        records = [require_record(run.paths, task) for task in run.plan.tasks(iteration)]
        yield Iteration(
            end - begin,
            covered(list(map(computing, records)), begin, end),
            begin,
            dict(waits_of(run, records)),
        )


def in_one_process(run: Run) -> list[Iteration]:
    command = [sys.executable, "benchmarks/in_process.py", str(run.paths.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["is_same_policy"]:
        print("process: the last policy is not the run's")
    return list(map(Iteration, found["seconds"], found["compute"]))[FIRST - 1 :]


def policy_digest(run: Run) -> tuple[str, ...]:
    """Return the hashes of the last policy's files: the same for all variants."""
    outputs = require_record(run.paths, policy_maker(run.plan.iterations)).outputs
    files = [e for e in outputs if (run.paths.root / e.path).is_relative_to(run.paths.policies)]
    return tuple(sorted(e.xxh3_128 for e in files))


# --- all of it -----------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Runs of all variants, in turn."""

    given: argparse.Namespace
    scratch: Path
    words: Sequence[str]
    found: dict[str, Measured] = field(default_factory=dict)
    digests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)
    reference: Run | None = None
    """Run that ``process`` repeats."""

    def go_round(self, number: int, clusters: Mapping[str, tuple[Setup, PracticeCluster]]) -> None:
        """Carry each variant out once, on each cluster if it is one of Slurm."""
        for variant in self.given.variants.split(","):
            if variant in ON_SLURM:
                for setup, cluster in clusters.values():
                    self.carry_out(variant, number, setup, cluster)
            elif variant == "process":
                assert self.reference is not None, "process needs a run before it"
                self.note(variant, number, in_one_process(self.reference))
            else:
                self.carry_out(variant, number, Setup(""), None)

    def carry_out(self, variant: str, number: int, setup: Setup, cluster: PracticeCluster | None) -> None:
        """Carry out a run of a variant, and note what it took."""
        label, room = variant + setup.name, self.given.keep or self.scratch
        name = f"{label.replace('/', '-')}-{number}"
        root = (cluster.shared if cluster and cluster.shared else room) / name
        counting = put_in_front(room / f"{name}.calls", os.environ["PATH"]) if cluster else None
        runner = Runner(cluster, counting, self.lags)
        words = [*self.words, *variant_words(variant, setup, self.given.pools)]
        with others(cluster, self.given.foreign_every) if cluster else contextlib.nullcontext():
            run = runner.carry_out(words, root)
        if self.given.keep and not root.is_relative_to(self.given.keep):
            left_out = shutil.ignore_patterns("wanted", ".*")  # which come and go
            shutil.copytree(root, self.given.keep / name, ignore=left_out)
        self.reference, self.digests[label] = run, policy_digest(run)
        self.note(label, number, list(iterations_of(run)))
        if cluster and counting:
            held = accounted_gpu_seconds(cluster, [run.identity.id])
            cost = cost_of([run], counting.calls(), runner.submitted, held)
            self.found[label].costs.append(cost)
            print("\n".join(f"    {line}" for line in slurm_costs.in_words(cost)), flush=True)

    def note(self, label: str, number: int, iterations: list[Iteration]) -> None:
        self.found.setdefault(label, Measured()).rounds.append(iterations)
        print(f"  {label} {number}: {[round(one.seconds, 2) for one in iterations]}", flush=True)


def compare(given: argparse.Namespace, scratch: Path) -> None:
    """Carry all variants out in turn, and print what they took."""
    if given.noop:
        words = light_words(given, light.make_inputs(scratch / "inputs"))
    else:
        words = quickstart_words(given, make_demo(given.demo or scratch / "demo"))
    wanted = setups(given) if set(ON_SLURM) & set(given.variants.split(",")) else []
    comparison = Comparison(given, scratch, words)
    with contextlib.ExitStack() as stack:
        clusters = {}
        for setup in wanted:
            cluster = start(
                scratch / f"cluster{setup.name.replace('/', '-')}", setup.layout, given.accounting
            )
            stack.callback(cluster.stop)
            fill_queue(cluster, given.foreign_jobs)
            clusters[setup.name] = (setup, cluster)
        for number in range(given.rounds):
            comparison.go_round(number, clusters)
    print(table(comparison.found))
    if lags := comparison.lags:
        print(f"rows lagged by {statistics.median(lags):.1f} s (median), {max(lags):.1f} s (at most)")
    if len(set(comparison.digests.values())) > 1:
        print("the variants' last policies differ")


def make_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "stages.demo.make", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def table(found: Mapping[str, Measured]) -> str:
    """Return medians and worst iterations, their ratios to this machine's median (to that of the first
    variant where it is not among them), what is not compute, and the worst of what runs cost."""
    base = "local" if "local" in found else next(iter(found))
    usual = found[base].middle
    lines = []
    for name, measured in found.items():
        seconds = [one.seconds for one in measured.iterations]
        share = statistics.median(1 - one.computed / one.seconds for one in measured.iterations)
        lines.append(
            f"{name:<14} {measured.middle:7.2f} s an iteration, {measured.middle / usual:6.2f} of {base}; "
            f"worst {max(seconds):7.2f} s, {max(seconds) / usual:6.2f}; not compute {share:6.1%}, "
            f"{share * measured.middle:.2f} s ({len(seconds)} iterations)"
        )
        if any(one.waits for one in measured.iterations):
            lines.append("  from input to computing: " + slurm_waits.in_words(measured.waits))
        lines += [f"  {line}" for line in worst_costs(measured.costs)]
        if name.endswith("/turns"):
            lines += [f"  {line}" for line in turns_told(measured, usual)]
    return "\n".join(lines)


def turns_told(measured: Measured, usual: float) -> Iterator[str]:
    """Say of each iteration of stages that take turns how long it took, and may have."""
    for number, (iterations, cost) in enumerate(zip(measured.rounds, measured.costs, strict=True)):
        for iteration, one in enumerate(iterations, FIRST):
            until = one.begin + one.seconds
            changes = sum(one.begin < time <= until for time in cost.hand_overs)
            limit = _MEDIAN * usual + changes * (cost.startup + _HAND_OVER)
            yield (
                f"round {number}, iteration {iteration}: {one.seconds:.1f} s, {changes} hand-overs, "
                f"allowed {limit:.1f} s{'' if one.seconds <= limit else ': too long'}"
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variants", default="local,workers", help=f"of {', '.join(VARIANTS)}")
    add("--places", default="2", help="GPUs on the node of rollouts, and of rewards; or all")
    add("--one-partition", action="store_true", help="stages take turns on both GPUs of a node")
    add("--pools", action="store_true", help="the reward model is a pool's, in the rewards' partition")
    add("--evaluate", type=int, help="iterations between evaluations. Default: 2; 0 for --places all")
    add("--rounds", type=int, default=2)
    add("--iterations", type=int, default=6)
    add("--shards", type=int, default=4)
    add("--responses", type=int, default=256)
    add("--rollout", choices=("transformers", "vllm"), default="transformers")
    add("--tuned", action="store_true", help="Slurm's settings as the tests have them, with --places all")
    add("--network-filesystem", action="store_true", help="runs on the cluster's own, caches on")
    add("--accounting", action="store_true", help="clusters with accounting: what jobs held, by sacct")
    add("--noop", action="store_true", help="light tasks")
    add("--foreign-jobs", type=int, default=0)
    add("--foreign-every", type=float, default=0.0)
    add("--gaps", action="store_true")
    add("--six-runs", action="store_true")
    add("--task-seconds", type=float, default=3.0, help="time of each light task of --six-runs")
    add("--demo", type=Path, help="the quickstart's models, made before or made here")
    add("--keep", type=Path, help="folder that the runs are left in")
    given = parser.parse_args()
    if given.evaluate is None:
        given.evaluate = 0 if given.places == ALL else 2
    return given


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no cluster is left behind
    with tempfile.TemporaryDirectory() as folder:
        if given.gaps:
            slurm_gaps.gaps(given, Path(folder), Layout() if given.tuned else DEFAULTS)
        elif given.six_runs:
            slurm_six_runs.six_runs(given, Path(folder))
        else:
            compare(given, Path(folder))


if __name__ == "__main__":
    main()
