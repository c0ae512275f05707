"""The wheel, installed away from the checkout: what a user gets from pip."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT, tiny


def call(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution, which is built first."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    call(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", wheel)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def elsewhere(tmp_path) -> dict[str, object]:
    """A folder and an environment that know nothing of the checkout."""
    hidden = ("PYTHON", "WANDB_", "HF_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {"cwd": tmp_path, "env": environment}


def test_the_wheel_holds_code_and_configurations_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipeline", "stages", "slurm"}
    assert [name for name in names if "test" in name] == []
    packaged = {name.removeprefix("pipeline/") for name in names if name.endswith(".yaml")}
    assert packaged == {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {"pipeline/py.typed", "slurm/py.typed", "stages/py.typed"} <= set(names)


def test_the_wheel_holds_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode().splitlines()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(metadata)


def test_the_command_is_there_and_is_the_installed_one(installed, elsewhere):
    assert "PPO post-training" in call(installed / "slurm-ppo", "--help", **elsewhere)
    where = call(installed / "python", "-c", "import pipeline; print(pipeline.__file__)", **elsewhere)
    assert where.startswith(str(installed.parent))


def test_packaged_configurations_are_used(installed, elsewhere, inputs, tmp_path):
    overrides = tiny.overrides(inputs, tmp_path / "run", "experiment=quickstart", "data.heldout=null")
    text = call(
        installed / "slurm-ppo",
        "config",
        *overrides,
        "model.context_length=64",
        "evaluate.every=0",
        **elsewhere,
    )
    found = yaml.safe_load(text)
    assert found["name"] == "quickstart"
    assert found["algorithm"]["kl"]["coef"] == 0.1
    assert not (tmp_path / "run").exists()


def test_the_quickstart_learns_without_a_checkout_and_so_does_the_rule_it_never_sees(installed, elsewhere):
    """The run is shorter than by default, and faster: it may drift further from where it began."""
    lesson = (
        "iterations=8",
        "evaluate.every=8",
        "data.prompts_per_iteration=96",
        "update.learning_rate=1e-3",
        "algorithm.kl.coef=0.02",
    )
    text = call(installed / "slurm-ppo", "quickstart", "run_dir=runs/first", *lesson, **elsewhere)
    assert len(re.findall(r"^ +\d+ ", text, re.MULTILINE)) >= 8, "a row per iteration"
    run = elsewhere["cwd"] / "runs/first"
    assert f"run directory: {run}" in text
    assert (run / "report.html").stat().st_size > 1_000_000
    gains = re.findall(r"^(?:reward-model score|hidden rule) .* (\S+)$", text, re.MULTILINE)
    assert len(gains) == 2
    assert min(map(float, gains)) >= 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["iterations=3"], "iterations=3: the quickstart is judged by at least 6"),
        (["iteration=8"], "iteration"),
        (["run_dir=there"], "there"),
        (["model.nothing=1"], "nothing"),
    ],
)
def test_a_quickstart_that_cannot_be_makes_nothing(slurm_ppo, elsewhere, words, said):
    (elsewhere["cwd"] / "there").write_text("a file")
    done = slurm_ppo("quickstart", *words, cwd=elsewhere["cwd"])
    assert done.returncode == 2
    assert said in done.stderr
    assert not (elsewhere["cwd"] / ".cache").exists()
