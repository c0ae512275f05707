"""A run on a real Slurm and a colleague of its owner's, both Unix users: he looks on, and takes it over.

Makes two users and a group on this machine, and removes them: for `make soak`, as root.
"""

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run.control import read_control
from pipeline.run.paths import RunPaths
from slurm.devcluster import PracticeCluster
from tests.cluster.conftest import start_cluster
from tests.cluster.scenario import SHARDS, policy_of, queue_of, record_path, take
from tests.support import ROOT, tiny
from tests.support.tables import IS_SOAK

pytestmark = pytest.mark.skipif(not IS_SOAK or os.getuid() != 0, reason="makes users: make soak, as root")

GROUP, OWNER, MATE = "ppolab", "ppoowner", "ppomate"
_PATIENCE = 240.0


@pytest.fixture(scope="module")
def users() -> Iterator[None]:
    def call(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    call("groupadd", GROUP)
    try:
        for name in (OWNER, MATE):
            call("useradd", "-M", "-G", GROUP, name)
        yield
    finally:
        for name in (OWNER, MATE):
            subprocess.run(["userdel", name], check=False, capture_output=True)
        subprocess.run(["groupdel", GROUP], check=False, capture_output=True)


def python_of_all() -> str:
    """An interpreter like this one that other users may start."""
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for name in (sys.executable, system):
        folders = Path(os.path.realpath(name)).parents
        if Path(name).exists() and all(folder.stat().st_mode & 0o001 for folder in folders):
            return name
    return pytest.skip("no Python that other users may start")


@dataclass(frozen=True)
class Lab:
    """A folder of a group's on a cluster that its members may use."""

    cluster: PracticeCluster
    folder: Path
    environment: dict[str, str]

    def command(self, user: str, *words: object) -> list[str]:
        typed = ["-m", "pipeline", *map(str, words)]
        become = ["setpriv", f"--reuid={user}", f"--regid={GROUP}", "--init-groups"]
        return [*become, "sh", "-c", 'umask 002; exec "$@"', "sh", python_of_all(), *typed]

    def type(self, user: str, *words: object) -> subprocess.CompletedProcess[str]:
        packages = os.pathsep.join([str(ROOT), *site.getsitepackages()])
        home = {"HOME": str(self.folder / f"home-{user}"), "PYTHONPATH": packages}
        return subprocess.run(
            self.command(user, *words),
            env=self.environment | self.cluster.environment() | home,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )

    def jobs(self, user: str) -> list[str]:
        return [job.id for job in queue_of(self.cluster, f"--user={user}")]


@pytest.fixture
def lab(users: None, inputs: Path, environment: dict[str, str]) -> Iterator[Lab]:
    base = Path(tempfile.mkdtemp(prefix="ppolab-"))  # pytest's own folders are root's alone
    cluster = start_cluster(base / "cluster")
    let_in(cluster.folder)
    folder = base / "lab"
    folder.mkdir()
    shutil.chown(folder, group=GROUP)
    folder.chmod(0o2775)
    shutil.copytree(inputs, folder / "inputs")
    subprocess.run(["chmod", "-R", "a+rX", folder / "inputs"], check=True)
    for user in (OWNER, MATE):
        (folder / f"home-{user}").mkdir()
        shutil.chown(folder / f"home-{user}", user)
    yield Lab(cluster, folder, environment)
    cluster.stop()
    shutil.rmtree(base, ignore_errors=True)


def let_in(folder: Path) -> None:
    """Let other users of this machine ask a cluster."""
    for above in (folder, *folder.parents):
        if above not in (Path("/"), Path("/tmp")):
            above.chmod(above.stat().st_mode | 0o755)
    for name in ("dev", "spool", "log", "run", "tmp"):
        if (folder / name).is_dir():
            (folder / name).chmod(0o755)
    for file in folder.glob("*.conf"):
        if file.name != "slurmdbd.conf":
            file.chmod(0o644)


def wait_for(is_so, what: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.3)


def test_a_colleague_looks_on_is_refused_and_takes_the_run_over_to_the_same_end(lab, long_local_run):
    root = lab.folder / "run"
    more = (f"rollout.num_shards={SHARDS}", "iterations=6", "scheduler=devcluster", *take("0.5", "rollout"))
    words = tiny.overrides(lab.folder / "inputs", root, *more)
    done = lab.type(OWNER, "submit", *words)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: record_path(root, 1, "update", 0).exists(), "the first policy")

    seen = lab.type(MATE, "status", root)
    assert f"runs as {OWNER} on cluster {lab.cluster.identity.name}; last commit " in " ".join(
        seen.stdout.split()
    )
    assert "resume" not in seen.stdout
    assert json.loads(lab.type(MATE, "status", root, "--json").stdout)["state"] == "running"

    for command in ("submit", "cancel"):
        refused = lab.type(MATE, command, root)
        assert refused.returncode == 2, refused.stdout
        assert f"was submitted by {OWNER}" in refused.stderr
        assert "--take-over" in refused.stderr
    assert not lab.jobs(MATE)
    assert lab.jobs(OWNER)
    assert not read_control(RunPaths(root)).cancelled

    taken = lab.type(MATE, "resume", root, "--take-over")
    assert taken.returncode == 0, taken.stderr
    assert f"taken over from {OWNER}" in taken.stderr
    wait_for(lambda: not lab.jobs(OWNER), "the end of the owner's jobs")
    assert policy_of(root, 6) == policy_of(long_local_run, 6)
    rows = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row["event"] == "failed"]
    assert lab.type(OWNER, "submit", root).returncode == 2
