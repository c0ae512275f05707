"""Slurm as the simulator has it: who starts where, who blocks whom, and what backfill changes."""

import pytest

from pipeline.simulate.cluster import SimulatedCluster, SimulatedJob
from pipeline.simulate.plant import PlantNode, PlantPartition, PlantRequest, UserLimits
from pipeline.simulate.scheduling import backfill

HOUR = 3600.0


@pytest.fixture
def cluster() -> SimulatedCluster:
    """Two nodes of two GPUs. Everybody may use both, some jobs only the second."""
    nodes = (PlantNode("a", 8, 2), PlantNode("b", 8, 2))
    return SimulatedCluster(nodes, (PlantPartition("all", ("a", "b")), PlantPartition("second", ("b",))))


def job(
    name: str, gpus: int = 1, nodes: int = 1, partition: str = "all", limit: float = HOUR, **more
) -> SimulatedJob:
    return SimulatedJob(
        name, PlantRequest(1, gpus, nodes=nodes, limit=limit), (partition,), more.pop("eligible", 0), **more
    )


def submit(cluster: SimulatedCluster, *jobs: SimulatedJob) -> None:
    for one in jobs:
        cluster.submit(one)


def started(cluster: SimulatedCluster, now: float = 0.0) -> list[str]:
    return [one.name for one in cluster.start_in_order(now)]


def test_jobs_start_where_there_is_room_those_that_leave_least_over_first(cluster):
    submit(cluster, job("one"), job("pair", gpus=2), job("other"))
    assert started(cluster) == ["one", "pair", "other"]
    assert [sorted(one.name for one in here) for here in cluster.running] == [["one", "other"], ["pair"]]


def test_a_job_over_two_nodes_holds_both(cluster):
    wide = job("wide", gpus=2, nodes=2)
    submit(cluster, wide, job("late"))
    assert started(cluster) == ["wide"]
    assert wide.nodes == (0, 1)
    cluster.end(wide)
    assert started(cluster) == ["late"]


def test_a_job_that_finds_no_room_keeps_later_ones_from_its_nodes(cluster):
    """Also those of another partition that shares them, as in Slurm; backfill starts what delays nobody."""
    submit(cluster, job("runs", partition="second", limit=HOUR), job("wide", gpus=2, nodes=2))
    submit(cluster, job("short", partition="second", limit=HOUR / 2), job("long", limit=2 * HOUR))
    assert started(cluster) == ["runs"]
    assert [one.name for one in backfill(cluster, 0.0)] == ["short"]
    assert [one.name for one in cluster.pending] == ["wide", "long"]
    assert all(one.lacks_room for one in cluster.pending)


def test_a_job_of_higher_priority_goes_first(cluster):
    submit(cluster, job("mine", gpus=2, nodes=2), job("theirs", gpus=2, nodes=2, priority=1, is_mine=False))
    assert started(cluster) == ["theirs"]


def test_a_users_limit_holds_back_their_jobs_and_nobody_elses():
    cluster = SimulatedCluster((PlantNode("a", 8, 4),), (PlantPartition("all", ("a",)),), UserLimits(gpus=2))
    first = job("first", gpus=2)
    submit(cluster, first, job("second"), job("theirs", is_mine=False))
    assert started(cluster) == ["first", "theirs"]
    cluster.end(first)
    assert started(cluster) == ["second"]


def test_a_job_with_a_begin_time_blocks_nobody_before_it(cluster):
    submit(cluster, job("later", gpus=2, nodes=2, eligible=10.0), job("now"))
    assert started(cluster) == ["now"]
    assert not cluster.pending[0].lacks_room


def test_a_cancelled_job_keeps_nobody_waiting(cluster):
    wide, runs = job("wide", gpus=2, nodes=2), job("runs")
    submit(cluster, runs, wide, job("small"))
    assert started(cluster) == ["runs"]
    cluster.cancel(wide)
    assert started(cluster) == ["small"]


@pytest.mark.parametrize(
    ("asked", "number"), [(PlantRequest(1, 1), 4), (PlantRequest(5, 1), 2), (PlantRequest(1, 2, 0, 2), 1)]
)
def test_how_many_jobs_could_ever_run_at_once(cluster, asked, number):
    assert cluster.could_start(asked, ("all",)) == number
