"""The definitions of an image, and what goes over to a site without internet: what needs no network of it."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT, documented

FOLDER = ROOT / "examples/containers"
CONTAINERFILE = (FOLDER / "Containerfile").read_text().replace("\\\n", "")
DEFINITION = (FOLDER / "slurm-ppo.def").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def section(name: str) -> list[str]:
    """The lines of a section of the definition, without comments."""
    body = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL)[1]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def copied() -> dict[str, list[str]]:
    """What each definition copies from the checkout."""
    lines = [line.split()[1:-1] for line in CONTAINERFILE.splitlines() if line.startswith("COPY ")]
    return {
        "Containerfile": [name for names in lines for name in names],
        "slurm-ppo.def": [line.split()[0] for line in section("files")],
    }


def test_both_definitions_do_the_same():
    assert sorted(copied()["Containerfile"]) == sorted(copied()["slurm-ppo.def"])
    (image,) = re.findall(r"^FROM docker.io/library/(.*)$", CONTAINERFILE, re.MULTILINE)
    assert f"Bootstrap: docker\nFrom: {image}\n" in DEFINITION
    installs = [re.findall(r"pip install .*", text)[0] for text in (CONTAINERFILE, DEFINITION)]
    assert installs[0].replace("$EXTRA", "{{ EXTRA }}") == installs[1]
    packages = [
        re.findall(r"apt-get install .*?recommends ([\w .+-]*)", t)[0] for t in (CONTAINERFILE, DEFINITION)
    ]
    assert packages[0].split() == packages[1].split()


def test_their_python_and_their_extras_are_the_projects():
    (minor,) = re.findall(r"^FROM .*python:3\.(\d+)-slim$", CONTAINERFILE, re.MULTILINE)
    assert 11 <= int(minor) <= 13
    texts = CONTAINERFILE + DEFINITION + (ROOT / "docs/howto/containers.md").read_text()
    named = set(re.findall(r"EXTRA=(\w+)", texts)) | set(re.findall(r"'\.\[(\w+)\]'", texts))
    assert {"train", "vllm"} == named <= EXTRAS.keys()


def test_the_shell_of_the_definition_parses():
    for name in ("post", "environment", "test"):
        done = subprocess.run(["bash", "-n"], input="\n".join(section(name)), capture_output=True, text=True)
        assert done.stderr == ""


@pytest.mark.parametrize("definition", ["Containerfile", "slurm-ppo.def"])
def test_what_is_copied_is_enough_to_install_it(definition, tmp_path):
    """The dependencies, which come from the network, are left out."""
    source = tmp_path / "source"
    source.mkdir()
    for name in copied()[definition]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", tmp_path / "installed", source]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"pipeline", "stages", "slurm"} <= {path.name for path in (tmp_path / "installed").iterdir()}
    assert (tmp_path / "installed/pipeline/configs/config.yaml").is_file()


def test_what_is_carried_over_is_what_is_installed():
    """Wheels are downloaded for the words that install them, and with them the package that builds ours."""
    words = [
        c.text for c in documented.all_commands() if c.page == "docs/howto/containers.md" and "pip " in c.text
    ]
    download, install = words
    assert download.removeprefix("pip download -c constraints.txt -d wheels ") == "hatchling '.[vllm]'"
    assert install == "pip install --no-index --find-links wheels -c constraints.txt '.[vllm]'"
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend.startswith("hatchling")
