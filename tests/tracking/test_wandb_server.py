"""The stand-in W&B server takes what the real client sends, and gives it back."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.wandb_server import KEY, WandbServer

WANDB = Path(sys.executable).with_name("wandb")
OPEN = """
import json
import wandb

def open_run(**more):
    return wandb.init(
        project="p", id="r1", dir=".", config={"lr": 1}, tags=["x"], resume="allow", reinit="create_new",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
                                disable_git=True, disable_code=True, init_timeout=20), **more)
"""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture
def shell(server: WandbServer, environment: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """Of a user who logs to the server, in an empty folder."""
    caches = {"WANDB_CACHE_DIR": str(tmp_path / "c"), "WANDB_DATA_DIR": str(tmp_path / "d")}
    env = environment | server.environment | caches
    return {"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}


def python(code: str, shell: dict[str, Any]) -> str:
    done = subprocess.run([sys.executable, "-c", OPEN + code], **shell)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_with_a_table_is_resumed_and_read_back(server, shell):
    said = python(
        """
first = open_run()
first.define_metric("iteration")
first.define_metric("reward*", step_metric="iteration")
first.log({"iteration": 1, "reward/mean": 0.5, "t": wandb.Table(columns=["a"], data=[["x"]])})
first.log({"iteration": 2, "reward/mean": 0.75})
first.finish()
second = open_run()
second.log({"iteration": 3, "reward/mean": 1.0})
second.finish(exit_code=3)
api = wandb.Api(timeout=20)
run = api.run("me/p/r1")
print(json.dumps([run.state, run.config, run.summary["iteration"], run.lastHistoryStep,
                  list(run.scan_history(keys=["iteration"], use_cache=False)),
                  [row["iteration"] for row in run.history(pandas=False)]]))
try:
    api.run("me/p/nope")
except wandb.errors.CommError as error:
    print(error)
run.delete()
""",
        shell,
    )
    read, missing = said.splitlines()
    steps = [{"_step": i, "iteration": i + 1} for i in range(3)]
    assert json.loads(read) == ["failed", {"lr": 1}, 3, 2, steps, [1, 2, 3]]
    assert missing == "Could not find run <Run me/p/nope (not found)>"
    (artifact,) = server.artifacts.values()
    assert artifact["name"] == "run-r1-t"
    assert artifact["committed"]
    assert json.loads(artifact["files"]["t.table.json"])["data"] == [["x"]]
    assert server.runs == {}
    assert server.unknown == []


def test_an_offline_segment_is_synced(server, shell):
    offline = {**shell, "env": shell["env"] | {"WANDB_MODE": "offline"}}
    python('run = open_run(); run.log({"iteration": 1}); run.log({"iteration": 2}); run.finish()', offline)
    assert server.requests == []
    done = subprocess.run([WANDB, "sync", "wandb"], **shell)
    assert done.returncode == 0, done.stderr
    assert server.rows("r1") == [{"_step": 0, "iteration": 1}, {"_step": 1, "iteration": 2}]
    run = server.run("r1")
    assert (run.state, run.tags, run.config) == ("finished", ["x"], {"lr": 1})


def test_another_key_is_refused(server, shell):
    stranger = {**shell, "env": shell["env"] | {"WANDB_API_KEY": KEY.replace("0", "1")}}
    said = python(
        "try:\n    open_run()\nexcept wandb.errors.CommError as error:\n    print(error)",
        stranger,
    )
    assert "401" in said
    assert server.runs == {}


def test_rows_arrive_once_although_it_hung_up_in_their_middle(server, shell):
    server.faults.drop_after_rows = 2
    code = OPEN + "run = open_run()\nfor i in range(5):\n    run.log({'iteration': i})\nrun.finish()"
    options = {key: shell[key] for key in ("env", "cwd")}
    with subprocess.Popen([sys.executable, "-c", code], **options) as client:
        until = time.monotonic() + 60
        while not any(run.history for run in server.runs.values()):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert len(server.rows("r1")) == 2
        server.faults.drop_after_rows = None
        assert client.wait(60) == 0
    assert [row["iteration"] for row in server.rows("r1")] == [0, 1, 2, 3, 4]
    assert server.run("r1").state == "finished"
