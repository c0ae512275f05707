"""Whether a cluster has places for a rollout and the update at once, which is all that rollout.staleness is
for. Pure: judged by the sizes of nodes, never by what jobs hold of them."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.checks.finding import Finding, problem, warning
from pipeline.checks.requests import shortened
from pipeline.config.schema import Config
from pipeline.decide.places import Need, less, place, room_of
from pipeline.executors.limits import IN_TURN
from pipeline.executors.slurm.crew import needs_of
from pipeline.run.tasks import Stage
from slurm.nodes import Node, Nodes

TITLE = "rollout and update"
_ADVICE = "start with rollout.staleness=0, or with places for both; a run's own settings are frozen"


def judge_side_by_side(config: Config, nodes: Nodes, most_running: int | None) -> Iterator[Finding]:
    """Judge whether stages take turns, with which older responses gain nothing.

    It is a problem where all nodes of both partitions together are too small, whatever their state; a warning
    where nodes that are away, or a limit of this user's that may not be the one that holds, are the reason.
    Where one of the two has no place even alone, what judges each stage's jobs says so.

    Args:
        nodes: of the partitions of both.
        most_running: jobs that the user may have running, by the strictest limit that is known.
    """
    assert config.slurm
    staleness, needs = config.rollout.staleness, needs_of(config.slurm, (Stage.ROLLOUT, Stage.UPDATE))
    every = (*nodes.nodes, *nodes.away)
    if not staleness or any(place(room_of(every), need) is None for need in needs.values()):
        return
    key = f"rollout.staleness={staleness}"
    if not fit_at_once(needs, every):
        yield problem(TITLE, f"{key}: {_too_small(needs, every)}; {IN_TURN}", _ADVICE)
    elif not fit_at_once(needs, nodes.nodes):
        away = shortened([node.name for node in nodes.away])
        why = f"until nodes are back (sinfo -R: {away}) a rollout and the update have no places at once"
        yield warning(TITLE, f"{key}: {why}, and older responses gain nothing", _ADVICE)
    elif most_running is not None and most_running < len(needs):
        why = f"if your limit of {most_running} running job holds for these, they take turns"
        way_out = "ask for a higher MaxJobs, name another account or QOS, or set it to 0"
        yield warning(TITLE, f"{key}: {why}, and older responses gain nothing; {way_out}", _ADVICE)


def fit_at_once(needs: Mapping[str, Need], nodes: Sequence[Node]) -> bool:
    """Whether empty nodes hold a rollout, which is on one node, and the update at once: wherever that is."""
    room, rollout = room_of(nodes), needs[Stage.ROLLOUT]
    rests = ({**room, node.name: less(node, rollout)} for node in nodes if rollout.fits(node))
    return any(place(rest, needs[Stage.UPDATE]) is not None for rest in rests)


def _too_small(needs: Mapping[str, Need], nodes: Sequence[Node]) -> str:
    """Say what is asked for, and what there is."""
    rollout, update = (_in_words(needs[stage]) for stage in (Stage.ROLLOUT, Stage.UPDATE))
    usable = [node for node in nodes if any(need.fits(node) for need in needs.values())]
    there = shortened([f"{node.name} ({node.cpus} CPUs, {node.gpus} GPUs)" for node in usable])
    return f"a rollout ({rollout}) and the update ({update}) never fit at once on {there}"


def _in_words(need: Need) -> str:
    memory = f", {need.memory} MiB" if need.memory else ""
    nodes = f"{need.num_nodes} nodes with " if need.num_nodes > 1 else ""
    return f"{nodes}{need.cpus} CPUs, {need.gpus} GPUs{memory}"
