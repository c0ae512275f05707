"""Whatever is typed at a run in whatever state: a command that refuses has changed nothing.

Command lines are made by chance, of every command there is. With SOAK_ROUNDS=20, as `make soak` has it, a
thousand are tried instead of one of each command.
"""

import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.chats import ROUNDS
from tests.support.every_state import RUNNING, STATES, Scene, every_state, processes_of
from tests.support.typed import Command, Typist, all_commands, chance_of

NO_PLACE_FOR_A_CLUSTER = ("complete", "file", "folder", "/dev/null", "/proc/x")
SHORT_CHECKS = ("driver", "driver,nothing", "nothing")
"""Checks of a rehearsal that take seconds; all of them take minutes."""
WORKING = ("run", "resume", "sweep", "submit", "fork")
"""Commands that may rightly do a run's work."""
COMMANDS = [command for command in all_commands() if command.words != ("quickstart",)]
"""All but one that trains for minutes wherever it is typed; tests/end_to_end/test_wheel.py refuses it."""


def typed(number: int) -> list[str]:
    """The line of a number. Nobody waits for a run that is at work to end."""
    command, chance = COMMANDS[number % len(COMMANDS)], chance_of(f"refusal {number}")
    fixed = {"CHECKS": lambda: chance.choice(SHORT_CHECKS)}
    if "devcluster" in command.words:
        fixed["DIR"] = lambda: chance.choice(NO_PLACE_FOR_A_CLUSTER)
    typist = Typist(STATES, 0.7, chance, fixed)
    line = typist.line(command)
    while follows(command, line) and RUNNING in line:
        line = typist.line(command)
    return line


def follows(command: Command, line: list[str]) -> bool:
    return command.words == ("watch",) or "--follow" in line


LINES = [typed(number) for number in range(len(COMMANDS) if ROUNDS == 1 else 50 * ROUNDS)]


@pytest.fixture(scope="module")
def scene(complete_run, inputs, slurm_ppo, environment, tmp_path_factory) -> Iterator[Scene]:
    with every_state(tmp_path_factory.mktemp("states"), inputs, complete_run, slurm_ppo, environment) as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES, ids=[ascii(shlex.join(line))[1:60] for line in LINES])
def test_what_refuses_has_changed_nothing(line, scene, slurm_ppo):
    scene.look()
    processes = processes_of(scene.folder)
    done = answer(slurm_ppo, scene, line)
    if done.returncode == 2:
        assert scene.changes() == {}, done.stderr
        assert processes_of(scene.folder) == processes
    scene.tidy()


def answer(slurm_ppo, scene: Scene, line: list[str]) -> subprocess.CompletedProcess[str]:
    seconds = 120 if line[0] in WORKING else 30
    done = slurm_ppo(*scene.words(line), env=scene.environment, cwd=scene.folder, timeout=seconds)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1, 2, 3), done.stderr
    return done
