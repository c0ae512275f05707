"""What a worker finds out of the filesystem that its run is on, and what it does there to see what is new."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from pipeline.config.scheduler import ResourcesConfig
from pipeline.decide.choosing import Chosen, Step
from pipeline.run import durable
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task
from pipeline.workers import filesystems
from pipeline.workers.beats import Beat, LiveWorkers
from pipeline.workers.outside import WorkerHost
from slurm import sharedfiles
from stages.workers import waiting
from stages.workers.pulse import Pulse
from stages.workers.waiting import Waiting
from tests.support import reportrun
from tests.support.committed import commit

MOUNTS = r"""
overlay / overlay rw,relatime,lowerdir=/a:/b 0 0
proc /proc proc rw 0 0
server:/export/home /home nfs4 rw,vers=4.2,addr=10.0.0.1 0 0
/dev/sdb1 /home/me/scratch xfs rw,noatime 0 0
10.0.0.2@o2ib:/work /lustre lustre rw,flock 0 0
fast /gpfs/fs1 gpfs rw 0 0
systemd-1 /auto autofs rw,fd=48 0 0
server:/auto /auto nfs rw,vers=3 0 0
server:/my\040data /my\040data cifs rw 0 0
new /new wonderfs rw 0 0
server:/v /gluster fuse.glusterfs rw 0 0
"""
"""Of a machine with filesystems of every kind."""


@pytest.fixture
def mounts(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    monkeypatch.setattr(filesystems, "_MOUNTS", path)
    return path


@pytest.mark.parametrize(
    ("folder", "kind", "is_network", "keeps_listings"),
    [
        ("/runs/first", "overlay", False, False),
        ("/home/me/runs", "nfs4", True, True),
        ("/homes/me", "overlay", False, False),
        ("/home/me/scratch/runs", "xfs", False, False),
        ("/lustre/me/runs", "lustre", True, False),
        ("/gpfs/fs1", "gpfs", True, False),
        ("/gluster/runs", "fuse.glusterfs", True, False),
        ("/auto/me", "nfs", True, True),
        ("/my data/runs", "cifs", True, True),
        ("/new/runs", "wonderfs", True, True),
    ],
)
def test_the_innermost_filesystem_that_was_mounted_last_says_how_its_folders_are_looked_at(
    mounts, folder, kind, is_network, keeps_listings
):
    path = Path(folder)
    assert filesystems.filesystem_of(path) == kind
    assert filesystems.is_network(path) is is_network
    assert filesystems.keeps_listings(path) is keeps_listings


def test_where_nothing_is_known_of_a_filesystem_it_is_looked_at_as_the_most_careful_would(mounts):
    for content in ("", "spoilt\n"):
        mounts.write_text(content)
        assert filesystems.filesystem_of(Path("/runs")) == ""
    mounts.unlink()
    assert filesystems.filesystem_of(Path("/runs")) == ""
    assert filesystems.is_network(Path("/runs"))
    assert filesystems.keeps_listings(Path("/runs"))


def test_this_machine_s_own_table_is_understood(tmp_path):
    assert filesystems.filesystem_of(Path("/proc/self")) == "proc"
    assert filesystems.filesystem_of(tmp_path)


class Client:
    """A network filesystem's client that lists a folder as it was, until it makes a file there itself."""

    def __init__(self) -> None:
        self.cached: dict[Path, set[str]] = {}

    def names_in(self, folder: Path) -> set[str]:
        if folder not in self.cached:
            self.cached[folder] = sharedfiles.names_in(folder)
        return self.cached[folder]

    @contextlib.contextmanager
    def private_file(self, folder: int, name: str) -> Iterator[tuple[str, IO[bytes]]]:
        self.cached.pop(Path(f"/proc/self/fd/{folder}").readlink(), None)
        with durable.private_file(folder, name) as made:
            yield made


@pytest.fixture
def client(monkeypatch) -> Client:
    found = Client()
    monkeypatch.setattr(waiting, "names_in", found.names_in)
    monkeypatch.setattr(waiting, "private_file", found.private_file)
    monkeypatch.setattr(waiting, "is_network", lambda folder: True)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS_ON_NETWORK", 0.2)
    return found


def waiting_worker(run: Run) -> Waiting:
    own = Beat("9_0r0", "rollout", "node", 1, 0.0, since=0.0)
    outside, pulse = WorkerHost(own.worker, str), Pulse(run.paths, own)
    return Waiting(run, "rollout", ResourcesConfig(linger=60), 600.0, outside, pulse, LiveWorkers(run.paths))


def test_who_has_started_up_for_what_is_still_to_come_has_a_pass_see_so(tmp_path):
    """Something that is wanted sooner may wait for its place: it would be seen when a pass is overdue."""
    run, asked = reportrun.make_run(tmp_path / "run"), []
    worker, first = waiting_worker(run), Task(2, Stage.ROLLOUT)
    worker.outside = replace(worker.outside, wanted=lambda: asked.append(1))
    choice = Chosen(Step.WAIT, first, awaited=(frozenset([policy_maker(1)]),))
    for _ in range(2):
        assert worker.go_on(choice, is_first=True) is None
    assert asked == [1], "once"
    worker.wait = None
    assert worker.go_on(choice, is_first=False) is None
    assert asked == [1]


@pytest.mark.parametrize("keeps_listings", [True, False])
def test_who_waits_where_listings_may_be_old_makes_a_file_of_its_own_before_it_looks(
    client, tmp_path, monkeypatch, keeps_listings
):
    monkeypatch.setattr(waiting, "keeps_listings", lambda folder: keeps_listings)
    run = reportrun.make_run(tmp_path / "run")
    worker, update = waiting_worker(run), policy_maker(1)
    choice = Chosen(Step.WAIT, Task(2, Stage.ROLLOUT), awaited=(frozenset([update]),))
    assert worker.go_on(choice, is_first=False) is None
    assert not worker.come
    commit(run, 1)
    assert worker.go_on(choice, is_first=False) is None
    assert worker.come == ({update} if keeps_listings else set())
    left = [path.name for path in run.paths.task(update).folder.iterdir()]
    assert left == [update.record_name], "nothing of the looks"
