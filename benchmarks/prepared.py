"""A run of which prepare is committed, for benchmarks of what comes after it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.commits import Record, publish
from pipeline.run.directory import Run, create_run
from pipeline.run.tasks import PREPARE, Task


def prepared_run(folder: Path, prompts: int, settings: Iterable[str]) -> Run:
    """Make a run in ``folder``, with its policy's model. Its reward is a rule that is never called."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "x"}) + "\n" for i in range(prompts)))
    common = [
        "reward=rule",
        "reward.components.rule.function=unused:scores",
        "tracking=none",
        f"run_dir={folder / 'run'}",
        f"model.policy={folder / 'policy'}",
        f"data.prompts={path}",
        f"data.prompts_per_iteration={prompts}",
        "algorithm.kl.coef=0",
    ]
    run = create_run(resolve(compose([*common, *settings])))
    publish(run.paths, record_of(PREPARE, ()))
    return run


def record_of(task: Task, outputs: Sequence[object], attempt: str = "bench") -> Record:
    """Return the record of an attempt that has written ``outputs``, and nothing else worth noting."""
    return Record(task, attempt, tuple(outputs), {}, task.iteration, 0, 1, "bench/1", 0, 0, "", 0, "")
