"""Every kind of file of a run, damaged in every way: commands answer in time; no policy is another one."""

import shutil
import time
from pathlib import Path

import pytest

from tests.cluster.scenario import policy_of
from tests.support.damage import DAMAGES
from tests.support.tables import sample

FILES = (
    *("run.json", "config.yaml", "events.jsonl", "metrics.jsonl", "spans.jsonl", "best.json", "report.html"),
    *("locks/*.json", "rows/00001.json", "data/prompts.json", "data/prompts.1-*.arrow", "data/*.jsonl"),
    *("iterations/00001/rollout/*0.json", "iterations/00002/rollout/*0.*.arrow"),
    *("iterations/00002/reward/*1.json", "iterations/00002/reward/*1.*.arrow"),
    *(
        "iterations/00001/update/*0.json",
        "iterations/00002/update/*0.json",
        "iterations/00002/update/*learned*",
    ),
    *("iterations/00001/state/*.json", "iterations/00002/state/*.json"),
    *("iterations/00001/evaluate/*.json", "iterations/00002/evaluate/*.arrow"),
    *("policy/00001.*/config.json", "policy/00002.*/model.safetensors", "policy/00002.*/tokenizer.json"),
    *("state/00001.*/critic/*", "state/00002.*/moments/policy.safetensors"),
    *("logs/00001-rollout/attempt-1/*0.log", "logs/00002-update/attempt-1/*.log"),
)
"""By the first path that fits, below the run directory."""
NO_FILE = ("pipe", "folder", "link to nothing")
TRIALS = [(file, damage) for file in FILES for damage in DAMAGES]
LOOKS = (["status"], ["logs"], ["samples"])
LONGEST_SECONDS = 30.0
"""Of a command that changes nothing, on a machine that runs other tests too."""


@pytest.mark.parametrize(("file", "damage"), sample(TRIALS, 0.015), ids=str)
def test_a_damaged_file_costs_no_traceback_no_wait_and_no_policy(
    complete_run, slurm_ppo, tmp_path, file, damage
):
    root = Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True))

    def answer(command: str, *options: str) -> int:
        done = slurm_ppo(command, root, *options, timeout=60)
        said = done.stdout + done.stderr
        assert done.returncode in (0, 1, 2, 3), (command, said)
        assert "Traceback" not in said, (command, said)
        assert done.returncode == 0 or said.strip(), command
        return done.returncode

    DAMAGES[damage](sorted(root.glob(file))[0])
    for command in (*LOOKS, *([["doctor", "--no-probe"]] if damage == "pipe" else [])):
        begun = time.monotonic()
        answer(*command)
        assert time.monotonic() - begun < LONGEST_SECONDS, command
    # Where no row can be written resume waits for ten minutes, and says for what.
    can_write_rows = file != "metrics.jsonl" or damage not in NO_FILE
    if can_write_rows and answer("resume") == 0:
        assert policy_of(root, 2) == policy_of(complete_run, 2)
    answer("clean", "--yes")
