"""Every stage in an image, driver jobs outside: by a rootless container program, on a real Slurm.

An image is a folder: links and empty mount points, made without a network. The machine's /usr and this
environment's Python are bound into it at places where the machine itself has nothing, so what runs there
runs in the image. Nothing else of the machine is seen, but for what a test binds.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run.benchmarks import read_measured
from pipeline.run.paths import RunPaths
from tests.cluster.scenario import SlurmRun, policy_of, results_of, room_on
from tests.support import ROOT
from tests.support.tables import ON_CLUSTER

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


PROGRAM = "ch-run"
CODE = "/opt/slurm-ppo"
"""Place of the checkout in an image."""
_LINKS = ("bin", "lib", "lib64", "sbin")
_FOLDERS = ("dev", "etc", "home", "opt", "proc", "run", "sys", "tmp", "usr", "var")
_FILES = ("group", "hosts", "passwd", "resolv.conf")


@dataclass(frozen=True)
class Image:
    """A root filesystem, and where it has its Python."""

    root: Path
    home: str
    """Place of the virtual environment in the image; outside of it there is none."""

    @property
    def python(self) -> str:
        return f"{self.home}/bin/python"

    def words(self, *shown: Path | str) -> str:
        """The words before a command, for ``scheduler.container``.

        Args:
            shown: folders of the machine that are seen in the image, at the same place.
        """
        binds = {"/usr": "/usr", sys.base_prefix: sys.base_prefix, sys.prefix: self.home, str(ROOT): CODE}
        binds |= {str(path): str(path) for path in shown}
        for target in binds.values():
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        pairs = [f"--bind={source}:{target}" for source, target in binds.items()]
        return shlex.join([PROGRAM, "--private-tmp", *pairs, str(self.root), "--"])


def compose_image(root: Path, home: str) -> Image:
    """Make an image in a new folder."""
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        if Path("/", name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in _FILES:
        (root / "etc" / name).touch()
    if Path("/etc/ld.so.cache").exists():
        shutil.copy("/etc/ld.so.cache", root / "etc")
    return Image(root, home)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the program itself wants."""
    return {"USER": environment.get("USER") or "root", "HOME": environment.get("HOME") or "/root"}


def why_none(image: Image, environment: Mapping[str, str]) -> str:
    """Why nothing can be run in an image here; empty if something can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed; on Debian or Ubuntu: sudo apt install charliecloud-runtime"
    command = [*shlex.split(image.words()), image.python, "-c", "import os"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**environment, **variables(environment)}
    )
    return "" if done.returncode == 0 else f"{PROGRAM} cannot be used here: {done.stderr.strip()}"


def settings(stages: Mapping[str, tuple[Image, str]]) -> list[str]:
    """Words of a run whose stages are in images, and its driver jobs outside.

    Args:
        stages: for each stage its image, and the words that enter it.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = [
        f"scheduler.environment={{PYTHONPATH: '{CODE}'}}",
        f"scheduler.driver.environment={{PYTHONPATH: '{path}'}}",
        f"scheduler.driver.python={sys.executable}",
    ]
    for stage, (image, words) in stages.items():
        found.append(f"scheduler.{stage}.container='{words}'")
        found.append(f"scheduler.{stage}.python={image.python}")
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory, environment) -> Image:
    made = compose_image(tmp_path_factory.mktemp("image") / "root", PYTHON)
    if why := why_none(made, environment):
        if "CI" in environment:
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return made


@pytest.fixture(scope="module")
def generating(tmp_path_factory) -> Image:
    return compose_image(tmp_path_factory.mktemp("image") / "root", GENERATING)


@pytest.fixture
def room(cluster, tmp_path) -> Path:
    return room_on(cluster, tmp_path)


@pytest.fixture
def make(cluster, make_run, inputs, environment):
    """Make a run whose stages are in"""

    def of(root: Path, stages: dict, *more: str) -> SlurmRun:
        heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
        pool = ("reward.components.rm.pool=models", "scheduler.pools.models.partition=reward")
        program = MEASURE.strip().replace("\n", "; ")
        command = f'[{PYTHON}/bin/python,-c,"{program}",{PYTHON},"{{policy}}","{{output}}"]'
        measured = (f"evaluate.command={command}", "evaluate.command_every=2")
        words = [*heldout, *pool, *measured, *settings(stages), *more]
        run = make_run(cluster, root, *words)
        run.environment.update(variables(environment))
        return run

    return of


@ON_CLUSTER
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
    assert re.search("update: update", done.stdout)
    assert re.search("^node for reward: reward", done.stdout, re.MULTILINE)
    assert list(room.iterdir()) == []


def test_validate_names_the_stage_and_the_path_that_its_image_does_not_show(image, make, inputs, room):
    stages = dict.fromkeys(STAGES, (image, image.words(room, inputs)))
    stages["pools.models"] = (image, image.words(room, inputs / "policy"))  # light rewards read no policy
    stages["update"] = (image, image.words(inputs))
    run = make(room / "run", stages)
    said = refused(run)
    update, score = said.splitlines()
    short = f"{PROGRAM} ... {image.root}"
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
