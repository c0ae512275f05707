"""What stages need of their hosts, beside the memory that their jobs get."""

import re
from dataclasses import replace

import pytest

from pipeline.checks import host_memory
from pipeline.checks.finding import Verdict
from pipeline.checks.host_memory import HostRoom, judge_host, room_of
from pipeline.checks.memory import check_memory
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig
from pipeline.config.update import UpdateConfig
from pipeline.forecast.parts import GIB
from pipeline.forecast.stages import stage_needs, update_need
from slurm.commands import SlurmMissing
from slurm.limits import ClusterMemory, NodeKind, Partition
from tests.support.large_models import eight_billion
from tests.support.processes import config_of

MIB = 2**20


@pytest.fixture
def config(inputs, tmp_path):
    """Eight billion weights beside a critic of as many, their optimizer in the host's memory."""
    found = config_of(inputs, tmp_path / "run")
    model = replace(found.model, policy=str(eight_billion(tmp_path / "policy", inputs / "policy")))
    update = UpdateConfig(engine="deepspeed", precision="bf16", zero_stage=2, offload_optimizer=True)
    return replace(found, model=model, update=update, scheduler=SlurmConfig())


def place(name: str = "gpu", sizes: tuple[int, ...] = (512_000,), **defaults: int) -> Partition:
    kinds = tuple(NodeKind(4, 64, size, {"gpu": 4}) for size in sizes)
    return Partition(name, None, "UP", 4, True, None, None, kinds, defaults)


COUNTED = ClusterMemory({}, is_counted=True)
JOB = {"cpus_per_task": 4, "ntasks_per_node": 2, "gpus_per_node": "2"}


@pytest.mark.parametrize(
    ("given", "places", "cluster", "mebibytes", "why"),
    [
        ({"mem": "64G"}, [], None, 64 * 1024, "scheduler.update.mem=64G"),
        ({}, [place(DefMemPerCPU=2000)], COUNTED, 16_000, "partition gpu gives it DefMemPerCPU=2000 x 8"),
        ({}, [place(DefMemPerGPU=9000)], COUNTED, 18_000, "partition gpu gives it DefMemPerGPU=9000 x 2"),
        (
            {},
            [place()],
            ClusterMemory({"DefMemPerNode": 3000}, True),
            3000,
            "gpu gives it DefMemPerNode=3000",
        ),
        ({}, [place(sizes=(512_000, 256_000))], COUNTED, 256_000, "partition gpu gives it a whole node"),
        (
            {},
            [place(DefMemPerCPU=10)],
            ClusterMemory({}, False),
            512_000,
            "partition gpu gives it a whole node",
        ),
        (
            {"partition": ("gpu", "small")},
            [place(), place("small", DefMemPerNode=7000)],
            COUNTED,
            7000,
            "partition small gives it DefMemPerNode=7000",
        ),
        ({}, [place()], None, None, ""),
        ({}, [], COUNTED, None, ""),
        ({}, [place(sizes=(1,))], ClusterMemory({}, False), None, ""),
        ({"options": {"mem-per-cpu": "4G"}}, [place(DefMemPerCPU=10)], COUNTED, None, ""),
        ({"options": {"exclusive": True}}, [place(DefMemPerCPU=10)], COUNTED, None, ""),
    ],
)
def test_a_job_has_what_it_asks_for_or_the_least_that_its_partitions_give(
    given, places, cluster, mebibytes, why
):
    partitions = {one.name: one for one in places}
    found = room_of("scheduler.update.mem", ResourcesConfig(**(JOB | given)), partitions, cluster)
    assert (found and found.size) == (mebibytes and mebibytes * MIB)
    assert found is None or (found.processes == 2 and why in found.why)


def need_of(config):
    return update_need(config, 1)


def judged(config, size: float, most: float | None = None, processes: int = 1):
    room = HostRoom("scheduler.update.mem", size * GIB, most and most * GIB, processes, "by a test")
    return judge_host(config, need_of(config), room, lambda _: 1)


def test_what_the_host_has_not_for_certain_is_a_problem_and_what_it_may_lack_a_warning(config):
    host = host_memory.host_need(need_of(config), 1)
    certain, peak = host.certain / GIB, host.peak / GIB
    assert certain < peak
    assert judged(config, peak / 0.9 + 1) is None
    assert judged(config, peak).verdict is Verdict.WARNING
    assert judged(config, certain * 0.99).verdict is Verdict.PROBLEM
    assert judged(config, certain * 1.99, processes=2).verdict is Verdict.PROBLEM
    assert judge_host(config, need_of(config), None, lambda _: 1) is None
    said = judged(config, 64).measured
    assert said.startswith("scheduler: update cannot fit: ")
    assert "and a job has 64.00 GiB on a node (by a test); it would fit with scheduler.update.mem=" in said


@pytest.mark.parametrize("most", [None, 4096])
def test_the_smallest_change_is_more_memory_where_a_node_has_it(config, most):
    size = int(
        re.fullmatch(r"it would fit with scheduler\.update\.mem=(\d+)M", judged(config, 64, most).advice)[1]
    )
    assert judged(config, size / 1024, most) is None
    assert judged(config, (size - 1) / 1024, most) is not None


def test_where_no_node_has_it_the_stage_is_changed_too(config):
    *words, memory = judged(config, 64, 128).advice.removeprefix("it would fit with ").split()
    assert memory == f"scheduler.update.mem={128 * 1024 - 1}M"
    assert words == ["scheduler.update.nodes=4", "update.zero_stage=3"]
    nodes = replace(config.scheduler.update, nodes=4)
    other = replace(config, scheduler=replace(config.scheduler, update=nodes))
    assert judged(replace(other, update=replace(config.update, zero_stage=3)), 128 - 1 / 1024, 128) is None
    assert judged(config, 1, 2).advice == "take nodes with more memory"


def test_without_a_gpu_all_that_a_stage_needs_is_the_hosts(config):
    update = replace(config.update, offload_optimizer=False)
    (need,) = [
        one for one in stage_needs(replace(config, update=update), lambda _: 0) if one.stage == "update"
    ]
    room = HostRoom("scheduler.update.mem", need.certain - 1, None, 1, "by a test")
    assert judge_host(config, need, room, lambda _: 0).verdict is Verdict.PROBLEM


def test_a_check_of_memory_compares_each_stages_mem(config, monkeypatch):
    def silent():
        raise SlurmMissing("sinfo")

    monkeypatch.setattr("pipeline.checks.memory.read_partitions", silent)
    few = ResourcesConfig(gpus_per_node="1", mem="16G")
    found = list(check_memory(replace(config, scheduler=SlurmConfig(update=few))))
    (about_host,) = [one for one in found if one.title == "host memory of update"]
    assert about_host.verdict is Verdict.PROBLEM
    assert "(scheduler.update.mem=16G)" in about_host.measured
    assert [one.title for one in check_memory(config)] == ["memory of update"]
