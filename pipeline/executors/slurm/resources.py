"""Resources that a job asks Slurm for: its stage's configuration, with escalation after failures. Pure."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.scheduler import ResourcesConfig
from pipeline.run.failures import NOT_BEGUN, Failure, FailureKind
from slurm.limits import format_duration, parse_duration, parse_memory

MORE_MEMORY = 2.0
MORE_TIME = 1.5
_LARGEST_MEMORY_FACTOR = 8
_FIRST_DELAY = 2.0
_LONGEST_DELAY = 1800.0
_FAULTS_OF_A_BAD_NODE = 2
_FAULTS = {FailureKind.LOST: 1, **dict.fromkeys(NOT_BEGUN, 2)}
_MOST_EXCLUDED = 8
SRUN = "srun"
"""First word of a container command whose image is an option of srun, as with pyxis."""


@dataclass(frozen=True)
class Escalation:
    """Changes to the resources of the next attempt, derived from earlier failures."""

    memory_factor: float = 1.0
    time_factor: float = 1.0
    exclude: tuple[str, ...] = ()
    delay: float = 0.0
    """Seconds before which it does not start."""


def escalate(failures: Iterable[Failure], everywhere: Iterable[Failure]) -> Escalation:
    """Ask for more memory after OUT_OF_MEMORY, more time after TIMEOUT, avoid bad nodes, and wait where Slurm
    could not start what was asked for, each time for twice as long.

    Args:
        failures: failures of the tasks to submit now.
        everywhere: failures of all tasks at hand, as a node is judged by everything that ran on it.
    """
    kinds: dict[object, Counter[FailureKind]] = {}
    for failure in failures:
        kinds.setdefault(failure.task, Counter())[failure.kind] += 1
    memory = max((count[FailureKind.MEMORY] for count in kinds.values()), default=0)
    time = max((count[FailureKind.TIMEOUT] for count in kinds.values()), default=0)
    vain = max((sum(count[kind] for kind in NOT_BEGUN) for count in kinds.values()), default=0)
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (vain - 1)) if vain else 0.0
    return Escalation(MORE_MEMORY**memory, MORE_TIME**time, bad_nodes(everywhere), delay)


def bad_nodes(failures: Iterable[Failure]) -> tuple[str, ...]:
    """Return the nodes that failed twice, or could not start a job, worst first; at most _MOST_EXCLUDED, so
    that a bug of ours does not exclude the whole cluster.
    """
    counts: Counter[str] = Counter()
    for failure in failures:
        if failure.node:
            counts[failure.node] += _FAULTS.get(failure.kind, 0)
    bad = [node for node, count in counts.most_common(_MOST_EXCLUDED) if count >= _FAULTS_OF_A_BAD_NODE]
    return tuple(bad)


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
        "mail-type": ",".join(given.mail_type or ()) or None,
        "mail-user": given.mail_user if given.mail_type else None,
    }
    return {name: value for name, value in (options | dict(given.options)).items() if value is not None}


def command_words(given: ResourcesConfig, tasks: str) -> list[str]:
    """Return the command of every element: under srun when the task has several ranks, or where options of
    srun bring it into its image."""
    words = python_words(given, "slurm.element", tasks)
    is_step = words[0] == SRUN
    if given.num_ranks == 1 and not is_step:
        return words
    # Explicit counts: srun's defaults changed between versions. A failed rank must end the others. But ranks
    # that succeed end before the first, which still writes, and a cluster's WaitTime would kill that one.
    ranks = [f"--nodes={given.nodes}", f"--ntasks-per-node={given.ntasks_per_node}"]
    ranks += [f"--cpus-per-task={given.cpus_per_task}"]
    step = [SRUN, "--kill-on-bad-exit=1", "--wait=0", *ranks, *(words[1:] if is_step else words)]
    return step if given.num_ranks == 1 else [*step, "--rank"]


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
    """Return the memory to ask for: escalated, but at most ``max_mem`` (by default 8 times ``mem``)."""
    if given.mem is None:
        return None
    megabytes = parse_memory(given.mem)
    most = parse_memory(given.max_mem) if given.max_mem else megabytes * _LARGEST_MEMORY_FACTOR
    return given.mem if factor == 1 else f"{math.ceil(min(megabytes * factor, max(most, megabytes)))}M"


def time_limit(given: str, factor: float, longest: float | None) -> str:
    """Return the time to ask for. Only an escalated time is cut to what the partition allows."""
    if factor == 1:
        return given
    seconds = parse_duration(given)
    assert seconds is not None
    return format_duration(min(seconds * factor, max(seconds, longest or math.inf)))
