"""Options and commands of a job: its stage's configuration with the escalation of the attempt. Pure."""

import math
import shlex

from pipeline.config.scheduler import ResourcesConfig
from pipeline.decide.escalating import Escalation
from slurm.limits import format_duration, parse_duration, parse_memory

_LARGEST_MEMORY_FACTOR = 8
SRUN = "srun"
"""First word of a container command whose image is an option of srun, as with pyxis."""


def sbatch_options(
    given: ResourcesConfig, escalation: Escalation, longest: float | None
) -> dict[str, str | int | bool]:
    """Return sbatch's long options.

    Args:
        longest: seconds that the partition allows a job; None if unlimited or not asked for.
    """
    options: dict[str, str | int | bool | None] = {
        "partition": ",".join(given.partition) or None,
        "account": given.account,
        "qos": given.qos,
        "time": time_limit(given.time, escalation.time_factor, longest),
        "nodes": given.nodes,
        "ntasks-per-node": given.ntasks_per_node,
        "gpus-per-node": given.gpus_per_node,
        "gres": given.gres,
        "cpus-per-task": given.cpus_per_task,
        "mem": memory(given, escalation.memory_factor),
        "constraint": given.constraint,
        "exclude": ",".join((*given.exclude, *escalation.exclude)) or None,
        "reservation": given.reservation,
        "signal": f"B:USR2@{given.signal}",
        "requeue" if given.requeue else "no-requeue": True,
    }
    return {name: value for name, value in (options | dict(given.options)).items() if value is not None}


def command_words(given: ResourcesConfig, tasks: str) -> list[str]:
    """Return the command of every element: under srun when the task has several ranks, or where options of
    srun bring it into its image."""
    words = python_words(given, "slurm.element", tasks)
    if given.num_ranks > 1:
        return [*rank_words(given, "slurm.element", tasks), "--rank"]
    return rank_words(given, "slurm.element", tasks) if words[0] == SRUN else words


def rank_words(given: ResourcesConfig, *module: str) -> list[str]:
    """Return the command that runs a module, with its arguments, in each rank of a job."""
    words = python_words(given, *module)
    # Explicit counts: srun's defaults changed between versions. A failed rank must end the others. But ranks
    # that succeed end before the first, which still writes, and a cluster's WaitTime would kill that one.
    ranks = [f"--nodes={given.nodes}", f"--ntasks-per-node={given.ntasks_per_node}"]
    ranks += [f"--cpus-per-task={given.cpus_per_task}"]
    return [SRUN, "--kill-on-bad-exit=1", "--wait=0", *ranks, *(words[1:] if words[0] == SRUN else words)]


def python_words(given: ResourcesConfig, *module: str) -> list[str]:
    """Return the command that runs a module, with its arguments, where a job's processes run."""
    return [*interpreter_words(given), "-m", *module]


def interpreter_words(given: ResourcesConfig) -> list[str]:
    """Return the words of a job's interpreter, in its container."""
    assert given.python is not None
    container = shlex.split(given.container) if given.container else []
    # -P: a slurm.py of the user's in the working directory must not be imported in place of ours.
    return [*container, given.python, "-P"]


def memory(given: ResourcesConfig, factor: float) -> str | None:
    """Return the memory to ask for: escalated, but at most 8 times ``mem``."""
    if given.mem is None or factor == 1:
        return given.mem
    return f"{math.ceil(parse_memory(given.mem) * min(factor, _LARGEST_MEMORY_FACTOR))}M"


def time_limit(given: str, factor: float, longest: float | None) -> str:
    """Return the time to ask for. Only an escalated time is cut to what the partition allows."""
    if factor == 1:
        return given
    seconds = parse_duration(given)
    assert seconds is not None
    return format_duration(min(seconds * factor, max(seconds, longest or math.inf)))
