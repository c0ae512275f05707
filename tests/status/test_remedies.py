"""The command that helps after a failure, with the setting and its value."""

import re
from dataclasses import replace

import pytest

from pipeline.config.compose import compose
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import task_of
from pipeline.status.obstacles import Obstacle, Permitted, obstacles_in, settings_for
from pipeline.status.remedies import remedy
from slurm.associations import Ceiling, Ceilings
from slurm.states import SlurmState
from tests.support.jobs import element, name_of

SLURM = (
    "scheduler=slurm",
    "scheduler.rollout.mem=64G",
    "scheduler.update.time=2:00:00",
    "scheduler.reward.exclude=[n1]",
    "rollout.engine=vllm",
    "reward.engine=vllm",
    "scheduler.update.environment={NCCL_IB_TIMEOUT: '22'}",
    "update.tokens_per_micro_batch=2048",
    "update.learning_rate=2e-5",
)


TOO_SMALL = "To serve at least one request with the model's max seq len (4096), 2.0 GiB KV cache is needed"
SHM = "Error while creating shared memory segment /dev/shm/nccl-abc (size 5767524)"
PLACE = "/home/ada/my rules/rules.py:12"
RAISED = f"(rules:score) raised KeyError: 'answer' at {PLACE}"
IN_UPDATE = "scheduler.update.environment"
REPORTED = {"words": (f"{IN_UPDATE}={{NCCL_DEBUG: INFO}}",), "said": "ncclRemoteError"}
OF_SCORING = "reward.vllm.gpu_memory_utilization"
WITHOUT_KL = {"words": ("algorithm.kl.coef=0",)}
ONE_OF_VLLM = {"words": ("reward.engine=transformers", "+reward.components.rm.engine=vllm")}
OWN_ENGINE = {"words": ("rollout.engine=transformers",)}


def helped(
    kind: FailureKind,
    job_kind: str,
    words: tuple[str, ...] = (),
    attempt: int = 3,
    node: str = "",
    said: str = "",
) -> str:
    config = compose(["experiment=quickstart", *SLURM, *words])
    found = remedy(config, Failure(task_of(1, job_kind), attempt, kind, said, node=node))
    if found is None:
        return ""
    return " ".join(["fork"] * found.is_fork + list(found.words or [found.what]))


@pytest.mark.parametrize(
    ("kind", "job_kind", "more", "expected"),
    [
        (FailureKind.TIMEOUT, "update", {}, "scheduler.update.time=0-09:00:00"),
        (FailureKind.TIMEOUT, "update", {"attempt": 1}, "scheduler.update.time=0-04:00:00"),
        (FailureKind.MEMORY, "rollout", {}, "scheduler.rollout.mem=524288M"),
        (FailureKind.MEMORY, "update", {}, ""),
        (FailureKind.DEVICE, "reward", {"node": "n7"}, "scheduler.reward.exclude=[n1,n7]"),
        (FailureKind.DEVICE, "update", {"node": "n[7-8]"}, "scheduler.update.exclude=[n7,n8]"),
        (FailureKind.LOST, "rollout", {"node": "n7"}, "scheduler.rollout.exclude=[n7]"),
        (FailureKind.LOST, "rollout", {}, ""),
        (FailureKind.DEVICE_MEMORY, "rollout", {}, "rollout.vllm.gpu_memory_utilization=0.80"),
        (FailureKind.DEVICE_MEMORY, "reward", {}, f"{OF_SCORING}=0.50"),
        (FailureKind.DEVICE_MEMORY, "reward", WITHOUT_KL, f"{OF_SCORING}=0.80"),
        (FailureKind.DEVICE_MEMORY, "reward", ONE_OF_VLLM, f"{OF_SCORING}=0.50"),
        (FailureKind.DEVICE_MEMORY, "update", {}, "fork update.tokens_per_micro_batch=1024"),
        (FailureKind.DEVICE_MEMORY, "evaluate", OWN_ENGINE, "fork rollout.tokens_per_batch=2048"),
        (FailureKind.NUMERICS, "update", {}, "fork update.learning_rate=1e-05"),
        (
            FailureKind.CONFIG,
            "reward",
            {"said": f"(ValueError: {TOO_SMALL})"},
            f"{OF_SCORING}=0.70",
        ),
        (FailureKind.CONFIG, "reward", {"said": "the rule raised KeyError"}, ""),
        (FailureKind.ERROR, "reward", {"said": f"r {RAISED} for p3"}, f"{PLACE} repaired"),
        (FailureKind.ERROR, "update", {"said": "ncclUnhandledCudaError"}, f"{IN_UPDATE}.NCCL_DEBUG=INFO"),
        (FailureKind.KILLED, "update", {"said": "ncclRemoteError"}, f"{IN_UPDATE}.NCCL_DEBUG=INFO"),
        (FailureKind.ERROR, "update", REPORTED, f"{IN_UPDATE}.NCCL_IB_DISABLE=1"),
        (FailureKind.ERROR, "update", {"said": f"Error {SHM}"}, f"{IN_UPDATE}.NCCL_SHM_DISABLE=1"),
        (FailureKind.ERROR, "update", {}, ""),
    ],
)
def test_what_helps(kind, job_kind, more, expected):
    assert helped(kind, job_kind, **more) == expected


def test_tasks_of_this_machine_get_more_time():
    config = compose(["experiment=quickstart", "scheduler.time_limit=600"])
    found = remedy(config, Failure(policy_maker(1), 3, FailureKind.TIMEOUT, "it took too long"))
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


# --- what no task's failure says ---

LIMITED = Permitted(
    accounts={"lab", "guest"},
    qos={"normal", "long"},
    ceilings=Ceilings(
        qos={"normal": Ceiling("QOS normal", wall=60.0), "long": Ceiling("QOS long", wall=86400.0)},
        default_qos={"lab": "normal", "guest": "normal"},
    ),
)
ONE_QOS = replace(LIMITED, accounts={"lab"}, qos={"normal"})
IN_A_MINUTE = [
    *("rollout.time=0-00:01:00", "rollout.signal=30"),
    *("update.time=0-00:01:00", "update.signal=30"),
]
OF_LAB = ("scheduler.account=lab", "scheduler.driver.time=0:01:00", "scheduler.prepare.time=0:00:30")


@pytest.mark.parametrize(
    ("said", "may", "words", "expected"),
    [
        ("Invalid account or account/partition combination specified", LIMITED, (), ["account=guest"]),
        ("InvalidAccount", LIMITED, (), ["account=guest"]),
        ("(AccountNotAllowed)", ONE_QOS, (), []),
        ("InvalidAccount", LIMITED, ("scheduler.rollout.account=gone",), ["rollout.account=guest"]),
        ("InvalidAccount", LIMITED, ("scheduler.update.account=other",), ["account=guest"]),
        ("Invalid qos specification", LIMITED, ("scheduler.qos=old",), ["qos=long"]),
        ("QOSMaxSubmitJobPerUserLimit", LIMITED, ("scheduler.qos=normal",), ["qos=long"]),
        ("QOSMaxWallDurationPerJobLimit", LIMITED, ("scheduler.rollout.time=20:00:00",), ["qos=long"]),
        ("QOSMaxWallDurationPerJobLimit", ONE_QOS, (), IN_A_MINUTE),
        ("(PartitionTimeLimit)", LIMITED, ("scheduler.rollout.time=0:00:30",), []),
        ("Priority", LIMITED, (), []),
        ("QOSMaxJobsPerUserLimit", LIMITED, (), []),
    ],
)
def test_what_lets_jobs_start_that_slurm_does_not_let(said, may, words, expected):
    config = compose(["experiment=quickstart", *SLURM, *OF_LAB, *words]).slurm
    kinds = ("prepare", "rollout", "update", "driver")
    found = [one for one in [Obstacle("rollout", said)] if one.lack]
    settings = settings_for(config, found, may, kinds)
    assert [f"{key}={value}" for key, value in settings.items()] == [f"scheduler.{one}" for one in expected]


def test_a_refusal_counts_until_something_of_its_kind_is_submitted():
    refused = {"event": "refused", "array": name_of("rollout"), "message": "Invalid account"}
    of_driver = refused | {"array": name_of("guard")}
    taken = {"event": "submitted", "array": name_of("rollout")}
    assert obstacles_in([refused, of_driver], ()) == (
        Obstacle("rollout", "Invalid account"),
        Obstacle("driver", "Invalid account"),
    )
    assert obstacles_in([refused, taken], ()) == ()
    waits = element(0, SlurmState.PENDING, reason="InvalidQOS")
    assert obstacles_in([refused, taken], [waits]) == (Obstacle("rollout", "InvalidQOS"),)
    assert obstacles_in([], [replace(waits, reason="JobHeldUser")]) == ()
