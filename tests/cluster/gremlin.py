"""Harm of every kind, at random: to jobs, nodes, disks, and to any file of a run."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.job_kinds import DRIVERS
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Doing, read_beats
from slurm.sharedfiles import unsealed
from tests.cluster.scenario import Job, SlurmRun, element_of, processes_of
from tests.support.damage import DAMAGES, flip_bit

IS_LONG = "SOAK_ROUNDS" in os.environ
FULL_SECONDS = (60.0, 150.0) if IS_LONG else (5.0, 15.0)
PATIENCE = 1500
WITHOUT_A_COPY = ("run.json", "config.yaml")
"""What nothing else says: a flipped bit there stops the run with a message, see tests/run/test_runs.py."""


@dataclass
class Gremlin:
    """Does harm, and mends later what a run is not meant to mend: nodes, disks, sleeping processes."""

    run: SlurmRun
    chance: random.Random
    told: list[str] = field(default_factory=list)
    hits: int = 0
    """Faults that hit a task or a pass at work, or files that were read or replaced afterwards."""
    harmed: list["HarmedFile"] = field(default_factory=list)
    _mending: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)

    def tell(self, what: str) -> None:
        self.told.append(f"{time.strftime('%H:%M:%S')} {what}")
        print(self.told[-1], flush=True)

    def do_harm(self) -> None:
        often = (kill, kill, freeze, freeze, flip, flip, spoil, spoil)
        fault = self.chance.choice((*often, cut_off, lose_node, put_back, cancel, fill, type_at_once))
        with contextlib.suppress(FileNotFoundError, IndexError):  # the file or job has just gone
            fault(self)

    def choose_running(self) -> tuple[Job, bool]:
        """Return a running job, one that is at work if there is any, and whether it is."""
        running = [job for job in self.run.jobs("RUNNING") if not self.spares(job)]
        at_work = [job for job in running if is_at_work(self.run, job)]
        return self.chance.choice(at_work or running), bool(at_work)

    def spares(self, job: Job) -> bool:
        """Whether a job is the last that makes passes: without one a run has ended until people submit it.
        While the disk is full, or a lease is spoilt for two minutes, no other can be submitted."""
        return job.stage in DRIVERS and sum(one.stage in DRIVERS for one in self.run.jobs()) == 1

    def count_hits(self) -> int:
        """Return how many faults hit something, by now."""
        return self.hits + sum(file.was_noticed() for file in self.harmed)

    def harm(self, path: Path, do: Callable[[Path], object]) -> None:
        """Change a file, and remember that, to see later whether it was read."""
        do(path)
        self.harmed.append(HarmedFile.of(path))

    def mend_later(self, seconds: float, what: str, mend: Callable[[], object]) -> None:
        self._mending.append((time.monotonic() + seconds, what, mend))

    def is_mended_later(self, what: str) -> bool:
        return any(name == what for _, name, _ in self._mending)

    def mend(self, all_of_it: bool = False) -> None:
        """What is due."""
        now = time.monotonic()
        due = [entry for entry in self._mending if all_of_it or entry[0] <= now]
        self._mending = [entry for entry in self._mending if entry not in due]
        for _, what, mend in due:
            self.tell(f"mended: {what}")
            mend()

    @property
    def has_all_mended(self) -> bool:
        return not self._mending


@dataclass(frozen=True)
class HarmedFile:
    """A file as it was after it was harmed, on a disk that notes times of access (strictatime)."""

    path: Path
    inode: int
    accessed: int

    @classmethod
    def of(cls, path: Path) -> "HarmedFile":
        status = path.lstat()
        return cls(path, status.st_ino, status.st_atime_ns)

    def was_noticed(self) -> bool:
        """Whether it was read, replaced or removed since."""
        try:
            status = self.path.lstat()
        except OSError:
            return True
        return (status.st_ino, status.st_atime_ns) != (self.inode, self.accessed)


def is_at_work(run: SlurmRun, job: Job) -> bool:
    """Whether a job's worker is at a task; of one without a beat: whether it makes passes."""
    beats = [b for b in read_beats(RunPaths(run.root)).values() if element_of(b) == job.id]
    return any(b.doing is Doing.BUSY for b in beats) or (not beats and job.stage in DRIVERS)


def kill(gremlin: Gremlin) -> None:
    job, is_hit = gremlin.choose_running()
    if send(job, signal.SIGKILL):
        gremlin.hits += is_hit
        gremlin.tell(f"kill -9 {job.name} {job.id}")


def put_back(gremlin: Gremlin) -> None:
    job, is_hit = gremlin.choose_running()
    if not gremlin.run.cluster.call("scontrol", "requeue", job.id).returncode:
        gremlin.hits += is_hit
        gremlin.tell(f"{job.name} {job.id} is put back into the queue")


def cancel(gremlin: Gremlin) -> None:
    """One job, and not by slurm-ppo."""
    job = gremlin.chance.choice([job for job in gremlin.run.jobs() if not gremlin.spares(job)])
    is_hit = is_at_work(gremlin.run, job)
    if not gremlin.run.cluster.call("scancel", job.id).returncode:
        gremlin.hits += is_hit
        gremlin.tell(f"scancel {job.name} {job.id}")


def type_at_once(gremlin: Gremlin) -> None:
    """Two people have the run go on, in the same moment."""
    both = [gremlin.run.begin("submit", gremlin.run.root) for _ in range(2)]
    gremlin.tell("submit is typed twice")
    for one in both:
        one.communicate(timeout=PATIENCE)


def freeze(gremlin: Gremlin) -> None:
    """A job's processes stand still, longer than a lease lives or shorter, and wake."""
    job, is_hit = gremlin.choose_running()
    seconds = gremlin.chance.choice((2.0, 15.0, 140.0 if IS_LONG else 15.0))
    if pids := send(job, signal.SIGSTOP):
        gremlin.hits += is_hit
        gremlin.tell(f"{job.name} {job.id} stands still for {seconds:g} s")
        gremlin.mend_later(seconds, f"{job.name} wakes", lambda: wake(pids))


def send(job, number: int) -> list[int]:
    pids = list(processes_of(job))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def wake(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut_off(gremlin: Gremlin) -> None:
    """A node's daemon is gone, its tasks work on: copies of them start elsewhere or later."""
    lose(gremlin, "is cut off", gremlin.run.cluster.kill_slurmd)


def lose_node(gremlin: Gremlin) -> None:
    lose(gremlin, "is lost", gremlin.run.cluster.kill_node)


def lose(gremlin: Gremlin, how: str, do: Callable[[str], None]) -> None:
    node = gremlin.chance.choice([n.name for n in gremlin.run.cluster.layout.nodes])
    if gremlin.is_mended_later(node):
        return
    gremlin.hits += any(
        job.node == node and is_at_work(gremlin.run, job) for job in gremlin.run.jobs("RUNNING")
    )
    gremlin.tell(f"{node} {how}")
    do(node)
    gremlin.mend_later(gremlin.chance.uniform(5, 40), node, lambda: gremlin.run.cluster.start_node(node))


def flip(gremlin: Gremlin) -> None:
    """In any file that the run has written, of any kind."""
    root = gremlin.run.root
    kinds: dict[tuple[str, ...], list[Path]] = {}
    for path in root.rglob("*"):
        if (
            path.is_file()
            and not path.is_symlink()
            and path.stat().st_size
            and path.name not in WITHOUT_A_COPY
            and not is_last_of_two(path)
        ):
            first = path.relative_to(root).parts[0]
            kinds.setdefault((first, re.sub("[0-9].*", "", path.parent.name), path.suffix), []).append(path)
    path = gremlin.chance.choice(kinds[gremlin.chance.choice(sorted(kinds))])
    gremlin.tell(f"a bit of {path.relative_to(root)} flips")
    gremlin.harm(path, flip_bit)


def is_last_of_two(path: Path) -> bool:
    """Whether a file is kept twice, and the other one cannot be read: without both a run stops with a message
    until people remove them, see tests/run/test_control.py."""
    name = path.name
    is_copy = name.endswith(".copy.json")
    other = path.with_name(name.replace(".copy", "")) if is_copy else path.with_suffix(".copy.json")
    if not is_copy and not os.path.lexists(other):
        return False
    try:
        return not other.is_file() or not unsealed(other.read_bytes())
    except (OSError, ValueError):
        return True


def spoil(gremlin: Gremlin) -> None:
    """A file by which drivers and workers understand each other, in whatever way."""
    root, what = gremlin.run.root, gremlin.chance.choice(sorted(DAMAGES))
    patterns = (
        "slurm/control.json",
        "locks/0*.json",
        "slurm/workers/*.json",
        "iterations/*/*/*.claim-*.json",
    )
    found = sorted(root.glob(gremlin.chance.choice(patterns)))
    sound = [p for p in found if p.is_file() and not p.is_symlink() and not is_last_of_two(p)]
    path = gremlin.chance.choice(sound)
    with contextlib.suppress(OSError):  # one is a pipe by now, or the disk is full
        gremlin.harm(path, DAMAGES[what])
        gremlin.tell(f"{path.relative_to(root)}: {what}")


def fill(gremlin: Gremlin) -> None:
    """The last byte of the run's disk is taken for a while."""
    disk = gremlin.run.root.parent
    if gremlin.is_mended_later("the disk") or not disk.is_mount():
        return
    seconds, filler = gremlin.chance.uniform(*FULL_SECONDS), disk / "filler"
    gremlin.tell(f"the disk is full for {seconds:.0f} s")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    gremlin.mend_later(seconds, "the disk", filler.unlink)
