"""A command that refuses has changed nothing: it checks before it acts."""

import pytest

from pipeline.cli.run import resume_run
from pipeline.run.control import Control, write_control
from pipeline.run.identity import RunError
from tests.support.processes import make_run
from tests.support.toyworld import Luck, make_world


@pytest.mark.parametrize("point", ["rollout@9", "score-nobody@1", "bake", "rollout@0"])
def test_a_point_that_a_run_cannot_go_back_to_costs_it_none_of_its_jobs(tmp_path, monkeypatch, clock, point):
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
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


def test_who_types_a_driver_s_command_where_slurm_does_not_answer_reads_one_line(inputs, slurm_ppo, tmp_path):
    run = make_run(inputs, tmp_path / "run", "scheduler=slurm")
    write_control(run.paths, Control(1))
    done = slurm_ppo("advance", run.paths.root)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
