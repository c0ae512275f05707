"""A rehearsal on the practice cluster: a job on each partition, with GPUs of two kinds."""

import json
import re

from tests.support import tiny


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
