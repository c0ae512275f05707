"""Tasks that do nothing but commit, for measuring and testing what orders them.

The commit records of a whole run are written ahead of it; a task is a shell script in place of the Python
interpreter (``scheduler.python``), which waits and links its record where it belongs.
"""

import json
import time
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.run.commits import Record
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task

SCRIPT = """#!/bin/sh
# noop.sh -P -m slurm.element RUN/slurm/00007/rollout-1-0.json [--rank]
tasks=$4
stage=${{tasks##*/}}; stage=${{stage%-*-*}}
folder=${{tasks%/*}}; iteration=${{folder##*/}}
case $stage in
prepare) record=data/prompts.json ;;
*) record=iterations/$iteration/$stage/shard-$(printf %05d "$SLURM_ARRAY_TASK_ID").json ;;
esac
sleep {seconds}
mkdir -p "{run}/${{record%/*}}"
ln "{records}/$record" "{run}/$record" 2>/dev/null || test -e "{run}/$record"
"""


def write_noops(folder: Path, config: Config, run_dir: Path, seconds: float) -> Path:
    """Records of every task below ``folder``, and the script that commits them in ``run_dir``.

    Returns the script, to be given as ``scheduler.python``.
    """
    plan, records = Plan.of(config), RunPaths(folder / "records")
    for task in plan.all_tasks():
        path = records.task(task).record
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make_record(task).to_json()) + "\n")
    script = folder / "noop.sh"
    script.write_text(SCRIPT.format(seconds=seconds, run=run_dir, records=records.root))
    script.chmod(0o755)
    return script


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
