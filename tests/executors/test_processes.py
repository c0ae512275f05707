"""Workers as processes of this machine: real ones, bounded in number, gone when they should be gone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.executors import processes
from pipeline.executors.limits import HERE, Limits, Started, WorkerEnd, need_of, node_of
from pipeline.executors.processes import Processes
from pipeline.run.paths import rank_log
from pipeline.run.tasks import Stage, Task
from tests.support import ROOT
from tests.support.waiting import eventually

LIMITS = Limits({"rollout": 4, "update": 1}, 60, grace=0.5)


class Provider(Processes):
    """Starts workers of words that tests.support.scheduled knows."""

    def begin(self, folder: Path, name: str, *words: object, stage=Stage.ROLLOUT, stays: bool = True) -> bool:
        worker = Started(name, Task(1, stage), folder / "logs" / f"{name}.log", stays=stays)
        return self.start(worker, tuple(map(str, words)), {})

    def finish(self, seconds: float = 30) -> dict[str, WorkerEnd]:
        until, ended = time.monotonic() + seconds, dict(self.collect_ended())
        while self.living:
            assert time.monotonic() < until
            self.wait(1)
            ended |= self.collect_ended()
        return ended


@pytest.fixture
def provide():
    """Make providers whose workers are ended at the end."""
    made = []

    def make(**limits: object) -> Provider:
        made.append(Provider("tests.support.scheduled:main", [], replace(LIMITS, **limits)))
        return made[-1]

    yield make
    for one in made:
        one.cancel()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(file: Path) -> list[int]:
    assert eventually(file.exists)
    return [int(text) for text in file.read_text().split()]


def are_gone(found: list[int]) -> bool:
    return eventually(lambda: not any(map(is_alive, found)))


def test_how_a_worker_ended_is_said_once_with_what_it_printed(provide, tmp_path):
    provider = provide()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/bad.log").write_text("before\n")
    provider.begin(tmp_path, "good", "quiet")
    provider.begin(tmp_path, "bad", "exit", 4)
    provider.begin(tmp_path, "killed", "signal", 9)
    provider.begin(tmp_path, "raised", "raise", "no luck")
    codes = {name: end.exit_code for name, end in provider.finish().items()}
    assert codes == {"good": 0, "bad": 4, "killed": -9, "raised": 1}
    assert provider.collect_ended() == {}
    assert (tmp_path / "logs/bad.log").read_text() == "before\nexit 4\n"
    assert "RuntimeError: no luck" in (tmp_path / "logs/raised.log").read_text()
    assert not (tmp_path / "logs/good.log").exists()


def test_no_more_of_a_kind_start_than_may_and_no_more_than_have_places(provide, tmp_path):
    places = {"nodes": (node_of(HERE, 2, 0),), "gpus": {HERE: ("0", "1")}}
    shown = {"show": lambda grant: {"SEES": ",".join(name for share in grant for name in share.gpus)}}
    needs = {"rollout": need_of(1), "update": need_of(2)}
    provider = provide(needs=needs, **places, **shown)
    go = tmp_path / "go"
    for name in "ab":
        assert provider.begin(tmp_path, name, "after", go, "environment", "SEES")
    assert not provider.begin(tmp_path, "c", "exit", 0), "both GPUs are taken"
    assert not provider.begin(tmp_path, "u", "exit", 0, stage=Stage.UPDATE)
    assert provider.begin(tmp_path, "r", "exit", 0, stage=Stage.REWARD), "it needs none"
    go.touch()
    provider.finish()
    assert sorted((tmp_path / f"logs/{name}.log").read_text().split()[-1] for name in "ab") == ["0", "1"]
    assert provider.begin(tmp_path, "u", "sleep", 9, stage=Stage.UPDATE)
    assert not provide(workers={"update": 0}).begin(tmp_path, "v", "exit", 0, stage=Stage.UPDATE)


def test_a_worker_gets_what_it_is_told_and_no_input(provide, tmp_path, monkeypatch):
    provider = provide()
    monkeypatch.setenv("SAID_LATER", "hello")
    for name in ("RANK", "WORLD_SIZE", "RENDEZVOUS_FILE"):
        monkeypatch.delenv(name, raising=False)
    provider.begin(tmp_path, "a", "environment", "SAID_LATER", "RANK", "WORLD_SIZE", "RENDEZVOUS_FILE")
    provider.begin(tmp_path, "b", "stdin")
    provider.begin(tmp_path, "c", "start method")
    provider.finish()
    assert (tmp_path / "logs/a.log").read_text().splitlines()[1:] == ["hello", "None", "None", "None"]
    assert (tmp_path / "logs/b.log").read_text().splitlines()[1] == "''"
    # Else its locks are the server's, and a run of which a worker is ended says that they leaked.
    default = multiprocessing.get_all_start_methods()[0]
    assert (tmp_path / "logs/c.log").read_text().splitlines()[1] == default


def test_what_a_worker_leaves_behind_goes_with_it(provide, tmp_path):
    """It would keep a GPU's memory."""
    provider = provide()
    provider.begin(tmp_path, "a", "leave", tmp_path / "child")
    assert provider.finish()["a"].exit_code == 0
    assert are_gone(pids(tmp_path / "child"))


def test_waiting_returns_when_a_worker_rings_or_ends_and_not_before(provide, tmp_path):
    provider = provide()
    provider.begin(tmp_path, "a", "commit", tmp_path / "go")
    began = time.monotonic()
    provider.wait(30)
    assert (tmp_path / "go.rung").exists() or eventually((tmp_path / "go.rung").exists)
    before = time.monotonic()
    provider.wait(0.3)
    assert time.monotonic() - before >= 0.3
    (tmp_path / "go").touch()
    assert eventually(lambda: not provider._teams["a"].living), "it is not slept through"
    provider.wait(30)
    assert time.monotonic() - began < 20
    assert provider.collect_ended() == {"a": WorkerEnd(0)}


def test_one_that_is_killed_ends_with_why(provide, tmp_path):
    provider = provide()
    provider.begin(tmp_path, "a", "pid", tmp_path / "pids", "deaf")
    found = pids(tmp_path / "pids")
    provider.kill("a", "stopped at the time limit of 3 s")
    assert provider.finish() == {"a": WorkerEnd(-9, "stopped at the time limit of 3 s")}
    assert are_gone(found)


@pytest.mark.parametrize(
    ("all_need_places", "stays", "is_awaited"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_the_end_of_one_that_has_rung_is_awaited_where_nothing_can_start_before(
    provide, tmp_path, monkeypatch, all_need_places, stays, is_awaited
):
    """A pass would find no place for what follows, and keep that waiting once there is one."""
    monkeypatch.setattr(processes, "_ENDING_SECONDS", 30.0)
    places = {"nodes": (node_of(HERE, 1, 0),), "gpus": {HERE: ("0",)}, "needs": {"rollout": need_of(1)}}
    provider, go = provide(all_need_places=all_need_places, **places), tmp_path / "go"
    provider.begin(tmp_path, "a", "commit", go, stays=stays)
    end = threading.Thread(target=lambda: eventually((tmp_path / "go.rung").exists) and go.touch())
    if is_awaited:
        end.start()
    provider.wait(30)
    assert list(provider.collect_ended()) == ["a"] * is_awaited
    go.touch()
    provider.finish()


@pytest.mark.parametrize("deaf", ["", "deaf"])
def test_cancel_leaves_no_process_but_those_that_are_spared(provide, tmp_path, deaf):
    provider = provide(ranks={"update": 2})
    provider.begin(tmp_path, "a", "pid", tmp_path / "pids", deaf)
    whats = [f"pid {tmp_path / 'first'}", f"pid {tmp_path / 'second'} {deaf}"]
    provider.begin(tmp_path, "ranks", "ranks", *whats, stage=Stage.UPDATE)
    provider.begin(tmp_path, "spared", "pid", tmp_path / "spared")
    running = [pid for name in ("pids", "first", "second") for pid in pids(tmp_path / name)]
    spared = pids(tmp_path / "spared")
    provider.cancel(but=["spared"])
    assert are_gone(running)
    assert all(map(is_alive, spared))
    assert list(provider.living) == ["spared"]
    assert provider.collect_ended() == {}


@pytest.mark.parametrize("stays", [False, True])
def test_devices_are_free_when_all_ranks_have_said_so_unless_the_worker_stays(provide, tmp_path, stays):
    places = {"nodes": (node_of(HERE, 1, 0),), "gpus": {HERE: ("0",)}, "ranks": {"update": 2}}
    provider, go = provide(needs={"update": need_of(1), "rollout": need_of(1)}, **places), tmp_path / "go"
    whats = [f"release {tmp_path / 'end'}", f"after {go} release {tmp_path / 'end'}"]
    provider.begin(tmp_path, "u", "ranks", *whats, stage=Stage.UPDATE, stays=stays)
    provider.wait(10)
    assert provider.nodes_of("u") == (HERE,)
    go.touch()
    provider.wait(10)
    assert provider.begin(tmp_path, "r", "exit", 0) is not stays
    (tmp_path / "end").touch()
    assert {end.exit_code for end in provider.finish().values()} == {0}


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RENDEZVOUS_FILE", "MASTER_ADDR", "MASTER_PORT")


def test_ranks_are_told_their_places_and_where_to_meet(provide, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of somebody else")
    provider, log = provide(ranks={"update": 2}), tmp_path / "logs/a.log"
    provider.begin(tmp_path, "a", "environment", *PLACE, stage=Stage.UPDATE)
    assert provider.finish() == {"a": WorkerEnd(0)}
    first, second = (rank_log(log, rank).read_text().splitlines()[-6:] for rank in range(2))
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3:] == second[3:]
    assert first[4:] == ["", ""]
    assert not Path(first[3]).exists()


@pytest.mark.parametrize(
    ("endings", "rank", "code", "words"),
    [
        (("pid {0} deaf", "after {0} signal 9"), 1, -9, "killed by signal 9"),
        (("pid {0} deaf", "after {0} exit 4"), 1, 4, "ended with exit code 4"),
        (("exit 1", "signal 9"), 1, -9, "killed by signal 9"),  # the error was that the peer had gone
        (("exit 3", "signal 6"), 0, 3, "ended with exit code 3"),  # a library gave up as the peer had gone
        (("exit 0", "exit 5"), 1, 5, "ended with exit code 5"),
    ],
)
def test_when_a_rank_fails_the_others_are_stopped_and_the_likely_cause_is_named(
    provide, tmp_path, endings, rank, code, words
):
    provider, first = provide(ranks={"update": 2}), tmp_path / "first"
    provider.begin(tmp_path, "a", "ranks", *(e.format(first) for e in endings), stage=Stage.UPDATE)
    if not first.exists() and "pid" not in endings[0]:
        assert eventually(lambda: not provider._teams["a"].living)
    assert provider.finish() == {"a": WorkerEnd(code, f"rank {rank} of 2 {words}", rank)}
    assert are_gone(pids(first) if "pid" in endings[0] else [])


START = """
import sys, time
from pathlib import Path
from tests.executors.test_processes import LIMITS, Provider, Stage, replace
if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    provider = Provider("tests.support.scheduled:main", [], replace(LIMITS, ranks={"update": ranks}))
    whats = [f"pid {folder / str(rank)}" for rank in range(ranks)]
    provider.begin(folder, "a", "ranks", *whats, stage=Stage.UPDATE)
    time.sleep(60)
"""


def test_workers_die_with_a_killed_driver(tmp_path):
    (tmp_path / "start.py").write_text(START)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0"}
    process = subprocess.Popen([sys.executable, tmp_path / "start.py", tmp_path, "2"], env=environment)
    running = [pid for rank in range(2) for pid in pids(tmp_path / str(rank))]
    assert len(running) == 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert are_gone(running)


def test_what_the_fork_server_imports_leaves_nothing_to_build_for_a_worker_that_opens_its_run():
    script = """
import stages.preload
from pydantic import ValidationError
from pipeline.config import conversion
from pipeline.config.schema import Config
from pipeline.run.commits import Record
from pipeline.run.control import Control
from pipeline.run.identity import Identity
from pipeline.workers.beats import Beat
from pipeline.workers.claims import ClaimFields
from pipeline.workers.handover import Instructions

del conversion.TypeAdapter  # it takes half the time of opening a run
for kind in (Config, Identity, Record, Control, Beat, ClaimFields, Instructions):
    try:
        conversion.converted(kind, None)
    except ValidationError:
        continue
    raise AssertionError(kind)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
