"""Updates of 4 and 8 ranks on two nodes. Through the srun line of their job they meet over gloo, each on a
GPU of its own; the death of one, or of its GPU, costs an attempt and nothing else."""

import os
import re
from pathlib import Path

from slurm.devcluster import Layout, PracticeCluster, PracticeNode, PracticePartition
from tests.cluster.scenario import SlurmRun, assert_same_policy, room_on
from tests.cluster.test_machines import needs_root
from tests.support import meeting
from tests.support.tables import ON_CLUSTER

NAMES = ("one", "two", "three")
MACHINES = Layout(
    nodes=tuple(PracticeNode(name, gpus=4, host=f"host-{name}") for name in NAMES),
    partitions=(
        PracticePartition("cpu", NAMES, default=True),
        *(PracticePartition(stage, NAMES) for stage in ("rollout", "reward", "update")),
    ),
)
"""Machines of four GPUs, which find each other by address: no name of theirs leads anywhere."""


def run_of(make_run, cluster: PracticeCluster, folder: Path, per_node: int, trouble: str = "") -> SlurmRun:
    """A run of one update on two nodes. What befalls the first rank of the second node befalls it once."""
    once = f", {trouble}: '{per_node}:{folder / 'mark'}'" if trouble else ""
    told = f"{meeting.FILE}: '{folder / 'notes'}'{once}"
    words = ["iterations=1", meeting.WORD, "scheduler.update.nodes=2"]
    words += [f"scheduler.update.{name}={per_node}" for name in ("ntasks_per_node", "gpus_per_node")]
    words += [f"scheduler.update.environment={{{told}}}"]
    return make_run(cluster, room_on(cluster, folder) / "run", *words)


def assert_met(run: SlurmRun, notes: Path, nodes: tuple[str, str], per_node: int) -> list[dict]:
    """Each rank on the node and GPU of its number, and of one sum."""
    number, met = 2 * per_node, meeting.read(notes)
    places = [(one["node"], one["device"]) for one in met]
    assert places == [(node, str(gpu)) for node in nodes for gpu in range(per_node)], run.story()
    assert [one["sum"] for one in met] == [[number, 2**number - 1]] * number
    script = next((run.root / "slurm").rglob("*update*.sh")).read_text()
    srun = f"exec srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks-per-node={per_node} --cpus-per-task=2"
    assert srun in script
    return met


@ON_CLUSTER
def test_four_ranks_on_two_nodes_meet_although_one_is_killed(cluster, make_run, complete_run, tmp_path):
    run = run_of(make_run, cluster, tmp_path, 2, meeting.KILLS)
    run.submit()
    run.wait_until_complete(300)
    met = assert_met(run, tmp_path / "notes", ("update0", "update1"), 2)
    assert {one["host"] for one in met} == {os.uname().nodename}
    (failure,) = run.events("failed")
    assert (failure["task"], failure["node"]) == ("1/update/0", "update[0-1]"), run.story()
    assert re.search("ranks lost their connection|killed by signal 9", failure["message"]), failure
    assert_same_policy(run, complete_run)


@ON_CLUSTER
@needs_root
def test_eight_ranks_on_two_machines_meet(own_cluster, make_run, complete_run, tmp_path):
    run = run_of(make_run, own_cluster(MACHINES), tmp_path, 4)
    run.submit()
    run.wait_until_complete(300)
    met = assert_met(run, tmp_path / "notes", ("one", "two"), 4)
    assert [one["host"] for one in met] == ["host-one"] * 4 + ["host-two"] * 4
    assert len({one["interface"] for one in met} - {None, "lo"}) == 1
    assert not run.events("failed"), run.story()
    assert_same_policy(run, complete_run)


@ON_CLUSTER
@needs_root
def test_a_machine_whose_gpu_fails_under_one_of_the_ranks_is_left_and_a_drained_one_waited_for(
    own_cluster, make_run, complete_run, tmp_path
):
    cluster = own_cluster(MACHINES)
    run = run_of(make_run, cluster, tmp_path, 1, meeting.FAULT)
    drain(cluster, "three", "state=drain", "reason=repair")
    run.submit()
    run.wait_for(lambda: run.events("failed"), "a fault of a GPU")
    run.wait_for(lambda: [j for j in run.jobs("PENDING") if "UnavailableNodes:three" in j.reason], "its wait")
    said = run.command("status", run.root).stdout
    assert "nodes that it needs are down, drained or reserved" in said, said
    assert re.search(r"iteration 1 update, attempt 1 \(job \w+ on two\): the GPU is broken", said), said
    drain(cluster, "three", "state=resume")
    run.wait_until_complete(300)
    assert_met(run, tmp_path / "notes", ("one", "three"), 1)
    (failure,) = run.events("failed")
    assert (failure["kind"], failure["node"]) == ("device", "two"), run.story()
    assert_same_policy(run, complete_run)


def drain(cluster: PracticeCluster, node: str, *state: str) -> None:
    assert cluster.call("scontrol", "update", f"nodename={node}", *state).returncode == 0
