"""A dry run: what would be submitted, and nothing on the disk."""

import re
from pathlib import Path

import pytest

from pipeline.preflight.dry_run import scripts
from tests.support import COLD, tiny
from tests.support.scripted import imagined_run
from tests.support.toyworld import Luck, make_world


def names(text: str) -> set[str]:
    """Of the scripts, as iteration/file."""
    return {"/".join(Path(name).parts[-2:]) for name in re.findall(r"^### (.*)$", text, re.MULTILINE)}


def test_the_command_prints_scripts_and_touches_nothing(inputs, tmp_path, slurm_ppo):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", "scheduler.reward.partition=rm")
    done = slurm_ppo("submit", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=rm\n" in done.stdout
    assert "This was a dry run: nothing was submitted.\nJobs go on with the next task" in done.stdout
    assert "--dependency=after" not in done.stdout.replace("--dependency=afterany:JOB-0-prepare", "")
    assert "00001/update-1-0.sh" in names(done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_where_each_task_has_a_job_the_next_iterations_wait_for_each_other(inputs, tmp_path, slurm_ppo):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", *COLD)
    done = slurm_ppo("submit", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --dependency=aftercorr:JOB-1-rollout\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "This was a dry run: nothing was submitted."
    assert "00002/update-1-0.sh" in names(done.stdout)


def test_the_horizon_says_how_many_iterations_are_submitted():
    for horizon in (1, 2, 9):
        found = names(scripts(imagined_run(scheduler={"horizon": horizon})))
        assert {int(name.split("/")[0]) for name in found} == set(range(min(horizon, 4) + 1))


@pytest.mark.parametrize("seed", range(5))
def test_it_shows_what_is_really_submitted(tmp_path, monkeypatch, clock, seed):
    world = make_world(tmp_path / "run", monkeypatch, seed, Luck())
    world.slurm.max_array_size = 1001
    shown = names(scripts(world.run))
    world.submit()
    written = {f"{path.parent.name}/{path.name}" for path in world.run.paths.slurm.glob("*/*.sh")}
    assert shown == written
    world.slurm.look()
    for _ in range(12):
        world.happen()
    assert names(scripts(world.run)).isdisjoint(
        f"{path.parent.name}/{path.name}" for path in world.run.paths.slurm.glob("*/*.sh")
    )


def test_what_is_committed_is_not_shown_again(tmp_path, monkeypatch, clock):
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    world.live_on()
    assert names(scripts(world.run)) == {"00000/guard-3-0.sh", "00000/guard-4-0.sh"}


def test_a_plan_on_slurm_shows_the_scripts_too(slurm_ppo, inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=devcluster")
    done = slurm_ppo("plan", "--all", *words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=reward" in done.stdout
    assert done.stdout.rstrip().endswith("This was a plan: nothing was run.")
    assert not (tmp_path / "run").exists()
