"""A run inside one allocation of Slurm: the executor of this machine, with a job step for each task."""

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import key_of
from pipeline.config.schema import Config
from pipeline.executors.assignment import Grant, Need, Share, place, unused
from pipeline.executors.processes import LocalExecutor
from pipeline.executors.running import LocalLimits
from pipeline.executors.steps import NODES, NODES_VARIABLE
from pipeline.run.directory import Run
from pipeline.run.invocation import stage_arguments
from pipeline.run.tasks import Stage, Task
from slurm.allocation import NodeShare, allocation_id, read_allocation
from slurm.limits import parse_memory

_MODULES = ("pipeline.executors.steps", "pipeline.cli.app")
_ALL = 1_000_000
"""Tasks of a stage at once, where only the allocation bounds them."""
_SHARDED = frozenset({Stage.ROLLOUT, Stage.SCORE, Stage.REWARD})


def allocation_executor(config: Config, environment: Mapping[str, str] = os.environ) -> LocalExecutor:
    """Make an executor whose jobs are steps of the allocation that this process runs in.

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
    return LocalExecutor("pipeline.executors.steps:serve", _MODULES, limits)


def describe_allocation(config: Config, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Say how many tasks fit into the allocation at once.

    Raises:
        ConfigError, SlurmError, SlurmMissing: as :func:`allocation_executor`.
    """
    if not isinstance(config.scheduler, AllocationConfig):
        return
    job = allocation_id(environment)
    if job is None:
        yield "not looked at: whether tasks fit, as this is not inside an allocation"
        return
    nodes = read_allocation(job)
    limits = allocation_limits(config, job, nodes)
    fitting = {kind: how_many(need, limits.nodes) for kind, need in limits.needs.items()}
    shown = ", ".join(f"{kind} {count}" for kind, count in fitting.items() if limits.pools[kind] == _ALL)
    yield f"allocation {job}: {len(nodes)} nodes; tasks that fit at once: {shown}"


def how_many(need: Need, nodes: Sequence[Share]) -> int:
    """Return how many tasks fit at once."""
    count, free = 0, list(nodes)
    while not need.is_nothing and (grant := place(need, free)) is not None:
        count, free = count + 1, unused(free, grant)
    return count


def allocation_limits(config: Config, job: str, nodes: Sequence[NodeShare]) -> LocalLimits:
    """Return the limits of a run in an allocation. Raises ConfigError where a stage's task does not fit."""
    given = config.scheduler
    assert isinstance(given, AllocationConfig)
    needs = {kind: need_of(step_of(given, kind)) for kind in kinds_of(config)}
    shares = tuple(
        Share(
            node.name,
            tuple(f"{node.name}:{index}" for index in range(node.gpus)),
            node.cpus,
            node.memory or math.inf,
        )
        for node in nodes
    )
    for kind, need in needs.items():
        if place(need, shares) is None:
            raise ConfigError(f"{key_of(kind)}: a task asks for {in_words(need)}; {described(job, nodes)}")
    at_once = {kind: _ALL if kind.partition("-")[0] in _SHARDED else 1 for kind in needs}
    return LocalLimits(
        _ALL,
        at_once,
        given.time_limit,
        nodes=shares,
        needs=needs,
        show=_nodes_of,
        grace=given.grace,
    )


def kinds_of(config: Config) -> list[str]:
    """Return the job kinds that a run may have."""
    stages = [Stage.PREPARE, Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE, Stage.EVALUATE, Stage.BENCHMARK]
    pools = [Task(0, Stage.SCORE, pool=pool).job_kind for pool in config.reward.pools]
    return [*map(str, stages), *pools]


def step_of(given: AllocationConfig, job_kind: str) -> StepConfig:
    """Return what a task of a job kind gets."""
    return given.resources.get(key_of(job_kind).removeprefix("scheduler."), StepConfig())


def need_of(step: StepConfig) -> Need:
    gpus = int(step.gpus_per_node.rpartition(":")[2]) if step.gpus_per_node else 0
    memory = math.ceil(parse_memory(step.mem)) if step.mem else 0
    return Need(gpus, step.ntasks_per_node * step.cpus_per_task, memory, step.nodes)


def in_words(need: Need) -> str:
    parts = [f"{need.cpus} CPUs", *([f"{need.gpus} GPUs"] if need.gpus else [])]
    parts += [f"{need.memory} MiB"] if need.memory else []
    return f"{need.nodes} node{'s' * (need.nodes > 1)} with {', '.join(parts)}"


def described(job: str, nodes: Sequence[NodeShare]) -> str:
    """Say what an allocation has."""
    shown = [
        f"{node.name} {node.cpus} CPUs, {node.gpus} GPUs, {node.memory or 'all'} MiB" for node in nodes[:4]
    ]
    more = f" and {len(nodes) - 4} nodes more" if len(nodes) > 4 else ""
    return f"allocation {job} has {'; '.join(shown)}{more}; ask sbatch for more, or for less here"


def _nodes_of(grant: Grant) -> dict[str, str]:
    return {NODES_VARIABLE: ",".join(share.node for share in grant)}


def step_arguments(run: Run, task: Task, number: int, attempt: str) -> tuple[str, ...]:
    """Return the arguments of :func:`pipeline.executors.steps.serve` for one attempt."""
    given = run.config.scheduler
    assert isinstance(given, AllocationConfig)
    step, paths = step_of(given, task.job_kind), run.paths.task(task)
    rendezvous = paths.log(number).with_suffix(f".{attempt}.rendezvous")
    job = allocation_id(os.environ) or ""
    words = srun_words(step, job, task.job_kind, run.identity.folder)
    words += task_words(given, step, str(rendezvous))
    return (str(paths.record), *words, *stage_arguments(run, task, number, attempt))


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


def task_words(given: AllocationConfig, step: StepConfig, rendezvous: str) -> list[str]:
    """Return the command of each process of a step, without the task's arguments."""
    variables = [f"{name}={value}" for name, value in {**given.environment, **step.environment}.items()]
    container = shlex.split(step.container or given.container or "")
    python = step.python or given.python or sys.executable
    command = [*container, python, "-P", "-m", "slurm.step", rendezvous, "stages"]
    return ["env", *variables, *command] if variables else command
