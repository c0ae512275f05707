"""Whatever is planted among a run's files, and whatever is typed at it: no traceback, no hang, and nothing
outside of the run directory is touched, nor what links in it lead to.

With SOAK_ROUNDS=20, as `make soak` has it, 500 inputs are tried instead of 12.
"""

import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.chats import ROUNDS
from tests.support.every_state import entries, stopped_copy, things_that_are_no_runs
from tests.support.planting import Planter, make_outside
from tests.support.processes import make_run
from tests.support.typed import SETTINGS, Typist, all_commands, chance_of

LONGEST_SECONDS = 10.0
"""Of a command, on a machine that runs other tests too."""
LONGEST_OF_WORK = 60.0
WORKING = ("run", "resume", "sweep", "submit")
"""Commands that may rightly do a run's work."""
COMMANDS = [one for one in all_commands() if one.words[0] not in ("devcluster", "completion")]
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
