"""The Tab key in folders with more entries than are offered: what was typed already finds its own."""

import pytest

from pipeline.cli.completion import answer


@pytest.fixture
def crowded(tmp_path, monkeypatch):
    """A folder of many runs and hidden files, and a run of many iterations; three entries are offered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answer, "_MOST_ENTRIES", 3)
    for name in ("a1", "a2", "a3", "a4", "b1", "last"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
        (tmp_path / "runs" / f".{name}").touch()
    for iteration in range(1, 9):
        (tmp_path / f"runs/last/iterations/{iteration:05d}").mkdir(parents=True)
    (tmp_path / "my/experiment").mkdir(parents=True)
    for name in ("mine.yaml", *(f"{number}.txt" for number in range(40))):
        (tmp_path / "my/experiment" / name).touch()


def test_a_run_is_found_by_the_begin_of_its_name_however_many_there_are(crowded):
    assert answer.run_paths("runs/la") == ["runs/last"]
    assert answer.file_paths("runs/b") == ["runs/b1/"]
    assert answer.run_paths("runs/") == ["runs/a1", "runs/a2", "runs/a3"]


def test_the_newest_iterations_of_a_long_run_are_offered(crowded):
    assert answer.versions("runs/last") == ["8", "7", "6", "5", "4", "3", "2", "1"]


def test_settings_of_ones_own_are_found_among_other_files(crowded):
    assert answer.options_of_groups("my") == {"experiment": ["mine"]}
