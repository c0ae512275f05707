"""A run on the test cluster as a user has it: submitted, watched through files and squeue, disturbed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.run.submissions import is_job_of, job_kind_of, parse_job_name
from pipeline.workers.beats import Beat, Doing, read_beats
from slurm.devcluster import PracticeCluster
from slurm.sharedfiles import is_there, read_newest, read_shared
from tests.support import ROOT, light, tiny

Cli = Callable[..., subprocess.CompletedProcess[str]]
STAGES = ("rollout", "reward", "update")
ATTEND_SECONDS = 5.0
LEAK = b"bad node_offset"
"""What Slurm 22.05 logs as it forgets to free the GPUs of a job that was put back while its node was down:
they stay used, by no job, until the controller counts again."""
SHARDS = 4
"""Number of shards of light runs: a node of the practice cluster has two GPUs, so there are fewer places."""


def take(seconds: str, *stages: str) -> list[str]:
    """Words that give light tasks time to be disturbed in: a step of each of these stages takes so long."""
    return [f"scheduler.{stage}.environment={{{light.SECONDS}: '{seconds}'}}" for stage in stages]


@dataclass(frozen=True)
class Hold:
    """Holds up the light tasks of a stage, so that they are at work for as long as a test needs that."""

    file: Path

    def on(self, stage: str, seconds: str = "0") -> str:
        """A word of the run. A step that is not held up takes some seconds."""
        return f"scheduler.{stage}.environment={{{light.SECONDS}: '{seconds}', {light.HOLD}: '{self.file}'}}"

    def begin(self) -> None:
        for mark in self.file.parent.glob(f"{self.file.name}.*"):
            mark.unlink()
        self.file.touch()

    def end(self) -> None:
        self.file.unlink()

    def holds(self, beat: Beat) -> bool:
        return Path(f"{self.file}.{beat.pid}").exists()


def staying(linger: object, start_early: bool = True) -> list[str]:
    """Words that say how long workers of all stages stay, and whether they start early."""
    early = str(start_early).lower()
    each = [(f"scheduler.{s}.linger={linger}", f"scheduler.{s}.start_early={early}") for s in STAGES]
    return [word for words in each for word in words]


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: str
    """Of the element, e.g. 12_3, or 12_[0-3] of those that wait together."""
    name: str
    state: str
    reason: str
    node: str
    partition: str
    """Before it starts, all that it may run in."""
    cluster: str
    """Name of the cluster: ids are used again on the next."""

    @property
    def stage(self) -> str:
        return job_kind_of(self.name)

    @property
    def iteration(self) -> int:
        name = parse_job_name(self.name)
        assert name
        return name.iteration


@dataclass
class SlurmRun:
    """A run, and the words it was made with."""

    cluster: PracticeCluster
    root: Path
    words: list[str]
    environment: dict[str, str]
    slurm_ppo: Cli
    folder: Path = ROOT
    """Where its commands are typed, and where plug-ins are looked for."""
    leaks: int = 0
    """Number of leaks that were seen to (:data:`LEAK`)."""

    def command(self, *arguments: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Wait for a command to end."""
        try:
            return self.slurm_ppo(*arguments, timeout=timeout, env=self.environment, cwd=self.folder)
        except subprocess.TimeoutExpired as error:
            said = f"{arguments[0]} took {timeout:g} s: {error.stderr}"
            raise AssertionError(f"{said}\n{self.story()}") from None

    def begin(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a command and go on."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *map(str, arguments)],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(self) -> None:
        done = self.command("submit", *self.words)
        assert done.returncode == 0, done.stderr + done.stdout

    @property
    def id(self) -> str:
        return json.loads(read_shared(self.root / "run.json"))["id"]

    def jobs(self, state: str = "") -> list[Job]:
        """Jobs of the run that wait or run, all or those in a state."""
        return [job for job in self._queue() if not state or job.state == state]

    def jobs_ever(self) -> list[Job]:
        """One line for each array of the run that the controller remembers, whatever became of it."""
        arrays = {job.id.partition("_")[0]: job for job in self._queue("--states=all")}
        return list(arrays.values())

    def _queue(self, *filters: str) -> list[Job]:
        if not is_there(self.root / "run.json"):
            return []
        return [job for job in queue_of(self.cluster, *filters) if is_job_of(self.id, job.name)]

    def wait_for(self, found: Callable, what: str, limit: float = 300):
        """The first true value of ``found``; on a time-out, everything that explains it is shown.

        Meanwhile what a restarted controller has drained, or counts as used though it is not, is returned to
        service, as people would.
        """
        try:
            return wait_for(found, what, limit, self._attend)
        except (TimeoutError, AssertionError) as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def _attend(self) -> None:
        self.cluster.return_nodes()
        log = self.cluster.folder / "log/slurmctld.log"
        leaks = log.read_bytes().count(LEAK) if log.exists() else 0
        if leaks > self.leaks:
            self.leaks = leaks
            self.cluster.call("scontrol", "reconfigure")

    def wait_for_job(self, stage: str, state: str = "RUNNING", limit: float = 300) -> Job:
        return self.wait_for(
            lambda: next((job for job in self.jobs(state) if job.stage == stage), None),
            f"a {stage} job that is {state}",
            limit,
        )

    def wait_until_complete(self, limit: float = 600) -> None:
        """No process of ours helps."""
        total = int([w for w in self.words if w.startswith("iterations=")][-1].split("=")[1])
        self.wait_for(lambda: len(self.rows()) == total and not self.jobs(), "the run's end", limit)

    def rows(self) -> list[dict]:
        return read_lines(self.root / "metrics.jsonl")

    def events(self, name: str = "") -> list[dict]:
        return [e for e in read_lines(self.root / "events.jsonl") if not name or e["event"] == name]

    def policy(self) -> dict[str, bytes]:
        return policy_of(self.root)

    def record(self, iteration: int, stage: str, shard: int = 0) -> dict:
        """What a task committed."""
        return read_record(self.root, iteration, stage, shard)

    def has_committed(self, iteration: int, stage: str, shard: int = 0) -> bool:
        return is_there(record_path(self.root, iteration, stage, shard))

    def logs(self, pattern: str) -> dict[str, str]:
        """Logs by their names below logs/, e.g. of ``00001-rollout/*/*``."""
        files = sorted((self.root / "logs").glob(f"{pattern}.log"))
        return {str(file.relative_to(self.root / "logs")): file.read_text() for file in files}

    def logs_of_passes(self) -> dict[str, str]:
        """By driver jobs and by workers."""
        return self.logs("*driver/*/*") | self.logs("guard/*") | self.logs("passes/*")

    def story(self) -> str:
        """Everything that explains how it went: queue, events, what failed and why, what Slurm did."""
        logs = self.logs_of_passes()
        for event in self.events("failed"):
            iteration, stage, shard = event["task"].split("/")
            folder = f"{int(iteration):05d}-{stage}/attempt-{event['attempt']}"
            logs |= self.logs(f"{folder}/*-{int(shard):05d}")
        latest = sorted((self.root / "logs").glob("*/*/*.log"), key=lambda file: file.stat().st_mtime)[-4:]
        logs |= {str(file): file.read_text() for file in latest}
        parts = [self.cluster.call("squeue", "--states=all", "-o", "%i %j %T %r %E").stdout]
        parts += [json.dumps(event) for event in self.events()[-60:]]
        parts += [f"--- {name}\n{text[-3000:]}" for name, text in logs.items()]
        parts += [f"{daemon.name} has ended" for daemon in self.cluster.status().daemons if not daemon.alive]
        told = sorted((self.cluster.folder / "log").glob("*.log"))
        parts += [f"--- {file.name}\n{notable(file.read_text(errors='replace'))}" for file in told]
        return "\n".join(parts)


def queue_of(cluster: PracticeCluster, *filters: str) -> list[Job]:
    """Jobs that wait or run, of whatever run, as options of squeue say otherwise."""
    shown = cluster.call("squeue", "-h", "-o", "%i|%j|%T|%r|%N|%P", *filters)
    assert shown.returncode == 0, shown.stderr
    return [Job(*line.split("|"), cluster.identity.name) for line in shown.stdout.splitlines()]


def room_on(cluster: PracticeCluster, otherwise: Path) -> Path:
    """A new folder for runs on the cluster's network filesystem, or ``otherwise`` if it has none."""
    return Path(tempfile.mkdtemp(dir=cluster.shared)) if cluster.shared else otherwise


def notable(log: str) -> str:
    """What a daemon says of jobs and of errors, of late."""
    said = [line for line in log.splitlines() if re.search("job|error|exit|down|drain|signal", line, re.I)]
    return "\n".join([line for line in said if "pmi" not in line][-150:])


def read_record(run: Path, iteration: int, stage: str, shard: int = 0) -> dict:
    return json.loads(read_shared(record_path(run, iteration, stage, shard)))


def record_path(run: Path, iteration: int, stage: str, shard: int) -> Path:
    return run / "iterations" / f"{iteration:05d}" / stage / f"shard-{shard:05d}.json"


def policy_of(run: Path, iteration: int = 0) -> dict[str, bytes]:
    """Weights of an iteration's policy, by default the last. They follow from every state before it."""
    name = f"{iteration or len(read_lines(run / 'metrics.jsonl')):05d}"
    return {"policy": (run / "policy" / name / "model.safetensors").read_bytes()}


def results_of(run: Path) -> list[dict]:
    """Rows of metrics.jsonl without what depends on when and where a task ran."""
    machine = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/", "slurm/")
    rows = read_lines(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(machine)} for row in rows]


def wait_for(found: Callable, what: str, limit: float, attend: Callable[[], object] = lambda: None):
    """The first true value of ``found``. ``attend`` is called every few seconds meanwhile."""
    until, attended = time.monotonic() + limit, time.monotonic()
    while not (value := found()):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit:g} s for {what}")
        if time.monotonic() > attended + ATTEND_SECONDS:
            attend()
            attended = time.monotonic()
        time.sleep(0.2)  # a look at the queue takes a tenth of that
    return value


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in read_newest(path).splitlines()] if is_there(path) else []


@dataclass(frozen=True)
class Runs:
    """Makes runs that are not submitted yet, of workers, as users have them."""

    inputs: Path
    environment: dict[str, str]
    slurm_ppo: Cli
    shards: int = SHARDS

    def __call__(self, cluster: PracticeCluster, root: Path, *more: str, folder: Path = ROOT) -> SlurmRun:
        own = ("scheduler=devcluster", f"rollout.num_shards={self.shards}")
        words = tiny.overrides(self.inputs, root, *own, *more)
        return SlurmRun(
            cluster, root, words, self.environment | cluster.environment(), self.slurm_ppo, folder
        )


def failed(run: SlurmRun) -> list[tuple[str, str]]:
    """Failed attempts: task and kind."""
    return [(event["task"], event["kind"]) for event in run.events("failed")]


def assert_same_policy(run: SlurmRun, local_run: Path) -> None:
    """Of as many iterations as the run has."""
    assert run.policy() == policy_of(local_run, len(run.rows())), run.story()


def restarts_of(run: SlurmRun, job: str) -> int:
    said = run.cluster.call("scontrol", "show", "job", job).stdout
    return max(
        (int(word.partition("=")[2]) for word in said.split() if word.startswith("Restarts=")), default=0
    )


def take_the_place_of(run: SlurmRun, job: str, node: str) -> None:
    """With a job that preempts one which runs on a node."""
    before, options = restarts_of(run, job), ("-prollout-high", "--exclusive", f"-w{node}", "-o/dev/null")
    urgent = run.cluster.call("sbatch", *options, "--wrap", "sleep 1")
    assert urgent.returncode == 0, urgent.stderr
    run.wait_for(lambda: restarts_of(run, job) > before, "a preempted job")


def worker_who(run: SlurmRun, job_kind: str, doing: Doing, is_right: Callable[[Beat], bool]) -> Beat:
    """Wait for a worker that does something."""

    def find() -> Beat | None:
        found = read_beats(RunPaths(run.root)).values()
        fitting = (b for b in found if (b.job_kind, b.doing) == (job_kind, doing) and is_right(b))
        return next((b for b in fitting if Path(f"/proc/{b.pid}").exists()), None)

    return run.wait_for(find, f"a {job_kind} worker that is {doing}")


def is_used(beat: Beat) -> bool:
    return beat.tasks > 0


def wait_for_commit_by(run: SlurmRun, job_kind: str, is_right: Callable[[str], bool]) -> None:
    def find() -> bool:
        beats = read_beats(RunPaths(run.root)).values()
        return any(b.job_kind == job_kind and is_used(b) and is_right(b.worker) for b in beats)

    run.wait_for(find, f"another {job_kind} worker that commits")


def held_at_work(run: SlurmRun, hold: Hold, job_kind: str, other_than: Sequence[Beat] = ()) -> Beat:
    """Wait for a used worker that is held up, and return what it says then."""
    others = [beat.worker for beat in other_than]

    def is_held(beat: Beat) -> bool:
        return is_used(beat) and hold.holds(beat) and beat.worker not in others

    found = worker_who(run, job_kind, Doing.BUSY, is_held)
    return read_beats(RunPaths(run.root))[found.worker]  # again: it may have gone on before it was held up


def element_of(beat: Beat) -> str:
    return beat.worker.partition("r")[0]


def processes_of(job: Job) -> Iterator[int]:
    """Processes of an array element, by the variables that Slurm gave them."""
    array, _, index = job.id.partition("_")
    wanted = {"SLURM_CLUSTER_NAME": job.cluster, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index}
    for pid, variables in processes():
        if wanted.items() <= variables.items():
            yield pid


def processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Every process and the environment that it was started with."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), {word.partition("=")[0]: word.partition("=")[2] for word in words}


def outside_slurm(text: str) -> list[str]:
    """Command lines that mention ``text``, of processes that are in no job."""
    found = []
    for pid, variables in processes():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if text in command and "SLURM_JOB_ID" not in variables:
                found.append(command)
    return found


def kill_job(job: Job) -> bool:
    """kill -9 of a job's processes. False if they were gone already."""
    found = list(processes_of(job))
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)
