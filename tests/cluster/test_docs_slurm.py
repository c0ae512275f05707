"""The tutorial's page about Slurm, as it is written: a practice cluster comes up, trains, and goes."""

import json

from docs.generate.file_page import undescribed
from tests.support import documented, light
from tests.support.documented import Kind


def test_the_practice_run_of_the_tutorial(inputs, tmp_path_factory, environment, cluster):
    """``cluster`` is not used: it says whether Slurm is there."""
    sandbox = documented.make_sandbox(tmp_path_factory.mktemp("docs"), inputs)
    env = documented.environment(sandbox, environment | {"WANDB_MODE": "disabled"})
    smaller = {"iterations": "1", "rollout.num_shards": "1", "evaluate.every": "0", "data.heldout": "null"}
    smaller |= dict(word.split("=", 1) for word in light.WORDS)
    env[documented.SMALLER] = json.dumps(smaller)
    story = [command for command in documented.all_commands() if command.kind is Kind.SLURM]
    told = documented.tell(story, sandbox, env, timeout=700)
    assert "complete" in told
    assert not (sandbox / ".slurm-ppo-devcluster").exists()
    assert not undescribed(sandbox / "runs/on-slurm")
