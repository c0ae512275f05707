"""A dry run: what would be submitted, and nothing on the disk."""

import re
from pathlib import Path

import pytest

from pipeline.executors.slurm.dry_run import scripts
from tests.support import tiny
from tests.support.toyworld import Luck, make_world


def names(text: str) -> set[str]:
    """Of the scripts, as iteration/file."""
    return {"/".join(Path(name).parts[-2:]) for name in re.findall(r"^### (.*)$", text, re.MULTILINE)}


def test_the_command_prints_scripts_and_touches_nothing(inputs, tmp_path, slurm_ppo):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", "scheduler.reward.partition=rm")
    done = slurm_ppo("submit", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=rm\n" in done.stdout
    assert "This was a dry run: nothing was submitted.\nNo array waits for another" in done.stdout
    assert "--dependency=after" not in done.stdout.replace("--dependency=afterany:JOB-0-prepare", "")
    assert "00001/update-1-0.sh" in names(done.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(5))
def test_it_shows_what_is_really_submitted(tmp_path, monkeypatch, clock, seed):
    """Of prepare; of the first iteration what one needs that nobody goes on for."""
    world = make_world(tmp_path / "run", monkeypatch, seed, Luck())
    world.slurm.max_array_size = 1001
    shown = names(scripts(world.run))
    assert {f"00001/{kind}-1-0.sh" for kind in world.run.plan.job_kinds} < shown
    world.submit()
    written = {f"{path.parent.name}/{path.name}" for path in world.run.paths.slurm.glob("*/*.sh")}
    assert written - shown == set()
    assert "00000/prepare-1-0.sh" in written
    for _ in range(12):
        world.happen()
    assert names(scripts(world.run)).isdisjoint(
        f"{path.parent.name}/{path.name}" for path in world.run.paths.slurm.glob("*/*.sh")
    )


def test_what_is_committed_is_not_shown_again(tmp_path, monkeypatch, clock):
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    world.live_on()
    assert {name.partition("-")[0] for name in names(scripts(world.run))} == {"00000/guard"}


def test_a_plan_on_slurm_shows_the_scripts_too(slurm_ppo, inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=devcluster")
    done = slurm_ppo("plan", "--all", *words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=reward" in done.stdout
    assert done.stdout.rstrip().endswith("This was a plan: nothing was run.")
    assert not (tmp_path / "run").exists()
