"""Whatever is planted among a run's files, and whatever is typed at it: no traceback, no hang, and nothing
outside of the run directory is touched, nor what links in it lead to.

With SOAK_ROUNDS=20, as `make soak` has it, 500 inputs are tried instead of 12.
"""

import os
import random
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.chats import ROUNDS
from tests.support.every_state import entries, stopped_copy, things_that_are_no_runs
from tests.support.processes import make_run
from tests.support.typed import SETTINGS, Typist, all_commands, chance_of

PLANTED = time.time() - 3600
"""An hour ago: nobody renews it, as who is at work would a lease."""
ODD_NAMES = (
    *(b"na\xff\xfeme", b"two\nlines", b"\x1b[31mred", b" ", b"-rf", b"*", b"~", b"n" * 255, b"a:b", b"%s"),
    *(b".left.1.0123abcd", b"shard-00000.json", b"shard-99999.json", b"shard-00000.1-0123abcd.arrow"),
    *(b"shard-00000.json.tmp", b"00001", b"00003", b"99999", b"00003.1-0123abcd", b"best", b"attempt-1"),
    *(b"000099.json", b"9" * 200 + b".json", b"prompts.json", b"config.json", b"shard-x.failure.json"),
    *(b"shard-00000.thinned.json", b"shard-00000.partial.1-0123abcd.json", b"00002-rollout", b"00001.json"),
)
"""Names that no run has, and names that it has or may get elsewhere."""
NEXT = (
    *(
        "iterations/00003",
        "iterations/00002/reward",
        "iterations/00002/update/shard-00000.json",
        "superseded",
    ),
    *("logs/00002-update", "logs/00002-reward/attempt-1", "logs/00002-update/attempt-1/shard-00000.log"),
    *("policy/00002", "policy/best", "policy/00002.1-0123abcd", "state/00002", "rows/00002.json", "rows/x"),
    *("metrics.jsonl", "events.jsonl", "spans.jsonl", "evaluations.jsonl", "report.html", "best.json"),
    *("locks", "locks/000099.json", "slurm", "slurm/control.json", "slurm/beats", "wandb", "cache/compiled"),
    *("wandb/online.json", "data", "critic", "trainer", "logs/driver.log", "samples", "cache"),
)
"""Where a run may make something, or looks for something, if it goes on."""


@dataclass
class Planter:
    """Plants things in a run by chance; its links lead to a folder outside, which nothing may touch."""

    run: Path
    outside: Path
    chance: random.Random
    told: list[str] = field(default_factory=list)
    """What was planted."""

    def plant(self) -> None:
        """One thing: beside others, where the run will make something, or in the place of something."""
        place = self.chance.choice((self._beside, self._where_it_goes_on, self._instead))()
        kind = self.chance.choice(tuple(KINDS))
        self.told.append(f"{os.fsdecode(place.relative_to(self.run))!a}: {kind}")
        KINDS[kind](self, place)
        os.utime(place, (PLANTED, PLANTED), follow_symlinks=False)

    def _beside(self) -> Path:
        folders = [self.run, *(path for path in self._entries() if path.is_dir() and not path.is_symlink())]
        place = self.chance.choice(folders) / os.fsdecode(self.chance.choice(ODD_NAMES))
        return self._vacated(place)

    def _where_it_goes_on(self) -> Path:
        place = self.run / self.chance.choice(NEXT)
        while not place.parent.is_dir() or place.parent.is_symlink():
            place = place.parent
        return self._vacated(place)

    def _instead(self) -> Path:
        return self._vacated(self.chance.choice(self._entries()))

    def _entries(self) -> list[Path]:
        return sorted(self.run.rglob("*"))

    def _vacated(self, place: Path) -> Path:
        """What lies there is moved outside, where links may lead to it."""
        if os.path.lexists(place):
            moved = self.outside / "moved"
            if os.path.lexists(moved):
                shutil.rmtree(moved) if moved.is_dir() and not moved.is_symlink() else moved.unlink()
            place.rename(moved)
        return place

    def link_to_what_was_there(self, place: Path) -> None:
        moved = self.outside / "moved"
        place.symlink_to(moved if os.path.lexists(moved) else self.outside / "file")


def _socket(_: Planter, place: Path) -> None:
    """Bound by a short name: those of sockets have at most 107 bytes."""
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{folder}/s")
        os.rename("s", place.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _full_folder(planter: Planter, place: Path) -> None:
    place.mkdir()
    (place / "shard-00000.json").write_text("{}")
    (place / "link").symlink_to(planter.outside / "file")
    (place / "inner").symlink_to(planter.outside / "folder")


KINDS: dict[str, Callable[[Planter, Path], object]] = {
    "empty": lambda _, place: place.touch(),
    "junk": lambda _, place: place.write_bytes(random.Random(0).randbytes(300)),
    "no UTF-8": lambda _, place: place.write_bytes(b'{"a": "\xff\xfe"}\n'),
    "deep JSON": lambda _, place: place.write_text("[" * 100_000),
    "deep objects": lambda _, place: place.write_text('{"a":' * 50_000 + "1" + "}" * 50_000),
    "huge JSON": lambda _, place: place.write_text('{"a": [' + "1," * 2_000_000 + "1]}"),
    "huge number": lambda _, place: place.write_text('{"iteration": ' + "9" * 6_000 + ', "time": 1e999}'),
    "another kind": lambda _, place: place.write_text('["a list"]\n'),
    "a terabyte of nothing": lambda _, place: (place.touch(), os.truncate(place, 1 << 40)),
    "pipe": lambda _, place: os.mkfifo(place),
    "socket": _socket,
    "folder": lambda _, place: place.mkdir(),
    "full folder": _full_folder,
    "link to a file outside": lambda planter, place: place.symlink_to(planter.outside / "file"),
    "link to a folder outside": lambda planter, place: place.symlink_to(planter.outside / "folder"),
    "link to what was there": Planter.link_to_what_was_there,
    "link to a pipe outside": lambda planter, place: place.symlink_to(planter.outside / "pipe"),
    "link to nothing outside": lambda planter, place: place.symlink_to(planter.outside / "nothing"),
    "link to itself": lambda _, place: place.symlink_to(place.name),
    "link to the run": lambda planter, place: place.symlink_to(planter.run),
    "link to a device": lambda _, place: place.symlink_to("/dev/zero"),
}
"""Ways to plant something at a path where nothing lies, by name."""


def make_outside(folder: Path) -> Path:
    """Of somebody else: what links of runs lead to."""
    (folder / "folder/inner").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/inner/shard-00000.json", "folder/.left.1.0123abcd"):
        (folder / name).write_text("precious\n")
    os.mkfifo(folder / "pipe")
    for path in folder.rglob("*"):
        os.utime(path, (PLANTED, PLANTED))
    return folder


# --- what is typed ---

LONGEST_SECONDS = 10.0
"""Of a command, on a machine that runs other tests too."""
LONGEST_OF_WORK = 60.0
WORKING = ("run", "resume", "sweep", "submit", "doctor", "try")
"""Commands that may rightly do a run's work."""
LASTING = ("devcluster", "completion", "quickstart", "rehearse")
"""Commands that set a machine up, or compute for minutes."""
COMMANDS = [one for one in all_commands() if one.words[0] not in LASTING]
OFTEN = ("resume", "clean", "fork", "report", "export")
"""Commands that write, of which more are typed."""
NUMBERS = range(12 if ROUNDS == 1 else 25 * ROUNDS)


@pytest.fixture(scope="module")
def runs(complete_run, inputs, tmp_path_factory) -> Path:
    """A folder with one that is complete, one that was stopped, and one that has not begun."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(complete_run, folder / "complete", symlinks=True)
    stopped_copy(complete_run, folder / "stopped")
    make_run(inputs, folder / "fresh")
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_that_is_planted_or_typed_costs_a_traceback_a_wait_or_anything_outside(
    number, runs, inputs, slurm_ppo, environment, tmp_path
):
    chance = chance_of(f"planted {number}")
    here = tmp_path / "here"
    here.mkdir()
    things_that_are_no_runs(here)
    run = Path(
        shutil.copytree(runs / chance.choice(("complete", "stopped", "fresh")), here / "run", symlinks=True)
    )
    planter = Planter(run, make_outside(tmp_path / "outside"), chance)
    for _ in range(chance.choice((1, 1, 2, 3))):
        planter.plant()
    before = entries(tmp_path / "outside")
    settings = tiny.overrides(inputs, Path("new"), "iterations=1", "data.prompts_per_iteration=2")
    often = [one for one in COMMANDS if one.words[0] in OFTEN]
    for commands in (often, COMMANDS):
        line = Typist(("run",), 0.9, chance).line(chance.choice(commands))
        words = [word for typed in line for word in (settings if typed == SETTINGS else [typed])]
        told = f"{planter.told}: {shlex.join(line)!a}"
        done = answer(slurm_ppo, words, told, env=environment | {"HOME": str(here / "home")}, cwd=here)
        assert done.returncode in (0, 1, 2, 3), (told, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr, (told, done.stdout, done.stderr)
        assert entries(tmp_path / "outside") == before, (told, done.stderr)


def answer(slurm_ppo, words: list[str], told: str, **where) -> subprocess.CompletedProcess[str]:
    limit = LONGEST_OF_WORK if words[0] in WORKING else LONGEST_SECONDS
    begun = time.monotonic()
    try:
        return slurm_ppo(*words, timeout=limit, **where)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{told}: no end after {time.monotonic() - begun:.0f} s: {error.stdout} {error.stderr}")
