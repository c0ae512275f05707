"""W&B as a mirror of the rows: each arrives once, in order, whatever fails; and W&B never stops a run."""

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.schema import WandbMode
from pipeline.metrics.catalogue import METRICS
from pipeline.run import journal
from pipeline.run.benchmarks import Measured, note_measured, trim_measured
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import git_commit
from pipeline.status.remedies import ways_around
from pipeline.tracking import tracker as tracking
from pipeline.tracking.destination import Destination
from pipeline.tracking.mirror import Once, mirror
from pipeline.tracking.state import read_state, wandb_mode
from pipeline.tracking.tracker import behind, last_words
from tests.support import ROOT, tiny
from tests.support.mirrored import WANDB, append, children, driver, family, follow, kill_all, row
from tests.support.waiting import wait_for
from tests.support.wandb_graphql import HISTORY
from tests.support.wandb_server import WandbServer

TRIAL = pytest.mark.trial(1 / 2)


@pytest.fixture
def server(wandb_server: WandbServer) -> WandbServer:
    return wandb_server


@pytest.fixture
def run(server: WandbServer, make: Callable[..., Run]) -> Run:
    return make()


def on_server(server: WandbServer, run_id: str) -> list[int]:
    """Iterations in W&B's order; each row has its place as its step, and the number of metrics.jsonl."""
    rows = server.rows(run_id) if server.runs else []
    assert [found["_step"] for found in rows] == list(range(len(rows)))
    assert all(found["reward/mean"] == found["iteration"] / 2 for found in rows)
    return [found["iteration"] for found in rows]


def mirror_of(process: subprocess.Popen[str]) -> int:
    """The process id of a driver's mirror."""
    (found,) = wait_for(lambda: children(process.pid), "the driver's mirror process")
    return found


# --- each row once, in order ---


def test_drivers_with_a_network_and_without_then_sync(run, server, sync, monkeypatch):
    append(run, 1, 2)
    assert follow(run) == []
    assert not list(run.paths.wandb.glob("run-*")), "files of an opening would pile up"
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for iteration in (3, 4):
            append(run, iteration)
            assert follow(run) == []
        assert not behind(run)
    assert behind(run)
    assert on_server(server, run.identity.id) == [1, 2]
    assert "4 rows, each once; 2 were there, 2 sent" in sync(run).stdout
    assert "4 were there, 0 sent" in sync(run).stdout
    assert on_server(server, run.identity.id) == [1, 2, 3, 4]
    assert not behind(run)


@TRIAL
def test_killed_again_and_again(run, server):
    """By kill -9 of everything at once, while rows are being written; then what was noted of it is lost."""
    for iteration in range(1, 4):
        append(run, iteration)
        with driver(run) as process:
            mirror_of(process)
            wait_for(lambda: iteration in on_server(server, run.identity.id), "the row")  # noqa: B023
            kill_all(family(process.pid), signal.SIGKILL)
    run.paths.wandb_online.write_text("{")
    append(run, 4)
    assert follow(run) == []
    assert on_server(server, run.identity.id) == [1, 2, 3, 4]
    assert server.run(run.identity.id).state == "finished"
    assert not behind(run)


@TRIAL
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_mirror_whose_driver_has_gone_or_that_is_asked_to_end_closes_in_order(run, server, number):
    append(run, 1, 2)
    with driver(run) as process:
        ending = mirror_of(process)
        wait_for(lambda: on_server(server, run.identity.id) == [1, 2], "the rows")
        append(run, 3)
        kill_all([process.pid] if number == signal.SIGKILL else family(process.pid), number)
        wait_for(lambda: not Path(f"/proc/{ending}").exists(), "the mirror's end")
    if number == signal.SIGKILL:
        assert on_server(server, run.identity.id) == [1, 2, 3]
        assert server.run(run.identity.id).exit_code == 1
    assert on_server(server, run.identity.id) in ([1, 2], [1, 2, 3]), "at most the row being written is lost"
    assert follow(run) == []
    assert on_server(server, run.identity.id) == [1, 2, 3]


@TRIAL
def test_two_drivers_of_which_one_is_killed(run, server):
    append(run, 1)
    with driver(run) as first, driver(run) as second:
        mirror_of(second)
        wait_for(lambda: on_server(server, run.identity.id) == [1], "the row")
        append(run, 2)
        holder = json.loads(max((run.paths.locks / "wandb-online").iterdir()).read_text())["pid"]
        killed, left = (first, second) if holder in family(first.pid) else (second, first)
        kill_all(family(killed.pid), signal.SIGKILL)
        killed.wait()
        append(run, 3)
        print("row", file=left.stdin, flush=True)
        wait_for(lambda: on_server(server, run.identity.id) == [1, 2, 3], "the other's rows")


@TRIAL
def test_a_server_that_hangs_up_in_the_middle(run, server):
    server.faults.drop_after_rows = 2
    append(run, *range(1, 6))

    def heal() -> None:
        wait_for(lambda: len(on_server(server, run.identity.id)) == 2, "two rows")
        server.faults.drop_after_rows = None

    threading.Thread(target=heal, daemon=True).start()
    assert follow(run) == []
    assert on_server(server, run.identity.id) == [1, 2, 3, 4, 5]


@TRIAL
def test_rows_that_the_server_lost_follow_with_sync(run, server, sync):
    append(run, 1, 2)
    assert follow(run) == []
    server.faults.lose = True
    append(run, 3)
    assert follow(run) == ["W&B has not confirmed 1 rows yet; the next driver looks again"]
    assert behind(run)
    refused = sync(run)
    assert refused.returncode == 1
    assert "W&B has not confirmed 1 of 3 rows" in refused.stderr
    server.faults.lose = False
    assert "2 were there, 1 sent" in sync(run).stdout
    assert on_server(server, run.identity.id) == [1, 2, 3]


def test_numbers_of_a_program_come_when_they_come_over_an_axis_of_their_own(run, server, tmp_path):
    program = replace(run.config.evaluate, command=("x", "{policy}", "{output}"), command_every=1)
    run = replace(run, config=replace(run.config, evaluate=program))
    append(run, 1, 2)
    note_measured(run.paths, [Measured(0, {"eval/acc": 0.25}), Measured(1, missing="it hung")], after=1)
    assert mirror(run, Destination.WANDB, Once(), print).sent == 3
    assert not behind(run)
    append(run, 3)
    note_measured(run.paths, [Measured(2, {"eval/acc": 0.5})], after=3)
    note_measured(run.paths, [Measured(3, {"eval/acc": 0.6})], after=4)  # row 4 is not seen yet
    assert behind(run)
    assert [mirror(run, Destination.WANDB, Once(), print).sent for _ in range(2)] == [2, 0]
    rows = server.rows(run.identity.id)
    assert [r.get("iteration", -r.get("eval/iteration", 0)) for r in rows] == [1, 0, 2, 3, -2]
    assert [r["eval/acc"] for r in rows if "iteration" not in r] == [0.25, 0.5]
    trim_measured(run.paths, 2, tmp_path)
    assert mirror(run, Destination.WANDB, Once(), print).sent == 4, "a new W&B run has all"


# --- going back ---


@TRIAL
def test_rows_that_were_taken_back_are_in_another_run(run, server):
    append(run, 1, 2, 3)
    assert follow(run) == []
    journal.rewrite(run.paths.metrics, [row(1)])
    append(run, 2, 3)
    assert follow(run) == [], "the same rows again"
    journal.rewrite(run.paths.metrics, [row(1), row(2) | {"policy/loss": 0.2}])
    assert behind(run)
    note = "W&B has rows that were retracted or changed since: a new W&B run has all"
    assert follow(run) == [note]
    assert on_server(server, run.identity.id) == [1, 2, 3]
    assert on_server(server, f"{run.identity.id}-2") == [1, 2]
    assert not behind(run)


@TRIAL
def test_rows_that_change_while_a_driver_is_at_work(run, server):
    append(run, 1, 2)
    with driver(run) as process:
        wait_for(lambda: on_server(server, run.identity.id) == [1, 2], "the rows")
        journal.rewrite(run.paths.metrics, [row(1), row(2) | {"policy/loss": 0.2}, row(3)])
        print("row", file=process.stdin, flush=True)
        wait_for(lambda: len(server.runs) == 2, "another W&B run")
        wait_for(lambda: on_server(server, f"{run.identity.id}-2") == [1, 2, 3], "its rows")


@TRIAL
def test_rows_that_another_program_sent_or_that_a_copy_of_yesterday_lacks(run, server, sync):
    """The server has more than the run, and cannot take rows back."""
    append(run, 1)
    follow(run)
    server.run(run.identity.id).streams[HISTORY][1] = json.dumps({**row(2), "_step": 1})
    done = sync(run)
    assert done.returncode == 0
    assert done.stderr == "W&B has 2 rows, the run 1: a new W&B run has all\n"
    assert on_server(server, f"{run.identity.id}-2") == [1]


# --- carried away ---


def test_an_offline_run_is_carried_to_a_machine_with_a_network(run, server, sync, monkeypatch, tmp_path):
    def carried(name: str) -> None:
        with monkeypatch.context() as patch:
            patch.delenv("WANDB_API_KEY")
            done = sync(run, "--offline", tmp_path / "carried")
        assert done.returncode == 0, done.stderr
        assert "where there is a network, once: wandb sync" in done.stdout
        there = (tmp_path / "carried").rename(tmp_path / name)
        subprocess.run([WANDB, "sync", there / "wandb"], check=True, capture_output=True, cwd=tmp_path)

    append(run, 1, 2)
    carried("monday")
    assert on_server(server, run.identity.id) == [1, 2]
    append(run, 3)
    carried("tuesday")
    assert on_server(server, run.identity.id) == [1, 2, 3]
    assert "there is nothing to carry" in sync(run, "--offline", tmp_path / "none").stdout
    assert not (tmp_path / "none").exists()
    append(run, 4)
    assert "3 were there, 1 sent" in sync(run).stdout
    assert on_server(server, run.identity.id) == [1, 2, 3, 4]


# --- what is recorded ---


def test_rows_the_configuration_and_the_commit_and_never_the_key(run, server, tmp_path):
    key = server.environment["WANDB_API_KEY"].encode()
    journal.append(run.paths.metrics, {**row(1), "policy/loss": float("nan"), "value/loss": float("inf")})
    for iteration in (2, 3):
        follow(run)
        append(run, iteration)
    stored = server.run(run.identity.id)
    assert not {"policy/loss", "value/loss"} & stored.history[0].keys(), "W&B would make words of them"
    assert stored.config["run_dir"] == str(run.paths.root)
    assert stored.config["update"]["learning_rate"] == 1e-3
    assert stored.config["git_commit"] == git_commit(str(ROOT))
    sections = {metric.name.split("/")[0] for metric in METRICS} - {"iteration", "eval"}  # of a program
    assert {one["2"] for one in stored.metrics if "2" in one} == {f"{section}*" for section in sections}
    files = [path for path in run.paths.root.rglob("*") if path.is_file()]
    assert not [path for path in files if key in path.read_bytes()]
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing goes into the home directory"


# --- W&B being broken ---


def test_a_refusing_server_is_a_note(run, server):
    server.faults.status = 401
    append(run, 1)
    (note,) = follow(run)
    assert note.startswith("W&B cannot be used now (")
    assert note.endswith(f"the rest follows with the next driver, or by: slurm-ppo sync {run.paths.root}")
    assert server.environment["WANDB_API_KEY"] not in note
    assert list(ways_around(run, journal.read_events(run.paths.events), "complete")) == [
        f"to send the rows that W&B lacks: slurm-ppo sync {run.paths.root}"
    ]
    server.faults.status = None
    assert follow(run) == []
    assert not list(ways_around(run, journal.read_events(run.paths.events), "complete"))
    assert on_server(server, run.identity.id) == [1]


def test_a_folder_that_cannot_be_written_is_a_note(run):
    append(run, 1)
    run.paths.wandb.write_text("a file in the way")
    (note,) = follow(run)
    assert note.startswith("W&B cannot be used now (")
    assert "\n" not in note


def test_a_bad_tag_in_the_environment_never_stops_a_run(server, inputs, slurm_ppo, environment, tmp_path):
    words = (*tiny.overrides(inputs, tmp_path / "run", "iterations=1"), "tracking=wandb")
    done = slurm_ppo("run", *words, env=environment | server.environment | {"WANDB_TAGS": "x" * 100})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("W&B cannot be used now (") == 1
    assert load_run(tmp_path / "run").paths.metrics.exists()


def test_a_server_that_never_answers_delays_neither_a_driver_nor_sync(run, server, sync, monkeypatch):
    server.faults.hang = True
    append(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "_CLOSE_SECONDS", 1.0)
        assert follow(run) == [
            "W&B did not take every row within 1 s; the rest follows with the next driver, or by: "
            f"slurm-ppo sync {run.paths.root}"
        ]
    done = sync(run, "--timeout", "3")
    server.faults.hang = False
    assert done.returncode == 1
    assert "W&B did not take the rows within 3 s" in done.stderr
    assert follow(run) == []
    assert on_server(server, run.identity.id) == [1]


def test_sync_without_a_key_says_how_to_give_one(run, sync, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    done = sync(run)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no API key for W&B: run `wandb login`, or set WANDB_API_KEY\n"
    assert read_state(run.paths).sent == 0


PYDANTIC = """Traceback (most recent call last):
  File "/env/lib/wandb/sdk/wandb_init.py", line 1, in init
    settings = Settings(**given)
pydantic_core._pydantic_core.ValidationError: 1 validation error for Settings
entity
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
"""
PLAIN = 'Traceback:\n  File "a.py", line 1\n    x()\nwandb.errors.CommError: no route'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PYDANTIC, "ValidationError: 1 validation error for Settings entity Field required"),
        (PLAIN, "CommError: no route"),
        ("wandb: one\nlast: word\n", "last: word"),
        ("", "no word"),
    ],
)
def test_why_the_mirror_failed_is_its_error_and_not_a_link(text, said):
    assert last_words(text).startswith(said)
    assert "v/missing" not in last_words(text)


# --- whether rows go anywhere ---


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
