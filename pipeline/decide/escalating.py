"""What the next attempt asks for after failures: more memory or time, other nodes, a delay. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.run.failures import NOT_BEGUN, Failure, FailureKind
from slurm.nodes import node_names

MORE_MEMORY = 2.0
MORE_TIME = 1.5
_FIRST_DELAY = 2.0
_LONGEST_DELAY = 1800.0
_FAULTS_OF_A_BAD_NODE = 2
_FAULTS = {FailureKind.LOST: 1, **dict.fromkeys([*NOT_BEGUN, FailureKind.DEVICE], 2)}
_MOST_EXCLUDED = 8


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
    """Return the nodes that failed twice, could not start a job, or have a broken GPU, worst first;
    at most _MOST_EXCLUDED, so that a bug of ours does not exclude the whole cluster. Of a job on several
    nodes of which none is known to be at fault all are suspected.
    """
    counts: Counter[str] = Counter()
    for failure in failures:
        for node in node_names(failure.node):
            counts[node] += _FAULTS.get(failure.kind, 0)
    bad = [node for node, count in counts.most_common(_MOST_EXCLUDED) if count >= _FAULTS_OF_A_BAD_NODE]
    return tuple(bad)
