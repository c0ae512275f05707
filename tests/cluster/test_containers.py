"""Every stage in an image, driver jobs outside: by a rootless container program, on a real Slurm."""

import re
from pathlib import Path

import pytest

from pipeline.run.benchmarks import read_measured
from pipeline.run.paths import RunPaths
from tests.cluster.scenario import SlurmRun, policy_of, results_of, room_on
from tests.support import images
from tests.support.images import Image

STAGES = ("prepare", "rollout", "pools.models", "reward", "update", "evaluate", "benchmark")
PYTHON = "/opt/ppo"
"""Place of the environment in the image of most stages."""
GENERATING = "/opt/generating"
"""Its place in the image of the rollout, which has one of its own."""
MEASURE = """
import json, os, sys
place, policy, output = sys.argv[1:]
assert os.path.exists(policy + '/config.json')
json.dump({'is_inside': float(sys.prefix == place)}, open(output, 'w'))
"""
"""A program for evaluate.command, which says whether its Python is in a place."""


@pytest.fixture(scope="module")
def image(tmp_path_factory, environment) -> Image:
    made = images.compose_image(tmp_path_factory.mktemp("image") / "root", PYTHON)
    if why := images.why_none(made, environment):
        if "CI" in environment:
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return made


@pytest.fixture(scope="module")
def generating(tmp_path_factory) -> Image:
    return images.compose_image(tmp_path_factory.mktemp("image") / "root", GENERATING)


@pytest.fixture
def room(cluster, tmp_path) -> Path:
    return room_on(cluster, tmp_path)


@pytest.fixture
def make(cluster, make_run, inputs, environment):
    """Make a run whose stages are in images."""

    def of(root: Path, stages: dict, *more: str) -> SlurmRun:
        heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
        pool = ("reward.components.rm.pool=models", "scheduler.pools.models.partition=reward")
        program = MEASURE.strip().replace("\n", "; ")
        command = f'[{PYTHON}/bin/python,-c,"{program}",{PYTHON},"{{policy}}","{{output}}"]'
        measured = (f"evaluate.command={command}", "evaluate.command_every=2")
        words = [*heldout, *pool, *measured, *images.settings(stages), *more]
        run = make_run(cluster, root, *words)
        run.environment.update(images.variables(environment))
        return run

    return of


def test_a_run_with_every_stage_in_an_image_ends_in_the_bytes_of_one_without(
    image, generating, make, inputs, complete_run, room, tmp_path
):
    """Rollouts have an image of their own; rewards enter theirs in a step of srun, as with pyxis. What the
    batch script makes for its worker is shown too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shown = (room, inputs, temporary)
    stages = dict.fromkeys(STAGES, (image, image.words(*shown)))
    stages["rollout"] = (generating, generating.words(*shown))
    stages["reward"] = (image, f"srun --export=ALL {image.words(*shown)}")
    run = make(room / "run", stages)
    run.environment["TMPDIR"] = str(temporary)
    run.submit()
    run.wait_until_complete()
    assert not run.events("failed"), run.story()
    assert run.policy() == policy_of(complete_run, 2)
    assert results_of(run.root) == results_of(complete_run)
    measured = [(one.policy_version, one.numbers) for one in read_measured(RunPaths(run.root))]
    assert measured == [(version, {"eval/is_inside": 1}) for version in (0, 2)]
    assert not any(Path(home).exists() for home in (PYTHON, GENERATING)), "no task can have run outside"
    assert run.logs("passes/passes"), "workers asked for passes, which were made outside"


# --- what an image does not show ---


def refused(run: SlurmRun) -> str:
    done = run.command("validate", *run.words)
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_validate_says_that_what_is_needed_is_seen(image, make, inputs, room):
    stages = dict.fromkeys(STAGES, (image, image.words(room, inputs)))
    stages["reward"] = (image, f"srun --export=ALL {image.words(room, inputs)}")
    run = make(room / "run", stages)
    done = run.command("validate", *run.words)
    assert done.returncode == 0, done.stderr
    assert re.search("update: ok on node update", done.stdout)
    assert re.search("^reward: ok on node reward", done.stdout, re.MULTILINE)
    assert list(room.iterdir()) == []


def test_validate_names_the_stage_and_the_path_that_its_image_does_not_show(image, make, inputs, room):
    stages = dict.fromkeys(STAGES, (image, image.words(room, inputs)))
    stages["pools.models"] = (image, image.words(room, inputs / "policy"))  # light rewards read no policy
    stages["update"] = (image, image.words(inputs))
    run = make(room / "run", stages)
    said = refused(run)
    update, score = said.splitlines()
    short = f"{images.PROGRAM} ... {image.root}"
    assert score.startswith(f"error: scheduler.pools.models.container={short}: score-models: cannot see ")
    assert score.endswith(f"in its image on node reward0; bind it: --bind {inputs / 'reward_model'}")
    assert update.startswith(f"error: scheduler.update.container={short}: update: cannot write into ")
    assert update.endswith(f"bind it: --bind {room}")
    assert not run.root.exists()


def test_an_interpreter_of_the_machine_is_none_in_the_image(image, make, inputs, room):
    stages = dict.fromkeys(STAGES, (image, image.words(room, inputs)))
    run = make(room / "run", stages, "scheduler.reward.python=/no/python")
    said = refused(run)
    assert "scheduler.reward.container=" in said
    assert "does this image have /no/python?" in said


def test_the_doctor_sees_the_same(image, make, inputs, room):
    stages = dict.fromkeys(STAGES, (image, image.words(room, inputs)))
    stages["evaluate"] = (image, image.words(room))
    run = make(room / "run", stages)
    done = run.command("doctor", *run.words)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "node for evaluate" in said
    assert f"evaluate: cannot see {inputs / 'policy'} in its image" in said
