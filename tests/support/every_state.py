"""Runs in every state, side by side in one folder, and what a command has changed there."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.orchestrate.rewind import Point, take_back
from pipeline.run.control import Control, write_control
from pipeline.run.directory import load_run
from pipeline.run.lease import hold
from pipeline.run.place import settle
from pipeline.run.tasks import Stage
from tests.support import light_training, tiny
from tests.support.damage import cut, flip_bit
from tests.support.killing import hooked
from tests.support.processes import make_run
from tests.support.typed import SETTINGS
from tests.support.waiting import wait_for

RUNNING = "running"
"""A run whose second update waits until the test is over: nothing of it moves."""
STATES = ("fresh", RUNNING, "stopped", "failed", "complete", "cancelled", "damaged", "spoilt")
"""Names of the runs, which say in what state each is."""


@dataclass(frozen=True)
class Entry:
    """A file, folder or link as it lies there."""

    mode: int
    size: int
    written: int
    """In nanoseconds; 0 of a folder in which leases come and go."""
    target: str
    """Of a link."""


def entries(folder: Path) -> dict[str, Entry]:
    """By path below a folder, all that lies in it but leases and heartbeats; names as the system has
    them."""
    return dict(_entries(folder, ""))


def _entries(folder: Path, above: str) -> Iterator[tuple[str, Entry]]:
    with os.scandir(folder) as found:
        inner = list(found)
    holds_leases = any(one.name in ("locks", "run.json") for one in inner)
    for one in inner:
        if (holds_leases and one.name == "locks") or f"{above}{one.name}".endswith("slurm/workers"):
            continue
        is_folder, name = one.is_dir(follow_symlinks=False), f"{above}{one.name}"
        state = one.stat(follow_symlinks=False)
        leases_below = is_folder and os.path.lexists(f"{one.path}/run.json")
        written = 0 if leases_below else state.st_mtime_ns
        target = str(Path(one.path).readlink()) if one.is_symlink() else ""
        yield name, Entry(state.st_mode, 0 if is_folder else state.st_size, written, target)
        if is_folder:
            yield from _entries(Path(one.path), f"{name}/")


Changes = dict[str, tuple[Entry | None, Entry | None]]


def differences(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> Changes:
    """By name, what lies there otherwise: before and after."""
    both = {name: (before.get(name), now.get(name)) for name in sorted({*before, *now})}
    return {name: (was, is_now) for name, (was, is_now) in both.items() if was != is_now}


def processes_of(folder: Path) -> dict[int, str]:
    """By number, when each process was started whose command line names the folder, zombies left out."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in (process / "cmdline").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(process.name)] = fields[19]
    return found


@dataclass
class Scene:
    """A folder with runs in every state, in which commands are typed."""

    folder: Path
    templates: Path
    """Copies of what lies in the folder, but for the run that is at work."""
    inputs: Path
    environment: Mapping[str, str]
    before: dict[str, Entry] = field(default_factory=dict)

    def words(self, line: list[str]) -> list[str]:
        """A typed line, with all that a run needs in the place of the word for it."""
        settings = tiny.overrides(self.inputs, Path("new"), "iterations=1", "data.prompts_per_iteration=2")
        return [word for typed in line for word in (settings if typed == SETTINGS else [typed])]

    def look(self) -> None:
        self.before = entries(self.folder)

    def changes(self) -> Changes:
        """What lies there otherwise than at the last look: before and after."""
        return differences(self.before, entries(self.folder))

    def tidy(self) -> None:
        """Put back what a command has rightly changed."""
        for name in {name.partition("/")[0] for name in self.changes()} - {RUNNING}:
            clear(self.folder / name)
            if os.path.lexists(self.templates / name):
                copy(self.templates / name, self.folder / name)


def stopped_copy(complete_run: Path, target: Path) -> Path:
    """A copy of a complete run of two iterations that went back to its last update."""
    shutil.copytree(complete_run, target, symlinks=True)
    run = settle(load_run(target))  # not as a copy, which would go on as a run of its own
    with hold(run.paths.locks):
        take_back(run, Point(Stage.UPDATE, 2))
    return target


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy(source: Path, target: Path) -> Path:
    """A run's folder, or anything else, as it lies there; without leases, which name a process."""
    if source.is_dir() and not source.is_symlink():
        ignored = shutil.ignore_patterns("locks")
        shutil.copytree(source, target, symlinks=True, ignore=ignored)
    elif source.is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


@contextlib.contextmanager
def every_state(
    base: Path, inputs: Path, complete_run: Path, slurm_ppo: Callable, environment: Mapping[str, str]
) -> Iterator[Scene]:
    """Make the runs, one of them at work until the block ends."""
    folder, templates = base / "here", base / "templates"
    folder.mkdir(parents=True)
    ours = copy(inputs, base / "inputs")
    shutil.copytree(complete_run, folder / "complete", symlinks=True)
    settle(load_run(folder / "complete"))  # each is a run, and no copy of another
    make_run(ours, folder / "fresh")
    write_control(make_run(ours, folder / "cancelled", "scheduler=slurm").paths, Control(1, cancelled=True))
    killed = hooked(environment, base, "before-link:iterations/00001/reward/shard-00001.json")
    failed = slurm_ppo(
        "run", *tiny.overrides(ours, folder / "failed", "scheduler.max_attempts=1"), env=killed
    )
    assert failed.returncode == 1, failed.stderr
    copy(folder / "complete", folder / "damaged")
    cut(folder / "damaged/run.json")
    settle(load_run(copy(folder / "complete", folder / "spoilt")))
    flip_bit(folder / "spoilt/iterations/00002/update/shard-00000.json")
    (folder / "spoilt/metrics.jsonl").write_bytes(b"\xff\x00no row\n" * 3)
    things_that_are_no_runs(folder)
    with _at_work(folder / RUNNING, base / "gate", ours, slurm_ppo, environment):
        settle(load_run(copy(folder / RUNNING, folder / "stopped")))
        shutil.copytree(folder, templates, symlinks=True, copy_function=_copy_any)
        shutil.rmtree(templates / RUNNING)
        scene = Scene(folder, templates, ours, environment | {"HOME": str(folder / "home")})
        scene.look()
        yield scene


def _copy_any(source: str, target: str) -> None:
    copy(Path(source), Path(target))


def things_that_are_no_runs(folder: Path) -> None:
    """What lies beside runs, and where people point by mistake."""
    (folder / "file").write_text("this is no run\n")
    (folder / "folder").mkdir()
    (folder / "folder/other").write_text("of somebody else")
    (folder / "home").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "looped").symlink_to("looped")


def _is_quiet(root: Path) -> bool:
    before = entries(root)
    time.sleep(1)
    return not differences(before, entries(root))


@contextlib.contextmanager
def _at_work(
    root: Path, gate: Path, inputs: Path, slurm_ppo: Callable, environment: Mapping[str, str]
) -> Iterator[None]:
    """A run whose second update waits."""
    waiting = environment | {light_training.GATE: f"2:{gate}"}
    ended = []
    words = ("run", *tiny.overrides(inputs, root, "evaluate.every=0"))
    hours = {"timeout": 4 * 3600.0}  # make soak types at it for long
    thread = threading.Thread(target=lambda: ended.append(slurm_ppo(*words, env=waiting, **hours)))
    thread.start()
    try:
        log = root / "logs/00002-update/attempt-1/shard-00000.log"
        wait_for(lambda: log.exists() and "responses" in log.read_text(), "an update that waits")
        wait_for(lambda: _is_quiet(root), "a driver that waits")
        yield
    finally:
        gate.touch()
        thread.join(120)
    assert ended[0].returncode == 0, ended[0].stderr
