from pathlib import Path

import pytest

from tests.support.user_rules import write_rules


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The user's own folder. Every test has a module name of its own."""
    folder = write_rules(tmp_path / "project", tmp_path.name)
    monkeypatch.syspath_prepend(str(folder))
    return folder
