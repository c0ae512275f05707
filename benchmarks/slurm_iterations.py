"""Seconds of an iteration: cold jobs of Slurm, workers, processes of this machine, and one process.

    python benchmarks/slurm_iterations.py [--variants cold,workers,local,process] [--rounds 2]
        [--iterations 8] [--shards 4] [--responses 256] [--rollout vllm] [--tuned]
    python benchmarks/slurm_iterations.py --noop [--foreign-jobs 300]
    python benchmarks/slurm_iterations.py --gaps

The quickstart's models, on a practice cluster that is brought up at Slurm's default settings, run after run
and in turn:

    cold         jobs of Slurm, each of which starts, does one task and ends
    workers      jobs of Slurm that stay and start early
    local        processes of this machine, as they are by default
    local-fresh  processes of this machine, each of which does one task
    process      benchmarks/in_process.py, on the local run's prompts

An iteration lasts from one policy's commit to the next; the first two are left out. What is not compute is
the share of it in which no model computed in any task. ``--noop`` takes light tasks that compute nothing;
``--foreign-jobs`` leaves so many jobs of others pending meanwhile. ``--gaps`` takes light tasks with a
start-up of 10 s and gaps of 30 s, and compares workers that may leave with workers that never do.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.config.scheduler import LocalStageConfig, ResourcesConfig  # noqa: E402
from pipeline.run.commits import Record, read_record, require_record  # noqa: E402
from pipeline.run.directory import Run, load_run  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.workers.reading import read_beats  # noqa: E402
from pipeline.workers.summary import spent_by  # noqa: E402
from slurm.devcluster import Cluster, Layout, start  # noqa: E402
from tests.support import light, tiny  # noqa: E402

STAGES = ("rollout", "reward", "update")
VARIANTS = ("cold", "workers", "local", "local-fresh", "process")
FIRST = 3
"""First iteration that counts: the ones before it fill caches."""
_LIMIT = 1800.0
_STARTUP, _GAP, _WORK = 10, 30, 5
"""Seconds, for ``--gaps``."""
_ACCOUNTED = 5.0
"""Seconds until accounting has the end of a job."""
DEFAULTS = Layout(
    cred_expire=120,
    kill_wait=30,
    more=("SchedulerParameters=batch_sched_delay=3,bf_interval=30",),
)
"""Slurm's own settings, where a practice cluster has quicker ones."""


@dataclass
class Measured:
    """Iterations of one variant, of all rounds."""

    seconds: list[float] = field(default_factory=list)
    not_compute: list[float] = field(default_factory=list)
    """Share of each."""

    def add(self, seconds: Sequence[float], computed: Sequence[float]) -> None:
        self.seconds += seconds
        self.not_compute += [1 - c / s for s, c in zip(seconds, computed, strict=True)]


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
        "data.heldout=null",
        "evaluate.every=0",
        f"reward.components.rm.path={demo / 'reward_model'}",
        "tracking=none",
    ]


def noop_words(given: argparse.Namespace, inputs: Path) -> list[str]:
    """Return the settings that all variants share, of light tasks."""
    return tiny.overrides(
        inputs,
        Path("unused"),
        f"iterations={given.iterations}",
        f"rollout.num_shards={given.shards}",
        f"data.prompts_per_iteration={max(given.shards, 8) // given.shards * given.shards}",
    )


def knows_workers(is_slurm: bool) -> bool:
    """Whether this version has workers."""
    return hasattr(ResourcesConfig() if is_slurm else LocalStageConfig(), "linger")


def variant_words(variant: str) -> list[str]:
    """Return the settings of a variant."""
    is_slurm = variant in ("cold", "workers")
    stays = {"cold": 0, "local-fresh": 0, "workers": "auto"}.get(variant)
    words = [f"scheduler={'devcluster' if is_slurm else 'local'}"]
    if is_slurm:
        words += [f"scheduler.{stage}.gpus_per_node=null" for stage in (*STAGES, "evaluate")]
    if stays is None or not knows_workers(is_slurm):
        return words
    words += [f"scheduler.{stage}.linger={stays}" for stage in (*STAGES, "evaluate")]
    if is_slurm:
        words += [
            f"scheduler.{stage}.start_early={str(variant == 'workers').lower()}"
            for stage in (*STAGES, "evaluate")
        ]
    return words


# --- runs ----------------------------------------------------------------------------------------------


def carry_out(words: Sequence[str], root: Path, cluster: Cluster | None) -> Run:
    """Make a run and wait for its end: on Slurm until its rows are there and the queue has none of its jobs.

    Raises:
        RuntimeError: the command failed; says what it said.
        TimeoutError: the run did not end.
    """
    verb = "submit" if cluster else "run"
    command = [sys.executable, "-m", "pipeline", verb, *words, f"run_dir={root}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (cluster.environment() if cluster else {})
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{verb} failed: {done.stderr[-2000:]}")
    run, until = load_run(root), time.monotonic() + _LIMIT
    while cluster and (num_rows(root) < run.plan.iterations or has_jobs(cluster, run)):
        if time.monotonic() > until:
            raise TimeoutError(f"{root} has {num_rows(root)} rows after {_LIMIT:g} s")
        time.sleep(1)
        LAGS.append(lag_of_rows(run))
    return run


LAGS: list[float] = []
"""Seconds by which rows lagged, as of each second of the runs on Slurm."""


def lag_of_rows(run: Run) -> float:
    """Return the age of the oldest policy whose iteration has no row."""
    record = read_record(run.paths, policy_maker(num_rows(run.paths.root) + 1))
    return 0.0 if record is None else max(0.0, time.time() - record.ended)


def num_rows(root: Path) -> int:
    path = root / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def has_jobs(cluster: Cluster, run: Run) -> bool:
    return f".{run.identity.id}." in cluster.call("squeue", "-h", "-o", "%j").stdout


def iterations_of(run: Run) -> Iterator[tuple[float, float]]:
    """Yield seconds of each iteration that counts, and in how many of them a model computed in some task."""
    for iteration in range(FIRST, run.plan.iterations + 1):
        begin, end = (require_record(run.paths, policy_maker(k)).ended for k in (iteration - 1, iteration))
        records = [require_record(run.paths, task) for task in run.plan.tasks(iteration)]
        yield end - begin, covered([computing(record) for record in records], begin, end)


def computing(record: Record) -> tuple[float, float]:
    """Return when a task's models computed: from the first to as many seconds later as they computed in all.
    Reading between two models of a task is counted among them, as far as it is shorter than they are."""
    begin = record.started + record.metrics.get("startup_seconds", 0.0)
    return begin, begin + record.metrics.get("compute_seconds", 0.0)


def covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the length of the union of intervals, from ``begin`` to ``end``. Pure."""
    total, reached = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        total += max(0.0, last - first)
        reached = max(reached, last)
    return total


def measure(
    variant: str, words: Sequence[str], root: Path, cluster: Cluster | None, reference: Run | None
) -> tuple[Run | None, list[tuple[float, float]]]:
    """Carry a variant out once. Returns its run, and (seconds, seconds of compute) of each iteration."""
    if variant == "process":
        assert reference is not None, "process needs a run before it"
        return None, in_one_process(reference)
    is_slurm = variant in ("cold", "workers")
    run = carry_out([*words, *variant_words(variant)], root, cluster if is_slurm else None)
    return run, list(iterations_of(run))


def in_one_process(run: Run) -> list[tuple[float, float]]:
    command = [sys.executable, "benchmarks/in_process.py", str(run.paths.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["is_same_policy"]:
        print("process: the last policy is not the run's")
    pairs = zip(found["seconds"], found["compute"], strict=True)
    return list(pairs)[FIRST - 1 :]


def policy_digest(run: Run) -> list[str]:
    """Return the hashes of the last policy's files: the same for all variants."""
    outputs = require_record(run.paths, policy_maker(run.plan.iterations)).outputs
    return sorted(e.xxh3_128 for e in outputs if (run.paths.root / e.path).is_relative_to(run.paths.policies))


# --- others' jobs --------------------------------------------------------------------------------------


def fill_queue(cluster: Cluster, count: int) -> None:
    """Leave ``count`` jobs pending for a node that one of them holds: the second one of the updates."""
    if not count:
        return
    common = ("--parsable", "-p", "all", "-w", "update1", "-t", "300", "-o", "/dev/null", "-D", "/")
    if os.geteuid() == 0:  # who alone may submit for others: a worker makes room for its own user's jobs
        common = (*common, "--uid=nobody")
    for seconds in (86400, *(0 for _ in range(count))):
        words = ("-J", "foreign", "--exclusive", *common, "--wrap", f"sleep {seconds}")
        done = cluster.call("sbatch", *words)
        if done.returncode:
            raise RuntimeError(f"sbatch failed: {done.stderr}")


# --- gaps ----------------------------------------------------------------------------------------------


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


def gaps(given: argparse.Namespace, scratch: Path) -> None:
    """Compare workers that may leave with workers that never do, both at once: they mostly sleep."""
    inputs = light.make_inputs(scratch / "inputs")
    cluster = start(scratch / "cluster", DEFAULTS if not given.tuned else None, accounting=True)
    folder = given.keep or scratch

    def one(name: str, linger: object) -> str:
        words = [*noop_words(given, inputs), *gap_words(linger)]
        run = carry_out(words, folder / name.replace(" ", "-"), cluster)
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


def held_seconds(cluster: Cluster, run: Run) -> float:
    """Return the seconds that the elements of the run's stages ran, as sacct has them."""
    shown = cluster.call("sacct", "-a", "-D", "-X", "-n", "-P", "--format=ElapsedRaw,JobName").stdout
    rows = (line.split("|") for line in shown.splitlines())
    named = [(float(elapsed), name.split(".")) for elapsed, name in rows if f".{run.identity.id}." in name]
    return sum(elapsed for elapsed, name in named if name[-3] in STAGES)


def needed_seconds(run: Run) -> float:
    """Return the seconds of all tasks, and one start-up for each."""
    tasks = [task for k in range(1, run.plan.iterations + 1) for task in run.plan.tasks(k)]
    records = [require_record(run.paths, task) for task in tasks]
    return sum(r.ended - r.started for r in records) + _STARTUP * len(records)


# --- all of it -----------------------------------------------------------------------------------------


def make_demo(folder: Path) -> Path:
    command = [sys.executable, "examples/quickstart/make_demo.py", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def compare(given: argparse.Namespace, scratch: Path) -> None:
    """Carry all variants out in turn, and print what they took."""
    variants = given.variants.split(",")
    if given.noop:
        words = noop_words(given, light.make_inputs(scratch / "inputs"))
    else:
        words = quickstart_words(given, make_demo(given.demo or scratch / "demo"))
    needs_slurm = {"cold", "workers"} & set(variants)
    layout = replace(Layout() if given.tuned else DEFAULTS, network_filesystem=given.network_filesystem)
    cluster = start(scratch / "cluster", layout) if needs_slurm else None
    found: dict[str, Measured] = {name: Measured() for name in variants}
    digests, reference = {}, None
    try:
        if cluster:
            fill_queue(cluster, given.foreign_jobs)
        for number in range(given.rounds):
            for name in variants:
                root = (
                    cluster.shared if cluster and cluster.shared else given.keep or scratch
                ) / f"{name}-{number}"
                run, pairs = measure(name, words, root, cluster, reference)
                if run is not None and given.keep and not root.is_relative_to(given.keep):
                    left_out = shutil.ignore_patterns("wanted", ".*")  # which come and go
                    shutil.copytree(root, given.keep / root.name, ignore=left_out)
                found[name].add([seconds for seconds, _ in pairs], [compute for _, compute in pairs])
                if run is not None:
                    reference, digests[name] = run, policy_digest(run)
                print(f"  {name} {number}: {[round(seconds, 2) for seconds, _ in pairs]}", flush=True)
    finally:
        if cluster:
            cluster.stop()
    print(table(found))
    if LAGS:
        print(f"rows lagged by {statistics.median(LAGS):.1f} s (median), {max(LAGS):.1f} s (at most)")
    if len(set(map(tuple, digests.values()))) > 1:
        print("the variants' last policies differ")


def table(found: Mapping[str, Measured]) -> str:
    """Return medians, ratios to the first variant, and what is not compute."""
    lines, base = [], None
    for name, measured in found.items():
        middle = statistics.median(measured.seconds)
        base = base or middle
        share = statistics.median(measured.not_compute)
        lines.append(
            f"{name:<12} {middle:8.2f} s an iteration, {middle / base:6.2f} of {next(iter(found))}; "
            f"not compute {share:6.1%}, {share * middle:.2f} s ({len(measured.seconds)} iterations)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="cold,local,process", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--rollout", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--tuned", action="store_true", help="Slurm's settings as the tests have them")
    parser.add_argument(
        "--network-filesystem", action="store_true", help="runs on the cluster's own, caches on"
    )
    parser.add_argument("--noop", action="store_true", help="light tasks")
    parser.add_argument("--foreign-jobs", type=int, default=0)
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--demo", type=Path, help="the quickstart's models, made before or made here")
    parser.add_argument("--keep", type=Path, help="folder that the runs are left in")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (gaps if given.gaps else compare)(given, Path(folder))


if __name__ == "__main__":
    main()
