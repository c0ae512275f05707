"""Plants for tests of the simulator: small clusters, and runs whose tasks take what a test says."""

from collections.abc import Mapping

from pipeline.config.types import Linger
from pipeline.run.plan import Plan
from pipeline.simulate.plant import Plant, PlantKind, PlantNode, PlantPartition, PlantRequest, Slurm

SECONDS = {"prepare": 1.0, "rollout": 5.0, "reward": 5.0, "update": 30.0, "evaluate": 10.0}


def plant_with(
    places: int,
    iterations: int = 6,
    shards: int = 2,
    startup: float = 10.0,
    queue: float = 2.0,
    seconds: Mapping[str, float] = SECONDS,
    linger: Linger = "auto",
    every: int = 0,
    request: PlantRequest = PlantRequest(gpus=1),  # noqa: B008
    **more: object,
) -> Plant:
    """Return a plant of one node with so many GPUs, which all job kinds share."""
    once = PlantKind(seconds["prepare"], ("all",), request, startup, linger=0, start_early=False)
    kinds = {name: PlantKind(took, ("all",), request, startup, linger) for name, took in seconds.items()}
    driver = PlantKind(0.0, ("all",), PlantRequest(), 2.0, linger=0, start_early=False)
    return Plant(
        Plan(iterations, shards, every),
        (PlantNode("node", 8 * places, places),),
        (PlantPartition("all", ("node",)),),
        {**kinds, "prepare": once, "driver": driver},
        slurm=Slurm(queue),
        **more,
    )
