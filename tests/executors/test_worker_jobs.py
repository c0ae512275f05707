"""Runs with workers, on a toy Slurm: whatever happens to them, the run goes on, and no task is left.

The driver is the real one, with its files; only Slurm and what workers do are made up. Passes are made when a
worker has committed or leaves, or when a driver job starts that waits for the end of their arrays.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeline.config.job_kinds import DRIVER
from pipeline.decide.ended import are_in_doubt, broken_attempts
from pipeline.executors.slurm.array_workers import ArrayWorkers
from pipeline.executors.slurm.arrays import Submitter
from pipeline.executors.slurm.crew import beats_of, silent_workers
from pipeline.executors.slurm.job_table import QueueReader
from pipeline.executors.slurm.queue import cancel_all, look_at_queue
from pipeline.executors.slurm.silence import LOOK_AGAIN_SECONDS, SILENT_SECONDS
from pipeline.orchestrate.driver import Outcome
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import require_record
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import slurm_settings
from pipeline.run.endings import Evidence, read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.pass_requests import is_requested
from pipeline.run.submissions import Ledger, Submission, read_limits_of
from pipeline.run.tasks import Stage, Task, task_key
from pipeline.workers.beats import Doing, Reason, read_beats
from pipeline.workers.claims import Claim
from slurm.commands import SlurmTimeout
from slurm.signals import Errands
from slurm.states import SlurmState
from tests.support.beats import beat
from tests.support.toyslurm import Element
from tests.support.toyworld import Luck, Worker, World, live_to_the_end, make_world, trials


@pytest.fixture
def worlds(tmp_path, monkeypatch, clock):
    """One after the other, different in everything that chance decides."""

    def make(number: int, luck: Luck, **scheduler: object) -> Iterator[World]:
        for seed in range(number):
            yield make_world(tmp_path / f"seed-{seed}", monkeypatch, seed, luck, **scheduler)

    return make


def arrays_of(world: World) -> list[Submission]:
    everything = Ledger(world.run.paths).load(range(world.run.plan.iterations + 1))
    return [submission for submission in everything if submission.is_of_stage]


def test_undisturbed_no_job_waits_for_another_and_workers_do_several_tasks(worlds):
    several = 0
    for world in worlds(trials(2), Luck()):
        live_to_the_end(world)
        arrays = arrays_of(world)
        assert not any(s.state.waits_for for s in arrays)
        endings = read_endings(world.run.paths, range(world.run.plan.iterations + 1))
        assert not any(ending.is_failure for ending in endings.values()), world.told()
        scripts = [Ledger(world.run.paths).script(s).read_text() for s in arrays]
        assert all("trap '' USR1" in script and "--dependency" not in script for script in scripts)
        tasks = len(list(world.run.plan.all_tasks()))
        several += sum(len(s.elements) for s in arrays) < tasks
    assert several


ALONE = {stage: {"linger": 0, "start_early": False} for stage in ("rollout", "reward", "update", "evaluate")}


@pytest.mark.parametrize("luck", [Luck(), Luck(mishaps=8, disturbances=6)], ids=["undisturbed", "disturbed"])
def test_where_nobody_lingers_or_starts_early_each_task_has_a_job(worlds, luck):
    for world in worlds(trials(2), luck, **ALONE):
        live_to_the_end(world)
        alone = [worker for worker in world.every_worker if worker.first.job_kind in ALONE]
        assert {worker.beat.reason for worker in alone if worker.beat.tasks} == {Reason.ONE}
        assert max(worker.beat.tasks for worker in alone) == 1
        claims = [claim for of_task in world.claims.values() for claim in of_task]
        claimed = Counter(claim.worker for claim in claims if claim.task.job_kind in ALONE)
        assert max(claimed.values()) == 1


def test_only_driver_jobs_wait_for_others_each_for_all_arrays_that_somebody_is_in(worlds):
    for world in worlds(2, Luck()):
        live_to_the_end(world)
        drivers = [s for s in Ledger(world.run.paths).load({0}) if s.job_kind == DRIVER]
        for one in drivers:
            text = Ledger(world.run.paths).script(one).read_text()
            (given,) = re.findall(r"^#SBATCH --dependency=(.*)$", text, re.MULTILINE)
            assert given.strip("'").startswith("afterany:")
            assert set(re.findall(r"afterany:(\d+)", given)) <= world.slurm.jobs.keys()
        assert drivers


def test_a_queue_that_does_not_show_its_guards_yet_gets_them_once(worlds, monkeypatch):
    """A pass that looks again, because something is not in the queue yet, submits no further guards."""
    (world,) = worlds(1, Luck())
    monkeypatch.setattr("pipeline.executors.slurm.job_table.run_queue", lambda run, seen: {})
    run, errands = world.run, Errands(print)
    submitter = Submitter(run, slurm_settings(run), lambda partitions: None, lambda: None)
    reader = QueueReader(run)
    workers = ArrayWorkers(submitter, read_limits_of(run.paths), print, errands, reader, needs_watchdogs=True)
    for _ in range(10):
        workers.look()
    assert [submission.number for submission in Ledger(run.paths).load({0})] == [1, 2]


def test_a_driver_job_that_starts_after_the_run_was_cancelled_does_nothing(worlds):
    for world in worlds(3, Luck()):
        world.submit()
        write_control(world.run.paths, replace(read_control(world.run.paths), cancelled=True))
        cancel_all(world.run)
        before = len(world.slurm.jobs)
        world.advance("a driver job")
        assert (world.outcome, len(world.slurm.jobs)) == (Outcome.CANCELLED, before)
        live_to_the_end(world)  # a person asks for it again


@pytest.mark.soak
def test_a_run_that_was_given_up_goes_on_with_a_new_budget_when_a_person_asks(worlds):
    calls = 0
    for world in worlds(trials(2), Luck(mishaps=60), max_attempts=2):
        while world.outcome is not Outcome.COMPLETE:
            world.submit()
            world.live_on()
            calls += 1
        world.check_is_complete()
    assert calls > trials(2), "something was given up"


def test_a_killed_attempt_whose_task_was_redone_is_told_and_one_that_was_too_late_is_not():
    task = Task(1, Stage.ROLLOUT, 0)
    claims = [Claim(task, n, f"{n}-4711_{n}r0", f"4711_{n}r0", 10.0 + n) for n in (1, 2, 3, 4)]
    beats = {
        "4711_1r0": beat("4711_1r0", task="1/rollout/0", attempt="1-4711_1r0"),
        "4711_2r0": beat("4711_2r0", doing=Doing.WAITING),
        "4711_3r0": beat("4711_3r0", doing=Doing.LEAVING),
    }
    won = {task: "4-4711_4r0"}
    killed, _, said_why, _ = (claim.attempt for claim in claims)
    assert broken_attempts(claims, beats, won, lambda claim: claim.number == 3) == {killed, said_why}
    assert broken_attempts(claims, beats, {}, lambda claim: True) == set(), "that is for others to judge"


def test_why_somebody_was_warned_is_asked_again_also_if_another_has_done_the_task():
    task = Task(1, Stage.ROLLOUT, 0)
    claims = [Claim(task, n, f"{n}-4711_{n}r0", f"4711_{n}r0", 10.0 + n) for n in (1, 2)]
    warned = {"4711_1r0": beat("4711_1r0", doing=Doing.LEAVING, reason=Reason.WARNED)}
    lasting = {"4711_1r0": beat("4711_1r0", doing=Doing.WAITING)}
    shown = {"4711_1r0"}  # the other, which has done it, has left
    assert are_in_doubt(claims, shown, warned, {task})
    assert are_in_doubt(claims, shown, warned, set())
    assert not are_in_doubt(claims, shown, lasting, {task})
    assert not are_in_doubt(claims[:1], shown, warned, {task}), "it has committed it itself"
    assert not are_in_doubt(claims, set(), warned, {task}), "nobody is shown as running"


def test_a_killed_attempt_at_a_task_that_is_done_counts_for_nothing(worlds):
    (world,) = worlds(1, Luck())
    world.submit()
    while not any(worker.claim for worker in world.workers.values()):
        world.happen()
    element, worker = next((e, w) for e, w in world.workers.items() if w.claim)
    killed = worker.claim
    world.slurm.end(element, SlurmState.FAILED, 137)
    world.commit(killed.task, "2-99_0r0")
    world.claims[killed.task].append(Claim(killed.task, 2, "2-99_0r0", "99_0r0", world.now()))
    world.live_on()
    world.check_is_complete()
    ending = read_endings(world.run.paths, [killed.task.iteration])[killed.attempt]
    assert (ending.kind, ending.is_redone) == (FailureKind.KILLED, True)
    events = [e for e in journal.read(world.run.paths.events) if e["event"] == "failed"]
    assert [e["task"] for e in events] == [task_key(killed.task)]


@pytest.mark.parametrize("fails", [False, True])
def test_workers_measure_policies_and_leave_out_those_of_which_a_program_gives_no_numbers(worlds, fails):
    for world in worlds(2, Luck(), measured_every=1):
        world.fails_benchmarks = fails
        live_to_the_end(world)
        found = read_measured(world.run.paths)
        assert [one.policy_version for one in found] == list(world.run.plan.benchmarks())
        assert all(one.missing for one in found) is fails


MISFORTUNES = {
    "tasks fail in every way": Luck(mishaps=12),
    "commits rot": Luck(mishaps=6, rot=3),
    "people and Slurm interfere": Luck(mishaps=6, disturbances=12),
    "things happen while a driver is at work": Luck(mishaps=8, disturbances=8, is_hurried=True),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", MISFORTUNES)
def test_whatever_happens_to_workers_no_guard_is_needed(worlds, name):
    for world in worlds(trials(1), MISFORTUNES[name]):
        live_to_the_end(world)


@pytest.mark.soak
def test_killed_drivers_are_replaced_by_others_or_a_guard(worlds):
    for world in worlds(trials(1), Luck(mishaps=4, disturbances=4, kills=4)):
        live_to_the_end(world)


def test_a_poison_task_ends_the_run_and_its_failures_are_counted_against_it(worlds):
    for world in worlds(3, Luck(), max_attempts=3):
        world.poison = next(task for task in world.run.plan.all_tasks() if task.stage.is_sharded)
        world.submit()
        world.live_on()
        assert world.outcome is Outcome.FAILED, world.told()
        endings = read_endings(world.run.paths, [world.poison.iteration])
        failed = [ending for ending in endings.values() if ending.is_failure]
        assert Counter(e.kind for e in failed) == {FailureKind.ERROR: 3}
        assert {e.evidence for e in failed} == {Evidence.FAILURE_FILE}
        assert not world.slurm.elements(SlurmState.PENDING)


def test_a_worker_that_does_not_beat_is_cancelled_and_one_that_never_did_is_not(worlds):
    (world,) = worlds(1, Luck())
    world.submit()
    free = [e for e in world.slurm.elements(SlurmState.PENDING) if not world.is_guard(e)]
    world.start(free[0])
    (worker,) = world.workers.values()
    world.say(worker, worker.beat.doing)
    queue = look_at_queue(world.run, max_age=0.0).elements
    beats = beats_of(world.run.paths, {element.job_id for element in queue})
    now = beats[worker.name].beat
    element = f"{free[0].job.id}_{free[0].index}"
    assert silent_workers(queue, beats, now + SILENT_SECONDS + 1) == {element: now}
    assert silent_workers(queue, beats, now + SILENT_SECONDS - 1) == {}
    assert silent_workers(queue, {}, now + SILENT_SECONDS + 1) == {}


def at_work(world: World) -> tuple[Element, Worker]:
    """Let a run go on until a worker is at a task."""
    world.submit()
    while not any(worker.claim for worker in world.workers.values()):
        world.happen()
    return next((element, worker) for element, worker in world.workers.items() if worker.claim)


def test_a_worker_that_hangs_is_cancelled_by_the_pass_after_and_another_does_its_task(worlds, clock):
    for world in worlds(3, Luck()):
        element, worker = at_work(world)
        hanging, paths = worker.claim, world.run.paths
        world.fall_silent(worker, SILENT_SECONDS + 1)
        before = clock[0]
        world.advance("a pass")
        assert element.state is SlurmState.RUNNING, world.told()
        assert clock[0] - before < LOOK_AGAIN_SECONDS, "it does not wait, as it holds the lease"
        assert not is_requested(paths)
        clock[0] += LOOK_AGAIN_SECONDS
        assert is_requested(paths), "somebody makes the next pass then"
        world.advance("a pass")
        assert element.state is SlurmState.CANCELLED, world.told()
        assert f"  workers {worker.name.partition('r')[0]} have sent no heartbeat for minutes" in world.told()
        world.live_on()
        world.check_is_complete()
        world.check_failures_are_told()
        assert world.record(hanging.task).attempt != hanging.attempt
        endings = read_endings(paths, [hanging.task.iteration])
        ending = endings[hanging.attempt]
        assert (ending.kind, ending.evidence) == (FailureKind.KILLED, Evidence.SILENCE), world.told()


def test_workers_that_were_silent_as_the_file_server_was_away_are_looked_at_again_and_live(worlds, clock):
    (world,) = worlds(1, Luck())
    element, worker = at_work(world)
    world.fall_silent(worker, SILENT_SECONDS + 1)
    world.advance("a pass")
    world.say(worker, Doing.BUSY, task=worker.claim.task, attempt=worker.claim.attempt)
    clock[0] += LOOK_AGAIN_SECONDS
    world.advance("a pass")
    assert element.state is SlurmState.RUNNING, world.told()
    world.live_on()
    world.check_is_complete()
    assert not world.kinds, "no attempt failed"


def lose(world: World, program: str, is_carried_out: bool) -> None:
    """The next answer of a command is lost, whether or not the controller has heard the request."""
    lost = iter([True])

    def forget(called: str) -> None:
        if called == program and next(lost, False):
            raise SlurmTimeout([program], None, "no answer in 7 s")

    setattr(world.slurm, "after" if is_carried_out else "before", forget)


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_what_sbatch_did_not_answer_is_found_by_name_or_submitted_again_by_later_passes(
    worlds, clock, is_carried_out
):
    """Nobody waits for it while he holds the lease, and no attempt is counted for it."""
    for world in worlds(trials(2), Luck()):
        world.submit()
        lose(world, "sbatch", is_carried_out)
        live_to_the_end(world, is_submitted=True)
        gone = [event["event"] for event in journal.read(world.run.paths.events)]
        assert "failed" not in gone
        assert ("never_arrived" in gone) is not is_carried_out
        names = [job.name for job in world.slurm.jobs.values()]
        assert len(names) == len(set(names))


@pytest.mark.soak
def test_array_parallelism_is_the_number_of_workers_that_share_the_shards(worlds):
    shared: Counter[int] = Counter()
    two = {"array_parallelism": 2}
    for world in worlds(trials(2), Luck(mishaps=3, disturbances=3), rollout=two, reward=two):
        live_to_the_end(world)
        shared[min(3, world.run.plan.num_shards)] += 1
        for job_kind in ("rollout", "reward"):
            assert world.most[job_kind] == min(2, world.run.plan.num_shards)
    assert shared[3], "no run had more shards than workers"


def test_a_worker_that_left_has_an_end_that_says_why_and_is_no_failure(worlds):
    seen = 0
    for world in worlds(2, Luck(mishaps=4)):
        live_to_the_end(world)
        everything = read_endings(world.run.paths, range(world.run.plan.iterations + 1))
        left = {name: ending for name, ending in everything.items() if ending.kind is None}
        seen += len(left)
        assert left.keys() <= {path.stem for path in (world.run.paths.slurm / "workers").glob("*.json")}
        assert all(ending.evidence is Evidence.BEAT for ending in left.values())
        assert all(ending.message.startswith(("it left: ", "what it took")) for ending in left.values())
    assert seen


# --- workers of rollouts that measure policies, on nodes that have room for all stages at once ---


NODES = "node|toy*|64|64000|(null)|idle|0/64/0/64\n"


@pytest.fixture
def world(request, tmp_path, monkeypatch, clock) -> World:
    """One of which some policies are measured."""
    size = {"iterations": 3, "rollout": {"num_shards": 2}, "evaluate": {"every": 2}}
    data = {"prompts_per_iteration": 8, "heldout": "/heldout"}
    made = make_world(tmp_path / "run", monkeypatch, 14, request.param, settings={**size, "data": data})
    made.slurm.nodes = NODES
    return made


def submitted(world: World, stage: Stage) -> set[str]:
    """Ids of the arrays of a stage."""
    arrays = Ledger(world.run.paths).load(range(world.run.plan.iterations + 1))
    return {submission.state.job for submission in arrays if submission.job_kind == stage}


@pytest.mark.parametrize(
    "world",
    [Luck(), Luck(mishaps=8), Luck(mishaps=6, disturbances=8)],
    indirect=True,
    ids=["undisturbed", "tasks fail", "people and Slurm interfere"],
)
def test_policies_are_measured_by_workers_of_rollouts_whatever_happens(world):
    live_to_the_end(world)
    tasks = world.run.plan.evaluation_tasks()
    rollouts = submitted(world, Stage.ROLLOUT)
    done_by = [claim.worker for task in tasks for claim in world.claims[task]]
    besides = [worker for worker in done_by if worker.partition("_")[0] in rollouts]
    assert besides, world.told()
    counted = Counter({name: beat.measured for name, beat in read_beats(world.run.paths).items()})
    won = {require_record(world.run.paths, task).attempt for task in tasks}
    winners = [c.worker for t in tasks for c in world.claims[t] if c.attempt in won and c.worker in besides]
    assert sum(counted.values()) >= len(winners)
    if world.luck == Luck():
        assert len(submitted(world, Stage.EVALUATE)) < len(tasks), world.told()
