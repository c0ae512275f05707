"""Lists of files of wheels, of which only those lists are loaded."""

import csv
import importlib.metadata
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

_SECONDS = 60
_BLOCK = 2**20


class RemoteFile(io.RawIOBase):
    """A file of a web server that is read in parts, as :mod:`zipfile` does."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS) as found:
            self._size = int(found.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        until = min(self._position + len(buffer), self._size)
        if until <= self._position:
            return 0
        part = urllib.request.Request(self._url, headers={"Range": f"bytes={self._position}-{until - 1}"})
        with urllib.request.urlopen(part, timeout=_SECONDS) as answer:
            assert answer.status == 206, f"{self._url} is not given in parts"
            found = answer.read()
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def wheel_url(requirement: str, platform: str, folder: Path) -> str:
    """Return where pip would load a wheel from. Raises OSError where no package index answers."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--report", "-"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--platform", platform]
    command += ["--retries", "1", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise OSError(done.stderr)
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def remote_record(url: str) -> dict[str, str]:
    """Return file -> hash of the Python files of a wheel."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), _BLOCK)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        return _python_files(wheel.read(name).decode().splitlines())


def installed_record(package: str) -> dict[str, str]:
    """Return file -> hash of the Python files of an installed package, as its wheel had them."""
    return _python_files((importlib.metadata.distribution(package).read_text("RECORD") or "").splitlines())


def _python_files(lines: Iterable[str]) -> dict[str, str]:
    return {name: hashed for name, hashed, _ in csv.reader(lines) if name.endswith(".py")}
