"""W&B as a mirror: every iteration arrives, whatever is killed in between, and W&B never stops a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from pipeline import tracking
from pipeline.checks import resolve
from pipeline.compose import compose
from pipeline.config import WandbMode
from pipeline.runs import Run, create_run, load_run
from pipeline.tracking import NoTracker, WandbTracker, open_tracker, rewind, wandb_mode

ROOT = Path(__file__).parent.parent
WANDB = Path(sys.executable).with_name("wandb")


@pytest.fixture
def run(inputs, tmp_path, monkeypatch) -> Run:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    overrides = [*tiny.overrides(inputs, tmp_path / "run"), "tracking=wandb"]
    return create_run(resolve(compose(overrides)))


def row(iteration: int) -> dict[str, float | int]:
    return {"iteration": iteration, "reward/mean": iteration / 2, "policy/loss": 0.1, "seconds/update": 3.0}


def segments(run: Run) -> list[list[dict]]:
    """What W&B has on disk, as its own reader says; a list of records per opening of the run."""
    found = []
    for folder in sorted(run.paths.wandb.glob("offline-run-*")):
        done = subprocess.run([WANDB, "leet", "inspect", "--json", folder], capture_output=True, text=True)
        found.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
    return found


def logged(run: Run) -> list[int]:
    """Iterations in the order in which they arrived."""
    iterations = []
    for records in segments(run):
        for record in records:
            if record["type"] == "history":
                items = record["history"]["item"]
                assert items["reward/mean"] == items["iteration"] / 2
                iterations.append(items["iteration"])
    return iterations


def follow(run: Run, rows: list[dict]) -> list[str]:
    """What one undisturbed driver does: take up the rows there are, and finish. Returns what it noted."""
    notes: list[str] = []
    tracker = open_tracker(run, notes.append)
    tracker.replay(rows)
    tracker.finish(0)
    return notes


KILLED_DRIVER = """
import os, signal, sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from pipeline import tracking
from pipeline.runs import load_run
from test_tracking import row
tracking._WRITTEN_AFTER_SECONDS = float(sys.argv[2])
tracker = tracking.open_tracker(load_run(Path(sys.argv[1])), print)
tracker.replay([row(1), row(2)])
time.sleep(float(sys.argv[3]))
tracker.log(row(3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_driver(run: Run, written_after: float, pause: float) -> None:
    command = [sys.executable, "-c", KILLED_DRIVER, run.paths.root, str(written_after), str(pause)]
    # As from a fresh shell: with WANDB_SERVICE it would share the W&B process of this test, and not kill it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


# --- rows ---


def test_rows_arrive_once_over_several_drivers(run):
    for count in (2, 2, 4):
        assert follow(run, [row(i) for i in range(1, count + 1)]) == []
    assert logged(run) == [1, 2, 3, 4]


def test_no_row_is_missing_after_a_driver_was_killed_right_after_logging(run):
    """W&B keeps rows in memory for a while; what dies there is logged again."""
    killed_driver(run, written_after=20, pause=0)
    assert follow(run, [row(i) for i in (1, 2, 3, 4)]) == []
    assert set(logged(run)) == {1, 2, 3, 4}
    assert logged(run)[-4:] == [1, 2, 3, 4]


def test_rows_that_were_surely_written_are_not_sent_twice(run):
    killed_driver(run, written_after=2, pause=2.5)
    assert follow(run, [row(i) for i in (1, 2, 3, 4)]) == []
    assert logged(run) == [1, 2, 3, 4]


def test_rows_that_were_taken_back_are_logged_anew(run):
    follow(run, [row(1), row(2), row(3)])
    rewind(run.paths, 1)
    rewind(run.paths, 2)  # never forward
    follow(run, [row(1), row(2)])
    assert logged(run) == [1, 2, 3, 2]


def test_every_segment_defines_every_metric_over_our_own_axis(run):
    follow(run, [row(1)])
    follow(run, [row(1), row(2)])
    sections = {metric.name.split("/")[0] for metric in tracking.METRICS} - {"iteration"}
    found = segments(run)
    assert len(found) == 2
    for records in found:
        metrics = [record["metric"] for record in records if record["type"] == "metric"]
        globs = {metric["glob_name"]: metric for metric in metrics if metric.get("glob_name")}
        assert set(globs) == {f"{section}*" for section in sections}
        steps = {m.get("step_metric") or metrics[m["step_metric_index"] - 1]["name"] for m in globs.values()}
        assert steps == {"iteration"}


def test_all_segments_are_one_run(run):
    follow(run, [row(1)])
    follow(run, [row(1), row(2)])
    ids = {
        record["run"]["run_id"] for records in segments(run) for record in records if record["type"] == "run"
    }
    assert ids == {run.identity.id}


def test_nothing_is_written_into_the_home_directory(run, tmp_path):
    follow(run, [row(1)])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# --- where rows go ---


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": ""}, "offline"),
        ("auto", {"WANDB_MODE": "online"}, "online"),
        ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
        ("auto", {"WANDB_MODE": "auto"}, "offline"),
        ("auto", {"WANDB_MODE": "shared"}, "offline"),
        ("online", {"WANDB_MODE": "disabled"}, "online"),
        ("offline", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, "offline"),
        ("disabled", {"WANDB_API_KEY": "k"}, "disabled"),
    ],
)
def test_configuration_then_environment_then_key(tmp_path, monkeypatch, asked, environment, expected):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_mode(WandbMode(asked), environment) == expected


def test_a_key_in_netrc_is_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x")
    assert wandb_mode(WandbMode.AUTO, {}) is WandbMode.ONLINE
    (tmp_path / ".netrc").unlink()
    (tmp_path / ".netrc").mkdir()
    assert wandb_mode(WandbMode.AUTO, {}) is WandbMode.OFFLINE


# --- W&B being broken ---


def test_an_unreachable_server_means_files_and_a_note(run, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "a" * 40)
    monkeypatch.setattr(tracking, "_INIT_SECONDS", 2.0)
    notes = follow(run, [row(1)])
    assert len(notes) == 1
    assert notes[0].startswith("W&B could not be reached (CommError")
    assert "\n" not in notes[0]
    assert logged(run) == [1]


def test_a_folder_that_cannot_be_written_is_a_note(run):
    run.paths.wandb.write_text("a file in the way")
    notes: list[str] = []
    assert isinstance(open_tracker(run, notes.append), NoTracker)
    assert len(notes) == 1
    assert "W&B is off, it could not start" in notes[0]


@pytest.mark.parametrize(("name", "value"), [("WANDB_CONSOLE", "bad"), ("WANDB_TAGS", "x" * 100)])
def test_bad_settings_in_the_environment_are_a_note(run, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    notes: list[str] = []
    tracker = open_tracker(run, notes.append)
    tracker.replay([row(1)])
    tracker.finish(0)
    assert all("metrics.jsonl has every row" in note for note in notes)
    assert isinstance(tracker, NoTracker) is bool(notes)


def test_a_bad_tag_never_stops_a_run(inputs, slurm_ppo, tmp_path):
    arguments = tiny.overrides(inputs, tmp_path / "run", "iterations=1", f"tracking.wandb.tags=[{'x' * 100}]")
    done = slurm_ppo("run", *arguments, "tracking=wandb", "tracking.wandb.mode=offline")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("W&B is off, it could not start") == 1
    assert load_run(tmp_path / "run").paths.metrics.exists()


def test_a_refused_row_is_said_once_and_comes_with_the_next_driver(run):
    class Refusing:
        def log(self, row):
            raise ConnectionError("the service has gone")

        def finish(self, exit_code):
            raise AssertionError("asked again")

    follow(run, [row(1)])
    notes: list[str] = []
    tracker = WandbTracker(run, Refusing(), notes.append)
    tracker.replay([row(1), row(2), row(3)])
    tracker.finish(0)
    assert len(notes) == 1
    follow(run, [row(1), row(2), row(3)])
    assert logged(run) == [1, 2, 3]


def test_a_cursor_that_cannot_be_read_means_from_the_start(run):
    follow(run, [row(1)])
    (run.paths.wandb / "logged_iterations").write_text("")
    follow(run, [row(1), row(2)])
    assert logged(run) == [1, 1, 2]
