"""Workers of rollouts that measure policies, on a toy Slurm whose nodes have room for all stages at once."""

from collections import Counter

import pytest

from pipeline.run.commits import require_record
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import Stage
from pipeline.workers.reading import read_beats
from tests.support.toyworkers import WorkerWorld, make_worker_world
from tests.support.toyworld import Luck, live_to_the_end

NODES = "node|toy*|64|64000|(null)|idle|0/64/0/64\n"


@pytest.fixture
def world(request, tmp_path, monkeypatch, clock) -> WorkerWorld:
    """One of which some policies are measured."""
    for seed in range(20):
        made = make_worker_world(tmp_path / f"seed-{seed}", monkeypatch, seed, request.param)
        if made.run.plan.evaluate_every and made.run.plan.iterations > 2 and made.run.plan.num_shards > 1:
            made.slurm.nodes = NODES
            return made
    raise AssertionError("no such run among twenty")


def submitted(world: WorkerWorld, stage: Stage) -> set[str]:
    """Ids of the arrays of a stage."""
    arrays = Ledger(world.run.paths).load(range(world.run.plan.iterations + 1))
    return {submission.state.job for submission in arrays if submission.job_kind == stage}


@pytest.mark.parametrize(
    "world",
    [Luck(), Luck(mishaps=8), Luck(mishaps=6, disturbances=8)],
    indirect=True,
    ids=["undisturbed", "tasks fail", "people and Slurm interfere"],
)
def test_policies_are_measured_by_workers_of_rollouts_whatever_happens(world):
    live_to_the_end(world)
    tasks = world.run.plan.evaluation_tasks()
    rollouts = submitted(world, Stage.ROLLOUT)
    done_by = [claim.worker for task in tasks for claim in world.claims[task]]
    besides = [worker for worker in done_by if worker.partition("_")[0] in rollouts]
    assert besides, world.told()
    counted = Counter({name: beat.measured for name, beat in read_beats(world.run.paths).items()})
    won = {require_record(world.run.paths, task).attempt for task in tasks}
    winners = [c.worker for t in tasks for c in world.claims[t] if c.attempt in won and c.worker in besides]
    assert sum(counted.values()) >= len(winners)
    if world.luck == Luck():
        assert len(submitted(world, Stage.EVALUATE)) < len(tasks), world.told()
