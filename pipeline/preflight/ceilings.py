"""Requests that exceed what accounts and QOS allow one job: it would wait for ever. Pure."""

import math
from collections.abc import Iterator, Mapping

from pipeline.config.issue import ConfigIssue
from pipeline.config.scheduler import ResourcesConfig
from slurm.ceilings import Ceiling, Ceilings
from slurm.limits import format_duration, parse_duration, parse_gres, parse_memory


def ceiling_problems(key: str, given: ResourcesConfig, known: Ceilings) -> Iterator[ConfigIssue]:
    """Find what one job asks for beyond the limits of its account and QOS.

    Args:
        key: of the resources, like ``scheduler.update``.
    """
    yield from _wall_problems(key, given, known.wall_of(given.account, given.qos))
    asked = _asked(given)
    for ceiling in known.of_job(given.account, given.qos):
        for name, (of, value, count) in asked.items():
            most = ceiling.amounts.get(name)
            if most is not None and count > most:
                why = f"{count} {name} in one job, and {ceiling.whose} allows {most}: it would wait for ever"
                yield ConfigIssue(f"{key}.{of}", value, why)


def _wall_problems(key: str, given: ResourcesConfig, ceiling: Ceiling | None) -> Iterator[ConfigIssue]:
    seconds = parse_duration(given.time)
    if ceiling is not None and (math.inf if seconds is None else seconds) > (ceiling.wall or math.inf):
        most = format_duration(ceiling.wall or 0.0)
        why = f"longer than {ceiling.whose} allows (MaxWall), so its jobs would never start"
        yield ConfigIssue(f"{key}.time", given.time, f"{why}; legal: up to {most}")


def _asked(given: ResourcesConfig) -> Mapping[str, tuple[str, object, int]]:
    """Return what one job asks for on all of its nodes, by Slurm's names, each with its key and value."""
    nodes = given.nodes
    asked: dict[str, tuple[str, object, int]] = {"node": ("nodes", nodes, nodes)}
    cpus = nodes * given.ntasks_per_node * given.cpus_per_task
    asked["cpu"] = ("cpus_per_task", given.cpus_per_task, cpus)
    if given.mem is not None:
        asked["mem"] = ("mem", given.mem, nodes * parse_memory(given.mem))
    key = "gres" if given.gres else "gpus_per_node"
    value = given.gres or f"gpu:{given.gpus_per_node or 0}"
    for name, count in parse_gres(value).items():
        asked[f"gres/{name}"] = (key, getattr(given, key), nodes * count)
    return asked
