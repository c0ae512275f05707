"""Faults of every kind at random moments of one run, several at a time; nobody lends a hand.

A round of ``make soak`` is long: disks are full for minutes, nodes stay away. That of ``make test`` is short.
"""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.run.commits import CorruptData, Record, read_record, verify_outputs
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task, parse_task, task_of
from slurm.devcluster import Layout
from slurm.devcluster.layout import NODES
from tests.cluster.gremlin import IS_LONG, PATIENCE, Gremlin
from tests.cluster.scenario import SlurmRun, policy_of, results_of
from tests.support import light, tiny
from tests.support.tables import sample

ITERATIONS, FAULTS, PAUSE = (6, 14, (2.0, 9.0)) if IS_LONG else (3, 6, (1.0, 4.0))
WORDS = (f"iterations={ITERATIONS}", "rollout.num_shards=4", "evaluate.every=2")
SECONDS = {"rollout": "0.3", "reward": "0.3", "update": "1"}
LAYOUT = Layout(slurmd_timeout=5, more=("MessageTimeout=5",)).with_machines(
    ["rollout0=twin", "reward0=twin"], ["reward0=90"]
)
"""Two nodes of one name, one of them with a clock that is ahead; where there is no root, one machine."""


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
    is_mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m,strictatime", "tmpfs", folder]
    ).returncode
    yield folder
    if is_mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def says_complete(run: SlurmRun) -> bool:
    done = run.command("status", run.root, "--json")
    return done.returncode == 0 and json.loads(done.stdout)["state"] == "complete"


def assert_has_all_rows(run: SlurmRun) -> None:
    assert [row["iteration"] for row in run.rows()] == list(range(1, ITERATIONS + 1)), run.story()


def assert_ends_as(run: SlurmRun, undisturbed: Path) -> None:
    """Where a record was lost, a row lacks what only it knew, and says so."""
    assert run.policy() == policy_of(undisturbed, ITERATIONS), run.story()
    for row, expected in zip(results_of(run.root), results_of(undisturbed), strict=True):
        if "records_lost" not in row:
            assert row == expected


def assert_lineage_holds(run: SlurmRun) -> None:
    """Every record was made from the outputs that the records of its inputs name."""
    paths = RunPaths(run.root)
    found = {task: record for task in tasks_of(run.root) if (record := readable(paths, task))}
    wrong = [
        f"{task} was made from another {source}"
        for task, record in found.items()
        for source, fingerprint in record.inputs.items()
        if (made := found.get(parse_task(source))) and made.fingerprint != fingerprint
    ]
    assert not wrong, "\n".join([*wrong, run.story()])
    last = Task(ITERATIONS, Stage.UPDATE)
    verify_outputs(paths, found[last])


def tasks_of(root: Path) -> Iterator[Task]:
    """Tasks that have a record in the run."""
    for path in sorted(root.glob("iterations/*/*/shard-?????.json")):
        yield task_of(int(path.parent.parent.name), path.parent.name, int(path.stem.partition("-")[2]))


def readable(paths: RunPaths, task: Task) -> Record | None:
    """A task's record; None of one that was spoilt after it was read for the last time."""
    try:
        return read_record(paths, task)
    except CorruptData:
        return None


def hurry(run: SlurmRun) -> None:
    """What waits for a later time need not wait for so long."""
    waiting = [job.id.partition("_")[0] for job in run.jobs("PENDING") if job.reason == "BeginTime"]
    for job in waiting:
        run.cluster.call("scontrol", "update", f"jobid={job}", "StartTime=now")


def live_through(run: SlurmRun, chance: random.Random) -> Gremlin:
    """Submit a run, do harm until enough of it has hit, and wait for its end."""
    run.submit()
    gremlin = Gremlin(run, chance)
    until = time.monotonic() + PATIENCE
    while gremlin.count_hits() < FAULTS and not says_complete(run):
        time.sleep(chance.uniform(*PAUSE))
        gremlin.do_harm()
        gremlin.mend()
    while not (says_complete(run) and gremlin.has_all_mended and not run.jobs()):
        assert time.monotonic() < until, "\n".join([*gremlin.told, run.story()])
        time.sleep(2)
        gremlin.mend()
        if gremlin.has_all_mended or not IS_LONG:
            hurry(run)
    gremlin.tell(
        f"{gremlin.count_hits()} of {len(gremlin.told)} hit somebody at work, or a file that was read"
    )
    return gremlin


@pytest.fixture
def run(own_cluster, make_run, inputs, small_disk) -> SlurmRun:
    """A run that is not submitted yet, on a cluster that may be broken."""
    cluster = own_cluster(LAYOUT if os.geteuid() == 0 else replace(LAYOUT, nodes=NODES))
    more = ("scheduler.max_attempts=30", "scheduler.driver.partition=all")
    return make_run(cluster, small_disk / "run", *words(inputs), *more)


def environment(**more: str) -> list[str]:
    """Words that give light tasks time to be disturbed in, and more variables."""
    shown = "".join(f", {name}: '{value}'" for name, value in more.items())
    return [
        f"scheduler.{stage}.environment={{{light.SECONDS}: '{seconds}'{shown}}}"
        for stage, seconds in SECONDS.items()
    ]


@pytest.mark.soak
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize(
    "is_repeatable", sample([True, False], 1 / 2), ids={True: "repeatable", False: "other each time"}.get
)
def test_whatever_happens_a_run_ends_by_itself_and_each_policy_is_of_one_piece(
    run, undisturbed, chance, is_repeatable
):
    """Tasks that give other bytes each time cannot hide that inputs of two attempts were mixed."""
    run.words.extend(environment(**({} if is_repeatable else {light.DICE: "1"})))
    live_through(run, chance)
    assert_has_all_rows(run)
    assert_lineage_holds(run)
    if is_repeatable:
        assert_ends_as(run, undisturbed)
