"""What status says after a failure: the whole command that helps, which works as it is printed.

Errors of GPUs, of vLLM and of NCCL are raised by stand-ins in light tasks; the rest happens.
"""

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slurm.sharedfiles import is_there
from tests.cluster.scenario import SlurmRun, assert_same_policy, room_on, staying
from tests.support import ALONE, faulty, light
from tests.support.killing import HOOKS
from tests.support.tables import sample
from tests.support.wandb_server import WandbServer

ALONE_IN_JOBS = (*ALONE, "iterations=1", "scheduler.max_attempts=1")
_WAY = re.compile(r"^(?:go on|it goes on|make room|to ).*?: ((?:slurm-ppo|scontrol) .+)$", re.MULTILINE)


@dataclass(frozen=True)
class Ground:
    """Where a run fails."""

    get: Callable[[str], Any]
    """Fixture by its name."""
    folder: Path

    def run(self, *words: str, on: str = "cluster", make: str = "make_run") -> SlurmRun:
        cluster = self.get(on)
        root = room_on(cluster, self.folder) / "run"
        return self.get(make)(cluster, root, *ALONE_IN_JOBS, *words)


@dataclass(frozen=True)
class Failed:
    """A run that does not go on, and what status is to say."""

    run: SlurmRun
    command: str
    """Regular expression."""
    has_same_policy: bool = True
    """Whether it is to end in the policy of a run that nothing happened to."""


def given(stage: str, **variables: object) -> str:
    said = ", ".join(f"{name}: '{value}'" for name, value in variables.items())
    return f"scheduler.{stage}.environment={{{said}}}"


def fails(run: SlurmRun) -> SlurmRun:
    """Submit a run and wait until it has given up."""
    run.submit()
    return has_given_up(run)


def has_given_up(run: SlurmRun) -> SlurmRun:
    run.wait_for(lambda: run.events("gave_up") and not run.jobs(), "a run that gives up")
    return run


# --- tasks that fail ---


@contextmanager
def time(ground: Ground) -> Iterator[Failed]:
    slow = given("rollout", **{light.SECONDS: 3, light.DEAF: 1})  # for each of two responses
    yield Failed(
        fails(ground.run(slow, "scheduler.rollout.task_time=0:00:05")),
        r"slurm-ppo resume \S+ scheduler.rollout.task_time=0-00:00:10",
    )


@contextmanager
def memory_of_the_host(ground: Ground) -> Iterator[Failed]:
    lacks = {faulty.FAULT: "the host has too little", faulty.MEMORY: 1, faulty.CURE: "SLURM_MEM_PER_NODE=600"}
    words = (*faulty.WORDS, "scheduler.rollout.mem=300M", given("rollout", **lacks))
    yield Failed(fails(ground.run(*words)), r"slurm-ppo resume \S+ scheduler.rollout.mem=600M")


@contextmanager
def memory_of_a_gpu(ground: Ground) -> Iterator[Failed]:
    lacks = {faulty.FAULT: "OutOfMemoryError: CUDA out of memory.", faulty.FITS: 1100, faulty.LATER: 1}
    words = (*faulty.WORDS, "iterations=2", "rollout.tokens_per_batch=2200", given("rollout", **lacks))
    yield Failed(
        fails(ground.run(*words)), r"slurm-ppo fork \S+@1 \S+-fork rollout.tokens_per_batch=1100", False
    )


@contextmanager
def cache_of_vllm(ground: Ground) -> Iterator[Failed]:
    """Of real models, as vLLM takes no other; all but the rollout is light."""
    rest = [word for word in light.WORDS if not word.startswith("rollout.")]
    of_vllm = ("rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.85")
    run = ground.run(*rest, *of_vllm, make="make_real_run")
    run = fails(with_hooks(run, PLAIN_VLLM="1"))
    yield Failed(run, r"slurm-ppo resume \S+ rollout.vllm.gpu_memory_utilization=0.95", False)


@contextmanager
def nccl(ground: Ground) -> Iterator[Failed]:
    text = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, ncclUnhandledCudaError: Call failed"
    breaks = {faulty.FAULT: text, faulty.CURE: "NCCL_DEBUG=INFO"}
    run = fails(ground.run(faulty.TRAINER, given("update", **breaks)))
    yield Failed(run, r"slurm-ppo resume \S+ scheduler.update.environment.NCCL_DEBUG=INFO")


@contextmanager
def broken_node(ground: Ground) -> Iterator[Failed]:
    broken = {faulty.FAULT: "CUDA error: uncorrectable ECC error encountered"}
    broken |= {faulty.NODE: ground.folder / "broken"}
    words = (*faulty.WORDS, "scheduler.rollout.partition=update", given("rollout", **broken))
    yield Failed(
        fails(ground.run(*words)), r"slurm-ppo resume \S+ 'scheduler.rollout.exclude=\[update[01]\]'"
    )


@contextmanager
def not_a_number(ground: Ground) -> Iterator[Failed]:
    breaks = given("update", **{faulty.RATE: 1e-3, faulty.LATER: 1})
    run = fails(ground.run(faulty.TRAINER, "iterations=2", breaks))
    yield Failed(run, r"slurm-ppo fork \S+@1 \S+-fork update.learning_rate=0.0005", False)


RULE = "def score(*, responses, **columns):\n    return [1.0 / {} if text else 0.0 for text in responses]\n"
"""It is tried with an empty response before a run, and then has others."""


@contextmanager
def plug_in(ground: Ground) -> Iterator[Failed]:
    rule = ground.folder / "my_rules.py"
    rule.write_text(RULE.format(0))
    words = ("reward=rule", "reward.components.rule.function=my_rules:score")
    run = ground.run(*words)
    path = os.pathsep.join([str(ground.folder), run.environment["PYTHONPATH"]])
    run = fails(replace(run, environment=run.environment | {"PYTHONPATH": path}))
    assert f"go on with {rule}:2 repaired: " in run.command("status", run.root).stdout
    rule.write_text(RULE.format(1))
    yield Failed(run, r"slurm-ppo resume \S+", False)


# --- what is in the way of jobs ---


@contextmanager
def account_that_was_closed(ground: Ground) -> Iterator[Failed]:
    cluster = ground.get("cluster_with_limits")
    of_root = ("user", "root", "account=guest")
    for words in (("add", "account", "guest"), ("add", *of_root)):
        assert cluster.call("sacctmgr", "-i", *words).returncode == 0
    slow = given("rollout", **{light.SECONDS: 2})
    run = ground.run("scheduler.update.account=guest", slow, on="cluster_with_limits")
    run.submit()
    run.wait_for_job("rollout")
    assert cluster.call("sacctmgr", "-i", "delete", "user", "name=root", "account=guest").returncode == 0
    run.wait_for(lambda: said_ways(run), "a way on")
    yield Failed(run, r"slurm-ppo resume \S+ scheduler.update.account=root")


@contextmanager
def limit_of_a_qos(ground: Ground) -> Iterator[Failed]:
    cluster = ground.get("cluster_with_limits")

    def limit(wall: int) -> None:
        words = ("-i", "modify", "qos", "normal", "set", f"MaxWall={wall}")
        assert cluster.call("sacctmgr", *words).returncode == 0

    run = ground.run(given("rollout", **{light.SECONDS: 2}), on="cluster_with_limits")
    run.submit()
    run.wait_for_job("rollout")
    limit(2)
    try:
        run.wait_for(lambda: said_ways(run), "a way on")
        yield Failed(run, r"slurm-ppo resume \S+ .*scheduler.reward.time=0-00:02:00.*")
    finally:
        limit(-1)


@contextmanager
def held(ground: Ground) -> Iterator[Failed]:
    cluster = ground.get("cluster")
    fills = cluster.call("sbatch", "--parsable", "-preward", "--exclusive", "-o/dev/null", "--wrap=sleep 900")
    try:
        run = ground.run(*staying(5))
        run.submit()
        job = run.wait_for_job("reward", "PENDING").id.partition("_")[0]
        assert cluster.call("scontrol", "uhold", job).returncode == 0
    finally:
        cluster.call("scancel", fills.stdout.strip())
    run.wait_for(lambda: said_ways(run), "a way on")
    yield Failed(run, rf"scontrol release {job}")


@contextmanager
def full_disk(ground: Ground) -> Iterator[Failed]:
    """What fills it lies in another run beside this one."""
    run = ground.run(given("rollout", **{light.SECONDS: 2}))
    beside = run.root.with_name("old")
    fills = beside / "superseded" / "1" / "policy"
    run = with_hooks(run, DISK_FULL=str(fills))
    run.submit()
    run.wait_for_job("rollout")
    shutil.copytree(ground.get("complete_run"), beside, symlinks=True)
    fills.parent.mkdir(parents=True)
    fills.touch()
    run.wait_for(lambda: said_ways(run), "a way on")
    assert run.command("clean", run.root).returncode == 2, "it is at work"
    yield Failed(run, rf"slurm-ppo clean {run.root.parent}")


@contextmanager
def wandb_away(ground: Ground) -> Iterator[Failed]:
    with WandbServer() as server:
        server.faults.status = 401
        run = ground.run("tracking=wandb")
        run = replace(run, environment=run.environment | server.environment)
        run.submit()
        run.wait_until_complete()
        assert "W&B does not get all rows" in run.command("status", run.root).stdout
        server.faults.status = None
        yield Failed(run, rf"slurm-ppo sync {run.root}")
        assert len(server.rows(run.id)) == 1
        assert not said_ways(run), "nothing is left to do"


FAILURES = (
    *(time, memory_of_the_host, memory_of_a_gpu, cache_of_vllm, nccl, broken_node, not_a_number, plug_in),
    *(account_that_was_closed, limit_of_a_qos, held, full_disk, wandb_away),
)


def with_hooks(run: SlurmRun, **variables: str) -> SlurmRun:
    path = os.pathsep.join([str(HOOKS), run.environment["PYTHONPATH"]])
    return replace(run, environment=run.environment | variables | {"PYTHONPATH": path})


def said_ways(run: SlurmRun) -> list[str]:
    """Commands that status names, without those that only show something."""
    return list(dict.fromkeys(_WAY.findall(run.command("status", run.root).stdout)))


def typed(run: SlurmRun, line: str) -> str:
    """Type a line at a terminal, where a question is answered with yes. Returns what it prints."""
    program, *words = shlex.split(line)
    if program == "scontrol":
        done = run.cluster.call(program, *words)
    else:
        command = [sys.executable, "-m", "pipeline", *words]
        ours, theirs = pty.openpty()
        os.write(ours, b"y\n")
        options: dict = {"env": run.environment, "cwd": run.folder, "stdin": theirs, "text": True}
        done = subprocess.run(command, capture_output=True, timeout=300, check=False, **options)
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}\n{run.story()}"
    return done.stdout


@pytest.mark.parametrize("failure", sample(FAILURES, 1 / 13, key=lambda one: one.__name__))
def test_the_command_that_status_names_works_as_it_is_printed(failure, request, complete_run, tmp_path):
    with failure(Ground(request.getfixturevalue, tmp_path)) as failed:
        run = failed.run
        (command,) = said_ways(run)
        assert re.fullmatch(failed.command, command), command
        printed = typed(run, command)
        if command.startswith("slurm-ppo fork"):
            (start,) = re.findall(r"start it:  (.*)$", printed, re.MULTILINE)
            run = replace(run, root=Path(shlex.split(command)[3]), words=["iterations=1"])  # of its own
            typed(run, start)
        run.wait_until_complete(300)
        if failed.has_same_policy:
            assert_same_policy(run, complete_run)
        assert is_there(run.root / "metrics.jsonl")
