"""Runs on a practice cluster, for benchmarks: layouts with so many places, runs carried out, others' jobs."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.plan import policy_maker
from slurm.devcluster import Layout, PracticeCluster
from tests.support import tiny
from tests.support.counting import Counting

ROOT = Path(__file__).parent.parent
STAGES = ("rollout", "reward", "update")
_LIMIT = 1800.0
_SHARED_NODES = ("rollout0", "reward0")
"""Nodes of the shipped layout on which shards are done."""
_FOREIGN_SECONDS = 5


# --- settings and layouts ----------------------------------------------------------------------------------


def layout_of(places: int, layout: Layout | None = None) -> Layout:
    """Return the shipped layout with so many GPUs on the nodes of rollouts and rewards, as ``devcluster up``
    gives it for 2."""
    layout = layout or Layout()
    changed = (replace(n, gpus=places) if n.name in _SHARED_NODES else n for n in layout.nodes)
    return replace(layout, nodes=tuple(changed))


def on_one_node(gpus: int, stages: Sequence[str]) -> list[str]:
    """Return words that put stages on the GPUs of one node, each job on so many of them."""
    each = [(f"scheduler.{s}.partition=rollout", f"scheduler.{s}.gpus_per_node={gpus}") for s in stages]
    return [word for words in each for word in words]


def noop_words(inputs: Path, iterations: int, shards: int, prompts: int) -> list[str]:
    """Return the settings of light tasks, which compute nothing."""
    more = (f"iterations={iterations}", f"rollout.num_shards={shards}")
    return tiny.overrides(inputs, Path("unused"), *more, f"data.prompts_per_iteration={prompts}")


# --- runs --------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Carries runs out, on a cluster or on this machine."""

    cluster: PracticeCluster | None = None
    counting: Counting | None = None
    """Wrappers that note calls of Slurm's commands; jobs inherit them."""
    lags: list[float] = field(default_factory=list)
    """Seconds by which rows lagged, as of each second of the runs on Slurm."""
    submitted: float = 0.0
    """Unix time at which the last command had ended."""

    def environment(self) -> Mapping[str, str]:
        found = os.environ | {"PYTHONPATH": str(ROOT)}
        if self.cluster:
            found |= self.cluster.environment()
        return self.counting.environment(found) if self.counting else found

    def command(self, *words: object) -> None:
        """Carry out a command of slurm-ppo.

        Raises:
            RuntimeError: it failed; says what it said.
        """
        command = [sys.executable, "-m", "pipeline", *map(str, words)]
        done = subprocess.run(
            command, env=self.environment(), cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{words[0]} failed: {done.stderr[-2000:]}")
        self.submitted = time.time()

    def carry_out(self, words: Sequence[str], root: Path) -> Run:
        """Make a run and wait for its end."""
        self.command("submit" if self.cluster else "run", *words, f"run_dir={root}")
        run = load_run(root)
        if self.cluster:
            self.wait_for([run])
        return run

    def wait_for(self, runs: Sequence[Run]) -> None:
        """Wait until runs on Slurm have all rows, and the queue none of their jobs.

        Raises:
            TimeoutError: they did not end.
        """
        until = time.monotonic() + _LIMIT
        while any(num_rows(run.paths.root) < run.plan.iterations for run in runs) or self.has_jobs(runs):
            if time.monotonic() > until:
                rows = {str(run.paths.root): num_rows(run.paths.root) for run in runs}
                raise TimeoutError(f"rows after {_LIMIT:g} s: {rows}")
            time.sleep(1)
            self.lags.append(max(map(lag_of_rows, runs)))

    def has_jobs(self, runs: Sequence[Run]) -> bool:
        assert self.cluster is not None
        shown = self.cluster.call("squeue", "-h", "-o", "%j").stdout
        return any(f".{run.identity.id}." in shown for run in runs)


def lag_of_rows(run: Run) -> float:
    """Return how long all is there that the oldest iteration without a row has: its policy and, where it is
    evaluated, what that found."""
    number = num_rows(run.paths.root) + 1
    awaited = [policy_maker(number), *(t for t in run.plan.evaluation_tasks() if t.iteration == number)]
    records = [read_record(run.paths, task) for task in awaited]
    ended = [record.ended for record in records if record is not None]
    return max(0.0, time.time() - max(ended)) if len(ended) == len(awaited) else 0.0


def num_rows(root: Path) -> int:
    path = root / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


# --- others' jobs --------------------------------------------------------------------------------------


def fill_queue(cluster: PracticeCluster, count: int) -> None:
    """Leave ``count`` jobs pending for a node that one of them holds: the second one of the updates."""
    for seconds in (86400, *(0 for _ in range(count))) if count else ():
        _foreign(cluster, seconds, "-p", "all", "-w", "update1", "--exclusive")


@contextlib.contextmanager
def others(cluster: PracticeCluster, every: float) -> Iterator[None]:
    """While it lasts have a job of another user come every so many seconds, for a GPU of the rollouts and of
    the rewards in turn; 0: none comes."""
    ended = threading.Event()

    def submit() -> None:
        number = 0
        while not ended.wait(every):
            _foreign(cluster, _FOREIGN_SECONDS, "-p", ("rollout", "reward")[number % 2], "--gres=gpu:1")
            number += 1

    thread = threading.Thread(target=submit)
    if every:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if every:
            thread.join()


def _foreign(cluster: PracticeCluster, seconds: int, *words: str) -> None:
    common = ("--parsable", "-J", "foreign", "-t", "300", "-o", "/dev/null", "-D", "/")
    if os.geteuid() == 0:  # who alone may submit for others: a worker makes room for its own user's jobs
        common = (*common, "--uid=nobody")
    done = cluster.call("sbatch", *common, *words, "--wrap", f"sleep {seconds}")
    if done.returncode:
        raise RuntimeError(f"sbatch failed: {done.stderr}")
