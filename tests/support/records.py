"""Records of a made-up task, and a disk that is too small for them."""

import subprocess
import sys

from pipeline.run.commits import FileEntry, Record
from pipeline.run.tasks import Stage, Task
from tests.support import ROOT

TASK = Task(3, Stage.ROLLOUT, 1)


def make_record(task: Task = TASK, attempt: str = "1-aa", outputs: tuple[FileEntry, ...] = ()) -> Record:
    return Record(
        task=task,
        attempt=attempt,
        outputs=outputs,
        inputs={"0/prepare/0": "ab"},
        policy_version=2,
        seed=7,
        rows=1,
        schema="rollout/1",
        started=1.0,
        ended=2.0,
        host="node1",
        pid=12,
        job_id="",
        metrics={"epoch": 0.0},
    )


def in_child_with_small_disk(limit: int, body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python that cannot write files larger than ``limit`` bytes: what a full disk looks like."""
    limiting = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    command = [sys.executable, "-B", "-c", body.replace("#LIMIT", limiting), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
