"""W&B as a mirror: every iteration arrives, whatever is killed in between, and W&B never stops a run."""

import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.config.schema import WandbMode
from pipeline.metrics.catalogue import METRICS
from pipeline.run import journal
from pipeline.run.benchmarks import Measured, note_measured
from pipeline.run.directory import Run, create_run, load_run
from pipeline.run.identity import git_commit
from pipeline.tracking import state as mirrorstate
from pipeline.tracking import tracker as tracking
from pipeline.tracking.mirror import Once, mirror
from pipeline.tracking.mode import wandb_mode
from pipeline.tracking.state import read_offline, rewind, rewind_measured
from pipeline.tracking.tracker import is_behind, last_words
from tests.support import ROOT, tiny
from tests.support.mirrored import (
    append,
    driver,
    family,
    follow,
    kill_all,
    logged,
    mirror_of,
    row,
    segments,
    wait_for,
)


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield listening.getsockname()[1]


def iterations_by_segment(run: Run) -> list[list[int]]:
    return [[r["history"]["item"]["iteration"] for r in rs if r["type"] == "history"] for rs in segments(run)]


# --- rows ---


def test_rows_arrive_once_over_several_drivers(run):
    for iterations in ((1, 2), (), (3, 4)):
        append(run, *iterations)
        assert follow(run) == []
    assert logged(run) == [1, 2, 3, 4]


def test_a_run_of_a_sweep_has_its_names_on_wandb(inputs, run, tmp_path):
    """Chosen ones stand for those that a sweep fills in."""
    names = ["name='lr: seed=0'", "group=lr", "job_type='learning_rate=1e-6'", "notes='first try'"]
    words = [f"tracking.wandb.{name}" for name in [*names, "tags=['seed=0']"]]
    swept = create_run(
        resolve(compose([*tiny.overrides(inputs, tmp_path / "swept"), "tracking=wandb", *words]))
    )
    append(swept, 1)
    assert follow(swept) == []
    ((found,),) = [[r["run"] for r in records if r["type"] == "run"][-1:] for records in segments(swept)]
    assert (found["display_name"], found["run_group"]) == ("lr: seed=0", "lr")
    assert (found["job_type"], found["notes"]) == ("learning_rate=1e-6", "first try")
    assert found["tags"] == ["seed=0"]


def test_numbers_of_a_program_arrive_once_over_an_axis_of_their_own(run, monkeypatch):
    """They come when they come, also after rows of later iterations."""
    program = replace(run.config.evaluate, command=("x", "{policy}", "{output}"), command_every=1)
    run = replace(run, config=replace(run.config, evaluate=program))
    append(run, 1, 2)
    note_measured(run.paths, [Measured(0, {"eval/acc": 0.25}), Measured(1, missing="it hung")])
    assert mirror(run, WandbMode.OFFLINE, Once(), print).sent == 3
    assert not is_behind(run, [row(1), row(2)])
    note_measured(run.paths, [Measured(2, {"eval/acc": 0.5})])
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert is_behind(run, [row(1), row(2)])
    assert mirror(run, WandbMode.OFFLINE, Once(), print).sent == 1
    assert mirror(run, WandbMode.OFFLINE, Once(), print).sent == 0
    items = [r["history"]["item"] for rs in segments(run) for r in rs if r["type"] == "history"]
    assert [item["iteration"] for item in items if "iteration" in item] == [1, 2]
    of_program = [item for item in items if "iteration" not in item]
    assert [(item["eval/iteration"], item["eval/acc"]) for item in of_program] == [(0, 0.25), (2, 0.5)]
    rewind_measured(run.paths)
    assert mirror(run, WandbMode.OFFLINE, Once(), print).sent == 4, "a new W&B run has all"


def test_a_driver_that_had_nothing_to_say_leaves_nothing(run):
    append(run, 1)
    follow(run)
    follow(run)
    assert len(segments(run)) == 1


def test_killed_again_and_again_is_one_row_per_iteration(run):
    """By kill -9 of everything at once, while rows are being written."""
    for iteration in range(1, 4):
        append(run, iteration)
        with driver(run) as process:
            mirror_of(process)
            wait_for(lambda: logged(run), "a row")
            kill_all(family(process.pid), signal.SIGKILL)
    append(run, 4)
    assert follow(run) == []
    assert logged(run) == [1, 2, 3, 4]
    assert {r["run"]["run_id"] for rs in segments(run) for r in rs if r["type"] == "run"} == {run.identity.id}


def test_a_killed_driver_leaves_its_mirror_to_close_in_order(run):
    append(run, 1, 2)
    with driver(run) as process:
        mirror = mirror_of(process)
        wait_for(lambda: logged(run) == [1, 2], "the rows")
        process.kill()
        wait_for(lambda: not Path(f"/proc/{mirror}").exists(), "the mirror's end")
    assert read_offline(run.paths).iterations == {1, 2}
    assert [record["exit"]["exit_code"] for record in segments(run)[0] if record["type"] == "exit"] == [1]


def test_sigterm_to_everything_loses_at_most_the_row_being_written(run):
    append(run, 1, 2)
    with driver(run) as process:
        mirror = mirror_of(process)
        wait_for(lambda: logged(run) == [1, 2], "the rows")
        append(run, 3)
        kill_all(family(process.pid), signal.SIGTERM)
        wait_for(lambda: not Path(f"/proc/{mirror}").exists(), "the mirror's end")
    assert logged(run) in ([1, 2], [1, 2, 3])
    assert follow(run) == []
    assert logged(run) == [1, 2, 3]


def test_many_small_segments_become_one(run, monkeypatch):
    monkeypatch.setattr(mirrorstate, "_MANY_SEGMENTS", 3)
    for iteration in range(1, 6):
        append(run, iteration)
        mirror(run, WandbMode.OFFLINE, Once(), print)
    assert sorted(iterations_by_segment(run)) == [[1, 2, 3, 4], [5]]


def test_segments_that_were_uploaded_are_left_as_they_are(run, monkeypatch):
    monkeypatch.setattr(mirrorstate, "_MANY_SEGMENTS", 2)
    for iteration in range(1, 6):
        append(run, iteration)
        mirror(run, WandbMode.OFFLINE, Once(), print)
        mirrorstate.mark_synced(mirrorstate.segment_folders(run.paths)[-1])
    assert sorted(iterations_by_segment(run)) == [[1], [2], [3], [4], [5]]


def test_rows_that_were_taken_back_are_logged_anew(run):
    append(run, 1, 2, 3)
    follow(run)
    journal.rewrite(run.paths.metrics, [row(1)])
    rewind(run.paths, 1)
    rewind(run.paths, 2)  # never forward
    append(run, 2)
    follow(run)
    assert logged(run) == [1, 2]


def test_rows_that_were_taken_back_after_an_upload_are_another_run_of_wandb(run):
    """W&B cannot take rows back, so what it has stays there, and the new run begins with the first row."""
    append(run, 1, 2, 3)
    follow(run)
    mirrorstate.mark_synced(mirrorstate.segment_folders(run.paths)[0])
    journal.rewrite(run.paths.metrics, [row(1)])
    rewind(run.paths, 1)
    append(run, 2)
    follow(run)
    ids = [r["run"]["run_id"] for rs in segments(run) for r in rs if r["type"] == "run"]
    assert ids == [f"{run.identity.id}-2"]
    assert logged(run) == [1, 2]


def test_numbers_that_are_not_finite_are_left_out(run):
    journal.append(run.paths.metrics, {**row(1), "policy/loss": float("nan"), "value/loss": float("inf")})
    follow(run)
    (items,) = (r["history"]["item"] for rs in segments(run) for r in rs if r["type"] == "history")
    assert "policy/loss" not in items
    assert "value/loss" not in items


def test_every_segment_defines_every_metric_over_our_own_axis(run):
    append(run, 1)
    follow(run)
    append(run, 2)
    follow(run)
    sections = {metric.name.split("/")[0] for metric in METRICS} - {"iteration", "eval"}  # of a program
    found = segments(run)
    assert len(found) == 2
    for records in found:
        metrics = [record["metric"] for record in records if record["type"] == "metric"]
        globs = {metric["glob_name"]: metric for metric in metrics if metric.get("glob_name")}
        assert set(globs) == {f"{section}*" for section in sections}
        steps = {m.get("step_metric") or metrics[m["step_metric_index"] - 1]["name"] for m in globs.values()}
        assert steps == {"iteration"}


def test_what_is_recorded_besides_rows(home, monkeypatch, request):
    """The configuration, where the run is, the commit it was made from; never the key."""
    key = "local-" + "s3cret" * 8
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    run = request.getfixturevalue("run")
    append(run, 1)
    follow(run)
    (recorded,) = (r["run"] for rs in segments(run) for r in rs if r["type"] == "run")
    config = recorded["config"]["update"]
    assert recorded["project"] == "of-the-environment"
    assert config["run_dir"] == str(run.paths.root)
    assert config["update"]["learning_rate"] == 1e-3
    assert config["git_commit"] == git_commit(str(ROOT))
    files = [path for path in run.paths.root.rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_nothing_is_written_into_the_home_directory(run, tmp_path):
    append(run, 1)
    follow(run)
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
        ("auto", {"WANDB_MODE": "dryrun", "WANDB_API_KEY": "k"}, "offline"),
        ("auto", {"WANDB_MODE": "run"}, "online"),
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


def test_a_folder_that_cannot_be_written_is_a_note(run):
    append(run, 1)
    run.paths.wandb.write_text("a file in the way")
    (note,) = follow(run)
    assert note.startswith("W&B is off, it does not work here (NotADirectoryError")
    assert "\n" not in note


@pytest.mark.parametrize(("name", "value"), [("WANDB_CONSOLE", "bad"), ("WANDB_TAGS", "x" * 100)])
def test_bad_settings_in_the_environment_are_a_note(run, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    append(run, 1)
    notes = follow(run)
    assert logged(run) == ([] if notes else [1])
    assert all("metrics.jsonl has every row" in note for note in notes)


def test_a_bad_tag_in_the_environment_never_stops_a_run(inputs, slurm_ppo, environment, tmp_path):
    arguments = tiny.overrides(inputs, tmp_path / "run", "iterations=1")
    words = (*arguments, "tracking=wandb", "tracking.wandb.mode=offline")
    done = slurm_ppo("run", *words, env=environment | {"WANDB_TAGS": "x" * 100})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("W&B is off, it does not work here") == 1
    assert load_run(tmp_path / "run").paths.metrics.exists()


def test_a_state_that_cannot_be_read_means_from_the_start(run):
    append(run, 1)
    follow(run)
    run.paths.wandb_offline.write_text("{")
    append(run, 2)
    follow(run)
    assert logged(run) == [1, 2]


def test_a_server_that_never_answers_does_not_delay_a_driver(home, monkeypatch, deaf_port, request):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{deaf_port}")
    run = request.getfixturevalue("run")
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "a" * 40)
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 1.0)
    append(run, 1)
    notes = follow(run)
    assert notes == [
        "W&B did not take every row within 1 s; the rest follows with the next driver, or by: "
        f"slurm-ppo sync {run.paths.root}"
    ]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 60.0)
    assert follow(run) == []
    assert logged(run) == [1]


PYDANTIC = """Traceback (most recent call last):
  File "/env/lib/wandb/sdk/wandb_init.py", line 1, in init
    settings = Settings(**given)
pydantic_core._pydantic_core.ValidationError: 1 validation error for Settings
entity
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PYDANTIC, "ValidationError: 1 validation error for Settings entity Field required"),
        (
            'Traceback:\n  File "a.py", line 1\n    x()\nwandb.errors.CommError: no route',
            "CommError: no route",
        ),
        ("wandb: one\nlast: word\n", "last: word"),
        ("", "no word"),
    ],
)
def test_why_the_mirror_failed_is_its_error_and_not_a_link(text, said):
    assert last_words(text).startswith(said)
    assert "v/missing" not in last_words(text)
