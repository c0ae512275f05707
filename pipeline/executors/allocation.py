"""A run inside one allocation of Slurm: workers that are job steps, each by a process of this machine.

The process starts srun, passes signals on, and ends like the step. So the provider of this machine's workers
(:mod:`pipeline.executors.processes`) has some on other nodes too.
"""

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import key_of
from pipeline.config.schema import Config
from pipeline.decide.places import Need, count, place, room_of
from pipeline.decide.sharing import fits_all
from pipeline.decide.staying import ALWAYS
from pipeline.executors.limits import IN_TURN, Grant, Limits, Started, need_of, node_of
from pipeline.executors.processes import Processes
from pipeline.process import end_with_parent
from pipeline.run.tasks import Stage, Task, is_sharded
from slurm.allocation import NodeShare, allocation_id, read_allocation
from slurm.commands import clean_environment
from slurm.limits import parse_memory

_MODULES = ("pipeline.executors.allocation", "pipeline.cli.app")
_LOOK_SECONDS = 1.0
"""Seconds after which the driver looks again: steps on other nodes cannot notify it."""


def allocation_executor(config: Config, environment: Mapping[str, str] = os.environ) -> Processes:
    """Make a provider whose workers are steps of the allocation that this process runs in.

    Raises:
        ConfigError: there is none, or it has too little for a task of some stage.
        SlurmError, SlurmMissing: Slurm does not say what it has.
    """
    job = allocation_id(environment)
    if job is None:
        raise ConfigError(
            "scheduler=allocation: this is not inside an allocation of Slurm (SLURM_JOB_ID is not set); type "
            "it in an sbatch script or under salloc, or choose scheduler=slurm for jobs of each stage"
        )
    limits = allocation_limits(config, job, read_allocation(job))
    return Processes("pipeline.executors.allocation:run_step", _MODULES, limits)


def describe_allocation(config: Config, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Say how many tasks fit into the allocation at once.

    Raises:
        ConfigError, SlurmError, SlurmMissing: as :func:`allocation_executor`.
    """
    if not isinstance(config.scheduler, AllocationConfig):
        return
    job = allocation_id(environment)
    if job is None:
        yield "not checked: whether tasks fit, as this is not inside an allocation"
        return
    nodes = read_allocation(job)
    limits = allocation_limits(config, job, nodes)
    room, most = room_of(limits.nodes), config.rollout.num_shards
    fitting = {kind: count(room, need, most) for kind, need in limits.needs.items() if is_sharded(kind)}
    shown = ", ".join(f"{kind} {number}" for kind, number in fitting.items())
    yield f"allocation {job}: {len(nodes)} nodes; tasks that fit at once: {shown}"


def allocation_limits(config: Config, job: str, nodes: Sequence[NodeShare]) -> Limits:
    """Return the limits of a run in an allocation. Raises ConfigError where a stage's task does not fit."""
    given = config.scheduler
    assert isinstance(given, AllocationConfig)
    needs = {kind: need_of_step(step_of(given, kind)) for kind in kinds_of(config)}
    there = tuple(node_of(node.name, node.gpus, node.cpus, node.memory or math.inf) for node in nodes)
    room = room_of(there)
    for kind, need in needs.items():
        if place(room, need) is None:
            raise ConfigError(f"{key_of(kind)}: a task asks for {in_words(need)}; {described(job, nodes)}")
    if config.rollout.staleness and not fits_all(needs, {Stage.ROLLOUT: 1, Stage.UPDATE: 1}, room):
        why = f"a rollout and the update do not fit at once; {described(job, nodes)}"
        raise ConfigError(f"rollout.staleness={config.rollout.staleness}: {why}; {IN_TURN}")
    numbers = {kind: config.rollout.num_shards if is_sharded(kind) else 1 for kind in needs}
    linger = ALWAYS if fits_all(needs, numbers, room) else 0
    return Limits(
        {kind: 1 for kind in needs if not is_sharded(kind)},
        given.time_limit,
        linger=dict.fromkeys(needs, linger),
        nodes=there,
        needs=needs,
        show=_nodes_of,
        command=lambda worker, words, told: step_words(given, job, worker, words, told),
        grace=given.grace,
        look_seconds=_LOOK_SECONDS,
    )


def kinds_of(config: Config) -> list[str]:
    """Return the job kinds that a run may have."""
    stages = [Stage.PREPARE, Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE, Stage.EVALUATE, Stage.BENCHMARK]
    pools = [Task(0, Stage.SCORE, pool=pool).job_kind for pool in config.reward.pools]
    return [*map(str, stages), *pools]


def step_of(given: AllocationConfig, job_kind: str) -> StepConfig:
    """Return what a task of a job kind gets."""
    return given.resources.get(key_of(job_kind).removeprefix("scheduler."), StepConfig())


def need_of_step(step: StepConfig) -> Need:
    memory = math.ceil(parse_memory(step.mem)) if step.mem else 0
    return need_of(step.num_gpus or 0, step.ntasks_per_node * step.cpus_per_task, memory, step.nodes)


def in_words(need: Need) -> str:
    parts = [f"{need.cpus} CPUs", *([f"{need.gpus} GPUs"] if need.gpus else [])]
    parts += [f"{need.memory} MiB"] if need.memory else []
    return f"{need.num_nodes} node{'s' * (need.num_nodes > 1)} with {', '.join(parts)}"


def described(job: str, nodes: Sequence[NodeShare]) -> str:
    """Say what an allocation has."""
    shown = [
        f"{node.name} {node.cpus} CPUs, {node.gpus} GPUs, {node.memory or 'all'} MiB" for node in nodes[:4]
    ]
    more = f" and {len(nodes) - 4} nodes more" if len(nodes) > 4 else ""
    return f"allocation {job} has {'; '.join(shown)}{more}; ask sbatch for more, or for less here"


def _nodes_of(grant: Grant) -> dict[str, str]:
    return {NODES_VARIABLE: ",".join(share.node for share in grant)}


def step_words(
    given: AllocationConfig, job: str, worker: Started, words: Sequence[str], told: Mapping[str, str]
) -> list[str]:
    """Return the command of a worker that is a job step.

    Args:
        words: its arguments.
        told: variables that it gets, beside those that the settings give it.
    """
    step, rendezvous = step_of(given, worker.job_kind), str(worker.log.with_suffix(".rendezvous"))
    command = srun_words(step, job, worker.job_kind, worker.folder)
    return [*command, *worker_words(given, step, rendezvous, told), *words]


def srun_words(step: StepConfig, job: str, name: str, folder: str) -> list[str]:
    """Return the srun command of a step, without what it runs. What a step holds no other step gets
    (``--exact`` and no ``--overlap``), so that GPUs are not shared; memory is, unless some is asked for."""
    options: dict[str, str | int | bool] = {
        "jobid": job,
        "job-name": name,
        "exact": True,
        "nodes": step.nodes,
        "ntasks": step.num_ranks,
        "ntasks-per-node": step.ntasks_per_node,
        "cpus-per-task": step.cpus_per_task,
        "gres": f"gpu:{step.gpus_per_node}" if step.gpus_per_node else "none",
        "mem": step.mem or "0",
        "nodelist": NODES,
        "chdir": folder,
        "mpi": "none",
        "kill-on-bad-exit": 1,
        "wait": 0,
        **step.options,
    }
    shown = [
        f"--{key}" if value is True else f"--{key}={value}"
        for key, value in options.items()
        if value is not False
    ]
    return ["srun", *shown]


def worker_words(
    given: AllocationConfig, step: StepConfig, rendezvous: str, told: Mapping[str, str]
) -> list[str]:
    """Return the command of each process of a step, without the worker's arguments."""
    variables = [
        f"{name}={value}" for name, value in {**given.environment, **step.environment, **told}.items()
    ]
    container = shlex.split(step.container or given.container or "")
    python = step.python or given.python or sys.executable
    return ["env", *variables, *container, python, "-P", "-m", "slurm.step", rendezvous, "stages.workers"]


NODES = "{nodes}"
"""Word of a command that stands for the names of the step's nodes."""
NODES_VARIABLE = "STEP_NODES"
"""Variable with these names."""


def run_step(command: Sequence[str]) -> int:
    """Run a step to its end. Returns its exit code; one that a signal ended ends this process by the same."""
    nodes = os.environ[NODES_VARIABLE]
    with subprocess.Popen(
        [word.replace(NODES, nodes) for word in command],
        env=clean_environment(os.environ),
        start_new_session=True,  # srun would take SIGTERM for a request to kill the step
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # of which srun ends its step
    ) as step:
        _pass_signals_on(step)
        code = step.wait()
    if code > 128:
        sys.stdout.flush()
        if code - 128 not in (signal.SIGKILL, signal.SIGSTOP):  # which none can handle
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)  # so that it is seen which signal it was
    return code if code >= 0 else 1


def _pass_signals_on(step: "subprocess.Popen[bytes]") -> None:
    """Warn the step's processes when this one is asked to end, and notify them: srun passes
    SIGUSR1 and SIGUSR2 on, and SIGTERM not."""
    passed = {signal.SIGTERM: signal.SIGUSR2, signal.SIGUSR2: signal.SIGUSR2, signal.SIGUSR1: signal.SIGUSR1}

    def pass_on(number: int, frame: FrameType | None) -> None:
        step.send_signal(passed[signal.Signals(number)])

    for number in passed:
        signal.signal(number, pass_on)
