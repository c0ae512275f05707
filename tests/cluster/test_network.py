"""What one machine sees of another's work through a network filesystem, caches on: two mounts."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.noop import make_record
from pipeline.orchestrate.row_writer import RowWriter
from pipeline.run import journal
from pipeline.run.commits import opened_history, publish
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.lease import LeaseHeld, LeaseLost, acquire, hold
from pipeline.run.paths import RunPaths
from pipeline.run.superseded import fresh_folder, move_history
from pipeline.run.tasks import Stage, Task
from slurm.devcluster import DevclusterError, PracticeCluster, attach, network, processes
from slurm.devcluster import start as start_cluster
from slurm.sharedfiles import is_there, make_folder, names_in, read_newest, read_shared
from tests.cluster.conftest import NETWORK, without_network
from tests.cluster.scenario import ROOT, policy_of, room_on, take, wait_for
from tests.cluster.test_devcluster import SMALL, related_to
from tests.support.tables import ON_CLUSTER

UPDATE = Task(1, Stage.UPDATE)
AGENT = """
import contextlib, os, sys, time
from pathlib import Path
from benchmarks.noop import make_record
from pipeline.run import journal, lease
from pipeline.run.commits import *
from pipeline.run.durable import *
from pipeline.run.records import Records
from pipeline.run.paths import RunPaths
from pipeline.orchestrate.row_writer import RowWriter
from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import *
from stages.attempts import runner
UPDATE = Task(1, Stage.UPDATE)
kept = contextlib.ExitStack()
known = globals()
print("ready", flush=True)
for line in sys.stdin:
    try:
        name, _, text = line.strip().partition(":=")
        if text:
            known[name] = eval(text, known)
            print("None", flush=True)
        else:
            print(repr(eval(name, known)), flush=True)
    except Exception as error:
        print("!" + repr(error).replace(chr(10), " "), flush=True)
"""


class Elsewhere:
    """A process on a node, which evaluates expressions: ``there("read_newest(Path('...'))")``."""

    def __init__(self, cluster: PracticeCluster, node: str) -> None:
        command = cluster.inside(node, [sys.executable, "-c", AGENT])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        assert self._answer() == "ready"

    def __call__(self, expression: str) -> object:
        self.begin(expression)
        return self.end()

    def begin(self, expression: str) -> None:
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def end(self) -> object:
        answer = self._answer()
        assert not answer.startswith("!"), answer
        return ast.literal_eval(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def there(cluster: PracticeCluster) -> Iterator[Elsewhere]:
    if not cluster.shared:
        pytest.skip(without_network())
    agent = Elsewhere(cluster, "rollout0")
    yield agent
    agent.close()


@pytest.fixture
def room(cluster: PracticeCluster, there: Elsewhere, tmp_path: Path) -> Path:
    """A folder that both see, but each through a mount of its own."""
    return room_on(cluster, tmp_path)


def expire() -> None:
    """Let everything go that a client may remember."""
    time.sleep(network.CACHE_SECONDS + 0.5)


# --- reading ---


def test_a_file_that_another_machine_made_is_there_at_once(there, room):
    path = room / "record.json"
    assert there(f"Path({str(path)!r}).exists()") is False  # which is remembered from now on
    began = time.monotonic()
    path.write_text("made")
    believed = there(f"Path({str(path)!r}).exists()")
    if time.monotonic() - began < network.CACHE_SECONDS - 1:
        assert believed is False, "the mount has caches"
    assert there(f"read_shared(Path({str(path)!r}))") == b"made"
    folder = room / "new" / "folder"
    assert there(f"names_in(Path({str(folder)!r}))") == set()
    folder.mkdir(parents=True)
    (folder / "one").touch()
    assert there(f"names_in(Path({str(folder)!r}))") == {"one"}


def test_a_file_that_another_machine_replaces_or_removes_is_read_as_it_is(there, room):
    path = room / "control.json"
    for turn in range(5):
        replace_durably(path, str(turn))
        assert there(f"read_newest(Path({str(path)!r}))") == str(turn).encode()
    path.unlink()
    assert there(f"is_there(Path({str(path)!r}))") is False
    replace_durably(path, "again")
    there(f"replace_durably(Path({str(path)!r}), 'theirs')")
    assert read_newest(path) == b"theirs"


def test_a_loop_of_replacing_here_and_reading_there_gives_whole_files_in_their_order(there, room):
    path = room / "state.json"
    replace_durably(path, "0" * 1000)
    stop = threading.Event()

    def replace_until_told() -> None:
        number = 0
        while not stop.wait(0.005):
            number += 1
            replace_durably(path, f"{number} " * 500)

    writer = threading.Thread(target=replace_until_told)
    writer.start()
    try:
        there(f"is_time:=lambda: time.time() < {time.time() + 3}")
        seen = there(f"[read_newest(Path({str(path)!r})) for _ in iter(is_time, False)]")
    finally:
        stop.set()
        writer.join()
    numbers = [{int(word) for word in content.split()} for content in seen]
    assert {len(found) for found in numbers} == {1}, "whole files"
    order = [found.pop() for found in numbers]
    assert order == sorted(order)
    assert len(set(order)) > 5


def test_lines_that_two_machines_append_are_all_there(there, room):
    path = room / "events.jsonl"
    for number in range(10):
        journal.append(path, {"here": number})
        there(f"journal.append(Path({str(path)!r}), dict(there={number}))")
    wanted = [{where: number} for number in range(10) for where in ("here", "there")]
    # Who has appended itself may see for a while what the others have appended cut short.
    wait_for(lambda: journal.read(path) == wanted, "all lines here", 2 * network.CACHE_SECONDS)
    tail = f"journal.read_tail(Path({str(path)!r}))"
    wait_for(lambda: there(tail) == wanted, "all lines there", 2 * network.CACHE_SECONDS)


# --- names that are taken once ---


def test_a_name_that_another_machine_gave_up_can_be_had(there, room):
    """As when a commit is taken back: the client's memory of the old one is not taken for a winner."""
    path = room / "shard-00000.json"
    assert there(f"link_once(Path({str(path)!r}), 'theirs')") is True
    assert link_once(path, "ours") is False
    assert there(f"read_shared(Path({str(path)!r}))") == b"theirs"
    path.rename(room / "aside.json")
    assert there(f"link_once(Path({str(path)!r}), 'new')") is True
    assert read_shared(path) == b"new"


def test_of_two_machines_that_race_for_a_name_one_gets_it(there, room):
    for turn in range(10):
        path = room / f"{turn}.json"
        there.begin(f"link_once(Path({str(path)!r}), 'theirs')")
        ours = link_once(path, "ours")
        theirs = there.end()
        assert ours != theirs
        assert read_newest(path) == (b"ours" if ours else b"theirs")


# --- going back ---


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "caches expired"])
def test_an_attempt_commits_into_the_history_that_it_began_in(there, room, is_late):
    """Its folder is moved aside by another machine, and a new one of the same name is in use since."""
    paths = RunPaths(room)
    there(f"paths:=RunPaths(Path({str(room)!r}))")
    there("late:=kept.enter_context(opened_history(paths, UPDATE))")
    target = fresh_folder(paths.superseded, "from-update-1")
    move_history(target, paths, [UPDATE])
    if is_late:
        expire()
        there("os.listdir(paths.task(UPDATE).folder)")
    assert there("publish(paths, make_record(UPDATE), late)") is True
    folder = paths.task(UPDATE).folder
    assert names_in(folder) == set()
    assert names_in(target / folder.relative_to(room)) == {"shard-00000.json"}

    # The node has the old folder under this name, until it asks.
    there("present:=kept.enter_context(opened_history(paths, UPDATE))")
    assert there("is_of_the_past(paths, UPDATE, present)") is False
    assert there("is_of_the_past(paths, UPDATE, late)") is True
    assert there("publish(paths, make_record(UPDATE), present)") is True
    assert names_in(folder) == {"shard-00000.json"}
    there("kept.close()")


def test_an_attempt_does_not_take_what_was_moved_aside_for_its_own_commit(there, room):
    """It would end at once, with nothing done, while the other ranks of its job wait for it."""
    paths = RunPaths(room)
    publish(paths, make_record(UPDATE))
    there(f"attempt:=runner.Arguments(UPDATE, Path({str(room)!r}), '2-b', None)")
    assert there("runner.is_committed(attempt)") is True
    there(f"os.listdir(RunPaths(Path({str(room)!r})).task(UPDATE).folder)")  # which is remembered from now on
    move_history(fresh_folder(paths.superseded, "from-update-1"), paths, [UPDATE])
    assert there("runner.is_committed(attempt)") is False


def test_whoever_looks_into_a_folder_all_the_time_sees_that_it_was_moved(there, room):
    """GlusterFS goes on to find a folder under its old name for as long as somebody looks into it."""
    paths = RunPaths(room)
    publish(paths, make_record(UPDATE))
    there(f"paths:=RunPaths(Path({str(room)!r}))")
    there("look:=lambda: (r := Records(paths), r.refresh([UPDATE]), len(r.known))[2]")
    assert there("look()") == 1
    stop = f"{room}/stop"
    there.begin(f"[time.sleep(0.1) or look() for _ in range(60) if not is_there(Path({stop!r}))]")
    time.sleep(1)
    move_history(fresh_folder(paths.superseded, "from-update-1"), paths, [UPDATE])
    time.sleep(0.5)
    Path(stop).touch()
    counts = there.end()
    assert counts[0] == 1
    assert counts[-1] == 0
    with opened_history(paths, UPDATE) as present:
        publish(paths, make_record(UPDATE), present)
    assert there("look()") == 1


def test_rows_go_where_the_run_is_after_it_went_back(there, room):
    paths = RunPaths(room)
    there(f"paths:=RunPaths(Path({str(room)!r}))")
    there("book:=RowWriter.open(paths, 1)")
    there("book.add(dict(iteration=1, loss=1.0))")
    book = RowWriter.open(paths, 1)
    assert book.newest == 1
    book.close()
    aside = fresh_folder(paths.superseded, "from-rollout-1")
    paths.rows.rename(aside / "rows")
    make_folder(paths.rows)
    journal.rewrite(paths.metrics, [])
    there("book.add(dict(iteration=2, loss=2.0))")  # of a driver that lost its lease
    assert journal.read(paths.metrics) == []
    assert names_in(aside / "rows") == {"00001.json", "00002.json"}
    there("book.close()")
    there("book:=RowWriter.open(paths, 1)")
    there("book.add(dict(iteration=1, loss=3.0))")
    there("book.close()")
    assert journal.read(paths.metrics) == [{"iteration": 1, "loss": 3.0}]
    assert names_in(paths.rows) == {"00001.json"}


# --- the lease ---


def test_the_lease_goes_from_machine_to_machine(there, room):
    locks = room / "locks"
    there(f"locks:=Path({str(locks)!r})")
    there("acquire_or_none:=lambda: next(iter([lease.acquire(locks)]), None)")
    with hold(locks):
        there.begin("lease.acquire(locks)")
        with pytest.raises(AssertionError, match=r"LeaseHeld.*a driver is active on this run"):
            there.end()
    there("held:=lease.acquire(locks)")  # at once: it does not remember the lease as it was
    with pytest.raises(LeaseHeld):
        acquire(locks)
    there("held.release()")
    ours = acquire(locks)
    there("held:=lease.Lease(locks / '000002.json', held.holder)")
    there.begin("held.beat()")
    with pytest.raises(AssertionError, match="LeaseLost"):
        there.end()
    ours.beat()
    ours.release()


def test_a_heartbeat_is_seen_elsewhere(there, room):
    locks = room / "locks"
    with hold(locks) as lease:
        os.utime(lease.path, (1e9, 1e9))
        there(f"names_in(Path({str(locks)!r}))")
        assert there(f"Path({str(lease.path)!r}).stat().st_mtime") == 1e9
        lease._beaten = 0.0
        with contextlib.suppress(LeaseLost):
            lease.beat()
        assert there(f"lease.holder_of(Path({str(locks)!r}))")
        age = there(f"time.time() - Path({str(lease.path)!r}).stat().st_mtime")
        assert abs(age) < 60


# --- bringing it up and down ---


def test_without_root_the_cluster_says_what_it_needs(monkeypatch, tmp_path, own_cluster):
    if not NETWORK:
        pytest.skip(without_network())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DevclusterError, match="needs root"):
        own_cluster(has_runs=True)


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def test_down_leaves_no_mount_and_no_daemon_after_a_crash_of_its_parts(cluster, slurm_ppo, tmp_path):
    if not NETWORK:
        pytest.skip(without_network())
    folder = tmp_path / "practice"
    up = slurm_ppo("devcluster", "up", folder, "--network-filesystem")
    assert up.returncode == 0, up.stderr
    assert f"put runs below:        {folder}/shared" in up.stdout
    assert len(mounts_below(folder)) == 1
    found = attach(folder)
    made = found.call("srun", "-prollout", "touch", f"{folder}/shared/by-a-node")
    assert made.returncode == 0, made.stderr
    assert is_there(folder / "shared" / "by-a-node")
    stuck = found.call(
        "sbatch", "-pupdate", "-o/dev/null", "--wrap", f"while :; do date >{folder}/shared/date; done"
    )
    assert stuck.returncode == 0, stuck.stderr
    wait_for(lambda: is_there(folder / "shared" / "date"), "a job that writes all the time", 20)
    standing = processes.recorded(folder / "run" / "glusterfs-update1.process")
    os.kill(standing.pid, signal.SIGSTOP)
    for name in ("glusterfs", "glusterfsd", "glusterfs-rollout0"):
        process = processes.recorded(folder / "run" / f"{name}.process")
        os.kill(process.pid, signal.SIGKILL)
    status = slurm_ppo("devcluster", "status", folder)
    assert status.returncode == 1
    assert "glusterfsd           has ended" in status.stdout
    down = slurm_ppo("devcluster", "down", folder)
    assert down.returncode == 0, down.stderr
    assert mounts_below(folder) == []
    assert related_to(folder) == []
    assert not folder.exists()


def test_a_filesystem_that_does_not_come_up_leaves_nothing(own_cluster, monkeypatch, tmp_path):
    if not NETWORK:
        pytest.skip(without_network())
    filled = network.filled
    spoilt = lambda name, **values: "nonsense\n" if name == "client.vol" else filled(name, **values)  # noqa: E731
    monkeypatch.setattr(network, "filled", spoilt)
    folder = tmp_path / "wrong"
    with pytest.raises(DevclusterError, match="glusterfs-one ended before it has mounted"):
        start_cluster(folder, replace(SMALL, network_filesystem=True))
    assert mounts_below(folder) == []
    assert related_to(folder) == []
    assert not folder.exists()


# --- a server that is away ---


@ON_CLUSTER
def test_a_run_goes_on_after_its_file_server_was_away(own_cluster, make_run, complete_run, tmp_path):
    """For a while nothing of the run can be read or written, by tasks that are at work neither."""
    if not NETWORK:
        pytest.skip(without_network())
    cluster = own_cluster(has_runs=True)
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=1", *take("2", "rollout"))
    run.submit()
    run.wait_for_job("rollout")
    cluster.kill_file_server()
    with pytest.raises(OSError, match="not connected"):
        (run.root.parent / "nothing").write_bytes(b"")
    time.sleep(3)
    cluster.start_file_server()
    run.wait_until_complete()
    assert run.policy() == policy_of(complete_run, 1), run.story()
