"""Claims and beats on disk: one winner, spoilt files, who lives."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pipeline.run.commits import publish, require_record
from pipeline.run.endings import Ending, note_endings
from pipeline.run.failures import FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.states import remove_unfinished
from pipeline.run.superseded import move_aside, remove_losers
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.workers.beats import (
    Beat,
    Doing,
    LiveWorkers,
    Reason,
    file_of,
    is_dead_here,
    living,
    mark_gone,
    process_space,
    read_beats,
    write_beat,
)
from pipeline.workers.claims import Attempt, Claim, attempts_of, claims_of, is_unlisted, next_number, take
from pipeline.workers.claims import file_of as claim_file
from pipeline.workers.outside import Queue
from stages.attempts.arguments import Arguments
from stages.workers.pulse import with_elapsed
from stages.workers.start import Following, Leading, from_json, to_json
from stages.workers.surroundings import Asking
from tests.support.committed import commit_in_two
from tests.support.damage import DAMAGES
from tests.support.reportrun import make_run, record

TASK = Task(3, Stage.ROLLOUT, 2)


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path)


def claim(number: int = 1, task: Task = TASK, worker: str = "4711_2r0") -> Claim:
    return Claim(task, number, f"{number}-{worker}", worker, 10.0)


def beat(worker: str = "4711_2r0", **more) -> Beat:
    return Beat(worker, "rollout", "node1", 7, 0.0, beat=more.pop("beat", 100.0), **more)


# --- claims ---


def test_of_workers_that_claim_at_once_one_gets_the_number(paths):
    names = [f"4711_{index}r0" for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda name: take(paths, claim(worker=name)), names))
    assert sum(got) == 1
    assert claims_of(paths, [TASK, PREPARE])[TASK] == (claim(worker=names[got.index(True)]),)


def test_claims_are_read_by_task_and_number_and_a_spoilt_one_keeps_its_number(paths):
    other = TASK._replace(shard=12)
    for one in (claim(2), claim(10), claim(1, other)):
        assert take(paths, one)
    claim_file(paths, TASK, 3).write_text("{")
    claim_file(paths, TASK, 4).write_bytes(claim_file(paths, TASK, 2).read_bytes())  # of another number
    found = claims_of(paths, [TASK])
    assert found == {TASK: (claim(2), Claim(TASK, 3, "", "", 0.0), Claim(TASK, 4, "", "", 0.0), claim(10))}
    assert next_number(paths, TASK, found[TASK]) == 11


def test_a_claim_on_an_update_outlives_its_row_until_nobody_writes_the_state_behind_it(tmp_path):
    """Passes know by it who still does; without it they said that the state was lost."""
    run = make_run(tmp_path / "run", 1, iterations=2)
    commit_in_two(run, 1, is_lost=True)
    update, before = Task(1, Stage.UPDATE), Task(1, Stage.REWARD)
    publish(run.paths, record(before))
    for task in (update, before):
        take(run.paths, claim(task=task))
    remove_losers(run.paths, [require_record(run.paths, task) for task in (update, before)])
    assert claims_of(run.paths, [update, before]) == {update: (claim(task=update),)}
    remove_unfinished(run.paths, 1)
    assert claims_of(run.paths, [update]) == {}


def test_who_sees_the_log_of_an_attempt_but_not_its_claim_takes_no_number_behind_it(paths):
    for number in (1, 2):
        take(paths, claim(number))
        log = paths.task(TASK).log(number)
        log.parent.mkdir(parents=True)
        log.touch()
    listed = claims_of(paths, [TASK])[TASK]
    assert not is_unlisted(paths, TASK, listed, next_number(paths, TASK, listed))
    earlier = listed[:1]
    assert is_unlisted(paths, TASK, earlier, next_number(paths, TASK, earlier))
    cold = paths.task(TASK).log(4)  # of a job that was no worker
    cold.parent.mkdir(parents=True)
    cold.touch()
    assert next_number(paths, TASK, listed) == 5
    assert not is_unlisted(paths, TASK, listed, 5)


def test_a_claim_is_read_once_until_the_run_goes_back(paths):
    known = {}
    take(paths, claim())
    assert claims_of(paths, [TASK], known) == claims_of(paths, [TASK], known)
    folder = paths.task(TASK).folder
    folder.rename(folder.with_name("aside"))
    take(paths, claim(worker="9_0r0"))
    assert claims_of(paths, [TASK], known)[TASK][0].worker == "9_0r0"


def test_taking_a_commit_back_moves_its_claims_and_no_others(paths):
    take(paths, claim())
    take(paths, claim(task=TASK._replace(shard=20)))
    target = move_aside(paths, [TASK], "corrupt")
    assert [path.name for path in (target / "iterations/00003/rollout").iterdir()] == [
        "shard-00002.claim-1.json"
    ]
    assert list(claims_of(paths, [TASK, TASK._replace(shard=20)])) == [TASK._replace(shard=20)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_among_claims_and_beats_stops_nobody(paths, damage):
    """A claim that cannot be read keeps its number, and is nobody's."""
    assert take(paths, claim(1))
    assert take(paths, claim(2))
    write_beat(paths, beat("7_0r0"))
    write_beat(paths, beat("8_0r0"))
    DAMAGES[damage](claim_file(paths, TASK, 1))
    DAMAGES[damage](file_of(paths, "7_0r0"))
    found = claims_of(paths, [TASK])[TASK]
    assert claim(2) in found
    assert next_number(paths, TASK, found) == 3
    assert "8_0r0" in read_beats(paths)


def test_an_attempt_runs_while_its_worker_lives_and_is_at_it(paths):
    mine = claim()
    at_it = beat(doing=Doing.BUSY, task=task_key(TASK), attempt=mine.attempt)
    (running,) = attempts_of(paths, [mine], {at_it.worker: at_it})
    assert running == Attempt(mine, is_running=True)
    for live in (
        {},
        {at_it.worker: replace(at_it, attempt="2-x")},
        {at_it.worker: beat(doing=Doing.WAITING)},
    ):
        (ended,) = attempts_of(paths, [mine], live)
        assert (ended.is_running, ended.failure) == (False, None)
    failure = paths.task(TASK).failure(1)
    failure.parent.mkdir(parents=True)
    failure.write_text('{"kind": "memory", "message": "", "suspect": null}')
    assert attempts_of(paths, [mine], {})[0].failure is FailureKind.MEMORY
    failure.write_text("{")
    assert attempts_of(paths, [mine], {})[0].failure is None
    later = replace(mine, time=9e9)  # by a node whose clock is ahead
    assert attempts_of(paths, [later], {}, invocation=2) == ()
    assert len(attempts_of(paths, [replace(mine, time=0.0, invocation=2)], {}, invocation=2)) == 1


def test_a_warning_in_vain_is_what_a_pass_has_found_it_to_be(paths):
    """Its worker does not know whether its time was up or its place was taken, after which others go on."""
    mine, failure = claim(), paths.task(TASK).failure(1)
    failure.parent.mkdir(parents=True)
    failure.write_text('{"kind": "timeout", "message": "", "suspect": null}')
    assert attempts_of(paths, [mine], {})[0].failure is FailureKind.TIMEOUT
    note_endings(paths, [Ending(mine.attempt, task_key(TASK), 1, 1, FailureKind.PREEMPTED)])
    assert attempts_of(paths, [mine], {})[0].failure is FailureKind.PREEMPTED


def test_what_a_pass_has_judged_an_attempt_knows_that_it_could_not_say(paths):
    """Killed for its memory: whoever takes the task next would be too, so it is left to passes."""
    mine = claim()
    assert attempts_of(paths, [mine], {})[0].failure is None
    note_endings(paths, [Ending(mine.attempt, task_key(TASK), 1, 1, FailureKind.MEMORY)])
    assert attempts_of(paths, [mine], {})[0].failure is FailureKind.MEMORY


# --- beats ---


def test_a_beat_is_read_as_it_was_written_and_a_spoilt_one_left_out(paths):
    written = beat(doing=Doing.BUSY, task="3/rollout/2", until=5.0, iterations=(1, 3))
    write_beat(paths, written)
    write_beat(paths, replace(written, worker="4711_3r0"))
    file_of(paths, "4711_3r0").write_text("{}")
    assert read_beats(paths) == {"4711_2r0": written}
    assert [path.name[0] for path in file_of(paths, "x").parent.iterdir()] == ["4", "4"]


def test_who_left_or_is_gone_dead_or_started_again_does_not_live():
    beats = {
        b.worker: b
        for b in (
            *(beat("1_0r0"), beat("1_0r1"), beat("1_1r0", doing=Doing.LEAVING), beat("1_2r0")),
            *(beat("1_4r0"), beat("host-7")),
        )
    }
    found = living(beats, {"1_2r0"}, lambda b: b.worker == "1_4r0")
    assert set(found) == {"1_0r1", "host-7"}


def test_a_worker_that_slurm_no_longer_has_is_marked(paths):
    for name in ("1_0r0", "1_1r0"):
        write_beat(paths, beat(name))
    mark_gone(paths, "1_0r0")
    mark_gone(paths, "1_0r0")
    crew = LiveWorkers(paths)
    assert set(crew.live(100.0)) == {"1_1r0"}
    write_beat(paths, beat("1_1r0", doing=Doing.LEAVING))
    assert crew.live(100.0) == {}
    assert crew.beats["1_1r0"].doing is Doing.LEAVING


def test_a_process_of_this_machine_that_is_no_more_is_dead_at_once():
    here = {"host": os.uname().nodename, "process_space": process_space()}
    own = replace(beat(), pid=os.getpid(), **here)
    assert not is_dead_here(own)
    assert is_dead_here(replace(own, pid=2**22 + 1))
    assert not is_dead_here(replace(own, pid=2**22 + 1, process_space="pid:[7]"))
    boot, space = process_space().split(" ", 1)
    twin = replace(own, pid=2**22 + 1, process_space=f"{'0' * len(boot)} {space}")
    assert not is_dead_here(twin), "another node has the same name"


def test_what_a_worker_did_adds_up_to_its_life():
    b = with_elapsed(beat(since=0.0), 3.0, Doing.BUSY)
    b = with_elapsed(replace(b, doing=Doing.BUSY), 10.0, Doing.WAITING)
    b = with_elapsed(replace(b, doing=Doing.WAITING), 14.0, None)
    b = with_elapsed(b, 15.0, Doing.LEAVING)
    assert (b.startup_seconds, b.busy_seconds, b.waiting_seconds, b.since) == (3.0, 7.0, 5.0, 15.0)


# --- ranks, and what is asked ---


class Pages(dict):
    """A store of this process."""

    def set(self, key, value):
        self[key] = value.encode()

    def add(self, key, amount):
        self[key] = self.get(key, 0) + amount
        return self[key]

    def wait(self, keys, timeout):
        assert set(keys) <= set(self)


class Source:
    """Gives what it was told, until it is to leave."""

    def __init__(self, *given):
        self.given, self.reason, self.has_left = iter(given), None, False

    def next(self):
        return None if self.reason else next(self.given)

    def ended(self, arguments, exit_code):
        pass

    def leave(self, reason):
        self.reason = reason

    def left(self):
        self.has_left = True


@pytest.fixture
def attempt(tmp_path, monkeypatch) -> Arguments:
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # ranks of a job share their output
    return Arguments(TASK, tmp_path, "1-4711_2r0", tmp_path / "failure", 30.0, stays=True)


def test_other_ranks_do_what_the_first_one_got(paths, attempt):
    given, store = [attempt, None], Pages()
    leading = Leading(Source(*given), store, 2)
    assert [leading.next(), leading.next()] == given
    following = Following(store, 1)
    heard = following.next()
    following.ended(heard, 0)
    assert [heard, following.next()] == given
    assert all(from_json(to_json(one)) == one for one in given)
    assert paths.task(TASK).log(1).exists()


@pytest.mark.parametrize("reason", [Reason.GREW, Reason.WARNED])
def test_a_rank_that_has_to_make_place_has_all_leave_after_the_task(attempt, reason):
    source, store = Source(attempt, attempt), Pages()
    leading, following = Leading(source, store, 2), Following(store, 1)
    assert leading.next() == following.next() == attempt
    following.ended(attempt, 0)
    following.leave(reason)
    assert leading.next() is following.next() is None
    assert source.reason is reason
    following.left()
    assert not source.has_left
    leading.left()
    assert source.has_left


def test_a_rank_that_failed_waits_for_nobody(attempt):
    following = Following(Pages(), 1)
    following.leave(Reason.FAILED)
    assert following.next() is None


def test_silence_is_no_answer_and_nobody_asks_often():
    answers = [Queue(ends=5.0), None]
    asking = Asking(lambda: answers.pop(0))
    for left, after in ((1, 30.0), (1, 30.0), (0, 0.0)):
        asking.ask_again(after)
        asking._thread.join()
        assert (asking.ends, len(answers)) == (5.0, left)
