"""Runs of an earlier version: this one continues, reports, shows and forks them, with the same final bytes.

tests/golden/old_runs has two, made before pipeline/ had rooms: one of this machine and one of Slurm, each
interrupted in iteration 5 of 6, and what they ended in when the version that made them went on. Their light
tasks are those of tests/support/light.py, whose bytes are therefore not to change.
"""

import hashlib
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import xxhash

from pipeline.orchestrate.fork import find_parent, fork_config
from pipeline.preflight.dry_run import scripts
from pipeline.run.directory import load_run
from slurm.sealing import sealed
from tests.support import ROOT

OLD = ROOT / "tests/golden/old_runs"
MADE_IN = "/made/elsewhere"
"""Stands in the files of an archive for the folder that it is unpacked to."""
CHECKOUT = "/made/checkout"
"""Stands there for the folder that the run was started in."""
WORKERS = ["scheduler.workers=true"]
MACHINE = ("seconds/", "tokens_per_second/", "memory_gib/", "slurm/")
LATER = ("data/", "reward/unscored")
"""Counts that rows have since."""


def unpack(kind: str, folder: Path) -> Path:
    """A run as it was left, in another folder: with its inputs, and with their paths."""
    with tarfile.open(OLD / f"{kind}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in (folder / "run").rglob("*"):
        if path.suffix in (".json", ".yaml", ".jsonl") and path.is_file() and not path.is_symlink():
            move(path, folder)
    identity = folder / "run/run.json"
    config_hash = xxhash.xxh3_128_hexdigest((folder / "run/config.yaml").read_bytes())
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"config_hash": config_hash}))
    return folder / "run"


def move(path: Path, folder: Path) -> None:
    """Put the paths of this test into a file, and its checksum right again."""
    before = path.read_text()
    after = before.replace(MADE_IN, str(folder)).replace(CHECKOUT, str(ROOT))
    if after != before and path.suffix == ".json" and "checksum" in (content := json.loads(after)):
        del content["checksum"]
        after = sealed(content)
    path.write_text(after)


@pytest.fixture(params=["local", "slurm"])
def old_run(request, tmp_path) -> Path:
    return unpack(request.param, tmp_path)


LAST = {"policy": "policy/00006/model.safetensors", "critic": "state/00006/critic/model.safetensors"}
"""Weights of the last version, as this version has them."""


def weights_of(run: Path, part: str) -> str:
    return hashlib.sha256((run / LAST[part]).read_bytes()).hexdigest()


def rows_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith((*MACHINE, *LATER))} for row in rows]


def test_it_is_continued_and_ends_in_the_same_bytes(tmp_path, slurm_ppo):
    run, expected = unpack("local", tmp_path), json.loads((OLD / "expected.json").read_text())
    done = slurm_ppo("resume", run)
    assert done.returncode == 0, done.stderr
    assert {part: weights_of(run, part) for part in ("policy", "critic")} | {"rows": rows_of(run)} == expected
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "retracted" not in events
    assert "failed" not in events
    identity = json.loads((run / "run.json").read_text())
    assert identity["format"] == 2
    assert not isinstance(identity["version"], str), "by which the version that made it refuses it"


def test_it_is_shown(old_run, slurm_ppo):
    status = json.loads(slurm_ppo("status", old_run, "--json").stdout)
    assert (status["iterations_done"], status["iterations"]) == (4, 6)
    for command in (["status"], ["plan"], ["logs"], ["watch"], ["report"]):
        done = slurm_ppo(*command, old_run)
        assert done.returncode in ((0, 3) if command[0] in ("status", "watch") else (0,)), done.stderr
        assert "Traceback" not in done.stderr
    page = (old_run / "report.html").read_text()
    assert re.search(r"reward/mean", page)
    spans = [json.loads(line) for line in (old_run / "spans.jsonl").read_text().splitlines()]
    assert len(spans) == 4, "a line an iteration, in the form of then"


def test_on_slurm_it_goes_on_with_a_job_for_each_task_and_so_does_a_fork(tmp_path):
    run = load_run(unpack("slurm", tmp_path))
    assert not run.config.scheduler.has_workers
    assert re.search(r"--dependency=afterok:JOB-\d+-reward", scripts(run))
    forked = [fork_config(find_parent(f"{run.paths.root}@4"), tmp_path / "f", w, None) for w in ([], WORKERS)]
    assert [config.scheduler.has_workers for config in forked] == [False, True]


def test_it_is_forked_and_exported(old_run, tmp_path, slurm_ppo):
    forked = slurm_ppo("fork", f"{old_run}@4", tmp_path / "fork", "iterations=5", "scheduler=local")
    assert forked.returncode == 0, forked.stderr
    done = slurm_ppo("resume", tmp_path / "fork")
    assert done.returncode == 0, done.stderr
    assert load_run(tmp_path / "fork").plan.start == 4
    assert (tmp_path / "fork/policy/00005/model.safetensors").stat().st_size
    exported = slurm_ppo("export", old_run, tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    shutil.rmtree(tmp_path / "fork")
