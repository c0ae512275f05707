"""Slurm's commands that wait, on a real Slurm: whoever makes a pass does not wait for them with the lease.

The seconds here are limits against what hangs for a minute, and what the pages promise where commands hang;
how short passes are where none does is measured elsewhere.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths
from slurm.devcluster import PracticeCluster
from slurm.signals import Errands, signal_elements
from tests.cluster.scenario import Hold, SlurmRun, assert_same_policy, room_on, staying, take, wait_for
from tests.support.tables import ON_CLUSTER, sample

SHIMS = Path(__file__).parent / "shims" / "hanging"
HELD, HEARD_OF = 15.0, 20.0
SHORT = 5.0
"""Most seconds of a pass where no command hangs, on a machine with nothing beside it."""
NOTES = """#!/bin/bash
trap 'echo rung >>"NOTES-$SLURM_ARRAY_TASK_ID"' USR1
: >"NOTES-$SLURM_ARRAY_TASK_ID"
while :; do sleep 0.1; done
"""


@dataclass
class Leases:
    """Seconds that each lease of a run was held, and the most that a holder was not heard of, as far as looks
    tell."""

    folder: Path
    held: dict[str, float] = field(default_factory=dict)
    silent: float = 0.0

    def look(self) -> None:
        for path in self.folder.glob("[0-9]*.json"):
            try:
                lease, beat, now = json.loads(path.read_text()), path.stat().st_mtime, time.time()
            except (OSError, ValueError):  # it is just being replaced, or gone
                continue
            self.held[path.name] = lease.get("released", now) - lease["acquired"]
            if "released" not in lease:
                self.silent = max(self.silent, now - beat)

    @contextmanager
    def watched(self) -> Iterator["Leases"]:
        is_over = threading.Event()

        def go_on() -> None:
            while not is_over.wait(0.1):
                self.look()

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield self
        finally:
            is_over.set()
            thread.join()
            self.look()


@contextmanager
def two_hundred_waiting(cluster: PracticeCluster, folder: Path) -> Iterator[str]:
    """An array of which one element runs, and takes both GPUs of its node."""
    script = folder / "array.sh"
    script.write_text(NOTES.replace("NOTES", str(folder / "notes")))
    options = ("--parsable", "--array=0-200", "-prollout", "--gpus-per-node=2", "-o/dev/null")
    said = cluster.call("sbatch", *options, str(script))
    assert said.returncode == 0, said.stderr
    array = said.stdout.strip()
    wait_for((folder / "notes-0").exists, "the first element", 60)
    try:
        yield array
    finally:
        cluster.call("scancel", array)


def is_rung(folder: Path) -> bool:
    return "rung" in (folder / "notes-0").read_text()


def test_who_runs_is_rung_once_and_at_once_although_others_of_its_array_wait(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])
    log = cluster.folder / "log" / "slurmctld.log"
    with two_hundred_waiting(cluster, tmp_path) as array:
        assert signal_elements("USR1", [f"{array}_0"]) == ""
        wait_for(lambda: is_rung(tmp_path), "the signal", 60)
        tries = len(re.findall(rf"REQUEST_KILL_JOB JobId={array}_0 ", log.read_text()))
        assert tries == 1, "scancel was ended before it tried again"
        assert signal_elements("USR1", [f"{array}_{index}" for index in (3, 4)]) == "", "who waits gets none"
        command = ["scancel", "-v", "--batch", "--signal=USR1", f"{array}_0"]
        said = cluster.call("timeout", "3", *command)
        assert (said.returncode, "in transitional state" in said.stderr) == (124, True), "by itself it would"
    assert signal_elements("USR1", [f"{array}_0"]) == "", "who has ended gets none"


def test_of_an_array_that_waits_those_are_withdrawn_that_are_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])
    told: list[str] = []
    errands = Errands(told.append)

    def waiting() -> set[str]:
        shown = cluster.call("squeue", "-hr", "-tPD", f"-j{array}", "-o%i").stdout
        return set(shown.split())

    with two_hundred_waiting(cluster, tmp_path) as array:
        errands.withdraw([f"{array}_{index}" for index in (0, 7, 11)])
        assert errands.finish() == []
        assert waiting() == {f"{array}_{index}" for index in range(1, 201) if index not in (7, 11)}
        assert cluster.call("squeue", "-h", "-tR", f"-j{array}", "-o%i").stdout.split() == [f"{array}_0"]
        errands.withdraw([f"{array}_7"])
        errands.withdraw(["4000000_1"])
        assert (errands.finish(), told) == ([], []), "it has ended meanwhile, or was never there"
        assert len(waiting()) == 198


@ON_CLUSTER
def test_a_pass_is_short_while_two_hundred_elements_wait(cluster, make_run, complete_run, tmp_path):
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(cluster, root, "iterations=2", *staying(60))
    with two_hundred_waiting(cluster, tmp_path), Leases(RunPaths(root).locks).watched() as leases:
        run.submit()
        wait_for(lambda: len(leases.held) >= 2, "passes", 60)
        assert run.command("submit", root).returncode == 0
    with leases.watched():
        run.wait_until_complete()
    assert_same_policy(run, complete_run)
    print(f"passes held the lease for {sorted(leases.held.values())} s")
    assert max(leases.held.values()) <= (SHORT if "SOAK_ROUNDS" in os.environ else HELD), leases
    assert leases.silent <= HEARD_OF


def behind_shims(run: SlurmRun, hangs: Path) -> SlurmRun:
    """The run with commands that may hang in front of Slurm's, also in its jobs."""
    path = f"{SHIMS}:{run.environment['PATH']}"
    return replace(run, environment={**run.environment, "HANGS": str(hangs), "PATH": path})


COMMANDS = [("squeue", 3), ("scancel", 1), ("sbatch", 2), ("scontrol", 1), ("sinfo", 1), ("sacct", 1)]


@ON_CLUSTER
@pytest.mark.parametrize(("command", "times"), sample(COMMANDS, 1 / 6))
def test_a_command_that_hangs_for_a_minute_holds_up_nobody_who_needs_the_lease(
    cluster, make_run, complete_run, tmp_path, command, times
):
    """It does so from the first rewards on, until it was called a few times: scancel perhaps at the end."""
    hangs, hold = tmp_path / "hangs", Hold(tmp_path / "hold")
    root = room_on(cluster, tmp_path) / "run"
    words = ["iterations=2", *staying(20), hold.on("reward"), *take("0.2", "rollout")]
    run = behind_shims(make_run(cluster, root, *words), hangs)
    calls = tmp_path / "hangs.calls"
    with Leases(RunPaths(root).locks).watched() as leases:
        hold.begin()
        run.submit()
        run.wait_for(lambda: run.has_committed(1, "rollout", 0), "the first rollouts")
        hangs.write_text(f"{command}\n")
        (RunPaths(root).slurm / "nodes.json").unlink(missing_ok=True)  # so that sinfo is asked again
        if command == "sacct":  # which is asked how one ended that has left nothing
            cluster.call("scancel", "--signal=KILL", f"--user={os.getuid()}", "--state=RUNNING", "-preward")
        hold.end()
        run.wait_for(lambda: calls.exists() and calls.read_text().count("\n") >= times, f"calls of {command}")
        hangs.unlink()
        run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert max(leases.held.values()) <= HELD, leases
    assert leases.silent <= HEARD_OF
