"""Where a site removes what was not used for long, people are told in time."""

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checks.disk import check_ages
from pipeline.config.compose import to_yaml
from pipeline.config.schema import StorageConfig
from pipeline.run.ages import ages_of
from pipeline.run.directory import load_run
from pipeline.run.identity import config_hash, write_identity

DAY = 86_400


@pytest.fixture
def aged(complete_run, tmp_path):
    """Return a run whose prompts, or another file, were not used for some days, on storage that is purged."""

    def make(days: float, purge_days: int | None, name: str = "data/prompts.1-*.arrow") -> Path:
        root = Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True))
        run = load_run(root)
        config = replace(run.config, storage=StorageConfig(purge_days=purge_days))
        text = to_yaml(config)
        run.paths.config_yaml.write_text(text)
        write_identity(run.paths, replace(run.identity, config_hash=config_hash(text), root=str(root)))
        old = time.time() - days * DAY
        os.utime(next(root.glob(name)), (old, old))
        return root

    return make


def test_status_tells_of_files_that_the_run_needs(aged, slurm_ppo):
    root = aged(25, 30)
    said = " ".join(slurm_ppo("status", root).stdout.split())
    assert "1 file that the run needs may soon be removed, as unused" in said
    assert re.search(r"\(the oldest, data/prompts.1-\w+.arrow: 25 days; storage.purge_days=30\)", said)
    assert f"cp -a {root} ARCHIVE" in said


@pytest.mark.parametrize(
    ("days", "purge_days", "name"),
    [
        (25, None, "data/prompts.1-*.arrow"),
        (20, 30, "data/prompts.1-*.arrow"),
        (40, 30, "iterations/00001/rollout"),
    ],
)
def test_nothing_is_told_of_what_is_young_or_not_needed_or_not_purged(
    aged, days, purge_days, name, slurm_ppo
):
    root = aged(days, purge_days, name)
    assert "unused" not in slurm_ppo("status", root).stdout


def test_doctor_looks_at_every_file(aged):
    run = load_run(aged(40, 30, "report.html"))
    found = check_ages(run)
    assert found.verdict == "warning"
    assert "report.html: 40 days" in found.measured
    without = check_ages(replace(run, config=replace(run.config, storage=StorageConfig())))
    assert (without.verdict, "storage.purge_days is not set" in without.measured) == ("ok", True)


def test_reading_a_file_counts_as_use_and_one_that_is_gone_is_left_out(tmp_path):
    now, path = time.time(), tmp_path / "file"
    path.write_text("")
    os.utime(path, (now - 2 * DAY, now - 90 * DAY))
    found = ages_of([path, tmp_path / "gone"], 30, now)
    assert (found.count, round(found.days)) == (0, 2)
