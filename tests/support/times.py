"""Where the suite's time goes: seconds of wall and CPU of every test and fixture.

``pytest -p tests.support.times --times=FOLDER`` writes them down, one file per worker;
``python -m tests.support.times FOLDER PAGE`` makes a page for contributors of them.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = """# Where the suite's time goes

Made by `make test-times`{where}. `wall` is what a worker of the test runner spent, `CPU` what its process and
its descendants computed; what outlives its parent, such as jobs of a practice cluster, is in `wall` only.
A file's tests are counted without the fixtures that others share; those are in the second table.

{workers} workers, {wall:.0f} s of wall in all, {cpu:.0f} s of CPU.

## Files

| file | tests | wall s | CPU s |
|---|---:|---:|---:|
{files}

## Fixtures of {least:g} s and more

| fixture | scope | times made | wall s | CPU s |
|---|---|---:|---:|---:|
{fixtures}

## The {slowest} slowest tests

| test | wall s | CPU s |
|---|---:|---:|
{tests}
"""
LEAST_SECONDS = 1.0
NUM_SLOWEST = 30


@dataclass(frozen=True)
class Spent:
    """Seconds of one phase of a test, or of making a fixture once."""

    kind: str
    """test, or the scope of a fixture."""
    file: str
    name: str
    wall: float
    cpu: float


# --- while tests run ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", help="folder for seconds of every test and fixture")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--times"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        Path(folder).mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(Path(folder) / f"{worker}.jsonl"))


class Recorder:
    """Appends a line for everything that took time. What a fixture takes is not counted as its test's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.unlink(missing_ok=True)
        self._in_fixtures = [0.0, 0.0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._in_fixtures = [0.0, 0.0]
        with self._timing("test", item.nodeid.partition("::")[0], item.nodeid.partition("::")[2]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        with self._timing(fixturedef.scope, fixturedef.baseid, fixturedef.argname):
            return (yield)

    @contextmanager
    def _timing(self, kind: str, file: str, name: str) -> Iterator[None]:
        wall, cpu, before = time.monotonic(), cpu_seconds(), list(self._in_fixtures)
        yield
        spent = [time.monotonic() - wall, cpu_seconds() - cpu]
        inner = [now - then for now, then in zip(self._in_fixtures, before, strict=True)]
        own = [max(0.0, whole - part) for whole, part in zip(spent, inner, strict=True)]
        if kind != "test":
            self._in_fixtures = [then + whole for then, whole in zip(before, spent, strict=True)]
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(Spent(kind, file, name, *own))) + "\n")


def cpu_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)] = int(words[1])
        used[int(folder.name)] = sum(map(int, words[11:15])) / _TICKS
    return sum(seconds for pid, seconds in used.items() if is_descendant(pid, os.getpid(), parents))


def is_descendant(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


# --- afterwards ---


def page(folder: Path, where: str = "") -> str:
    """The page, from what the workers wrote."""
    workers = sorted(folder.glob("*.jsonl"))
    spent = [Spent(**json.loads(line)) for file in workers for line in file.read_text().splitlines()]
    tests = [entry for entry in spent if entry.kind == "test"]
    fixtures = [entry for entry in spent if entry.kind != "test"]
    by_file, by_fixture = grouped(tests, "file"), grouped(fixtures, "name")
    slow = sorted(tests, key=lambda entry: -entry.wall)[:NUM_SLOWEST]
    return _PAGE.format(
        where=where,
        workers=len(workers),
        wall=sum(entry.wall for entry in spent),
        cpu=sum(entry.cpu for entry in spent),
        files="\n".join(f"| {name} | {len(es)} | {seconds(es)} |" for name, es in by_file),
        least=LEAST_SECONDS,
        fixtures="\n".join(
            f"| {name} | {es[0].kind} | {len(es)} | {seconds(es)} |"
            for name, es in by_fixture
            if sum(e.wall for e in es) >= LEAST_SECONDS
        ),
        slowest=len(slow),
        tests="\n".join(f"| {e.file.rpartition('/')[2]} `{e.name}` | {seconds([e])} |" for e in slow),
    )


def grouped(spent: list[Spent], by: str) -> list[tuple[str, list[Spent]]]:
    """The slowest group first."""
    groups: dict[str, list[Spent]] = defaultdict(list)
    for entry in spent:
        groups[getattr(entry, by)].append(entry)
    return sorted(groups.items(), key=lambda group: -sum(entry.wall for entry in group[1]))


def seconds(spent: list[Spent]) -> str:
    return f"{sum(e.wall for e in spent):.1f} | {sum(e.cpu for e in spent):.1f}"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])))
