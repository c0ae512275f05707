"""Layout of a run directory; the only module that joins paths of a run.

``RunPaths`` knows what belongs to the run, ``TaskPaths`` what belongs to one task. Data files carry the
attempt in their name, so that attempts never share a file; the commit record has no attempt in its name,
because at most one attempt wins.
"""

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import names_in

CARRIED_PART = "carried"
"""Part of an update's data file with the groups that it leaves for later updates (rollout.oversample)."""
BAND_PART = "band"
"""Part of an update's data file with how prompts scored, and which are left out (data.band)."""
PASSED_ON = (CARRIED_PART, BAND_PART)
"""Parts that tasks of the next iterations read, and no fork; packed with the shards."""
SWEEP_MANIFEST = "sweep.json"
"""File that makes a folder a sweep's, whose runs lie in folders below it (:mod:`pipeline.sweep.manifest`)."""


class _Below:
    """Path of a fixed name below a run's directory."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get__(self, paths: "RunPaths", owner: type) -> Path:
        return paths.root.joinpath(*self.names)


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run directory."""

    root: Path

    run_json = _Below("run.json")
    config_yaml = _Below("config.yaml")
    run_copy = _Below("run.copy.json")
    config_copy = _Below("config.copy.yaml")
    """Copies of the two: what identifies a run is its oldest, and purges by age take that first."""
    settings = _Below("settings.json")
    settings_copy = _Below("settings.copy.json")
    """What was changed of the configuration since, twice too; neither where nothing was."""
    events = _Below("events.jsonl")
    metrics = _Below("metrics.jsonl")
    rows = _Below("rows")
    """Folder of metrics.jsonl's rows, each published once; see :mod:`pipeline.orchestrate.row_writer`."""
    evaluations = _Below("evaluations.jsonl")
    """Journal of what evaluate.command said of policies."""
    spans = _Below("spans.jsonl")
    """Journal of when and where every attempt waited and ran."""
    report = _Below("report.html")
    best = _Below("best.json")
    locks = _Below("locks")
    wandb = _Below("wandb")
    wandb_online = _Below("wandb", "online.json")
    """Record of what W&B's server was sent."""
    tensorboard = _Below("tensorboard")
    mlflow = _Below("mlflow")
    data = _Below("data")
    superseded = _Below("superseded")
    compiled = _Below("cache", "compiled")
    policies = _Below("policy")
    states = _Below("state")
    """What learning needs to go on from a policy, one folder for each attempt that wrote some."""
    critics = _Below("critic")
    trainers = _Below("trainer")
    """Critics and trainer states of runs and trainers that commit them with the policy."""
    references = _Below("reference")
    """Averages of policies that are the KL's reference (algorithm.kl.sync_weight)."""
    slurm = _Below("slurm")
    control = _Below("slurm", "control.json")
    forecast = _Below("forecast.json")
    """What was expected of the run when it began."""
    iterations = _Below("iterations")
    log_root = _Below("logs")
    slurm_log = _Below("logs", "slurm.log")
    """What Slurm itself prints of jobs of stages, and what jobs print that cannot write their logs."""

    @property
    def of_updates(self) -> tuple[Path, ...]:
        """Folders below which an update has a folder of its own."""
        return (self.policies, self.critics, self.trainers, self.references)

    def submissions(self, iteration: int) -> Path:
        """Return the folder of what was submitted to Slurm for an iteration."""
        return self.slurm / f"{iteration:05d}"

    def endings(self, iteration: int) -> Path:
        """Return the file that says how attempts at an iteration's tasks ended."""
        return self.submissions(iteration) / "endings.json"

    def logs(self, task: Task) -> Path:
        return self.log_root / f"{task.iteration:05d}-{task.job_kind}"

    def task(self, task: Task) -> "TaskPaths":
        return TaskPaths(self, task)

    def relative(self, path: Path) -> str:
        """Return ``path`` as records name it: relative to the run directory, with forward slashes."""
        return path.relative_to(self.root).as_posix()


def holds_identity(root: Path) -> bool:
    """Whether a directory holds a run's identity or the copy of it, as this machine remembers. Raises
    PermissionError in one that may not be read."""
    return RunPaths(root).run_json.exists() or RunPaths(root).run_copy.exists()


OWN_NAMES = frozenset(below.names[0] for below in vars(RunPaths).values() if isinstance(below, _Below))
"""Names in a run's directory that the run itself makes."""


def data_name(task: Task, attempt: str, part: str = "", suffix: str = "arrow") -> str:
    """Return the name of a data file, without its folder."""
    return ".".join(word for word in (task.file_stem, part, attempt, suffix) if word)


@dataclass(frozen=True)
class TaskPaths:
    """Paths of one task."""

    run: RunPaths
    task: Task

    @property
    def folder(self) -> Path:
        if self.task.stage is Stage.PREPARE:
            return self.run.data
        return self.run.iterations / f"{self.task.iteration:05d}/{self.task.job_kind}"

    @property
    def record(self) -> Path:
        """Commit record: the task is done if and only if it exists and what it names verifies."""
        return self.folder / self.task.record_name

    @property
    def thinned(self) -> Path:
        """Marker that names what of the commit was removed on purpose; see :mod:`pipeline.run.retention`."""
        return self.folder / f"{self.task.file_stem}.thinned.json"

    def data(self, attempt: str, part: str = "", suffix: str = "arrow") -> Path:
        """Return a data file of one attempt; if it has several, all but the main one have a ``part``."""
        return self.folder / data_name(self.task, attempt, part, suffix)

    def partial(self, attempt: str, save: str) -> Path:
        """Return the data file of one save of an unfinished attempt; every save has an id of its own."""
        return self.data(attempt, "partial", f"{save}.arrow")

    def partial_record(self, attempt: str) -> Path:
        """Return the file that names the data of an attempt's latest save."""
        return self.data(attempt, "partial", "json")

    def partial_records(self) -> list[Path]:
        """List :meth:`partial_record` of every attempt at this task that saved something, sorted by name."""
        names = fnmatch.filter(names_in(self.folder), f"{self.task.file_stem}.partial.*.json")
        return [self.folder / name for name in sorted(names)]

    def claims(self) -> list[Path]:
        """List the files by which workers have claimed the task (:mod:`pipeline.workers.claims`)."""
        names = fnmatch.filter(names_in(self.folder), f"{self.task.file_stem}.claim-*.json")
        return [self.folder / name for name in sorted(names)]

    def policy(self, attempt: str) -> Path:
        return self.run.policies / f"{self.task.iteration:05d}.{attempt}"

    def reference(self, attempt: str) -> Path:
        return self.run.references / f"{self.task.iteration:05d}.{attempt}"

    def state(self, attempt: str) -> Path:
        return self.run.states / f"{self.task.iteration:05d}.{attempt}"

    def critic(self, attempt: str) -> Path:
        return self.run.critics / f"{self.task.iteration:05d}.{attempt}"

    def trainer(self, attempt: str) -> Path:
        return self.run.trainers / f"{self.task.iteration:05d}.{attempt}"

    def attempt_logs(self, attempt_number: int) -> Path:
        return self.run.logs(self.task) / f"attempt-{attempt_number}"

    def log(self, attempt_number: int) -> Path:
        """Return the file of one attempt's standard output and error."""
        return self.attempt_logs(attempt_number) / f"{self.task.file_stem}.log"

    def failure(self, attempt_number: int) -> Path:
        """Return the failure file: why an attempt failed, written by the attempt itself."""
        return self.attempt_logs(attempt_number) / f"{self.task.file_stem}.failure.json"


def rank_log(log: Path, rank: int) -> Path:
    """Return the log of one of several ranks: the first one's own, a file beside it for each other."""
    return log.with_suffix(f".rank-{rank}{log.suffix}") if rank else log


ADAPTER = "adapter"
"""Folder of a policy directory that holds the peft adapter, with update.lora."""
BASE = "base.json"
"""File of a policy directory that holds no model, but the adapter of one: says of which."""
