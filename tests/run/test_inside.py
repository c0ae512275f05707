"""Whatever is removed or moved of a run lies in its directory, wherever somebody's links lead."""

import shutil
from pathlib import Path

import pytest

from pipeline.run import inside

ELSEWHERE = ("superseded", "policy", "state", "iterations", "iterations/00001/rollout", "logs", "rows")
"""Folders of a run that somebody has put elsewhere, with a link in their place."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def copied_run(complete_run, tmp_path) -> Path:
    root = Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True))
    (root / "superseded/20260101-update@1").mkdir(parents=True)
    (root / "superseded/20260101-update@1/file").write_text("moved aside")
    return root


@pytest.mark.parametrize("name", ELSEWHERE)
def test_neither_cleaning_nor_going_back_touches_what_a_link_leads_to(copied_run, tmp_path, slurm_ppo, name):
    """A colleague's folder, for whose sake somebody has made a link."""
    outside = tmp_path / "outside"
    (copied_run / name).rename(outside)
    (copied_run / name).symlink_to(outside)
    (outside / "of somebody else").write_text("precious")
    (outside / ".left.1.0123abcd").write_text("as attempts leave it")
    before = contents(outside)
    for command in (
        ["clean", copied_run, "--yes"],
        ["resume", copied_run, "--from", "update@1"],
        ["clean", copied_run, "--yes"],
    ):
        done = slurm_ppo(*command)
        assert done.returncode in (0, 1, 2), done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        now = contents(outside)
        assert {file: now.get(file) for file in before} == before, command


def test_what_lies_in_the_run_is_removed_and_moved(tmp_path):
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    (folder / "file").write_text("1")
    (folder / "link").symlink_to(tmp_path)
    (tmp_path / "linked run").symlink_to(tmp_path)
    inside.move(tmp_path, folder / "file", tmp_path / "a/moved")
    inside.remove(tmp_path, folder / "link")
    assert not any(folder.iterdir())
    inside.remove(tmp_path / "linked run", tmp_path / "linked run/a")
    assert not (tmp_path / "a").exists()


def test_a_link_on_the_way_is_named(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").symlink_to(tmp_path / "outside")
    (tmp_path / "outside/file").write_text("precious")
    with pytest.raises(OSError, match=r"nothing outside of the run is touched: .*/run/logs'"):
        inside.remove(tmp_path / "run", tmp_path / "run/logs/file")
    assert not inside.is_inside(tmp_path / "run", tmp_path / "run/logs/file")
    assert inside.is_inside(tmp_path / "run", tmp_path / "run/logs")
    assert (tmp_path / "outside/file").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("superseded", "iterations/00002", "iterations/00001/update", "logs/00002-update", "metrics.jsonl"),
        "data/prompts.json",
    ],
)
def test_a_run_with_a_link_where_it_writes_neither_goes_back_nor_on(copied_run, tmp_path, slurm_ppo, name):
    """Refused before anything is moved, not in the middle of it."""
    link = copied_run / name
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    before = every_name(tmp_path)
    is_ahead = "00001" not in name
    for options in [["--from", "update@1"], *([[]] if is_ahead else [])]:
        done = slurm_ppo("resume", copied_run, *options)
        assert done.returncode == 2, done.stderr
        told = f"error: {link} is a link, and a run touches nothing outside of its directory"
        assert done.stderr.startswith(told), ascii(done.stderr)
        assert "move the whole run to other storage and link to that (mv, ln -s)" in done.stderr
        assert done.stderr.endswith("nothing was changed\n")
        assert every_name(tmp_path) == before


def every_name(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "locks" not in path.parts}


def test_a_run_that_was_moved_whole_to_other_storage_goes_back_and_is_cleaned_through_a_link(
    copied_run, complete_run, tmp_path, slurm_ppo
):
    """As the refusal of a link within it says."""
    storage = tmp_path / "storage"
    storage.mkdir()
    link, moved = copied_run, copied_run.rename(storage / "run")
    link.symlink_to(moved)
    back = slurm_ppo("resume", link, "--from", "update@2")
    assert back.returncode == 0, back.stderr
    assert slurm_ppo("clean", link, "--yes").returncode == 0
    assert list((moved / "superseded").iterdir()) == []
    assert contents(link / "policy/00002") == contents(complete_run / "policy/00002")


def test_links_beside_what_a_run_makes_are_the_users_own(copied_run, tmp_path, slurm_ppo):
    (copied_run / "notes").symlink_to(tmp_path)
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
