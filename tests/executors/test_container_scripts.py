"""The recipes of docs/howto/containers.md, as batch scripts: which jobs enter an image, with which words."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.run.directory import Run
from tests.support import documented
from tests.support.scripted import imagined_run, pinned, rendered

PAGE = "docs/howto/containers.md"
RECIPES = ("apptainer", "pyxis", "images", "modules", "conda")
ON_TWO_NODES = (
    "scheduler.update.nodes=2",
    "scheduler.update.ntasks_per_node=4",
    "scheduler.rollout.linger=60",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The reader's folder, with every file that the pages show."""
    folder = tmp_path_factory.mktemp("reader")
    for block in documented.all_blocks():
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder / "my"


def run_of(written: Path, recipe: str, *more: str) -> Run:
    words = [
        "experiment=first",
        f"scheduler={recipe}",
        "run_dir=/scratch/runs/r1",
        "scheduler.check_minutes=15",
    ]
    given = [*words, "data.heldout=/data/heldout", "evaluate.every=2", *more]
    return replace(imagined_run(), config=compose(given, written))


def commands(scripts: dict[str, str]) -> dict[str, str]:
    """The command of each job kind."""
    found = {
        name.split("-")[1]: re.findall("^exec (.*)$", text, re.MULTILINE) for name, text in scripts.items()
    }
    return {kind: lines[-1] for kind, lines in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_scripts_of_a_recipe_are_what_they_were(written, recipe, tmp_path):
    """After a change that is meant: PIN=1 pytest tests/executors/test_container_scripts.py."""
    more = ON_TWO_NODES if recipe in ("apptainer", "pyxis") else ()
    found = rendered(run_of(written, recipe, *more))
    assert found == pinned(f"containers-{recipe}", found)
    for name, text in found.items():
        (tmp_path / name).write_text(text)
        assert subprocess.run(["bash", "-n", tmp_path / name], capture_output=True).stderr == b""


def test_every_recipe_of_the_page_is_here():
    files = [block.file for block in documented.all_blocks() if block.page == PAGE and block.file]
    carried_out = "packed"  # by tests/end_to_end/test_packed_environment.py
    assert [Path(file).stem for file in files] == [*RECIPES, carried_out]


@pytest.mark.parametrize("recipe", ["apptainer", "pyxis", "images"])
def test_stages_enter_their_images_and_drivers_none(written, recipe):
    run = run_of(written, recipe)
    for kind, command in commands(rendered(run)).items():
        is_inside = re.match(r"(apptainer exec|srun .*--container-image)", command) is not None
        assert is_inside == (kind not in ("driver", "guard")), command


def test_images_of_pyxis_are_options_of_the_one_step(written):
    """Its counts are the stage's, on one node as on several."""
    run = run_of(written, "pyxis", *ON_TWO_NODES)
    found = commands(rendered(run))
    assert all(command.count("srun ") <= 1 for command in found.values())
    assert found["rollout"].startswith("srun --kill-on-bad-exit=1 --wait=0 --nodes=1 --ntasks-per-node=1 ")
    assert "--nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --container-image=/images/ppo" in found["update"]
    assert [kind for kind, command in found.items() if command.endswith("--rank")] == ["update"]


# --- without an image: what setup puts on PATH is what computes ---

PYTHON = '#!/bin/sh\nprintf \'%s\\n\' "$0" "$@"\n'
CONDA = 'conda() { [ "$1" = activate ] && PATH=SITE/miniforge3/envs/$2/bin:$PATH; }\n'
MODULE = '() { echo "$*" >>SITE/loaded; [ "$1" = load ] && PATH=SITE/modules/bin:$PATH; true; }'


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder that stands for /scratch: pythons of a module, a virtual environment and conda's environments,
    which print how they are called."""
    for place in ("modules", "venv", "miniforge3/envs/ppo", "miniforge3/envs/vllm"):
        python = tmp_path / place / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
    (tmp_path / "venv/bin/activate").write_text(f"PATH={tmp_path}/venv/bin:$PATH\n")
    conda = tmp_path / "miniforge3/etc/profile.d/conda.sh"
    conda.parent.mkdir(parents=True)
    conda.write_text(CONDA.replace("SITE", str(tmp_path)))
    (tmp_path / "loaded").touch()
    return tmp_path


def who_computes(text: str, site: Path) -> list[str]:
    """Run a batch script in a shell that has ``module``. Returns the path of its python, and arguments."""
    module = {"BASH_FUNC_module%%": MODULE.replace("SITE", str(site))}
    script = text.replace("/scratch", str(site))
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin", **module}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("recipe", "usual", "of_rollouts"),
    [("modules", "venv", "venv"), ("conda", "miniforge3/envs/ppo", "miniforge3/envs/vllm")],
)
def test_the_python_of_modules_and_conda_is_the_one_that_setup_activates(
    written, site, recipe, usual, of_rollouts
):
    scripts = rendered(run_of(written, recipe))
    assert {"driver", "prepare", "rollout", "reward", "update", "evaluate"} <= commands(scripts).keys()
    for name, text in scripts.items():
        kind = name.split("-")[1]
        python, *arguments = who_computes(text, site)
        assert python == str(site / (of_rollouts if kind == "rollout" else usual) / "bin/python"), name
        assert shlex.join(["python", *arguments]) in text, name
    expected = "purge\nload gcc/12 cuda/12.4 python/3.11\n" * len(scripts) if recipe == "modules" else ""
    assert (site / "loaded").read_text() == expected
