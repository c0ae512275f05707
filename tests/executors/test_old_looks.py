"""A pass decides by a look at the queue that is some seconds old: jobs were submitted, started, ended, were
cancelled or put back since. Workers' beats and claims are newer than the look.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.executors.slurm import passes
from pipeline.executors.slurm.crew import read_crew
from pipeline.executors.slurm.job_table import Snapshot, read_table, take_snapshot
from pipeline.executors.slurm.passes import make_pass
from pipeline.executors.slurm.queue import as_heard_of, newest_starts
from pipeline.run import journal
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run
from pipeline.run.endings import read_endings
from pipeline.run.lease import hold
from pipeline.run.submissions import Ledger, Submission, parse_job_name
from pipeline.workers import looking
from pipeline.workers.looking import FROM_NOW, Look
from slurm.commands import SlurmTimeout
from slurm.states import SlurmState
from tests.support import jobs
from tests.support.beats import beat
from tests.support.passes import Watcher, in_job, pass_over
from tests.support.toyslurm import Element as ToyElement
from tests.support.toyworld import MIN_JOB_AGE, Luck, Worker, World, is_driver, make_world


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    return make_world(tmp_path / "run", monkeypatch, 1, Luck())


def look_of(world: World) -> Look:
    world.look()
    return world.looks[-1]


def submissions(run: Run) -> list[Submission]:
    return Ledger(run.paths).load(range(run.plan.iterations + 1))


def failures(world: World) -> list[str]:
    return [e["task"] for e in journal.read(world.run.paths.events) if e["event"] == "failed"]


def working(world: World) -> tuple[ToyElement, Worker]:
    """Let the run go on until a worker is at a task."""
    world.submit()
    while not any(worker.claim for worker in world.workers.values()):
        world.happen()
    return next((element, worker) for element, worker in world.workers.items() if worker.claim)


def test_what_was_submitted_since_is_not_submitted_again(world):
    before = look_of(world)
    world.submit()
    there = [one.name for one in submissions(world.run)]
    assert len(there) >= 3, "two guards, and an array"
    for _ in range(3):
        pass_over(world.run, world.story, before)
    assert [one.name for one in submissions(world.run)] == there
    assert not failures(world)


def test_what_was_submitted_since_for_an_iteration_that_is_over_is_known(world):
    """Iterations may be shorter than a look is old."""
    before = look_of(world)
    world.submit()
    (array,) = (s for s in submissions(world.run) if s.is_of_stage and s.iteration)
    seen = take_snapshot(world.run, before, is_fresh=False)
    table = read_table(Ledger(world.run.paths), seen, {array.iteration + 1})
    assert array.name in {s.name for s in table.submissions}
    assert {e.state for e in table.seen.queue[array.name]} == {SlurmState.PENDING}


def test_a_worker_of_an_element_that_is_not_shown_yet_is_at_its_task(world):
    before = look_of(world)
    element, worker = working(world)
    pass_over(world.run, world.story, replace(before, asked=time.time() - 10))
    assert not failures(world)
    assert not read_endings(world.run.paths, [worker.claim.task.iteration])
    assert element.state is SlurmState.RUNNING


def test_who_has_started_since_is_at_its_task_though_it_is_shown_as_waiting(world):
    world.submit()
    before = look_of(world)
    assert not any("|RUNNING|" in line for line in before.text.splitlines())
    element, _ = working(world)
    pass_over(world.run, world.story, replace(before, asked=time.time() - 5))
    assert not failures(world)
    assert element.state is SlurmState.RUNNING


@pytest.mark.parametrize(
    ("shown", "said", "nodes"),
    [("", "gpu[01-02]", ("gpu01", "gpu02")), ("gpu03", "", ("gpu03",)), ("gpu03", "gpu01", ("gpu01",))],
)
def test_where_who_has_started_since_is_says_its_beat(world, shown, said, nodes):
    """Who makes place for what waits depends on where each worker is."""
    world.submit()
    seen = take_snapshot(world.run, look_of(world), is_fresh=False)
    name, (element, *_) = next(
        (n, e) for n, e in seen.queue.items() if parse_job_name(n).job_kind == "prepare"
    )
    queue = {name: (replace(element, node=shown, restarts=0),)}
    table = read_table(Ledger(world.run.paths), replace(seen, queue=queue), {0})
    worker = element.run_id
    crew = read_crew(table, {worker: beat(worker, "prepare", nodes=said)})
    assert {w.name: w.nodes for w in crew.workers} == {worker: nodes}


def test_who_was_put_back_and_has_started_again_is_at_the_task_that_it_has_claimed(world):
    element, _ = working(world)
    before = look_of(world)
    world.slurm.requeue(element)
    world.happen()
    while element not in world.workers or world.workers[element].claim is None:
        assert world.happen()
    again = world.workers[element]
    pass_over(world.run, world.story, before)
    endings = read_endings(world.run.paths, range(world.run.plan.iterations + 1))
    assert again.claim.attempt not in endings, "although it was shown as its first start"


def test_restarts_that_were_heard_of_count():
    shown = jobs.element(1, SlurmState.PENDING, restarts=1)
    running = replace(shown, state=SlurmState.RUNNING)
    assert as_heard_of(shown, newest_starts(["7_1r0", "7_2r5", "77_1r9", "host-12"])) == shown
    assert as_heard_of(shown, newest_starts(["7_1r1"])) == running
    assert as_heard_of(shown, newest_starts(["7_1r3", "7_1r0"])) == replace(running, restarts=3)
    ended = replace(shown, state=SlurmState.COMPLETED)
    assert as_heard_of(ended, newest_starts(["7_1r1"])) == ended


def test_an_end_that_is_not_shown_yet_is_judged_by_a_later_pass(world):
    element, worker = working(world)
    claim, before = worker.claim, look_of(world)
    world.slurm.end(element, SlurmState.FAILED, 137)
    pass_over(world.run, world.story, before)
    assert not failures(world)
    pass_over(world.run, world.story, look_of(world))
    assert claim.attempt in read_endings(world.run.paths, [claim.task.iteration])


@pytest.mark.parametrize("answer", ["it is gone", "it lives", "none"])
def test_before_something_is_judged_that_is_not_shown_there_is_another_look(world, monkeypatch, answer):
    element, worker = working(world)
    claim = worker.claim
    time.sleep(MIN_JOB_AGE)
    if answer != "it lives":
        world.slurm.end(element, SlurmState.FAILED, 137)
        world.slurm.forget_ended()
    own = f"{element.job.id}|"
    shown = look_of(world)
    without = replace(shown, text="".join(f"{s}\n" for s in shown.text.splitlines() if not s.startswith(own)))
    asked: list[float] = []
    real = looking.ask_queue

    def ask(timeout: float) -> str:
        asked.append(timeout)
        if answer == "none":
            raise SlurmTimeout(["squeue"], None, "no answer in 5 s")
        return real(timeout)

    monkeypatch.setattr(looking, "ask_queue", ask)
    if answer == "none":
        monkeypatch.setattr("pipeline.executors.slurm.passes.SLURM_PATIENCE", -1.0)
        with pytest.raises(SlurmTimeout):
            pass_over(world.run, world.story, without)
    else:
        pass_over(world.run, world.story, without)
    assert max(asked) <= 5.0, "the lease is held meanwhile"
    judged = claim.attempt in read_endings(world.run.paths, [claim.task.iteration])
    assert judged == (answer == "it is gone")


def test_where_squeue_has_no_time_under_the_lease_a_look_between_two_passes_confirms(world, monkeypatch):
    """squeue takes 20 s: more than there is while the lease is held."""
    element, worker = working(world)
    claim = worker.claim
    world.slurm.end(element, SlurmState.FAILED, 137)
    time.sleep(MIN_JOB_AGE)
    world.slurm.forget_ended()
    real = looking.ask_queue

    def slow(timeout: float) -> str:
        if timeout < 20:
            raise SlurmTimeout(["squeue"], None, f"no answer in {timeout:g} s")
        return real(timeout)

    monkeypatch.setattr(looking, "ask_queue", slow)
    make_pass(world.run, Watcher(world.story), FROM_NOW)
    assert claim.attempt in read_endings(world.run.paths, [claim.task.iteration])


def test_a_look_between_two_passes_is_believed_only_if_nobody_held_the_lease_since(world, monkeypatch):
    """Another submits the run, and its workers begin, while this one waits for squeue's second answer."""
    real, answers = looking.ask_queue, iter(["none", "of before"])

    def ask(timeout: float) -> str:
        answer = next(answers, "")
        if answer == "none":
            raise SlurmTimeout(["squeue"], None, "no answer in 10 s")
        shown = real(timeout)
        if answer == "of before":
            with hold(world.run.paths.locks):
                working(world)
        return shown

    monkeypatch.setattr(looking, "ask_queue", ask)
    make_pass(world.run, Watcher(world.story), 0.0)
    assert next(answers, None) is None
    assert not failures(world)
    names = [(one.iteration, one.job_kind) for one in submissions(world.run) if one.is_of_stage]
    assert len(names) == len(set(names)), "nothing is submitted twice"


def test_a_driver_job_takes_no_look_that_shows_it_as_waiting(world, monkeypatch):
    seen = Look(time.time(), "")
    vars(seen)["elements"] = [SimpleNamespace(array_id="7", index=3, state=SlurmState.PENDING)]
    monkeypatch.setenv("SLURM_JOB_NAME", "slurm-ppo.run.driver.iter0.0123456789ab.1.0")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert passes._if_young(seen) is seen
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert passes._if_young(seen) is None, "it has started since"
    monkeypatch.setenv("SLURM_JOB_NAME", "slurm-ppo.run.rollout.iter1.0123456789ab.1.0")
    assert passes._if_young(seen) is seen, "a worker's start is known by its beat"


def test_a_driver_job_that_is_shown_as_waiting_leaves_another_behind(world):
    working(world)
    drivers = [e for e in world.slurm.elements(SlurmState.PENDING) if is_driver(e) and not e.job.begin]
    (driver,) = drivers
    before = look_of(world)
    driver.state = SlurmState.RUNNING
    with in_job(driver):
        pass_over(world.run, world.story, before)
    waiting = [e for e in world.slurm.elements(SlurmState.PENDING) if is_driver(e) and not e.job.begin]
    assert len(waiting) == 1


def test_what_was_cancelled_since_waits_until_the_next_look(world):
    world.submit()
    before = look_of(world)
    cancelled = next(e for e in world.slurm.elements(SlurmState.PENDING) if not is_driver(e))
    world.slurm.end(cancelled, SlurmState.CANCELLED)
    there = len(submissions(world.run))
    pass_over(world.run, world.story, before)
    assert len(submissions(world.run)) == there
    pass_over(world.run, world.story, look_of(world))
    world.live_on()
    world.check_is_complete()


def test_who_submits_again_what_was_cancelled_just_now_is_not_told_that_it_waits(world):
    world.submit()
    there = len(submissions(world.run))
    for element in world.slurm.elements(SlurmState.PENDING):
        world.slurm.end(element, SlurmState.CANCELLED)
    world.slurm.forget_ended()
    begin_invocation(world.run.paths)
    pass_over(world.run, world.story, look_of(world))
    assert len(submissions(world.run)) > there
    world.live_on()
    world.check_is_complete()


def test_what_is_expected_is_what_was_submitted_about_when_squeue_was_called(world):
    world.submit()
    (array,) = (s for s in submissions(world.run) if s.is_of_stage and s.iteration)

    def pending(asked: float, is_fresh: bool = False, **state: object) -> int:
        changed = replace(array, state=replace(array.state, **state))
        seen = Snapshot(asked=asked, is_fresh=is_fresh)
        return seen.expecting([changed]).count_pending(array.job_kind)

    for asked in (array.created - 10, array.created, array.created + 29):
        assert pending(asked) == 1
    assert pending(array.created + 31) == 0, "it is gone"
    assert pending(array.created + 10, is_fresh=True) == 0, "as soon as the pass looks itself"
    assert pending(array.created, is_withdrawn=True) == 0
    assert pending(array.created, withdrawn=tuple(array.indices)) == 0
    assert pending(array.created, job=None) == 0, "that is looked for by its name"
