"""Workers lose their nodes and places, where nodes are hosts of their own: the policy is that of one machine.

All nodes of a practice cluster are one host, on which a worker sees at once that another's process has ended.
With tests/support/hooks each is another host to its processes, as on a real cluster: that a worker there has
died is known by a pass's mark, by a later start of its element, or by long silence.

Tasks are light: each version of the policy is a hash of all that it was made from.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import GONE, Beat, Doing, folder_of, read_beats
from slurm.devcluster import Layout, PracticeCluster, PracticeNode, PracticePartition
from slurm.sharedfiles import names_in
from tests.cluster.scenario import (
    SHARDS,
    Hold,
    SlurmRun,
    assert_same_policy,
    element_of,
    failed,
    held_at_work,
    is_used,
    restarts_of,
    room_on,
    staying,
    take_the_place_of,
    wait_for_commit_by,
    worker_who,
)
from tests.support.killing import HOOKS
from tests.support.tables import ON_CLUSTER

ITERATIONS = 10
PLACES = ("rollout0", "rollout1", "rollout2")
"""Nodes for rollouts, each of which takes one whole; two are enough."""
SPARE = PLACES[-1]
LAYOUT = Layout(
    nodes=(*map(PracticeNode, PLACES), PracticeNode("rest", gpus=3)),
    partitions=(
        *(PracticePartition(name, ("rest",), default=name == "cpu") for name in ("cpu", "reward", "update")),
        PracticePartition("rollout", PLACES, preemptible=True),
        PracticePartition("rollout-high", PLACES, priority_tier=10),
    ),
    slurmd_timeout=5,
    more=("MessageTimeout=5",),
)
WORDS = [
    *(f"iterations={ITERATIONS}", *staying(300)),
    *("scheduler.rollout.options={exclusive: true}", "scheduler.rollout.time='1:00:00'"),
    "scheduler.rollout.task_time='0:10:00'",
]


def on_hosts_of_their_own(run: SlurmRun) -> SlurmRun:
    path = os.pathsep.join([str(HOOKS), run.environment["PYTHONPATH"]])
    return replace(run, environment={**run.environment, "PYTHONPATH": path, "NODE_IS_HOST": "1"})


@ON_CLUSTER
def test_nodes_and_places_are_taken_from_workers_at_work(own_cluster, make_run, long_local_run, tmp_path):
    cluster, hold = own_cluster(LAYOUT, has_runs=True), Hold(tmp_path / "hold")
    set_state(cluster, SPARE, "drain")
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", *WORDS, hold.on("rollout", "0.2"))
    run = on_hosts_of_their_own(run)
    run.submit()
    lose_a_node(run, hold)
    cut_off_one_node_and_take_the_place_on_another(run, hold)
    run.wait_until_complete()
    assert_same_policy(run, long_local_run)
    assert {kind for _, kind in failed(run)} <= {"preempted", "lost", "paused"}, run.story()


def lose_a_node(run: SlurmRun, hold: Hold) -> None:
    """There is no other place for its job, and nobody but a pass can see that its worker is gone."""
    at_work(run, is_used)
    hold.begin()
    lost = held_at_work(run, hold, "rollout")
    run.cluster.kill_node(lost.host)
    run.wait_for(lambda: restarts_of(run, element_of(lost)) == 1, "its job in the queue again")
    hold.end()
    wait_until_committed(run, lost)
    hold.begin()  # at once, here as below: an iteration takes no two seconds
    marks = folder_of(RunPaths(run.root))
    run.wait_for(lambda: f"{lost.worker}{GONE}" in names_in(marks), "a pass that has seen it gone")
    assert not [b for b in others_of(run, lost) if b.host == lost.host], "somebody is where no node is"

    run.cluster.start_slurmd(lost.host)
    at_work(run, lambda beat: beat.host == lost.host and beat.worker != lost.worker)
    hold.end()
    wait_for_commit_by(run, "rollout", lambda worker: worker in [b.worker for b in others_of(run, lost)])
    hold.begin()


def cut_off_one_node_and_take_the_place_on_another(run: SlurmRun, hold: Hold) -> None:
    """What both were at is gone on with elsewhere; the worker that was cut off is at it too."""
    run.wait_for(lambda: len(used_workers(run, "rollout")) > 1, "two workers that have done a task")
    unseen, preempted = held_at_the_last_two(run, hold)
    run.cluster.kill_slurmd(unseen.host)
    set_state(run.cluster, SPARE, "resume")
    slow = (unseen.task, preempted.task)  # one of them, as nobody knows yet that somebody is cut off
    at_work(run, lambda beat: beat.host == SPARE and beat.task in slow)
    take_the_place_of(run, element_of(preempted), preempted.host)
    at_work(run, lambda beat: beat.task == preempted.task and beat.worker != preempted.worker)
    at_work(run, lambda beat: beat.task == unseen.task and beat.worker == unseen.worker)
    hold.end()
    wait_until_committed(run, unseen)
    wait_until_committed(run, preempted)
    run.wait_for(lambda: not is_still_at_it(run, unseen), "the word of who was cut off that it goes on")
    run.cluster.start_slurmd(unseen.host)


def held_at_the_last_two(run: SlurmRun, hold: Hold) -> tuple[Beat, Beat]:
    """Hold up two workers at the last rollouts of an iteration: who comes then finds none that is untried."""
    for _ in range(2 * ITERATIONS):  # there are four rollouts in each
        first = held_at_work(run, hold, "rollout")
        second = held_at_work(run, hold, "rollout", other_than=[first])
        iteration = int(first.task.split("/")[0])
        left = [s for s in range(SHARDS) if not run.has_committed(iteration, "rollout", s)]
        if len(left) == 2:
            return first, second
        hold.end()
        wait_until_committed(run, first)
        hold.begin()
    raise AssertionError("no iteration was caught with two rollouts left")


def others_of(run: SlurmRun, lost: Beat) -> list[Beat]:
    """Workers for rollouts on the node of one that is lost, itself left out."""
    beats = read_beats(RunPaths(run.root)).values()
    return [b for b in beats if (b.job_kind, b.host) == ("rollout", lost.host) and b.worker != lost.worker]


def used_workers(run: SlurmRun, job_kind: str) -> list[Beat]:
    beats = read_beats(RunPaths(run.root)).values()
    return [b for b in beats if b.job_kind == job_kind and is_used(b) and Path(f"/proc/{b.pid}").exists()]


def at_work(run: SlurmRun, is_right: Callable[[Beat], bool]) -> None:
    """Wait for a worker that is at work."""
    worker_who(run, "rollout", Doing.BUSY, is_right)


def is_still_at_it(run: SlurmRun, beat: Beat) -> bool:
    """Whether a worker says that it is at the attempt that it was at."""
    return read_beats(RunPaths(run.root))[beat.worker].attempt == beat.attempt


def wait_until_committed(run: SlurmRun, beat: Beat) -> None:
    """Wait for a commit of what a worker was at, by whomever."""
    iteration, _, shard = beat.task.split("/")
    run.wait_for(lambda: run.has_committed(int(iteration), "rollout", int(shard)), f"a commit of {beat.task}")


def set_state(cluster: PracticeCluster, node: str, state: str) -> None:
    """As an administrator does."""
    done = cluster.call("scontrol", "update", f"nodename={node}", f"state={state}", "reason=tests")
    assert done.returncode == 0, done.stderr
