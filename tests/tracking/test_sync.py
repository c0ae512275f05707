"""W&B online: one run and one row per iteration on the server, whatever was killed, down or offline."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.tracking import state as mirrorstate
from pipeline.tracking.state import read_online, rewind
from pipeline.tracking.tracker import is_behind
from tests.support.mirrored import (
    WANDB,
    append,
    driver,
    family,
    follow,
    kill_all,
    logged,
    mirror_of,
    row,
    wait_for,
)
from tests.support.wandb_server import StoredRun, WandbServer

TRIAL = pytest.mark.trial(1 / 2)


@pytest.fixture
def server(home: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def run(server: WandbServer, run: Run) -> Run:
    """Made in a shell that names the server."""
    return run


def on_server(server: WandbServer, run: Run) -> list[int]:
    """Iterations of W&B's rows, in its order; every row has the number that metrics.jsonl has."""
    rows = server.rows(run.identity.id) if server.runs else []
    for found in rows:
        assert found["reward/mean"] == found["iteration"] / 2
    return [found["iteration"] for found in rows]


def stored(server: WandbServer, run: Run) -> StoredRun:
    assert list(server.runs) == [("me", "slurm-ppo", run.identity.id)]
    return server.runs["me", "slurm-ppo", run.identity.id]


def offline(run: Run, monkeypatch: pytest.MonkeyPatch, *iterations: int) -> None:
    """A driver without network."""
    append(run, *iterations)
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        assert follow(run) == []


# --- drivers with a server ---


@TRIAL
def test_killed_again_and_again_is_one_run_and_one_row_per_iteration(run, server):
    for iteration in range(1, 4):
        append(run, iteration)
        with driver(run) as process:
            mirror_of(process)
            wait_for(lambda: iteration in on_server(server, run), "the row")  # noqa: B023
            kill_all(family(process.pid), signal.SIGKILL)
    append(run, 4)
    assert follow(run) == []
    assert on_server(server, run) == [1, 2, 3, 4]
    assert stored(server, run).state == "finished"
    assert read_online(run.paths).arrived == 4
    assert not is_behind(run, journal.read(run.paths.metrics))


def test_an_online_opening_leaves_no_files_behind(run, server):
    append(run, 1)
    assert follow(run) == []
    assert not list(run.paths.wandb.glob("run-*"))


def test_a_refusing_server_means_files_and_a_note(run, server):
    server.faults.status = 401
    append(run, 1)
    (note,) = follow(run)
    assert note.startswith("W&B cannot be used now (")
    assert note.endswith(f"writing its files under {run.paths.wandb}")
    assert server.environment["WANDB_API_KEY"] not in note
    assert logged(run) == [1]


@TRIAL
def test_rows_that_were_taken_back_are_in_another_run(run, server):
    append(run, 1, 2, 3)
    follow(run)
    journal.rewrite(run.paths.metrics, [row(1)])
    rewind(run.paths, 1)
    append(run, 2)
    assert follow(run) == []
    assert [r["iteration"] for r in server.rows(run.identity.id)] == [1, 2, 3]
    assert [r["iteration"] for r in server.rows(f"{run.identity.id}-2")] == [1, 2]


@TRIAL
def test_taken_back_behind_the_mirrors_back(run, server):
    """The run directory was copied back from yesterday: the server knows rows that the run does not."""
    append(run, 1, 2, 3)
    follow(run)
    journal.rewrite(run.paths.metrics, [row(1)])
    run.paths.wandb_online.unlink()
    (note,) = follow(run)
    assert note == "W&B has rows that were taken back (from iteration 2 on): a new W&B run has all"
    assert [r["iteration"] for r in server.rows(f"{run.identity.id}-2")] == [1]


# --- sync ---


@pytest.fixture
def sync(slurm_ppo, environment, run):
    def call(*options: str) -> subprocess.CompletedProcess[str]:
        given = {name: os.environ[name] for name in ("WANDB_BASE_URL", "WANDB_API_KEY", "HOME")}
        return slurm_ppo("sync", run.paths.root, *options, env=environment | given)

    return call


@TRIAL
def test_days_offline_then_sync(run, server, sync, monkeypatch):
    offline(run, monkeypatch, 1, 2)
    offline(run, monkeypatch, 3)
    done = sync()
    assert done.returncode == 0, done.stderr
    assert "3 rows, one per iteration; 0 were there, 3 sent" in done.stdout
    assert "2 offline segments hold nothing new" in done.stdout
    assert on_server(server, run) == [1, 2, 3]
    assert "3 were there, 0 sent" in sync().stdout
    assert on_server(server, run) == [1, 2, 3]


@TRIAL
def test_wandbs_own_sync_and_ours_do_not_add_up(run, server, sync, monkeypatch, tmp_path):
    offline(run, monkeypatch, 1, 2)
    command = [WANDB, "sync", *mirrorstate.segment_folders(run.paths)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert on_server(server, run) == [1, 2]
    offline(run, monkeypatch, 3)
    assert "2 were there, 1 sent" in sync().stdout
    said = subprocess.run([WANDB, "sync", run.paths.wandb], capture_output=True, text=True, cwd=tmp_path)
    assert "Skipped" in said.stdout + said.stderr
    assert on_server(server, run) == [1, 2, 3]


@TRIAL
def test_cut_segments_and_killed_online_drivers(run, server, sync, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        append(run, 1, 2)
        with driver(run) as process:
            mirror_of(process)
            wait_for(lambda: logged(run), "a row")
            kill_all(family(process.pid), signal.SIGKILL)
    cut(run)
    append(run, 3)
    done = sync()
    assert done.returncode == 0, done.stderr
    assert "1 offline segments were cut and are removed" in done.stdout
    assert on_server(server, run) == [1, 2, 3]


def cut(run: Run) -> None:
    """As a crash of the machine cuts the file."""
    (data,) = run.paths.wandb.glob("offline-run-*/run-*.wandb")
    os.truncate(data, data.stat().st_size - 20)


@TRIAL
def test_an_outage_in_the_middle(run, server, sync):
    """Rows that the server lost or refused follow with sync."""
    append(run, 1, 2)
    assert follow(run) == []
    server.faults.lose = True
    append(run, 3)
    (note,) = follow(run)
    assert note == "W&B has not confirmed 1 rows yet; the next driver looks again"
    assert is_behind(run, journal.read(run.paths.metrics))
    refused = sync()
    assert refused.returncode == 1
    assert "W&B has not confirmed 1 of 3 rows" in refused.stderr
    server.faults.lose = False
    assert "2 were there, 1 sent" in sync().stdout
    assert on_server(server, run) == [1, 2, 3]


@TRIAL
def test_rows_that_another_program_sent_twice(run, server, sync):
    append(run, 1, 2)
    follow(run)
    lines = stored(server, run).streams["wandb-history.jsonl"]
    lines[2] = json.dumps({**json.loads(lines[1]), "_step": 2})
    done = sync()
    assert done.returncode == 1
    assert "W&B has iteration 2 more than once" in done.stderr
    assert f"slurm-ppo sync {run.paths.root} --anew" in done.stderr
    assert sync("--anew").returncode == 0
    assert [r["iteration"] for r in server.rows(f"{run.identity.id}-2")] == [1, 2]


def test_sync_without_a_key_says_how_to_give_one(run, slurm_ppo, environment, tmp_path):
    done = slurm_ppo("sync", run.paths.root, env=environment | {"HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no API key for W&B: type `wandb login`, or set WANDB_API_KEY\n"


def test_sync_with_a_server_that_is_away_ends_in_time(run, sync, monkeypatch, deaf):
    append(run, 1)
    done = sync("--timeout", "3")
    assert done.returncode == 1
    assert "W&B did not take the rows within 3 s" in done.stderr


@pytest.fixture
def deaf(server: WandbServer) -> Iterator[None]:
    server.faults.hang = True
    yield
    server.faults.hang = False
