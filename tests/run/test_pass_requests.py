"""Passes that workers ask for: each wish is seen by a pass that began after it, and few passes see many."""

import errno
import os
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run import pass_requests
from pipeline.run.pass_requests import (
    LastPass,
    PassRunner,
    is_due,
    is_requested,
    is_starting,
    read_last,
    request_pass,
    request_pass_later,
    rest_after,
    serve_requests,
)
from pipeline.run.paths import RunPaths
from tests.support.passes import take_turn


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


class Child:
    """A process that makes passes until it is told to end."""

    def __init__(self) -> None:
        self.stdin = None
        self.waited = False

    def poll(self) -> int | None:
        return 0 if self.waited else None

    def wait(self, timeout: float) -> int:
        self.waited = True
        return 0


@pytest.fixture
def started(paths, monkeypatch):
    """Processes that were started; each makes one pass, and says no more."""
    children = []

    def start(paths):
        take_turn(paths, lambda: None)
        children.append(Child())
        children[-1].waited = True
        return children[-1]

    monkeypatch.setattr(pass_requests, "start_pass", start)
    return children


def test_a_wish_is_taken_away_before_the_pass_looks(paths):
    request_pass(paths)
    assert take_turn(paths, lambda: is_requested(paths) and pytest.fail("the wish is still there"))
    assert not is_requested(paths)


def test_a_wish_that_comes_while_a_pass_is_at_work_is_for_the_next(paths):
    request_pass(paths)
    take_turn(paths, lambda: request_pass(paths))
    assert is_requested(paths)


def test_a_wish_for_later_is_one_from_then_on_and_no_clock_that_is_ahead_puts_it_off(paths, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    request_pass_later(paths, 45.0)
    assert not is_requested(paths)
    assert request_pass(paths), "one for now is another"
    take_turn(paths, lambda: None)
    now[0] += 60.0
    assert not is_requested(paths), "the pass that was made meanwhile was enough"
    request_pass_later(paths, 45.0)
    now[0] += 46.0
    assert is_requested(paths)
    take_turn(paths, lambda: None)
    for seconds in (45.0, 5.0, 45.0):
        request_pass_later(paths, seconds)
    now[0] += 6.0
    assert is_requested(paths), "of several the soonest counts"
    now[0] = 10.0
    assert is_requested(paths), "whoever wrote it has a clock that is far ahead"


def test_one_pass_at_a_time_and_the_second_leaves_its_wish(paths):
    def look() -> None:
        request_pass(paths)
        assert not is_due(paths, 0.0)
        assert not take_turn(paths, lambda: pytest.fail("two at once"))

    request_pass(paths)
    assert take_turn(paths, look)
    assert is_requested(paths)


def test_without_a_wish_there_is_no_pass(paths):
    assert not take_turn(paths, lambda: pytest.fail("nobody asks"))
    assert read_last(paths).number == 0


def test_a_pass_that_fails_leaves_the_wish(paths):
    request_pass(paths)
    with pytest.raises(FileNotFoundError):
        take_turn(paths, (paths.root / "missing").read_text)
    assert is_requested(paths)


def test_passes_take_a_tenth_of_a_core_at_most(paths):
    assert rest_after(3.0, 2.0) == 18.0
    assert rest_after(3.0, 0.1) == 3.0, "what waits for others gives them as long a rest"
    assert rest_after(60.0, 0.1) == 5.0, "and rows are not late for that"
    last = LastPass(began=100.0, ended=102.0, rest=18.0)
    assert not last.allows_another(119.0)
    assert last.allows_another(120.0)
    assert last.allows_another(50.0), "a clock that is ahead holds nobody up"
    request_pass(paths)
    take_turn(paths, lambda: None)
    assert read_last(paths).ended >= read_last(paths).began > 0


def test_passes_that_fail_come_ever_more_rarely_until_one_succeeds(paths):
    rests = []
    for _ in range(6):
        request_pass(paths, at_once=True)
        with pytest.raises(FileNotFoundError):
            take_turn(paths, (paths.root / "missing").read_text)
        rests.append(read_last(paths).rest)
    assert rests == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    take_turn(paths, lambda: None)
    assert (read_last(paths).failures, read_last(paths).number) == (0, 1)
    assert read_last(paths).rest < 5.0


def test_after_a_failure_a_worker_that_leaves_waits_for_the_rest_too(paths, monkeypatch):
    request_pass(paths)
    with pytest.raises(FileNotFoundError):
        take_turn(paths, (paths.root / "missing").read_text)
    request_pass(paths, at_once=True)
    now = [0.0]

    def wait(*files: object) -> tuple[list[int], ...]:
        now[0] += 20.0
        return [], [], []

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(select, "select", wait)
    serve_requests(paths, lambda: pytest.fail("the last has failed just now"), 0)
    assert now[0] >= 60.0, "it was ready all the time"
    assert is_requested(paths)


def test_of_many_who_wait_one_starts_a_process(paths, monkeypatch):
    begun = []
    monkeypatch.setattr(pass_requests, "start_pass", lambda paths: begun.append(Child()) or begun[-1])
    request_pass(paths)
    for _ in range(3):
        PassRunner(paths).poll()
    assert len(begun) == 1


@given(st.floats(0, 1e6), st.floats(-100, 100), st.floats(-100, 100))
def test_a_process_has_ten_seconds_to_begin_its_pass(started, began, age):
    last = LastPass(began=started + began, ended=started + began + 1)
    now = started + age
    assert is_starting(last, started, now) == (last.began < started and 0 <= now - started < 10)


def test_a_process_makes_all_passes_that_are_asked_for_until_it_is_told_to_end(paths):
    """Rests are for wishes that are not urgent."""
    reader, writer = os.pipe()
    made = []

    def make_pass() -> None:
        made.append(read_last(paths).is_at_work)
        if len(made) < 3:
            request_pass(paths, at_once=True)
        else:
            request_pass(paths)
            os.write(writer, b"end\n")

    request_pass(paths)
    serve_requests(paths, make_pass, reader)
    assert made == [True] * 4, "the last for what was asked before it was told"
    assert (read_last(paths).number, read_last(paths).is_at_work) == (4, False)
    assert is_requested(paths)


def test_a_worker_has_one_process_for_passes_and_tells_it_to_end(paths, monkeypatch):
    """A real one: this module's functions in another process."""
    code = "import sys; from pathlib import Path; from pipeline.run.pass_requests import serve_requests; "
    code += "from pipeline.run.paths import RunPaths; "
    code += "serve_requests(RunPaths(Path(sys.argv[1])), lambda: None, 0)"
    children = []

    def start(paths):
        words = [sys.executable, "-c", code, str(paths.root)]
        children.append(subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0))
        return children[-1]

    monkeypatch.setattr(pass_requests, "start_pass", start)
    keeper = PassRunner(paths)
    keeper.request()
    keeper.request()
    other = PassRunner(paths)
    other.leave()
    assert read_last(paths).number >= 1
    assert len(children) == 1, "the first one's makes it"
    keeper.leave()
    assert len(children) == 1
    assert [child.returncode for child in children] == [0]
    assert not is_requested(paths)


def test_who_need_not_be_seen_leaves_once_what_was_asked_for_is_granted(paths, started):
    PassRunner(paths).leave(must_be_seen=False)
    assert started == []
    request_pass(paths)
    PassRunner(paths).leave(must_be_seen=False)
    assert len(started) == 1
    assert read_last(paths).number == 1


def test_who_leaves_it_to_others_goes_once_they_have_taken_it_up_and_else_sees_to_it(
    paths, started, monkeypatch
):
    seconds, takes = [], True

    def sleep(pause: float) -> None:
        seconds.append(pause)
        if takes:
            take_turn(paths, lambda: None)

    clock = SimpleNamespace(time=time.time, monotonic=lambda: sum(seconds), sleep=sleep)
    monkeypatch.setattr(pass_requests, "time", clock)
    PassRunner(paths).leave(is_handled=lambda: is_requested(paths))
    assert (started, sum(seconds)) == ([], 0.1)
    takes = False
    PassRunner(paths).leave(is_handled=lambda: True)
    assert len(started) == 1
    assert sum(seconds) >= 10


def test_who_commits_starts_what_another_has_asked_for_and_left(paths, started):
    request_pass(paths)
    PassRunner(paths).request()
    assert len(started) == 1


def test_a_worker_that_leaves_does_not_wait_for_what_others_wish_later(paths, started, monkeypatch):
    start = pass_requests.start_pass

    def start_among_others(paths):
        child = start(paths)
        request_pass(paths)
        return child

    monkeypatch.setattr(pass_requests, "start_pass", start_among_others)
    PassRunner(paths).leave()
    assert len(started) == 1
    assert is_requested(paths)


def test_where_a_full_disk_takes_nothing_processes_for_passes_come_ever_more_rarely(paths, monkeypatch):
    """No file says there that one has failed, or was started."""
    request_pass(paths)
    started = []

    def start(paths):
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"]))
        started[-1].wait(60)
        return started[-1]

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(pass_requests, "start_pass", start)
    monkeypatch.setattr(pass_requests, "replace_durably", full)
    keeper = PassRunner(paths)
    for number, seconds in enumerate([0.0, 5.5, 10.5, 20.5], start=1):
        keeper._begun -= seconds
        for _ in range(10):
            keeper.poll()
        assert len(started) == number
