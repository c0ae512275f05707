"""The run directory's layout is an interface: people and scripts read it."""

import re
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import PREPARE, Stage, Task

GOLDEN = """
best.json
config.copy.yaml
config.yaml
data/prompts.ATTEMPT.arrow
data/prompts.chunks.ATTEMPT.json
data/prompts.claim-1.json
data/prompts.heldout.ATTEMPT.arrow
data/prompts.json
data/prompts.normalization.ATTEMPT.json
data/prompts.rejected.ATTEMPT.jsonl
events.jsonl
forecast.json
iterations/00000/evaluate/shard-00000.ATTEMPT.arrow
iterations/00000/evaluate/shard-00000.claim-1.json
iterations/00000/evaluate/shard-00000.json
iterations/00001/evaluate/shard-00000.ATTEMPT.arrow
iterations/00001/evaluate/shard-00000.json
iterations/00001/reward/shard-00000.ATTEMPT.arrow
iterations/00001/reward/shard-00000.json
iterations/00001/reward/shard-00001.ATTEMPT.arrow
iterations/00001/reward/shard-00001.json
iterations/00001/rollout/shard-00000.ATTEMPT.arrow
iterations/00001/rollout/shard-00000.json
iterations/00001/rollout/shard-00001.ATTEMPT.arrow
iterations/00001/rollout/shard-00001.json
iterations/00001/state/shard-00000.json
iterations/00001/update/shard-00000.json
iterations/00001/update/shard-00000.learned.ATTEMPT.json
iterations/00002/evaluate/shard-00000.ATTEMPT.arrow
iterations/00002/evaluate/shard-00000.json
iterations/00002/reward/shard-00000.ATTEMPT.arrow
iterations/00002/reward/shard-00000.json
iterations/00002/reward/shard-00001.ATTEMPT.arrow
iterations/00002/reward/shard-00001.json
iterations/00002/rollout/shard-00000.ATTEMPT.arrow
iterations/00002/rollout/shard-00000.json
iterations/00002/rollout/shard-00001.ATTEMPT.arrow
iterations/00002/rollout/shard-00001.json
iterations/00002/state/shard-00000.json
iterations/00002/update/shard-00000.json
iterations/00002/update/shard-00000.learned.ATTEMPT.json
locks/000001.json
logs/00000-evaluate/attempt-1/shard-00000.log
logs/00000-prepare/attempt-1/prompts.log
logs/00001-evaluate/attempt-1/shard-00000.log
logs/00001-reward/attempt-1/shard-00000.log
logs/00001-reward/attempt-1/shard-00001.log
logs/00001-rollout/attempt-1/shard-00000.log
logs/00001-rollout/attempt-1/shard-00001.log
logs/00001-update/attempt-1/shard-00000.log
logs/00002-evaluate/attempt-1/shard-00000.log
logs/00002-reward/attempt-1/shard-00000.log
logs/00002-reward/attempt-1/shard-00001.log
logs/00002-rollout/attempt-1/shard-00000.log
logs/00002-rollout/attempt-1/shard-00001.log
logs/00002-update/attempt-1/shard-00000.log
metrics.jsonl
policy/00001 -> 00001.ATTEMPT
policy/00001.ATTEMPT/config.json
policy/00001.ATTEMPT/generation_config.json
policy/00001.ATTEMPT/model.safetensors
policy/00001.ATTEMPT/tokenizer.json
policy/00001.ATTEMPT/tokenizer_config.json
policy/00002 -> 00002.ATTEMPT
policy/00002.ATTEMPT/config.json
policy/00002.ATTEMPT/generation_config.json
policy/00002.ATTEMPT/model.safetensors
policy/00002.ATTEMPT/tokenizer.json
policy/00002.ATTEMPT/tokenizer_config.json
policy/best -> 0000N.ATTEMPT
report.html
rows/00001.json
rows/00002.json
run.copy.json
run.json
slurm/control.copy.json
slurm/control.json
slurm/workers/WORKER.json
spans.jsonl
state/00001 -> 00001.ATTEMPT
state/00001.ATTEMPT/critic/model.safetensors
state/00001.ATTEMPT/moments/critic.safetensors
state/00001.ATTEMPT/moments/policy.safetensors
state/00002 -> 00002.ATTEMPT
state/00002.ATTEMPT/critic/model.safetensors
state/00002.ATTEMPT/moments/critic.safetensors
state/00002.ATTEMPT/moments/policy.safetensors
"""


def tree(root: Path) -> list[str]:
    """Every file and link, with attempts' ids blotted out."""
    lines = []
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            target = str(path.readlink())
            name += f" -> {re.sub('^0000.', '0000N', target) if path.name == 'best' else target}"
        elif path.is_dir():
            continue
        lines.append(re.sub(r"\blocal-\d+-\d+r0\b", "WORKER", re.sub(r"\b1-[0-9a-f]{8}\b", "ATTEMPT", name)))
    return sorted(set(lines))  # how many workers there were is chance


def test_the_tree_of_a_complete_run(complete_run):
    assert tree(complete_run) == GOLDEN.split("\n")[1:-1]


def test_a_task_s_files_share_its_name_and_carry_the_attempt():
    paths = RunPaths(Path("/runs/r"))
    files = paths.task(Task(7, Stage.ROLLOUT, 3))
    assert str(files.record) == "/runs/r/iterations/00007/rollout/shard-00003.json"
    assert str(files.data("2-ab")) == "/runs/r/iterations/00007/rollout/shard-00003.2-ab.arrow"
    assert str(files.log(2)) == "/runs/r/logs/00007-rollout/attempt-2/shard-00003.log"
    assert str(files.failure(2)) == "/runs/r/logs/00007-rollout/attempt-2/shard-00003.failure.json"
    assert str(paths.task(Task(7, Stage.UPDATE)).policy("1-cd")) == "/runs/r/policy/00007.1-cd"
    assert str(paths.task(PREPARE).data("1-cd", "heldout")) == "/runs/r/data/prompts.heldout.1-cd.arrow"


def test_records_name_files_relative_to_the_run_so_that_runs_can_be_moved(complete_run):
    for record in complete_run.glob("iterations/*/*/*.json"):
        assert str(complete_run) not in record.read_text()
