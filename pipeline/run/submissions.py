"""Submissions to Slurm, on disk: a small file per array, written before sbatch is called.

``<run>/slurm/00007/rollout-1-0.json`` says what is being submitted, and holds the task list that the array's
elements read. It is made by hard link, so that of two drivers one gets the number. ``rollout-1-0.state.json``
beside it says what became of it: the job id, what a driver job waits for, which elements were cancelled. A
crash between sbatch and noting its answer leaves a submission without a job id, which is then looked for by
its name.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pipeline.config.conversion import converted, plain
from pipeline.config.job_kinds import DRIVERS
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.packed import BadArchive, packed_below, read_file
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import JOB_KIND_PATTERN, Task, task_of
from slurm.limits import ClusterLimits, read_limits
from slurm.sharedfiles import make_folder, names_in, read_newest, sealed, unsealed

SUBMITTED = "submitted"
"""Name of the event of a submission in the journal."""
PROJECT = "slurm-ppo"
"""Begin of the names of all jobs, by which an administrator knows whose they are."""
_LONGEST_NAME, _HEAD = 64, 40
"""Characters of a run's name in a job's name, and how many of them are its first where it is longer."""
_UNUSABLE = re.compile(r"[^A-Za-z0-9_.-]")
_FILE = re.compile(rf"({JOB_KIND_PATTERN})-(\d+)-(\d+)\.json")


@dataclass(frozen=True)
class State:
    """State of a submission since sbatch. Written by drivers that hold the lease."""

    job: str | None = None
    """Slurm's id of the array."""
    waits_for: tuple[str, ...] = ()
    """Ids of the arrays that the dependency of a driver job names."""
    is_withdrawn: bool = False
    """Cancellation by slurm-ppo, as the run went back, or its job never came: its end is no failure."""
    withdrawn: tuple[int, ...] = ()
    """Indices of elements that slurm-ppo cancelled while they waited, whose end is no failure."""
    hurried: tuple[int, ...] = ()
    """Indices of elements that no longer wait for the time at which it begins."""


@dataclass(frozen=True)
class Submission:
    """One array job of a run."""

    name: str
    """Job name: unique, so that the job can be found by it."""
    iteration: int
    job_kind: str
    """Job kind of its tasks, or which driver job it is."""
    number: int
    """Number among the submissions of a job kind in an iteration; names the folder of the logs."""
    chunk: int
    """Part of an array that is split, being longer than allowed: index + chunk * chunk_size is the shard."""
    chunk_size: int
    invocation: int
    """Number of the invocation of submit, run or resume that it belongs to."""
    created: float
    module: str
    arguments: tuple[str, ...]
    elements: Mapping[str, tuple[str, ...]]
    """Arguments of each array element alone, by array index."""
    max_restarts: int
    begins: float | None = None
    """Unix time before which it does not start; None: as soon as there is room."""
    known: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest claim on its task that the pass knew of, by array index; none is 0."""
    settings: int = 0
    """Number of changes of the run's settings that it was submitted with."""
    state: State = State()

    @property
    def is_of_stage(self) -> bool:
        return self.job_kind not in DRIVERS

    @property
    def indices(self) -> list[int]:
        return [int(index) for index in self.elements]

    def task(self, index: int) -> Task:
        return task_of(self.iteration, self.job_kind, index + self.chunk * self.chunk_size)

    def begin_of(self, index: int) -> float | None:
        """Return the unix time before which an element does not start; None: as soon as there is room."""
        return None if index in self.state.hurried else self.begins

    def element_name(self, index: int) -> str:
        """Return the id of an element, without its restart: its attempts are named by numbers of claims. One
        that never got a job is named by its file."""
        return f"{self.state.job or self.stem}_{index}"

    @property
    def stem(self) -> str:
        """Name of its files, without their endings."""
        return f"{self.job_kind}-{self.number}-{self.chunk}"

    def tasks(self) -> Iterator[tuple[int, Task]]:
        for index in self.indices if self.is_of_stage else ():
            yield index, self.task(index)

    def log_folder(self, paths: RunPaths) -> Path:
        """Return the folder of its elements' output: of workers apart from the logs of tasks, which are named
        by the numbers of claims."""
        folder = paths.log_root / f"{self.iteration:05d}-{self.job_kind}"
        return folder / f"{'worker' if self.is_of_stage else 'attempt'}-{self.number}"

    def log(self, paths: RunPaths, task: Task) -> Path:
        """Return the file of the output of the element that begins with a task."""
        return self.log_folder(paths) / f"{task.file_stem}.log"

    def own_log(self, paths: RunPaths, task: Task) -> str:
        """Return the path of the output of a worker that takes no task, relative to the run."""
        return paths.relative(self.log(paths, task))


@dataclass(frozen=True)
class Ledger:
    """The submissions of one run."""

    paths: RunPaths

    def load(self, iterations: Iterable[int]) -> list[Submission]:
        """Return the submissions of some iterations, by iteration, job kind, number and chunk."""
        found = []
        for iteration in sorted(set(iterations)):
            for name in self._names(iteration):
                if _FILE.fullmatch(name):
                    # Skip the file of an old guard, just forgotten, or one that is spoilt: its tasks are then
                    # submitted again, and the commit protocol lets one attempt win.
                    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                        found.append(self._read(iteration, name))
        return sorted(found, key=lambda s: (s.iteration, s.job_kind, s.number, s.chunk))

    def named(self, names: Iterable[str]) -> list[Submission]:
        """Return the submissions of jobs with these names (:func:`job_name`), as far as they can be read."""
        found = []
        for name in sorted(set(names)):
            if (of := parse_job_name(name)) is None:
                continue
            if (file := f"{of.job_kind}-{of.number}-{of.chunk}.json") in self._names(of.iteration):
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                    found.append(self._read(of.iteration, file))
        return found

    def next_number(self, iteration: int, job_kind: str) -> int:
        names = map(_FILE.fullmatch, self._names(iteration))
        return 1 + max((int(name[2]) for name in names if name and name[1] == job_kind), default=0)

    def _names(self, iteration: int) -> set[str]:
        """Return the names of the files of an iteration's submissions, packed ones too."""
        folder = self.paths.submissions(iteration)
        try:
            return names_in(folder) | packed_below(self.paths, iteration, folder)
        except BadArchive:  # what an old iteration was submitted as has ended
            return names_in(folder)

    def _read(self, iteration: int, name: str) -> Submission:
        """Read a submission whose folder has just been listed. Raises as :func:`read_file`, and what a
        spoilt one raises."""
        path = self.paths.submissions(iteration) / name
        content = unsealed(read_file(self.paths, iteration, path))
        content.pop("writer", None)
        submission: Submission = converted(Submission, content)
        try:
            state = unsealed(read_file(self.paths, iteration, _state_file(path)))
            return replace(submission, state=converted(State, state))
        except (FileNotFoundError, ValueError, TypeError):  # its job is then looked for by its name
            return submission

    def files(self, submission: Submission, indices: Iterable[int]) -> Iterator[str]:
        """Yield the files of a submission, and the logs of some of its elements, by paths relative to the
        run."""
        path, folder = self.file(submission), submission.log_folder(self.paths)
        logs = [folder / f"{submission.job_kind}.log"]
        if submission.is_of_stage:
            logs = [submission.log(self.paths, submission.task(index)) for index in indices]
        yield from map(self.paths.relative, (path, _state_file(path), self.script(submission), *logs))

    def begin(self, submission: Submission) -> bool:
        """Write what is about to be submitted, by hard link. False when another driver took the number."""
        path = self.file(submission)
        make_folder(path.parent, self.paths.root)
        content = plain(submission)
        del content["state"]
        # Clocks may agree to the last digit, and the winner is found by content: see durable.py.
        content["writer"] = os.urandom(8).hex()
        return link_once(path, sealed(content))

    def note(self, submission: Submission, state: State) -> Submission:
        """Write the state of a submission. Returns the submission as it is now."""
        path = _state_file(self.file(submission))
        if not path.parent.is_dir():  # packed, and of a job that comes late
            make_folder(path.parent, self.paths.root)
        replace_durably(path, sealed(plain(state)))
        return replace(submission, state=state)

    def forget(self, submission: Submission) -> None:
        """Remove the files of a submission that has no job left, and will have none."""
        path = self.file(submission)
        for file in (path, _state_file(path), self.script(submission)):
            file.unlink(missing_ok=True)

    def file(self, submission: Submission) -> Path:
        return self.paths.submissions(submission.iteration) / f"{submission.stem}.json"

    def script(self, submission: Submission) -> Path:
        return self.file(submission).with_suffix(".sh")


def _state_file(path: Path) -> Path:
    return path.with_suffix(".state.json")


def note_submitted(paths: RunPaths, submission: Submission, job: str, waits_for: str) -> None:
    """Write into the journal that Slurm took a submission, with the dependency that it was given."""
    count = len(submission.elements)
    journal.event(
        paths.events, SUBMITTED, job=job, array=submission.name, elements=count, waits_for=waits_for
    )


class JobName(NamedTuple):
    """What a job's name says: to people, who see it in squeue, and to every pass, which finds jobs by it."""

    run_id: str
    iteration: int
    job_kind: str
    number: int
    chunk: int


_NAME = re.compile(rf"{PROJECT}\..+\.({JOB_KIND_PATTERN})\.iter(\d+)\.([^.]+)\.(\d+)\.(\d+)")


def job_name(run_name: str, run_id: str, iteration: int, job_kind: str, number: int, chunk: int) -> str:
    """Return the name of an array: project, run, stage and iteration for people, and what makes it unique
    among all submissions. At most 160 characters, whatever the run's name is."""
    known = _UNUSABLE.sub("_", run_name)
    if len(known) > _LONGEST_NAME:  # runs of a sweep differ at the end
        known = f"{known[:_HEAD]}..{known[_HEAD + 2 - _LONGEST_NAME :]}"
    return f"{PROJECT}.{known}.{job_kind}.iter{iteration}.{run_id}.{number}.{chunk}"


def parse_job_name(name: str) -> JobName | None:
    """Return what a job's name says (:func:`job_name`); None where it is no such name."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    job_kind, iteration, run_id, number, chunk = found.groups()
    return JobName(run_id, int(iteration), job_kind, int(number), int(chunk))


def is_job_of(run_id: str, name: str) -> bool:
    return bool(run_id) and run_id_of(name) == run_id


def run_id_of(name: str) -> str:
    """Return the run's id in a job's name (:func:`job_name`); empty where it is no such name."""
    found = parse_job_name(name)
    return found.run_id if found else ""


def job_kind_of(name: str) -> str:
    """Return the job kind in a job's name (:func:`job_name`); empty where it is no such name."""
    found = parse_job_name(name)
    return found.job_kind if found else ""


def is_driver_job(name: str) -> bool:
    """Whether a job, of whatever run, only makes passes."""
    return job_kind_of(name) in DRIVERS


def chunks_of(shards: Sequence[int], chunk_size: int) -> dict[int, list[int]]:
    """Return chunk -> array indices, such that index + chunk * chunk_size is the shard."""
    chunks: dict[int, list[int]] = {}
    for shard in sorted(shards):
        chunks.setdefault(shard // chunk_size, []).append(shard % chunk_size)
    return chunks


def chunk_size_for(max_array_size: int) -> int:
    """Return the largest power of ten (up to 100,000) that fits arrays, so that logs can be named by shard.

    Slurm pads an array index with zeros; a chunk's leading digits are written before it.
    """
    return int(10 ** min(5, len(str(max_array_size)) - 1))


def read_limits_of(paths: RunPaths, qos: Collection[str] = ()) -> ClusterLimits:
    """Return the cluster's limits, asked once in each invocation of submit, run or resume, and kept.

    Args:
        qos: names of the QOS that the run's jobs are submitted with.
    """
    path, invocation = _limits_file(paths), read_control(paths).invocation
    # Where the file is spoilt, or of another invocation, the cluster is asked again.
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        kept = unsealed(read_newest(path))
        if kept["invocation"] == invocation:
            return converted(ClusterLimits, kept["limits"])
    limits = read_limits(qos)
    make_folder(path.parent, paths.root)
    replace_durably(path, sealed({"invocation": invocation, "limits": asdict(limits)}))
    return limits


def kept_limits(paths: RunPaths) -> ClusterLimits | None:
    """Return the limits of the cluster that the newest invocation submitted to; None where they are not
    known."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        kept: ClusterLimits = converted(ClusterLimits, unsealed(read_newest(_limits_file(paths)))["limits"])
        return kept
    return None


def cluster_of(paths: RunPaths) -> str:
    """Return the name of the cluster that the newest invocation submitted to; empty where it is not known."""
    limits = kept_limits(paths)
    return limits.name if limits else ""


def _limits_file(paths: RunPaths) -> Path:
    return paths.slurm / "cluster.json"
