"""Cleaning: what goes is what nobody reads, so that a cleaned run that is resumed ends in the same bytes."""

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.compose import from_mapping
from pipeline.run import journal
from pipeline.run.cleaning import LeftoverKind, _has_several_attempts, find_removable, remove
from pipeline.run.directory import Run, create_run, load_run
from pipeline.run.lease import hold
from pipeline.run.place import settle
from pipeline.run.retention import list_folders
from pipeline.run.states import can_go_on, has_state, oldest_needed, state_before
from pipeline.run.tasks import PREPARE
from tests.support import ROOT, tiny
from tests.support.committed import commit_in_two
from tests.support.reportrun import make_row

ITERATIONS = 5


def kinds(run: Run) -> dict[str, int]:
    found = find_removable(run)
    return {str(kind): n for kind in LeftoverKind if (n := sum(item.kind is kind for item in found))}


def clean(run: Run) -> None:
    assert list(remove(run, find_removable(run))) == []


# --- states, without models ---


def make_run(root: Path, states: list[bool], every: int | None) -> Run:
    """A run of as many updates as ``states`` has entries, which say whether a state was committed too."""
    config = {
        "run_dir": str(root),
        "iterations": 60,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "prompts_per_iteration": 4},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "update": {"keep_last": None, "keep_every": every},
    }
    run = create_run(from_mapping(config))
    run.paths.data.mkdir()
    run.paths.task(PREPARE).record.write_text("{}")
    for version, is_there in enumerate(states, 1):
        commit_in_two(run, version, is_lost=not is_there)
    journal.rewrite(run.paths.metrics, [make_row(i) for i in range(1, len(states) + 1)])
    return run


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([None, 3]))
def test_what_learning_may_begin_with_stays_whatever_is_cleaned(states, every):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        run = make_run(Path(folder) / "run", states, every)
        newest = len(states)
        versions = range(oldest_needed(run.plan, run.paths, newest), newest + 1)

        def seen() -> list[object]:
            return [
                oldest_needed(run.plan, run.paths, newest),
                [(state_before(run.plan, run.paths, v), can_go_on(run.plan, run.paths, v)) for v in versions],
                [has_state(run.paths, v) for v in range(3, newest + 1, 3)] if every else None,
                [
                    f
                    for folders in list_folders(run.paths).values()
                    for f in folders
                    if f.startswith("policy/")
                ],
            ]

        before = seen()
        clean(run)
        assert seen() == before
        assert kinds(run) == {}, "nothing is left to clean"
        kept = [v for v in range(1, newest + 1) if has_state(run.paths, v)]
        assert len([v for v in kept if not (every and v % every == 0)]) <= 4


def test_states_that_went_are_known_to_be_gone_on_purpose(tmp_path):
    run = make_run(tmp_path / "run", [True] * 6, None)
    assert kinds(run) == {"states": 4}
    clean(run)
    assert [v for v in range(1, 7) if has_state(run.paths, v)] == [5, 6]
    assert (run.paths.iterations / "00002/state/shard-00000.thinned.json").exists()
    (event,) = [e for e in journal.read(run.paths.events) if e["event"] == "cleaned"]
    assert event["states"] == 4


# --- a run of light tasks ---


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, tmp_path_factory) -> Path:
    """An undisturbed run of five iterations."""
    root = tmp_path_factory.mktemp("whole") / "run"
    done = slurm_ppo("run", *tiny.overrides(inputs, root, f"iterations={ITERATIONS}"))
    assert done.returncode == 0, done.stderr
    return root


def taken_back(whole: Path, root: Path, last: int) -> Run:
    """The run as it was when its iteration ``last`` had its row, and the next was half done."""
    shutil.copytree(whole, root, symlinks=True)
    for iteration in range(last + 1, ITERATIONS + 1):
        for stage in (
            ("update", "state") if iteration == last + 1 else ("rollout", "reward", "update", "state")
        ):
            shutil.rmtree(root / f"iterations/{iteration:05d}/{stage}", ignore_errors=True)
        for parent in ("policy", "state"):
            for path in (root / parent).glob(f"{iteration:05d}*"):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
        (root / f"rows/{iteration:05d}.json").unlink(missing_ok=True)
    journal.rewrite(root / "metrics.jsonl", journal.read(root / "metrics.jsonl")[:last])
    return settle(load_run(root))  # as if it had been moved


def leave_behind(run: Run, last: int) -> None:
    """What drivers, attempts and people leave."""
    root = run.paths.root
    for path in (
        f"policy/{last:05d}.7-zz/model",
        f"policy/{last + 1:05d}.8-zz/model",
        f"state/{last:05d}.7-zz/moments",
        "iterations/00001/rollout/shard-00000.9-zz.arrow",
        "iterations/00001/rollout/shard-00001.partial.9-zz.json",
        "iterations/00002/reward/.shard-00000.json.123.abcdef01",
        "data/prompts.9-zz.arrow",
        ".run.json.77.00ff00ff",
        "superseded/20260101-update@1/file",
        "cache/compiled/kernel",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("left behind")


def weights(root: Path) -> bytes:
    return (root / f"policy/{ITERATIONS:05d}/model.safetensors").read_bytes()


@pytest.mark.parametrize("last", [3, ITERATIONS])
def test_a_run_that_was_cleaned_and_resumed_ends_in_the_same_bytes(last, whole, tmp_path, slurm_ppo):
    run = taken_back(whole, tmp_path / "run", last)
    leave_behind(run, last)
    shown = slurm_ppo("clean", run.paths.root)
    assert shown.returncode == 2, "nobody can be asked"
    done = slurm_ppo("clean", run.paths.root, "--yes")
    assert done.returncode == 0, done.stderr
    for said in ("superseded", "states", "leftovers", "caches", "logs"):
        assert f"  {said} " in done.stdout
    left = [str(p) for p in run.paths.root.rglob("*") if "zz" in p.name or "left behind" in _text(p)]
    assert left == []
    resumed = slurm_ppo("resume", run.paths.root)
    assert resumed.returncode == 0, resumed.stderr
    assert weights(run.paths.root) == weights(whole)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


@pytest.mark.parametrize(
    ("endings", "are_several"),
    [
        (["1-9f3a.arrow", "2-77aa.arrow"], True),
        (["1-4711_0r0.arrow", "learned.1-4711_0r0.json"], False),
        (["1-4711_0r0.3.arrow", "2-4711_1r0.3.arrow"], True),  # the fourth task of each of two workers
        (["1-4711_0r0.3.arrow", "learned.1-4711_0r0.3.json"], False),
        (["1-4711_0r0.3.arrow", "partial.1-4711_0r0.3.json"], True),
    ],
)
def test_files_of_several_attempts_at_a_task_are_told_apart(endings, are_several):
    names = ["shard-00000.json", *(f"shard-00000.{ending}" for ending in endings)]
    assert _has_several_attempts("shard-00000", names) is are_several


def answered(run: Run, environment: dict[str, str], keys: bytes) -> tuple[int, str]:
    """Type ``slurm-ppo clean RUN`` at a terminal, and answer. Returns the exit code and what is shown."""
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "pipeline", "clean", str(run.paths.root)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=inside, stdout=inside, stderr=inside)
    try:
        os.write(terminal, keys)  # a terminal keeps what is typed until it is read
        code = process.wait(60)
        return code, os.read(terminal, 1 << 16).decode()
    finally:
        process.kill()
        os.close(terminal)
        os.close(inside)


def test_at_a_terminal_it_asks_and_only_a_yes_removes(whole, environment, tmp_path):
    run = taken_back(whole, tmp_path / "run", ITERATIONS)
    leave_behind(run, ITERATIONS)
    before = sorted(run.paths.root.rglob("*"))
    for keys in (b"n\n", b"\n", b"\x04"):  # no, Enter, Ctrl-D
        code, shown = answered(run, environment, keys)
        assert (code, "nothing was removed" in shown) == (0, True), shown
        assert re.search(r"remove [\d.]+ [KM]iB\? \[y/N\]", shown)
        assert sorted(run.paths.root.rglob("*")) == before
    code, shown = answered(run, environment, b"y\n")
    assert (code, "removed " in shown) == (0, True), shown
    assert kinds(load_run(run.paths.root)) == {}


def test_saved_progress_of_a_task_that_is_not_done_stays(whole, tmp_path):
    run = taken_back(whole, tmp_path / "run", 3)
    folder = run.paths.iterations / "00004/rollout"
    (folder / "shard-00000.json").unlink()
    saved = folder / "shard-00000.partial.9-zz.json"
    saved.write_text("{}")
    clean(run)
    assert saved.exists()


def test_a_run_that_is_at_work_is_left_alone(whole, tmp_path, slurm_ppo):
    run = taken_back(whole, tmp_path / "runs/one", ITERATIONS)
    shutil.copytree(whole, tmp_path / "runs/two", symlinks=True)
    with hold(run.paths.locks):
        alone = slurm_ppo("clean", run.paths.root, "--yes")
        both = slurm_ppo("clean", tmp_path / "runs", "--yes", "--only", "logs")
    assert alone.returncode == 2
    assert "a driver is active on this run" in alone.stderr
    assert both.returncode == 0
    assert f"{run.paths.root} is left alone: a driver is active" in both.stdout
    assert any(run.paths.log_root.iterdir())
    assert not any(path.is_file() for path in (tmp_path / "runs/two/logs").rglob("*"))
