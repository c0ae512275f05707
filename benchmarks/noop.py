"""Records of tasks that do nothing, for measuring and testing what orders them."""

import time

from pipeline.run.commits import Record
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task


def make_record(task: Task) -> Record:
    """What a task that did nothing commits."""
    metrics = {"compute_seconds": 0.0, "peak_memory_gib": 0.0, "epoch": 0.0, "reward/mean": 0.0}
    now = time.time()
    return Record(
        task=task,
        attempt="1-noop",
        outputs=(),
        inputs={},
        policy_version=task.iteration if task.stage is Stage.UPDATE else max(0, task.iteration - 1),
        seed=derive_seed(0, task.iteration, task.stage, task.shard),
        rows=0,
        schema="noop/1",
        started=now,
        ended=now + 1,
        host="",
        pid=0,
        job_id="",
        metrics=metrics | {"response_length/mean": 0.0},
    )
