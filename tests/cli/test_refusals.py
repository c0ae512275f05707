"""A command that refuses has changed nothing: it checks before it acts."""

import pytest

from pipeline.cli.run import resume_run
from pipeline.run.directory import RunError
from tests.support.toyworkers import make_worker_world
from tests.support.toyworld import Luck


@pytest.mark.parametrize("point", ["rollout@9", "score-nobody@1", "bake", "rollout@0"])
def test_a_point_that_a_run_cannot_go_back_to_costs_it_none_of_its_jobs(tmp_path, monkeypatch, clock, point):
    world = make_worker_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    root = world.run.paths.root

    def everything() -> tuple[object, ...]:
        files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        jobs = [(str(element), element.state) for element in world.slurm.elements()]
        return {path: text for path, text in files.items() if "locks" not in path.parts}, jobs

    before = everything()
    assert before[1], "jobs of the run are in the queue"
    with pytest.raises(RunError):
        resume_run(world.run, watch=False, back_to=point)
    assert everything() == before
