"""A node whose GPU is broken: the next try is on another node, and so is all that follows."""

import re
from pathlib import Path

from tests.cluster.scenario import Hold, SlurmRun, room_on
from tests.support import ALONE, faulty, light
from tests.support.tables import ON_CLUSTER

BROKEN = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def with_broken_node(make_run, cluster, folder: Path, partition: str) -> SlurmRun:
    """Rollouts in a partition, of whose nodes the first that one comes to is broken. Each has a job of its
    own; the first that computes is held up while a file is there."""
    told = f"{faulty.FAULT}: '{BROKEN}', {faulty.NODE}: '{folder / 'broken'}', {light.SECONDS}: '0'"
    told += f", {light.HOLD}: '{folder / 'hold'}'"
    words = [*faulty.WORDS, *ALONE[:2], f"scheduler.rollout.partition={partition}", "iterations=2"]
    words += [f"scheduler.rollout.environment={{{told}}}", "rollout.num_shards=1"]
    return make_run(cluster, room_on(cluster, folder) / "run", *words)


def exclusions(run: SlurmRun) -> list[str]:
    """What each array of rollouts excludes, in the order of their submission."""
    scripts = sorted((run.root / "slurm").rglob("*rollout*.sh"), key=lambda path: path.stat().st_mtime_ns)
    found = (re.search(r"^#SBATCH --exclude=(.*)$", path.read_text(), re.MULTILINE) for path in scripts)
    return [match[1] if match else "" for match in found]


@ON_CLUSTER
def test_what_follows_a_fault_of_a_gpu_is_on_another_node(cluster, make_run, tmp_path):
    run, hold = with_broken_node(make_run, cluster, tmp_path, "update"), Hold(tmp_path / "hold")
    hold.begin()
    run.submit()
    run.wait_for(lambda: list(tmp_path.glob("hold.*")), "a rollout at work")
    broken = (tmp_path / "broken").read_text()
    (other,) = {"update0", "update1"} - {broken}
    said = run.command("status", run.root).stdout
    assert re.search(rf"job \d+ on {other}; 2 attempts, 1 retry", said), said
    assert re.search(rf"rollout shard 0, attempt 1 \(job \w+ on {broken}\): the GPU is broken", said), said
    hold.end()
    run.wait_until_complete(300)
    (event,) = run.events("failed")
    assert (event["task"], event["kind"], event["node"]) == ("1/rollout/0", "device", broken), run.story()
    assert exclusions(run) == ["", broken, broken], "the second try, and the second iteration"
