"""Runs submitted ahead, on a toy Slurm: whatever happens to jobs and drivers, the run goes on by itself.

The driver is the real one, with its files; only Slurm and what tasks do are made up. Drivers start when what
they wait for happens, and at no other time: one that nobody wakes is found here as a run that stands still.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeline.executors.slurm.jobs import SlurmJobs
from pipeline.executors.slurm.queue import cancel_all
from pipeline.executors.slurm.submitter import Submitter
from pipeline.orchestrate.driver import Outcome
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run, slurm_settings
from pipeline.run.submissions import Ledger, Submission, read_limits_of
from pipeline.run.tasks import Stage
from slurm.signals import Errands
from slurm.submission import cancel
from tests.support.toyworld import Luck, World, live_to_the_end, make_world, trials


def submissions_of(run: Run, call: int) -> list[Submission]:
    everything = Ledger(run.paths).load(range(run.plan.iterations + 1))
    return [submission for submission in everything if submission.invocation == call]


@pytest.fixture
def worlds(tmp_path, monkeypatch, clock):
    """One after the other, different in everything that chance decides."""

    def make(number: int, luck: Luck, **scheduler: object) -> Iterator[World]:
        for seed in range(number):
            yield make_world(tmp_path / f"seed-{seed}", monkeypatch, seed, luck, **scheduler)

    return make


def test_undisturbed_a_run_needs_one_array_for_each_stage_and_one_driver_for_each_iteration(worlds):
    pools = set()
    for world in worlds(trials(3), Luck()):
        live_to_the_end(world)
        assert (world.guards, world.early) == (0, 0)
        plan, chunks = world.run.plan, -(-world.run.plan.num_shards // world.array_size)
        counts = Counter(s.job_kind for s in submissions_of(world.run, 1))
        for job_kind in set(plan.job_kinds) - {"update"}:
            assert counts[job_kind] == chunks * plan.iterations
        assert counts["update"] == plan.iterations
        # One that an update's job released early leaves another behind, for that job's end.
        released = len(world.writing) if slurm_settings(world.run).horizon == 1 else 0
        assert plan.iterations <= counts["driver"] <= plan.iterations + released
        assert counts["evaluate"] == counts["evaldriver"] == len(plan.evaluations())
        assert (counts["prepare"], counts["guard"]) == (1, 2)
        pools.add(len(plan.pools))
    assert len(pools) > 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_measures_policies_or_fails_each_time_keeps_no_run_from_its_end(worlds, fails):
    for world in worlds(2, Luck(mishaps=4 * fails), measured_every=1):
        world.fails_benchmarks = fails
        live_to_the_end(world)
        plan = world.run.plan
        found = read_measured(world.run.paths)
        assert [one.policy_version for one in found] == list(plan.benchmarks())
        assert all(one.missing for one in found) is fails
        attempts = Counter(s.iteration for s in submissions_of(world.run, 1) if s.job_kind == Stage.BENCHMARK)
        most = world.run.config.evaluate.command_attempts
        assert all(attempts[i] == (most if fails else 1) for i in plan.benchmarks()) or world.luck.mishaps


MISFORTUNES = {
    "tasks fail in every way": Luck(mishaps=12),
    "commits rot": Luck(mishaps=6, rot=3),
    "people and Slurm interfere": Luck(mishaps=6, disturbances=12),
    "things happen while a driver is at work": Luck(mishaps=8, disturbances=8, rot=2, is_hurried=True),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", MISFORTUNES)
def test_whatever_happens_to_tasks_no_guard_is_needed(worlds, name):
    for world in worlds(trials(2), MISFORTUNES[name]):
        live_to_the_end(world)
        assert world.early == 0 or world.luck.rot


@pytest.mark.soak
@pytest.mark.parametrize("is_hurried", [False, True])
def test_killed_drivers_are_replaced_by_others_or_a_guard(worlds, is_hurried):
    for world in worlds(trials(2), Luck(mishaps=4, disturbances=4, kills=4, is_hurried=is_hurried)):
        live_to_the_end(world)


def test_a_queue_that_does_not_show_its_guards_yet_gets_them_once(worlds, monkeypatch):
    """A pass that looks again, because something is not in the queue yet, submits no further guards."""
    (world,) = worlds(1, Luck())
    monkeypatch.setattr("pipeline.executors.slurm.job_table.run_queue", lambda run, seen: {})
    submitter = Submitter(world.run, slurm_settings(world.run), lambda partitions: None, lambda: None)
    limits, errands = read_limits_of(world.run.paths), Errands(print)
    jobs = SlurmJobs(submitter, limits, print, errands, needs_watchdogs=True)
    for _ in range(10):
        jobs.query()
    assert [submission.number for submission in Ledger(world.run.paths).load({0})] == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("luck", [Luck(), Luck(mishaps=6, disturbances=4)])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_where_few_tasks_may_wait_the_run_goes_on_piece_by_piece(worlds, luck, most):
    for world in worlds(trials(1), luck, max_submitted=most):
        live_to_the_end(world)


def test_where_the_queue_is_full_the_run_goes_on_when_it_is_not(worlds, monkeypatch):
    refused, makes_room = 0, []
    for world in worlds(trials(2), Luck(mishaps=2, may_need_guard=True)):

        def cancel_noted(jobs, only_pending, world=world):
            """What is cancelled is noted before: whoever is killed between has done it, and no person."""
            makes_room.extend(jobs)
            noted = {s.state.job for s in submissions_of(world.run, 1) if s.state.is_withdrawn}
            assert noted.issuperset(jobs)
            cancel(jobs, only_pending)

        monkeypatch.setattr("pipeline.executors.slurm.launcher.cancel", cancel_noted)
        world.slurm.most_queued = 12
        live_to_the_end(world)
        refused += sum(event["event"] == "refused" for event in journal.read(world.run.paths.events))
        assert all(s.state.job for s in submissions_of(world.run, 1)), "nothing is left of what was refused"
    assert refused
    assert makes_room


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
    calls = Counter()
    for world in worlds(trials(2), Luck(mishaps=60), max_attempts=2):
        for call in range(1, 60):
            world.submit()
            world.live_on()
            attempts = Counter(task for s in submissions_of(world.run, call) for _, task in s.tasks())
            assert max(attempts.values(), default=0) <= 5 * 2, world.told()
            if world.outcome is Outcome.COMPLETE:
                break
        world.check_is_complete()
        calls[call] += 1
    assert max(calls) > 2  # else nothing was given up
