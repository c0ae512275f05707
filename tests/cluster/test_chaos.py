"""Faults of every kind at random moments of one run, several at a time; nobody lends a hand.

A round of ``make soak`` is long: disks are full for minutes, nodes stay away. That of ``make test`` is short.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slurm.devcluster import Layout
from slurm.devcluster.layout import NODES
from tests.cluster.scenario import SlurmRun, policy_of, processes_of, results_of, take
from tests.support import tiny
from tests.support.damage import DAMAGES, flip_bit

IS_LONG = "SOAK_ROUNDS" in os.environ
ITERATIONS, FAULTS, PAUSE = (6, 14, (2.0, 9.0)) if IS_LONG else (3, 6, (1.0, 4.0))
FULL_SECONDS = (60.0, 150.0) if IS_LONG else (5.0, 15.0)
WORDS = (f"iterations={ITERATIONS}", "rollout.num_shards=4", "evaluate.every=2")
PATIENCE = 1500
LAYOUT = Layout(slurmd_timeout=5, more=("MessageTimeout=5",)).with_machines(
    ["rollout0=twin", "reward0=twin"], ["reward0=90"]
)
"""Two nodes of one name, one of them with a clock that is ahead; where there is no root, one machine."""
WITHOUT_A_COPY = ("run.json", "config.yaml")
"""What nothing else says: a flipped bit there stops the run with a message, see tests/run/test_runs.py."""


def words(inputs: Path) -> tuple[str, ...]:
    return (*WORDS, f"data.heldout={inputs / 'heldout.jsonl'}")


@pytest.fixture(scope="session")
def undisturbed(inputs, slurm_ppo, tmp_path_factory) -> Path:
    """The same run on one machine."""
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    done = slurm_ppo("run", *tiny.overrides(inputs, root, *words(inputs)))
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, where one can be mounted, that a test may fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    is_mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder]).returncode
    yield folder
    if is_mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass
class Gremlin:
    """Does harm, and mends later what a run is not meant to mend: nodes, disks, sleeping processes."""

    run: SlurmRun
    chance: random.Random
    told: list[str] = field(default_factory=list)
    _mending: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)

    def tell(self, what: str) -> None:
        self.told.append(f"{time.strftime('%H:%M:%S')} {what}")
        print(self.told[-1], flush=True)

    def do_harm(self) -> None:
        often = (kill, kill, freeze, freeze, flip, flip, spoil, spoil)
        fault = self.chance.choice((*often, cut_off, lose_node, put_back, cancel, fill, type_at_once))
        with contextlib.suppress(FileNotFoundError, IndexError):  # the file or job has just gone
            fault(self)

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


def kill(gremlin: Gremlin) -> None:
    job = gremlin.chance.choice(gremlin.run.jobs("RUNNING"))
    if send(job, signal.SIGKILL):
        gremlin.tell(f"kill -9 {job.name} {job.id}")


def put_back(gremlin: Gremlin) -> None:
    job = gremlin.chance.choice(gremlin.run.jobs("RUNNING"))
    if not gremlin.run.cluster.call("scontrol", "requeue", job.id).returncode:
        gremlin.tell(f"{job.name} {job.id} is put back into the queue")


def cancel(gremlin: Gremlin) -> None:
    """One job, and not by slurm-ppo."""
    job = gremlin.chance.choice(gremlin.run.jobs())
    if not gremlin.run.cluster.call("scancel", job.id).returncode:
        gremlin.tell(f"scancel {job.name} {job.id}")


def type_at_once(gremlin: Gremlin) -> None:
    """Two people have the run go on, in the same moment."""
    both = [gremlin.run.begin("submit", gremlin.run.root) for _ in range(2)]
    gremlin.tell("submit is typed twice")
    for one in both:
        one.communicate(timeout=PATIENCE)


def freeze(gremlin: Gremlin) -> None:
    """A job's processes stand still, longer than a lease lives or shorter, and wake."""
    job = gremlin.chance.choice(gremlin.run.jobs("RUNNING"))
    seconds = gremlin.chance.choice((2.0, 15.0, 140.0 if IS_LONG else 15.0))
    if pids := send(job, signal.SIGSTOP):
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
        ):
            first = path.relative_to(root).parts[0]
            kinds.setdefault((first, re.sub("[0-9].*", "", path.parent.name), path.suffix), []).append(path)
    path = gremlin.chance.choice(kinds[gremlin.chance.choice(sorted(kinds))])
    gremlin.tell(f"a bit of {path.relative_to(root)} flips")
    flip_bit(path)


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
    path = gremlin.chance.choice([p for p in found if p.is_file() and not p.is_symlink()])
    with contextlib.suppress(OSError):  # one is a pipe by now, or the disk is full
        DAMAGES[what](path)
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


def says_complete(run: SlurmRun) -> bool:
    done = run.command("status", run.root, "--json")
    return done.returncode == 0 and json.loads(done.stdout)["state"] == "complete"


def assert_is_complete(run: SlurmRun, undisturbed: Path) -> None:
    assert [row["iteration"] for row in run.rows()] == list(range(1, ITERATIONS + 1)), run.story()
    assert run.policy() == policy_of(undisturbed, ITERATIONS), run.story()


def hurry(run: SlurmRun) -> None:
    """What waits for a later time need not wait for so long."""
    waiting = [job.id.partition("_")[0] for job in run.jobs("PENDING") if job.reason == "BeginTime"]
    for job in waiting:
        run.cluster.call("scontrol", "update", f"jobid={job}", "StartTime=now")


@pytest.mark.soak
@pytest.mark.timeout(2 * PATIENCE)
def test_whatever_happens_a_run_ends_by_itself_as_it_would_have(
    own_cluster, make_run, inputs, undisturbed, chance, small_disk
):
    cluster = own_cluster(LAYOUT if os.geteuid() == 0 else replace(LAYOUT, nodes=NODES))
    run = make_run(
        cluster,
        small_disk / "run",
        *words(inputs),
        *take("0.3", "rollout", "reward"),
        *take("1", "update"),
        "scheduler.max_attempts=30",
        "scheduler.driver.partition=all",
    )
    run.submit()
    gremlin = Gremlin(run, chance)
    until = time.monotonic() + PATIENCE
    for _ in range(FAULTS):
        time.sleep(chance.uniform(*PAUSE))
        if says_complete(run):  # nobody looks at its files any more, but for who asks doctor
            assert_is_complete(run, undisturbed)
            break
        gremlin.do_harm()
        gremlin.mend()
    while not (says_complete(run) and gremlin.has_all_mended and not run.jobs()):
        assert time.monotonic() < until, "\n".join([*gremlin.told, run.story()])
        time.sleep(2)
        gremlin.mend()
        if gremlin.has_all_mended or not IS_LONG:
            hurry(run)
    assert_is_complete(run, undisturbed)
    assert_rows_are_as_they_would_have_been(run, undisturbed)


def assert_rows_are_as_they_would_have_been(run: SlurmRun, undisturbed: Path) -> None:
    """Where a record was lost, a row lacks what only it knew, and says so."""
    for row, expected in zip(results_of(run.root), results_of(undisturbed), strict=True):
        if "records_lost" not in row:
            assert row == expected
