"""A run on the test cluster as a user has it: submitted, watched through files and squeue, disturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tiny

from benchmarks.noop import write_noops
from pipeline.checks import resolve
from pipeline.compose import compose
from slurm.devcluster import Cluster

ROOT = Path(__file__).parent.parent.parent
CPU_ONLY = [
    f"scheduler.{stage}.gpus_per_node=null" for stage in ("rollout", "reward", "update", "evaluate")
]
"""Where what is tested has nothing to do with GPUs, they need not limit how many tasks run at once."""


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: str
    """Of the element, e.g. 12_3, or 12_[0-3] of those that wait together."""
    name: str
    state: str
    reason: str
    node: str

    @property
    def stage(self) -> str:
        return self.name.split(".")[-3]

    @property
    def iteration(self) -> int:
        return int(self.name.split(".")[-4])


@dataclass
class SlurmRun:
    """A run, and the words it was made with."""

    cluster: Cluster
    root: Path
    words: list[str]
    environment: dict[str, str]

    def command(self, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, arguments)],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def submit(self) -> None:
        done = self.command("submit", *self.words)
        assert done.returncode == 0, done.stderr + done.stdout

    def jobs(self, state: str = "") -> list[Job]:
        """Jobs of the run that wait or run."""
        shown = self.cluster.call("squeue", "-h", "-o", "%i|%j|%T|%r|%N")
        lines = [Job(*line.split("|")) for line in shown.stdout.splitlines()]
        return [job for job in lines if job.name.count(".") == 5 and (not state or job.state == state)]

    def wait_for_job(self, stage: str, state: str = "RUNNING", limit: float = 90) -> Job:
        return wait_for(
            lambda: next((job for job in self.jobs(state) if job.stage == stage), None),
            f"a {stage} job that is {state}",
            limit,
        )

    def wait_until_complete(self, limit: float = 240) -> None:
        """No process of ours helps; on a time-out, everything that explains it is shown."""
        total = int([w for w in self.words if w.startswith("iterations=")][-1].split("=")[1])
        try:
            wait_for(lambda: len(self.rows()) == total and not self.jobs(), "the run's end", limit)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def rows(self) -> list[dict]:
        return read_lines(self.root / "metrics.jsonl")

    def events(self, name: str = "") -> list[dict]:
        return [e for e in read_lines(self.root / "events.jsonl") if not name or e["event"] == name]

    def policy(self) -> dict[str, bytes]:
        """Weights of the last policy and critic."""
        last = f"{len(self.rows()):05d}"
        return {p: (self.root / p / last / "model.safetensors").read_bytes() for p in ("policy", "critic")}

    def story(self) -> str:
        """Queue, events, drivers' logs."""
        logs = sorted((self.root / "logs").glob("*driver/*/*.log")) + sorted((self.root / "logs").glob("*guard/*/*.log"))
        parts = [self.cluster.call("squeue", "-o", "%i %j %T %r %E").stdout]
        parts += [json.dumps(event) for event in self.events()[-30:]]
        parts += [f"--- {log}\n{log.read_text()[-1500:]}" for log in logs]
        return "\n".join(parts)


def wait_for(found: Callable, what: str, limit: float):
    """The first true value of ``found``."""
    until = time.monotonic() + limit
    while not (value := found()):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit:g} s for {what}")
        time.sleep(0.1)
    return value


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def prepare(
    cluster: Cluster, inputs: Path, root: Path, environment: dict[str, str], *more: str
) -> SlurmRun:
    """A run that is not submitted yet."""
    words = tiny.overrides(inputs, root, "scheduler=devcluster", *more)
    return SlurmRun(cluster, root, words, environment | cluster.environment())


def prepare_noops(
    cluster: Cluster,
    inputs: Path,
    root: Path,
    environment: dict[str, str],
    *more: str,
    seconds: float = 0.3,
) -> SlurmRun:
    """A run whose tasks only wait and commit: for what orders them."""
    words = [*CPU_ONLY, "scheduler.python=PYTHON", f"scheduler.driver.python={sys.executable}", *more]
    run = prepare(cluster, inputs, root, environment, *words)
    config = resolve(compose(run.words))
    script = write_noops(root.parent / f"{root.name}-noops", config, root, seconds)
    run.words = [word.replace("scheduler.python=PYTHON", f"scheduler.python={script}") for word in run.words]
    return run


def processes_of(job: str) -> Iterator[int]:
    """Processes of an array element, by the variables that Slurm gave them."""
    array, _, index = job.partition("_")
    wanted = {f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={index}"}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = set((folder / "environ").read_bytes().decode(errors="replace").split("\0"))
            if wanted <= variables:
                yield int(folder.name)


def kill_job(job: Job) -> bool:
    """kill -9 of a job's processes. False if they were gone already."""
    found = list(processes_of(job.id))
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)
