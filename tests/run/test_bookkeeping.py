"""Passes that workers ask for: each wish is seen by a pass that began after it, and few passes see many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run import bookkeeping
from pipeline.run.bookkeeping import (
    Bookkeeper,
    LastPass,
    ask_for_pass,
    is_due,
    is_starting,
    is_wanted,
    read_last,
    take_turn,
)
from pipeline.run.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


class Child:
    """A process that makes a pass: as long as it is at work, the wish is taken away and the turn is held."""

    def __init__(self) -> None:
        self.waited = False

    def poll(self) -> int | None:
        return 0 if self.waited else None

    def wait(self, timeout: float) -> int:
        self.waited = True
        return 0


@pytest.fixture
def started(paths, monkeypatch):
    """Passes that were started; each takes the wish away."""
    children = []

    def start(paths):
        take_turn(paths, lambda: None)
        children.append(Child())
        return children[-1]

    monkeypatch.setattr(bookkeeping, "start_pass", start)
    return children


def test_a_wish_is_taken_away_before_the_pass_looks(paths):
    ask_for_pass(paths)
    assert take_turn(paths, lambda: is_wanted(paths) and pytest.fail("the wish is still there"))
    assert not is_wanted(paths)


def test_a_wish_that_comes_while_a_pass_is_at_work_is_for_the_next(paths):
    ask_for_pass(paths)
    take_turn(paths, lambda: ask_for_pass(paths))
    assert is_wanted(paths)


def test_one_pass_at_a_time_and_the_second_leaves_its_wish(paths):
    def look() -> None:
        ask_for_pass(paths)
        assert not is_due(paths, 0.0)
        assert not take_turn(paths, lambda: pytest.fail("two at once"))

    ask_for_pass(paths)
    assert take_turn(paths, look)
    assert is_wanted(paths)


def test_a_pass_whose_wish_another_has_taken_is_not_made(paths):
    assert not take_turn(paths, lambda: pytest.fail("nobody asks"))
    assert read_last(paths).number == 0


def test_a_pass_that_fails_leaves_the_wish(paths):
    ask_for_pass(paths)
    with pytest.raises(FileNotFoundError):
        take_turn(paths, (paths.root / "missing").read_text)
    assert is_wanted(paths)


def test_passes_take_a_tenth_of_a_core_at_most(paths):
    last = LastPass(began=100.0, ended=102.0)
    assert not last.allows_another(119.0)
    assert last.allows_another(120.0)
    assert last.allows_another(50.0), "a clock that is ahead holds nobody up"
    ask_for_pass(paths)
    take_turn(paths, lambda: None)
    assert read_last(paths).ended >= read_last(paths).began > 0


def test_of_many_who_wait_one_starts_a_process(paths, monkeypatch):
    begun = []
    monkeypatch.setattr(bookkeeping, "start_pass", lambda paths: begun.append(Child()) or begun[-1])
    ask_for_pass(paths)
    for _ in range(3):
        Bookkeeper(paths).tend()
    assert len(begun) == 1


@given(st.floats(0, 1e6), st.floats(-100, 100), st.floats(-100, 100))
def test_a_process_has_ten_seconds_to_begin_its_pass(started, began, age):
    last = LastPass(began=started + began, ended=started + began + 1)
    now = started + age
    assert is_starting(last, started, now) == (last.began < started and 0 <= now - started < 10)


def test_a_worker_starts_one_pass_at_a_time_and_waits_for_one_that_sees_it_leave(paths, started):
    keeper = Bookkeeper(paths)
    keeper.ask()
    assert len(started) == 1
    keeper.ask()
    assert len(started) == 1, "the first is still at work"
    keeper.leave()
    assert len(started) == 2
    assert all(child.waited for child in started)
    assert not is_wanted(paths)


def test_a_worker_that_leaves_does_not_wait_for_what_others_wish_later(paths, started, monkeypatch):
    start = bookkeeping.start_pass

    def start_among_others(paths):
        child = start(paths)
        ask_for_pass(paths)
        return child

    monkeypatch.setattr(bookkeeping, "start_pass", start_among_others)
    Bookkeeper(paths).leave()
    assert len(started) == 1
    assert is_wanted(paths)
