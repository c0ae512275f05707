"""One process at a time in a folder."""

import fcntl
import os
import threading

import pytest

from pipeline.run.alone import alone_in


def test_a_second_one_waits_says_so_and_gives_up_after_its_patience(tmp_path):
    told: list[str] = []
    with alone_in(tmp_path, 5.0):
        with (
            pytest.raises(TimeoutError, match=f"another process has kept {tmp_path} locked for 0 s"),
            alone_in(tmp_path, 0.2, lambda: told.append("waits")),
        ):
            pytest.fail("two were in it")
        assert told == ["waits"]
    with alone_in(tmp_path, 0.0, lambda: told.append("waits again")):
        assert told == ["waits"]
    assert list(tmp_path.iterdir()) == []


def test_it_comes_in_as_soon_as_the_other_has_left(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [held]).start()
    with alone_in(tmp_path, 30.0):
        assert list(tmp_path.iterdir()) == []
