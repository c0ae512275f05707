"""The command that helps after a failure, with the setting and its value."""

import re

import pytest

from pipeline.config.compose import compose
from pipeline.run.failures import FailureKind
from pipeline.status.remedies import GivenUp, remedy

SLURM = (
    "scheduler=slurm",
    "scheduler.rollout.mem=64G",
    "scheduler.update.time=2:00:00",
    "scheduler.reward.exclude=[n1]",
    "rollout.engine=vllm",
    "reward.engine=vllm",
    "update.tokens_per_micro_batch=2048",
    "update.learning_rate=2e-5",
)


def helped(
    kind: FailureKind, job_kind: str, *words: str, attempt: int = 3, node: str = "", said: str = ""
) -> str:
    found = remedy(
        compose(["experiment=quickstart", *SLURM, *words]), GivenUp(job_kind, kind, attempt, node, said)
    )
    return "" if found is None else f"{'fork ' * found.is_fork}{' '.join(found.words)}"


@pytest.mark.parametrize(
    ("kind", "job_kind", "more", "expected"),
    [
        (FailureKind.TIMEOUT, "update", {}, "scheduler.update.time=0-09:00:00"),
        (FailureKind.TIMEOUT, "update", {"attempt": 1}, "scheduler.update.time=0-04:00:00"),
        (FailureKind.MEMORY, "rollout", {}, "scheduler.rollout.mem=524288M"),
        (FailureKind.MEMORY, "update", {}, ""),
        (FailureKind.DEVICE, "reward", {"node": "n7"}, "scheduler.reward.exclude=[n1,n7]"),
        (FailureKind.LOST, "rollout", {"node": "n7"}, "scheduler.rollout.exclude=[n7]"),
        (FailureKind.LOST, "rollout", {}, ""),
        (FailureKind.DEVICE_MEMORY, "rollout", {}, "rollout.vllm.gpu_memory_utilization=0.80"),
        (FailureKind.DEVICE_MEMORY, "update", {}, "fork update.tokens_per_micro_batch=1024"),
        (FailureKind.NUMERICS, "update", {}, "fork update.learning_rate=1e-05"),
        (
            FailureKind.CONFIG,
            "reward",
            {"said": "To serve at least one request 2.0 GiB KV cache is needed"},
            "reward.vllm.gpu_memory_utilization=0.95",
        ),
        (FailureKind.CONFIG, "reward", {"said": "the rule raised KeyError"}, ""),
        (FailureKind.ERROR, "update", {}, ""),
    ],
)
def test_what_helps(kind, job_kind, more, expected):
    assert helped(kind, job_kind, **more) == expected


def test_tasks_of_this_machine_get_more_time():
    config = compose(["experiment=quickstart", "scheduler.time_limit=600"])
    found = remedy(config, GivenUp("update", FailureKind.TIMEOUT, 3, "", "it took too long"))
    assert found.words == ("scheduler.time_limit=1200",)


def test_status_of_a_run_that_failed_says_the_command_and_it_works(slurm_ppo, inputs, tmp_path, environment):
    from tests.support import tiny

    run = tmp_path / "run"
    slow = environment | {"LIGHT_SECONDS": "5"}
    words = ("scheduler.time_limit=2", "scheduler.max_attempts=1", "iterations=1")
    done = slurm_ppo("run", *tiny.overrides(inputs, run, *words), env=slow)
    assert done.returncode == 1
    said = slurm_ppo("status", run).stdout
    (command,) = re.findall(r"^go on with twice the time: slurm-ppo (.*)$", said, re.MULTILINE)
    assert command in done.stderr
    assert slurm_ppo(*command.split()).returncode == 0
    assert "scheduler.time_limit 2 -> 4" in slurm_ppo("config", run, "--history").stdout
