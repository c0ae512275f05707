"""The definitions of an image, and what goes over to a site without internet: what needs no network of it."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement

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


# --- sites without internet ---

PAGE = "docs/howto/containers.md"


def words_of(program: str) -> list[list[str]]:
    """The words of the page's commands that call this program."""
    commands = [shlex.split(c.text) for c in documented.all_commands() if c.page == PAGE]
    return [words for words in commands if words[0] == program]


def pack_wheel(name: str, folder: Path) -> None:
    """Make the wheel of a package of this environment, of Python alone, again, and those that it needs."""
    found = metadata.distribution(name)
    files = [file for file in found.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in files:
            wheel.write(file.locate(), str(file))
    for needed in map(Requirement, found.requires or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            pack_wheel(needed.name, folder)


def test_what_is_copied_installs_with_the_wheels_that_are_carried_over(tmp_path):
    """By the page's command, but without the dependencies, which are hundreds of wheels: what an image gets
    of the checkout is enough, and the folder of wheels has the program that builds."""
    (words,) = [words for words in words_of("pip") if words[1] == "install"]
    source, wheels = tmp_path / "source", tmp_path / "source" / "wheels"
    wheels.mkdir(parents=True)
    for name in copied()["Containerfile"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pack_wheel("hatchling", wheels)
    command = [sys.executable, "-m", *words, "--no-deps", "--target", tmp_path / "installed"]
    done = subprocess.run(list(map(str, command)), cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"pipeline", "stages", "slurm"} <= {path.name for path in (tmp_path / "installed").iterdir()}
    assert (tmp_path / "installed/pipeline/configs/config.yaml").is_file()


def test_what_is_carried_over_is_what_is_installed():
    """Wheels are downloaded for the words that install them, and with them the package that builds ours."""
    download, install = words_of("pip")
    assert download == [
        *("pip", "download", "-c", "constraints-cuda.txt", "-d", "wheels", "hatchling", ".[vllm]")
    ]
    assert install == [
        *("pip", "install", "--no-index", "--find-links", "wheels", "-c", "constraints-cuda.txt", ".[vllm]")
    ]
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend.startswith("hatchling")


def test_the_model_that_is_downloaded_lies_where_the_pages_look_for_it():
    """Nothing is downloaded: the words are those that hf has, and the folder is the policy of every page."""
    (words,) = words_of("hf")
    command, repository, option, place = words[1:]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    blocks = [block for block in documented.all_blocks() if block.file and block.language == "yaml"]
    settings = [yaml.safe_load(block.text) for block in blocks]
    policies = {found["model"]["policy"] for found in settings if "policy" in found.get("model", {})}
    assert f"/{place}" in policies
    hf = Path(sys.executable).parent / "hf"
    done = subprocess.run([hf, command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
