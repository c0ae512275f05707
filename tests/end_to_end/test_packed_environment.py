"""A Python environment as one file, which the first job of a node unpacks, and all others there use."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from slurm.setup_lines import SETUP_EXIT, checked, failed_line
from tests.support import ROOT

UNPACK = ROOT / "examples/environment/unpack.sh"


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """An environment with a module of its own."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    packages = folder / "env/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "packed.py").write_text("x = 7\n")
    subprocess.run(["tar", "-C", folder / "env", "-cf", folder / "env.tar", "."], check=True)
    return folder / "env.tar"


def job(archive: Path, place: Path) -> subprocess.Popen[bytes]:
    """A job that starts up with it, as a batch script does, and notes each time that tar is called."""
    tar = place / "bin" / "tar"
    if not tar.exists():
        tar.parent.mkdir(parents=True)
        tar.write_text(f'#!/bin/sh\necho >>"{place}/unpacked"\nPATH=${{PATH#*:}} exec tar "$@"\n')
        tar.chmod(0o755)
    lines = checked([f"source {UNPACK} {archive}"])
    script = "\n".join([*lines, "exec python -P -c 'import sys, packed; print(sys.prefix, packed.x)'"])
    environment = {"PATH": f"{tar.parent}:/usr/bin:/bin", "SLURM_PPO_LOCAL": f"{place}/local disk"}
    return subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE)


def test_jobs_that_start_at_once_on_a_node_unpack_it_once(archive, tmp_path):
    said = {one.communicate(timeout=60)[0].decode() for one in [job(archive, tmp_path) for _ in range(4)]}
    (line,) = said
    prefix, _, number = line.strip().rpartition(" ")
    assert number == "7"
    assert Path(prefix).parent == tmp_path / "local disk"
    assert (tmp_path / "unpacked").read_text() == "\n"
    os.utime(archive, (1, 1))  # another archive: what is there is not that
    assert job(archive, tmp_path).communicate(timeout=60)[0] != line.encode()
    assert (tmp_path / "unpacked").read_text() == "\n\n"


def test_what_was_cut_off_is_unpacked_again(archive, tmp_path):
    first = job(archive, tmp_path).communicate(timeout=60)[0].decode()
    folder = Path(first.strip().rpartition(" ")[0])
    (folder / ".unpacked").unlink()
    (folder / "bin/python").unlink()
    assert job(archive, tmp_path).communicate(timeout=60)[0].decode() == first


def test_an_archive_that_is_missing_or_broken_ends_the_job_with_the_line(tmp_path):
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no archive" * 1000)
    for archive in (tmp_path / "none.tar", broken):
        started = job(archive, tmp_path)
        said = started.communicate(timeout=60)[0]
        assert started.returncode == SETUP_EXIT
        assert f"source {UNPACK} {archive}" in failed_line(said)
