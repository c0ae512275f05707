"""What grows with a run: a pass, status, plan, the check of the chain, and packing; and with runs: ls.

    python benchmarks/scale.py [--shards 10000] [--iterations 1000] [--part pass status ...]

The run directory is made by hand and Slurm is a toy in this process, so seconds are our own. All are CPU
seconds of one process, which other work on the machine does not change much.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import submitit

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.noop import make_record  # noqa: E402
from pipeline.config.compose import from_mapping  # noqa: E402
from pipeline.decide.reconcile import Observation, reconcile  # noqa: E402
from pipeline.run import journal  # noqa: E402
from pipeline.run.commits import hash_file, publish, require_record, verify_outputs  # noqa: E402
from pipeline.run.control import begin_invocation  # noqa: E402
from pipeline.run.directory import Run, create_run  # noqa: E402
from pipeline.run.losses import find_break  # noqa: E402
from pipeline.run.packing import pack, unpack  # noqa: E402
from pipeline.run.plan import Plan  # noqa: E402
from pipeline.run.tasks import PREPARE, Stage, Task, task_key  # noqa: E402
from pipeline.status.plan import describe_plan  # noqa: E402
from pipeline.status.snapshot import read_status  # noqa: E402
from pipeline.status.text import describe  # noqa: E402
from slurm import commands  # noqa: E402
from slurm.states import SlurmState  # noqa: E402
from tests.support.passes import pass_over  # noqa: E402
from tests.support.reportrun import make_row  # noqa: E402
from tests.support.reportrun import make_run as make_local_run  # noqa: E402
from tests.support.toyslurm import ToySlurm  # noqa: E402
from tests.support.toyworld import is_driver, task_of  # noqa: E402

NUM_RUNS = 1000
"""Runs that ``ls`` lists."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    os.fsync = lambda descriptor: None  # a power cut may take the benchmark's input
    for part in given.part:
        with tempfile.TemporaryDirectory() as scratch:
            PARTS[part](Path(scratch) / "run", given.iterations, given.shards)


class Committed(NamedTuple):
    """What reconcile reads of a commit record."""

    fingerprint: str
    inputs: dict[str, str]


def timed(what: str, act: Callable[[], object]) -> None:
    began = time.process_time()
    act()
    print(f"{what}: {time.process_time() - began:.2f} s", flush=True)


def measure_reconcile(root: Path, iterations: int, shards: int) -> None:
    """Rollouts are committed, and rewards run."""
    plan = Plan(iterations, shards, 0)
    done = {Task(6, Stage.ROLLOUT, shard): Committed("f", {"5/update/0": "f"}) for shard in range(shards)}
    committed = {PREPARE: Committed("f", {}), Task(5, Stage.UPDATE): Committed("f", {}), **done}
    live = {Task(6, Stage.REWARD, shard) for shard in range(shards)}
    seen = Observation(plan.window(5, 0), committed, {}, live, {})
    timed(f"reconcile, {shards} shards", lambda: reconcile(plan, seen, 3))


def make_run(root: Path, iterations: int, shards: int) -> Run:
    config = {
        "run_dir": str(root),
        "iterations": iterations,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "prompts_per_iteration": shards},
        "rollout": {"num_shards": shards},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "scheduler": {
            "kind": "slurm",
            "python": "/py",
            "max_submitted": 10**6,
        },
    }
    return create_run(from_mapping(config))


def commit(run: Run, task: Task) -> None:
    """With lineage, as a real task does, but without data."""
    record = make_record(task)
    sources = run.plan.inputs(task)
    made_from = {task_key(source): make_record(source).fingerprint for source in sources}
    publish(run.paths, replace(record, inputs=made_from))


def submitted_run(root: Path, shards: int) -> Run:
    """The first iteration: rollouts are submitted, nine tenths of them are committed, the others failed."""
    slurm = ToySlurm(has_accounting=False)
    slurm.max_array_size = 10**6
    commands._run_once, commands.begin_command = slurm.run, slurm.begin
    submitit.SlurmExecutor.affinity = lambda: 2
    run = make_run(root, 2, shards)
    begin_invocation(run.paths)
    commit(run, PREPARE)
    timed(f"pass that submits {shards} shards", lambda: pass_over(run, []))
    for element in (e for e in slurm.elements() if not is_driver(e)):
        task = task_of(run, element)
        if task.stage is Stage.ROLLOUT:
            failed = task.shard % 10 == 0
            slurm.end(element, SlurmState.FAILED if failed else SlurmState.COMPLETED, int(failed))
            failed or commit(run, task)
    return run


def measure_pass(root: Path, iterations: int, shards: int) -> None:
    run = submitted_run(root, shards)
    timed("pass that reads their commits", lambda: pass_over(run, []))


def measure_status(root: Path, iterations: int, shards: int) -> None:
    run = submitted_run(root, shards)
    pass_over(run, [])
    timed(f"status, {shards} shards", lambda: describe(read_status(run)))
    timed(f"plan, {shards} shards", lambda: [*describe_plan(run)])


def measure_long(root: Path, iterations: int, shards: int) -> None:
    """A run of many iterations of 64 shards, and one of few iterations of very many."""
    for number, width in ((iterations, 64), (20, shards)):
        run = make_run(root.with_name(f"run{width}"), number, width)
        commit(run, PREPARE)
        for iteration in range(1, number):
            commit(run, Task(iteration, Stage.UPDATE))
        journal.rewrite(run.paths.metrics, ({"iteration": i} for i in range(1, number)))
        print(f"{number} iterations of {width} shards:")
        timed(
            "  check of the whole chain",
            lambda run=run, last=number - 1: find_break(run.plan, run.paths, last),
        )
        timed("  plan", lambda run=run: [*describe_plan(run)])


def measure_packing(root: Path, iterations: int, shards: int) -> None:
    """64 shards of 1 MB of rollouts and rewards, with a log each."""
    run = make_run(root, 5, 64)
    for task in run.plan.tasks(1):
        files = run.paths.task(task)
        log = files.log(1)
        for path, size in ((files.data("1-noop"), 1 << 20), (log, 2000)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
        outputs = (hash_file(run.paths, files.data("1-noop")),) if task.stage.is_sharded else ()
        publish(run.paths, replace(make_record(task), outputs=outputs))
    before = len([*root.rglob("*")])
    timed(f"packing {before} files and folders", lambda: pack(run, 1))
    print(f"  {len([*root.rglob('*')])} are left")
    tasks = [task for task in run.plan.tasks(1) if task.stage.is_sharded]

    def read_all() -> None:
        for task in tasks:
            verify_outputs(run.paths, require_record(run.paths, task))

    timed("reading all from the archive", read_all)
    unpack(run.paths, 1)
    timed("reading all from files", read_all)


def make_listed(root: Path, iterations: int) -> None:
    """A run of this machine with 20 rows of some 90 numbers and the three newest policies and states."""
    run = make_local_run(root, iterations=iterations)
    rows = [make_row(i) | {f"more/{n}": 1 / (n + i) for n in range(50)} for i in range(1, 21)]
    journal.rewrite(run.paths.metrics, rows)
    journal.event(run.paths.events, "driver_started")
    run.paths.best.write_text('{"iteration": 18, "reward": 0.5}')
    for version in (18, 19, 20):
        for folder in (run.paths.policies, run.paths.states):
            (folder / f"{version:05d}.1-a").mkdir(parents=True)
            (folder / f"{version:05d}.1-a/model.safetensors").write_bytes(bytes(1000))
            (folder / f"{version:05d}").symlink_to(f"{version:05d}.1-a")


def measure_list(root: Path, iterations: int, shards: int) -> None:
    """Every other run is complete. The command is typed three times, its start and imports are counted."""
    for number, planned in enumerate((20, 40)):
        make_listed(root / f"run-{number}", planned)
    for number in range(2, NUM_RUNS):
        shutil.copytree(root / f"run-{number % 2}", root / f"run-{number}", symlinks=True)
    for _ in range(3):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "pipeline", "ls", str(root)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"ls of {NUM_RUNS} runs: {used:.2f} s, {wall:.2f} s on the clock", flush=True)


PARTS = {
    "packing": measure_packing,
    "reconcile": measure_reconcile,
    "pass": measure_pass,
    "status": measure_status,
    "long": measure_long,
    "ls": measure_list,
}

if __name__ == "__main__":
    main()
