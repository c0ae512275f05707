"""A rehearsal, and a look before training, on the practice cluster: jobs on each partition, with GPUs of two
kinds."""

import json
import re
from dataclasses import replace

from slurm.devcluster import PracticePartition
from tests.cluster.test_machines import needs_root
from tests.cluster.test_many_ranks import MACHINES, NAMES
from tests.support import tiny
from tests.support.tables import ON_CLUSTER


def test_each_stage_is_rehearsed_on_its_partition_and_nothing_is_left(
    cluster, slurm_ppo, inputs, environment, tmp_path
):
    words = tiny.overrides(
        inputs, tmp_path / "run", "scheduler=devcluster", "scheduler.update.python=/no/python"
    )
    told = environment | cluster.environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurm_ppo("rehearse", "--short", "--only", "storage", "--json", *words, env=told)
    assert done.returncode == 1, done.stderr
    found = {one["title"]: one for one in json.loads(done.stdout)["findings"]}
    for stage in ("rollout", "reward"):
        said = found[f"{stage}: storage"]["measured"]
        assert re.search(r"written at .*, read from another node at [\d.]+ GB/s", said)
    assert re.search(
        r"job \d+ on update\d left no answer \(exit code 127\)", found["update: job"]["measured"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert not cluster.call("squeue", "--noheader").stdout


@ON_CLUSTER
def test_a_look_before_training_is_taken_by_jobs_of_each_partition_and_nothing_is_left(
    cluster, slurm_ppo, inputs, environment, tmp_path
):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=devcluster", "rollout.num_shards=4")
    told = environment | cluster.environment()
    done = slurm_ppo("try", "--prompts", 2, "--json", *words, env=told, timeout=400)
    found = json.loads(done.stdout)
    places = {one["job_kind"]: one["partition"] for one in found["stages"]}
    assert (places.keys(), found["responses"]) == ({"prepare", "rollout", "reward", "update"}, 2), done.stderr
    assert places["rollout"] != places["update"]
    rollout = found["outlook"]["stages"][0]
    assert (rollout["tasks"], rollout["at_once"] <= 4) == (4, True)
    assert list(tmp_path.iterdir()) == []
    assert not cluster.call("squeue", "--noheader").stdout


@ON_CLUSTER
@needs_root
def test_the_ranks_of_two_nodes_are_rehearsed_on_the_partition_of_all_stages(
    own_cluster, slurm_ppo, inputs, environment, tmp_path
):
    """Its jobs may take half an hour, which is less than a rehearsal asks for elsewhere."""
    one = PracticePartition("update", NAMES, max_time="30")
    cluster = own_cluster(replace(MACHINES, partitions=(*MACHINES.partitions[:1], one)))
    checks = ("own-device", "all-reduce", "killed-rank")
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=devcluster", "scheduler.update.nodes=2")
    words += ["scheduler.update.ntasks_per_node=2", "scheduler.update.cpus_per_task=2"]
    for stage in ("rollout", "reward", "update"):
        words += [f"scheduler.{stage}.partition=update", f"scheduler.{stage}.gpus_per_node=2"]
    told = environment | cluster.environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurm_ppo("rehearse", "--only", ",".join(checks), "--json", *words, env=told)
    found = {one["title"]: one for one in json.loads(done.stdout)["findings"]}
    assert {title: one["verdict"] for title, one in found.items()} == {f"update: {n}": "ok" for n in checks}
    own, summed, killed = (found[f"update: {name}"]["measured"] for name in checks)
    assert re.fullmatch(r"4 ranks on (\w+)/0, \1/1, (?!\1)(\w+)/0, \2/1, named by numbers", own)
    assert re.match(r"4 ranks on 2 nodes, gloo, interface \w+: [\d.]+ GB/s for 64 MiB", summed)
    assert re.match(r"all ranks had ended [\d.]+ s after one was killed", killed)
    assert done.returncode == 0
