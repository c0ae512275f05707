"""One look at Slurm's queue for all who want one: how old an answer may be, who asks, where it is kept."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.paths import RunPaths
from pipeline.workers import looking, outside
from pipeline.workers.looking import (
    FROM_NOW,
    PASS_AGE,
    PERSON_AGE,
    WORKER_AGE,
    Look,
    QueueQuestion,
    Shelf,
    allowed_age,
    cache_home,
    claim_place,
    is_usable,
    look,
    resting,
)
from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout
from slurm.sharedfiles import sealed, unsealed
from slurm.states import UnknownState

NAME = "slurm-ppo.run.rollout.iter1.abc.1.0"
times = st.lists(st.floats(0, 200), max_size=30)


def answer(*states: str, names: str = NAME) -> str:
    """squeue's output for the elements of an array."""
    return "".join(
        f"7|{i}|{state}|0|0|100|200|0|1:00:00|100|0:05|cpu=1,node=1|N/A|cpu|n1|None|{names}|\n"
        for i, state in enumerate(states)
    )


class Squeue:
    """squeue, whose answers are made up."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        """Patience of each call."""
        self.act: Callable[[], str] = lambda: answer("RUNNING")

    def __call__(self, timeout: float) -> str:
        self.asked.append(timeout)
        return self.act()


@pytest.fixture
def squeue(monkeypatch) -> Squeue:
    made = Squeue()
    monkeypatch.setattr(looking, "ask_queue", made)
    return made


@pytest.fixture
def paths(tmp_path, monkeypatch) -> RunPaths:
    """Of a run on a cluster whose name is known, of a user with a home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir()
    return run_on("big cluster/1", tmp_path / "run", monkeypatch)


def run_on(cluster: str, root: Path, monkeypatch) -> RunPaths:
    monkeypatch.setattr(looking, "cluster_of", lambda paths: cluster)
    (root / "slurm").mkdir(parents=True, exist_ok=True)
    return RunPaths(root)


def shelf_of(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "home/.cache/slurm-ppo/big_cluster_1", "queue-v1")


# --- how old an answer may be ---


@given(st.floats(0, 60), times, st.floats(0, 200))
def test_an_answer_from_the_future_is_none_and_the_more_was_asked_the_older_one_may_be(age, recent, now):
    assert age <= allowed_age(age, recent, now) <= 4 * age
    assert allowed_age(age, recent, now) <= allowed_age(age, [*recent, now], now)
    seen = Look(now + 0.001, "", tuple(recent))
    assert not is_usable(seen, 1000.0, 0.0, now)
    assert not is_usable(replace(seen, asked=now), 0.0, 0.0, now), "who wants one of now asks"


@given(
    st.lists(
        st.tuples(st.floats(0.01, 5), st.sampled_from([PASS_AGE, PERSON_AGE, WORKER_AGE])), min_size=100
    ),
    st.sampled_from([1, 20]),
)
def test_however_many_look_a_minute_has_few_questions(looks, runs):
    """Passes, views and workers of any number of runs."""
    now, kept, asked = 1000.0, Look(0.0, ""), []
    for pause, max_age in looks:
        now += pause
        if not is_usable(kept, max_age, 0.0, now):
            asked.append(now)
            kept = Look(now, "", tuple(one for one in (*kept.recent, now) if now - one < 60), runs)
    most = 10 if runs == 1 else 25
    assert all(sum(first <= one < first + 60 for one in asked) <= most for first in asked)


@given(st.lists(st.floats(0.01, 5), min_size=100), st.sampled_from([1, 20]))
def test_however_many_need_an_answer_of_now_a_minute_has_few_questions(pauses, runs):
    """Driver jobs of any number of runs: those who come while one rests before it asks get its answer."""
    now, asked = 1000.0, []
    for pause in pauses:
        now += pause
        if not asked or now > asked[-1]:
            asked.append(now + resting(asked, now, runs))
    most = 13 if runs == 1 else 30
    assert all(sum(first <= one < first + 60 for one in asked) <= most for first in asked)


def test_who_needs_an_answer_of_now_gets_that_of_who_asks_later_and_none_of_before(paths, squeue, clock):
    before = look(paths, PASS_AGE, 10.0)
    clock[0] += 0.5
    of_now = look(paths, FROM_NOW, 10.0)
    assert of_now.asked > before.asked
    clock[0] += 0.5
    assert look(paths, PASS_AGE, 10.0) == of_now


def test_an_answer_is_used_again_until_it_is_too_old(paths, squeue, clock):
    first = look(paths, PASS_AGE, 10.0)
    clock[0] += 2.0
    assert look(paths, PASS_AGE, 10.0) == first
    assert look(paths, PASS_AGE, 10.0, since=clock[0] - 1.0).asked == clock[0], (
        "not for who saw something since"
    )
    clock[0] += 4.0
    assert look(paths, WORKER_AGE, 10.0).asked == clock[0] - 4.0
    assert look(paths, PASS_AGE, 10.0).asked == clock[0]
    assert len(squeue.asked) == 3
    clock[0] -= 1.0  # the node of who asks is a second behind the one of who asked last
    assert look(paths, WORKER_AGE, 10.0).asked == clock[0]
    assert len(squeue.asked) == 4


def test_all_jobs_of_the_user_are_shown_and_unknown_states_matter_for_ours_only(paths, squeue):
    squeue.act = lambda: answer("RUNNING", "PENDING") + answer("FROZEN", names="notebook")
    seen = look(paths, PASS_AGE, 10.0)
    assert [(e.name, e.index) for e in seen.elements] == [(NAME, 0), (NAME, 1)]
    assert len(seen.elements_of(lambda name: name == NAME)) == 2
    with pytest.raises(UnknownState):
        seen.elements_of(lambda name: True)


# --- who asks ---


def test_of_many_who_want_an_answer_at_once_one_asks(paths, squeue):
    begun = threading.Barrier(8)

    def slow() -> str:
        time.sleep(0.3)
        return answer("RUNNING")

    squeue.act = slow
    found: list[Look] = []

    def want() -> None:
        begun.wait()
        found.append(look(paths, PASS_AGE, 10.0))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(squeue.asked) == 1
    assert {one.asked for one in found} == {found[0].asked}
    assert len(found) == 8


def test_who_waits_in_vain_for_anothers_answer_asks_itself(paths, squeue, tmp_path):
    shelf, now = shelf_of(tmp_path), time.time()
    look(paths, PASS_AGE, 10.0)
    gone = QueueQuestion("of a process that was killed", now, now + 1000)
    assert shelf.claim(gone, None)
    began = time.monotonic()
    look(paths, 1e-9, 0.4)
    assert time.monotonic() - began >= 0.2, "half of its patience"
    assert len(squeue.asked) == 2
    assert 0 < squeue.asked[1] <= 0.2
    assert shelf.question() is None, "the claim is nobody's any more"


@pytest.mark.parametrize("claim", ["over", "of the future", "spoilt"])
def test_a_claim_that_means_nothing_holds_nobody_up(paths, squeue, tmp_path, claim):
    shelf, now = shelf_of(tmp_path), time.time()
    shelf.folder.mkdir(parents=True)
    begun = {"over": now - 100, "of the future": now + 100, "spoilt": now}[claim]
    shelf.claim(QueueQuestion("another", begun, begun + 50), None)
    if claim == "spoilt":
        (shelf.folder / "queue-v1.claim").write_text("{")
    look(paths, PASS_AGE, 1000.0)
    assert squeue.asked == [pytest.approx(1000.0, abs=5)]


def test_where_squeue_hangs_not_everybody_tries(paths, squeue, clock):
    def hangs() -> str:
        clock[0] += 10.0
        raise SlurmTimeout(["squeue"], None, "no answer in 10 s")

    squeue.act = hangs
    for age in (WORKER_AGE, WORKER_AGE, WORKER_AGE):
        with pytest.raises(SlurmTimeout, match="no answer in 10 s"):
            look(paths, age, 10.0)
    assert len(squeue.asked) == 1
    with pytest.raises(SlurmTimeout):
        look(paths, PASS_AGE, 60.0)
    assert len(squeue.asked) == 2, "a pass that tries again has more patience"
    squeue.act = lambda: answer("RUNNING")
    assert look(paths, 0.0, 5.0).elements
    assert look(paths, WORKER_AGE, 5.0).elements
    assert len(squeue.asked) == 3


def test_a_shell_with_another_configuration_of_slurm_keeps_no_run_from_asking(paths, squeue, monkeypatch):
    """Its squeue may fail where that of the run's jobs does not."""

    def fail() -> str:
        raise SlurmError(["squeue"], 1, "Unable to contact slurm controller")

    squeue.act = fail
    monkeypatch.setenv("SLURM_CONF", "/somewhere/else/slurm.conf")
    with pytest.raises(SlurmError, match="Unable to contact"):
        look(paths, PERSON_AGE, 10.0)
    squeue.act = lambda: answer("RUNNING")
    with pytest.raises(SlurmError, match="Unable to contact"):
        look(paths, PERSON_AGE, 10.0)
    monkeypatch.delenv("SLURM_CONF")
    assert len(look(paths, PASS_AGE, 10.0).elements_of(NAME.__eq__)) == 1


def test_questions_without_an_answer_count_as_questions(paths, squeue, clock):
    """Driver jobs start, one each second, while the controller is away."""
    squeue.act = lambda: (_ for _ in ()).throw(SlurmTimeout(["squeue"], None, "unable to contact"))
    until = clock[0] + 60.0
    while clock[0] < until:
        with pytest.raises(SlurmTimeout):
            look(paths, FROM_NOW, 10.0)
        clock[0] += 1.0
    assert len(squeue.asked) <= 13


def test_who_rests_takes_the_answer_of_who_does_not_and_holds_no_person_up(paths, squeue, clock, monkeypatch):
    for _ in range(8):
        look(paths, 0.0, 10.0)
        clock[0] += 1.0
    real, rests = time.sleep, []

    def a_person_asks(seconds: float) -> None:
        rests.append(seconds)
        monkeypatch.setattr(time, "sleep", real)
        clock[0] += seconds / 2
        assert look(paths, PASS_AGE, 10.0).asked == clock[0], "at once, though somebody rests"
        clock[0] += seconds / 2

    monkeypatch.setattr(time, "sleep", a_person_asks)
    found = look(paths, FROM_NOW, 10.0)
    assert rests == [pytest.approx(11.0)]
    assert found.asked == clock[0] - rests[0] / 2
    assert len(squeue.asked) == 9


def test_an_error_is_an_error_for_all_who_waited_and_no_squeue_is_no_answer(paths, squeue, clock):
    def fails() -> str:
        raise SlurmError(["squeue"], 1, "Invalid user id")

    def missing() -> str:
        raise SlurmMissing("squeue")

    squeue.act = fails
    for _ in range(2):
        with pytest.raises(SlurmError, match="Invalid user id") as raised:
            look(paths, PASS_AGE, 10.0)
        assert not isinstance(raised.value, SlurmTimeout)
    assert len(squeue.asked) == 1
    clock[0] += 60
    squeue.act = missing
    for _ in range(2):
        with pytest.raises(SlurmMissing):
            look(paths, PASS_AGE, 10.0)
    squeue.act = lambda: answer("RUNNING")
    assert look(paths, PASS_AGE, 10.0).elements, "a container without a client holds nobody up"
    squeue.act = missing
    assert look(paths, PASS_AGE, 10.0).elements, "and uses what others have asked"


# --- where it is kept ---


def test_all_runs_of_a_user_on_a_cluster_share_it(paths, squeue, tmp_path, monkeypatch):
    look(paths, PASS_AGE, 10.0)
    look(run_on("big cluster/1", tmp_path / "other", monkeypatch), PASS_AGE, 10.0)
    assert len(squeue.asked) == 1
    look(run_on("small", tmp_path / "other", monkeypatch), PASS_AGE, 10.0)
    assert len(squeue.asked) == 2
    (kept,) = (tmp_path / "home/.cache/slurm-ppo/big_cluster_1").iterdir()
    assert kept.name == "queue-v1.json"
    assert kept.stat().st_mode & 0o777 == 0o666 & ~looking_umask()
    assert not list(paths.slurm.iterdir())


def looking_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("why", ["no name", "no home", "unreadable", "read-only", "full", "another's"])
def test_where_the_users_cache_takes_nothing_a_run_has_its_own(paths, squeue, tmp_path, monkeypatch, why):
    if why == "no name":
        run_on("", paths.root, monkeypatch)
    elif why == "no home":
        monkeypatch.delenv("HOME")
    elif why == "unreadable":  # as a home to which a job has no ticket: even to look there is an error
        monkeypatch.setenv("HOME", f"/{'x' * 300}")
    elif why == "read-only":
        (tmp_path / "home/.cache").write_text("no folder can be made here")
    elif why == "another's":
        home, real = tmp_path / "home", Path.stat
        another = SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o40755)
        monkeypatch.setattr(
            Path, "stat", lambda path, **more: another if path == home else real(path, **more)
        )
    else:
        write = looking.link_once

        def full(path: Path, text: str) -> bool:
            if path.is_relative_to(tmp_path / "home"):
                raise OSError(122, "Disk quota exceeded", str(path))
            return write(path, text)

        monkeypatch.setattr(looking, "link_once", full)
    for _ in range(3):
        assert look(paths, PASS_AGE, 10.0).elements
    assert len(squeue.asked) == 1
    assert [path.name for path in paths.slurm.iterdir()] == ["queue.json"]


def test_a_view_writes_nothing_into_a_run_but_uses_what_is_there(paths, squeue, monkeypatch):
    run_on("", paths.root, monkeypatch)
    for _ in range(2):
        assert look(paths, PERSON_AGE, 10.0, is_view=True).elements
    assert len(squeue.asked) == 2
    assert not list(paths.slurm.iterdir())
    look(paths, PASS_AGE, 10.0)
    assert look(paths, PERSON_AGE, 10.0, is_view=True).elements
    assert len(squeue.asked) == 3


def test_where_nothing_can_be_written_each_asks(paths, squeue, tmp_path, monkeypatch):
    monkeypatch.setattr(looking, "_is_own", lambda folder: False)
    for _ in range(3):
        assert look(paths, PASS_AGE, 10.0).elements
    assert squeue.asked == [10.0] * 3


def test_an_answer_that_cannot_be_kept_is_an_answer(paths, squeue, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(looking, "replace_durably", full)
    assert look(paths, PASS_AGE, 10.0).elements
    assert len(squeue.asked) == 1


@pytest.mark.parametrize("how", ["cut", "flipped", "another user's", "of another version", "no object"])
def test_what_is_not_ours_or_not_whole_is_asked_again(paths, squeue, tmp_path, how):
    look(paths, PASS_AGE, 10.0)
    file = shelf_of(tmp_path).folder / "queue-v1.json"
    content = unsealed(file.read_bytes())
    changed = {
        "cut": file.read_text()[:50],
        "flipped": file.read_text().replace("RUNNING", "RUNNINH"),
        "another user's": sealed(content | {"user": os.getuid() + 1}),
        "of another version": sealed(content | {"format": "Name:|"}),
        "no object": json.dumps([1]),
    }[how]
    file.write_text(changed)
    assert look(paths, PASS_AGE, 10.0).elements
    assert len(squeue.asked) == 2
    look(paths, PASS_AGE, 10.0)
    assert len(squeue.asked) == 2


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(paths, squeue, tmp_path):
    newest = look(paths, PASS_AGE, 10.0)
    shelf_of(tmp_path).keep(Look(newest.asked - 5, answer("PENDING")))
    assert look(paths, PASS_AGE, 10.0) == newest


def test_the_cache_is_where_the_user_says():
    assert cache_home({"HOME": "/home/me"}) == Path("/home/me/.cache")
    assert cache_home({"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me")
    assert cache_home({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}) == Path("/home/me/.cache")
    assert cache_home({"HOME": ""}) is None


# --- a worker's own end ---


def test_workers_of_a_run_learn_of_their_ends_by_one_question(paths, squeue):
    squeue.act = lambda: answer("RUNNING", "RUNNING", "PENDING")
    ends = [outside.slurm_queue(paths, "7", index) for index in range(2)]
    assert [queue.ends for queue in ends] == [200.0 + 3600.0] * 2
    assert outside.slurm_queue(paths, "8", 0) is None, "it has started since"
    assert len(squeue.asked) == 1


def test_a_worker_learns_of_jobs_that_wait_for_room(paths, squeue):
    """Of its own run, too: of a job that was put back into the queue nothing else tells."""
    names = {
        "10": "slurm-ppo.other.rollout.iter1.def.1.0",
        "11": "slurm-ppo.own.reward.iter1.abc.1.0",
        "12": "bash",
        "13": "held",
    }
    names["14"] = "slurm-ppo.own.driver.iter0.abc.1.0"
    lines = "".join(
        answer("PENDING", names=name).replace("7|0|", f"{job}|0|").replace("|None|", "|Resources|")
        for job, name in names.items()
        if name != "held"
    )
    squeue.act = lambda: answer("RUNNING") + lines + answer("PENDING", names="held").replace("7|0|", "13|0|")
    assert outside.slurm_queue(paths, "7", 0).lacking_room == {"10_0", "11_0", "12_0"}


# --- who makes place ---


def test_of_two_runs_one_makes_place_for_a_job_and_knows_that_it_does(paths, tmp_path, monkeypatch):
    other = run_on("big cluster/1", tmp_path / "other", monkeypatch)
    assert claim_place(paths, "10_0", 6000.0)
    assert claim_place(paths, "10_0", 6010.0), "its next pass"
    assert not claim_place(other, "10_0", 6010.0)
    assert claim_place(other, "10_1", 6010.0)
    assert not claim_place(other, "10_0", 6060.0), "who makes place may have just begun with it"
    assert claim_place(other, "10_0", 6120.0), "it still waits: the first came to nothing"
    assert claim_place(other, "12_0", 6060.0 + 7200), "and what is long over is forgotten"
    left = [path.name for path in (tmp_path / "home").rglob("place-*")]
    assert [name.rpartition("-")[0] for name in left] == ["place-12_0"]
