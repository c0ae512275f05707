"""Killing at a step of a function, and the ends of runs that were killed: bytes, rows and events compared."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import ROOT

HOOKS = ROOT / "tests/support/hooks"


class Killed(BaseException):
    """kill -9."""


def killed_at(step: int, names: Collection[str], act: Callable[[], Iterable[object]]) -> tuple[bool, int]:
    """Go through all that ``act`` yields, killed at the ``step``-th call of functions of ``os`` (from 1).

    Returns:
        Whether it was killed, and how many calls there were.
    """
    counter = itertools.count(1)

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(counter) == step:
                raise Killed
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            list(act())
        except Killed:
            return True, step
    return False, next(counter) - 1


def policy_bytes(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "00002" / "model.safetensors").read_bytes()


def state_bytes(run_dir: Path) -> dict[str, bytes]:
    """Files of the trainer's last state, critic included."""
    folder = run_dir / "state" / "00002"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hooked(environment: dict[str, str], folder: Path, point: str) -> dict[str, str]:
    """The environment in which a warm command's task, or the command itself, is killed once: forks load
    tests/support/hooks for it, as interpreters do through PYTHONPATH."""
    marker = folder / f"killed-{point.partition(':')[0]}"
    return environment | {"KILL_AT": point, "KILL_MARKER": str(marker)}


def run_killed_once(
    slurm_ppo: Callable[..., CompletedProcess[str]],
    words: Sequence[str],
    point: str,
    environment: dict[str, str],
    room: Path,
    folder: Path,
) -> None:
    """Make the run ``folder/run``, of which something is killed at a point, to its end.

    Args:
        words: its settings.
        room: folder that its rules are imported from.
    """
    done = slurm_ppo("run", *words, cwd=room, env=hooked(environment, folder, point))
    assert list(folder.glob("killed-*")), "the hook never fired"
    if point.startswith("driver"):
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = slurm_ppo("resume", folder / "run", cwd=room)
    assert done.returncode == 0, done.stderr


def assert_same_end(run_dir: Path, complete_run: Path, may_lose_state: bool = False) -> None:
    """Policy, rows and state are those of an undisturbed run.

    Args:
        may_lose_state: whether the run was killed when its last update may have been writing the state: then
            that may be missing, if the journal says so.
    """
    assert policy_bytes(run_dir) == policy_bytes(complete_run)
    found = state_bytes(run_dir)
    is_lost = not found and 2 in [event["iteration"] for event in events(run_dir, "state_lost")]
    assert found == state_bytes(complete_run) or (may_lose_state and is_lost)
    rows, expected = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run_dir, complete_run)
    )
    timing = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/")
    for row in (*rows, *expected):
        for name in [name for name in row if name.startswith(timing)]:
            del row[name]
    assert rows == expected


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def data_file(run_dir: Path, task: str) -> Path:
    record = json.loads((run_dir / f"iterations/{task}.json").read_text())
    return run_dir / record["outputs"][0]["path"]
