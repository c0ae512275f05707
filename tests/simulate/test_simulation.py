"""Simulated runs: what disturbs a real one disturbs them too, and the books add up."""

import statistics
import sys
from dataclasses import replace
from itertools import count

import pytest

from pipeline.run.plan import Plan
from pipeline.simulate.plant import (
    Others,
    Plant,
    PlantNode,
    PlantPartition,
    PlantRequest,
    UserLimits,
    uniform,
)
from pipeline.simulate.plants import job_for_each_task, never_leave
from pipeline.simulate.results import SimulationResult
from pipeline.simulate.simulation import Simulation, _partition_at, simulate
from pipeline.workers.beats import Reason
from tests.support.plants import SECONDS, plant_with
from tests.support.tables import sample

MOST_CALLS = 200_000
"""Calls of functions for an iteration of 16 shards: about half as many again as there are."""


def changed(plant: Plant, job_kind: str, **changes: object) -> Plant:
    return replace(plant, kinds=plant.kinds | {job_kind: replace(plant.kinds[job_kind], **changes)})


def test_a_run_takes_what_its_longest_tasks_take_one_after_the_other():
    found = simulate(never_leave(plant_with(8)))
    assert found.is_complete
    assert found.iterations[2:] == pytest.approx([40.0] * 4)
    assert found.spent("busy") == pytest.approx(1 + 6 * (2 * 5 + 2 * 5 + 30))


def test_where_three_stages_share_two_places_nobody_starts_in_vain():
    found = simulate(plant_with(2, shards=4))
    assert found.is_complete
    assert found.without_task <= 2
    assert found.evictions >= 6
    assert sum(found.iterations) <= sum(simulate(job_for_each_task(plant_with(2, shards=4))).iterations)


def test_a_pass_waits_for_the_start_of_the_process_that_makes_it_where_the_last_one_ended_with_its_worker():
    slow = {"maker_startup": 10.0}
    leaving, staying = job_for_each_task(plant_with(8)), never_leave(plant_with(8))
    before, after = (simulate(replace(leaving, **more)).iterations[2:] for more in ({}, slow))
    assert statistics.fmean(after) >= statistics.fmean(before) + 2 * 10, "for rewards and for the update"
    assert simulate(replace(staying, **slow)).iterations[2:] == pytest.approx([40.0] * 4)


def test_where_nobody_leaves_the_first_to_come_keep_the_others_out():
    found = simulate(never_leave(plant_with(2, shards=4)), until=4000)
    assert not found.is_complete


def test_start_ups_beside_others_take_longer():
    one = simulate(never_leave(plant_with(16, shards=4)))
    crowded = simulate(never_leave(plant_with(16, shards=4, crowding=1.0)))
    assert one.spent("startup", "rollout") == pytest.approx(4 * 10)
    assert crowded.spent("startup", "rollout") >= 4 * 40  # all four at once, beside prepare


def test_an_evaluation_runs_beside_training_and_is_waited_for_at_the_end():
    found = simulate(plant_with(8, every=2))
    assert [job.job_kind for job in found.jobs].count("evaluate") >= 1
    assert sum(job.tasks for job in found.jobs if job.job_kind == "evaluate") == 4
    assert found.seconds > sum(found.iterations)


def starts_of(found: SimulationResult, job_kind: str) -> int:
    return sum(job.job_kind == job_kind for job in found.jobs)


def test_workers_of_rollouts_measure_policies_while_they_would_wait():
    """Of 35 s in which they have nothing to do an evaluation takes ten."""
    plants = (plant_with(8, every=2, startup=60.0, measures=is_on) for is_on in (True, False))
    found, apart = map(simulate, plants)
    assert found.is_complete
    assert starts_of(found, "evaluate") == 0 < starts_of(apart, "evaluate")
    assert found.iterations == pytest.approx(apart.iterations, rel=0.02)
    assert found.seconds <= apart.seconds
    assert sum(job.held for job in found.jobs) < sum(job.held for job in apart.jobs)
    assert found.spent("busy") == pytest.approx(apart.spent("busy"))


def test_what_takes_longer_than_that_has_a_worker_of_its_own_once_it_is_known():
    long = SECONDS | {"evaluate": 38.0}
    found = simulate(plant_with(8, 12, every=1, seconds=long, measures=True))
    assert found.is_complete
    assert starts_of(found, "evaluate") == 1
    assert found.iterations[7:] == pytest.approx([40.0] * 5)


def test_stages_that_take_turns_are_kept_waiting_by_no_evaluation():
    found, apart = (simulate(plant_with(2, shards=4, every=2, measures=is_on)) for is_on in (True, False))
    assert found.iterations == apart.iterations


@pytest.mark.parametrize(("startup", "queue"), [(38.0, 0.0), (3.0, 100.0)])
def test_an_evaluation_that_has_no_place_of_its_own_evicts_nobody_from_a_chain_that_is_quick(startup, queue):
    """Three stages have the three places; to come back would take each as long as four iterations, or ten."""
    quick = {"rollout": 4.0, "reward": 2.0, "update": 4.0}
    plant = plant_with(3, 32, shards=1, startup=startup, queue=queue, every=2, seconds=SECONDS | quick)
    found = simulate(plant)
    assert found.is_complete
    assert found.iterations[4:] == pytest.approx([10.0] * 28, rel=0.3)
    assert sum(job.tasks for job in found.jobs if job.job_kind == "evaluate") == 17


def test_who_got_its_place_before_what_it_waits_for_gives_it_back():
    """The queue is not in order: of two jobs for the one place the second may come first."""
    plant = plant_with(1, 8, shards=4, queue=22.0, queue_spread=0.5, seconds=SECONDS | {"reward": 15.0})
    found = simulate(plant)
    assert found.is_complete
    assert max(found.iterations) < 2 * statistics.median(found.iterations)
    assert found.without_task <= 1


def test_no_partition_is_busier_with_others_than_the_cluster_is():
    nodes = (PlantNode("small", 8, 1), PlantNode("large", 312, 39))
    parts = (PlantPartition("one", ("small",)), PlantPartition("all", ("large",)))
    plant = replace(plant_with(40), nodes=nodes, partitions=parts, others=Others(0.5, 100.0))
    drawn = [_partition_at(plant, uniform("seed", str(number))) for number in range(4000)]
    assert 60 <= drawn.count("one") <= 140, "a fortieth of the places, and of the jobs"


def test_pools_score_between_rollout_and_reward():
    plant = plant_with(8, seconds=SECONDS | {"score-judge": 7.0})
    plan = Plan(6, 2, 0, pools=("judge",))
    found = simulate(never_leave(replace(plant, plan=plan)))
    assert found.iterations[2:] == pytest.approx([47.0] * 4)


def test_a_benchmark_keeps_nobody_waiting():
    plant = replace(
        plant_with(8, seconds=SECONDS | {"benchmark": 100.0}), plan=Plan(6, 2, 0, benchmark_every=2)
    )
    found = simulate(changed(plant, "benchmark", linger=0, start_early=False))
    assert sum(job.tasks for job in found.jobs if job.job_kind == "benchmark") == 4
    assert found.iterations[3:] == pytest.approx([40.0] * 3)


def test_a_state_is_written_while_the_next_update_computes_and_the_one_after_waits_for_it():
    seconds = SECONDS | {"rollout": 1.0, "reward": 1.0, "update": 5.0}
    plain, short, found, seldom = (
        simulate(never_leave(plant_with(8, seconds=seconds, state_seconds=took, save_every=every)))
        for took, every in ((0.0, 1), (5.0, 1), (10.0, 1), (10.0, 3))
    )
    assert short.iterations[1:5] == pytest.approx(plain.iterations[1:5])
    assert found.iterations[3] == pytest.approx(plain.iterations[3] + 3)  # ten, of which seven go by anyway
    assert sum(seldom.iterations) < sum(found.iterations)


def test_where_each_update_has_a_job_of_its_own_it_writes_its_state_before_it_ends():
    seconds = SECONDS | {"rollout": 1.0, "reward": 1.0, "update": 5.0}
    plain, found = (
        simulate(changed(plant_with(8, seconds=seconds, state_seconds=took), "update", linger=0))
        for took in (0.0, 10.0)
    )
    assert found.iterations[3] > plain.iterations[3] + 5


def test_a_policy_takes_its_size_over_the_bandwidth_to_be_read():
    plain, large = (
        simulate(never_leave(plant_with(8, policy_gb=size, gb_per_second=2.0))).iterations[3]
        for size in (0.0, 8.0)
    )
    assert large == pytest.approx(plain + 4)  # rollouts read it; the update has made it


def test_what_fails_is_tried_again():
    found = simulate(plant_with(8, shards=8, iterations=10, failures=0.1))
    assert found.is_complete
    assert found.spent("busy") > 1 + 10 * (8 * 10 + 30)


def test_preempted_jobs_come_back_and_their_tasks_are_done_again():
    found = simulate(plant_with(8, iterations=20, disturbed_every=100.0))
    assert found.is_complete
    assert found.reasons[None] >= 4
    assert found.adds_up
    assert found.spent("lost") > 0


def test_a_worker_whose_time_limit_comes_near_leaves_before_it():
    plant = plant_with(8, iterations=12, linger=10_000, linger_max=10_000.0)
    short = {
        name: replace(kind, request=replace(kind.request, limit=400.0), signal=20.0)
        for name, kind in plant.kinds.items()
    }
    found = simulate(replace(plant, kinds=short))
    assert found.is_complete
    assert found.reasons[Reason.WARNED] + found.reasons[Reason.TIME] >= 2
    assert not found.spent("lost")
    assert max(job.held for job in found.jobs) < 400


def test_other_people_take_places():
    quiet = simulate(plant_with(4))
    busy = simulate(plant_with(4, others=Others(0.6, 100.0, 1.0), seed="busy"))
    assert busy.is_complete
    assert busy.seconds > 1.1 * quiet.seconds


def test_other_people_are_there_from_the_start():
    simulation = Simulation([plant_with(8, others=Others(0.5, 100.0), seed="there")])
    simulation.carry_out(until=0.0)
    assert simulation.cluster.has_others
    assert simulation.cluster.free[0].gpus == 4
    simulation.clock.step()
    assert simulation.keepers[0].run.known.is_contended, "so the first pass knows of them"


def test_the_only_place_is_kept_where_others_would_take_it():
    """Of two partitions one has a single place, and people whose jobs take ten minutes come to both."""
    plant = plant_with(1, 16, shards=2)
    nodes = (*plant.nodes, PlantNode("many", 64, 8))
    parts = (*plant.partitions, PlantPartition("large", ("many",)))
    kinds = {name: replace(kind, partitions=("large",)) for name, kind in plant.kinds.items()}
    kinds["update"] = plant.kinds["update"]
    plant = replace(plant, nodes=nodes, partitions=parts, kinds=kinds, others=Others(0.4, 600.0))
    kept = simulate(plant)
    assert kept.seconds <= 1.1 * simulate(never_leave(plant)).seconds
    assert [job.job_kind for job in kept.jobs].count("update") == 1


def test_the_one_place_goes_back_to_those_who_were_preempted():
    """They had done the task that they were submitted for; who waits for the others' results leaves."""
    seconds = SECONDS | {"rollout": 12.0, "reward": 0.1, "update": 0.1}
    plant = plant_with(1, 4, shards=40, queue=0.0, startup=20.0, seconds=seconds, disturbed_every=400.0)
    assert simulate(plant).seconds <= 1.1 * simulate(job_for_each_task(plant)).seconds


def test_a_limit_of_the_user_makes_stages_take_turns():
    found = simulate(plant_with(8, limits=UserLimits(gpus=2)))
    assert found.is_complete
    assert found.evictions > 0


@pytest.mark.parametrize("submitted", sample((5, 6, 7, 8, 10, 12), 0.4))
@pytest.mark.parametrize("linger", [600, 0])
def test_a_limit_of_submitted_jobs_is_one_of_places(submitted, linger):
    """Nodes have room for all, and workers stay for ten minutes: no stage waits for those of another."""
    found = simulate(plant_with(16, 4, shards=4, linger=linger, limits=UserLimits(submitted=submitted)))
    assert found.is_complete
    one_by_one = 4 * SECONDS["rollout"] + 4 * SECONDS["reward"] + SECONDS["update"]
    assert found.seconds < 4 * (one_by_one + 3 * 60)


def test_a_limit_of_running_jobs_is_a_place_too_where_stages_have_partitions_of_their_own():
    """Nobody has another's node, but three workers that wait keep the update from starting."""
    plant = plant_with(4, 4, limits=UserLimits(jobs=4))
    names = ("rollout", "reward", "update")
    nodes = (*plant.nodes, *(PlantNode(name, 32, 4) for name in names))
    parts = (*plant.partitions, *(PlantPartition(name, (name,)) for name in names))
    kinds = {n: replace(kind, partitions=(n,)) if n in names else kind for n, kind in plant.kinds.items()}
    apart = replace(plant, nodes=nodes, partitions=parts, kinds=kinds)
    found = simulate(apart)
    assert found.is_complete
    assert found.evictions > 0
    assert found.seconds <= 1.1 * simulate(job_for_each_task(apart)).seconds


def test_no_more_is_submitted_than_a_user_may():
    simulation = Simulation([plant_with(16, shards=12, limits=UserLimits(submitted=9))])
    most, submit = 0, simulation.scheduling.submit

    def count_them(job, starts):
        nonlocal most
        submit(job, starts)
        most = max(most, len(simulation.scheduling.starts))

    simulation.scheduling.submit = count_them
    found = simulation.carry_out()[0]
    assert found.is_complete
    assert 4 <= most <= 9


def test_where_others_keep_a_worker_waiting_nobody_gives_up_a_place_that_it_takes_longer_to_get_back():
    """Seven places, of which others use two thirds; who has left waits for twelve minutes."""
    quick = SECONDS | {"rollout": 0.2, "reward": 8.0, "update": 1.2}
    around = {"others": Others(0.64, 144.0), "queue_spread": 0.5, "seed": "a"}
    plant = plant_with(7, 12, startup=0.6, queue=750.0, seconds=quick, **around)
    assert simulate(plant).seconds <= 1.3 * simulate(never_leave(plant)).seconds


def test_where_the_queue_takes_longer_than_a_worker_may_stay_it_gets_in_line_again_at_once():
    """One worker each, and an hour is the most that one waits: four stages wait 24 minutes each at first."""
    quick = SECONDS | {"rollout": 5.0, "reward": 0.4, "update": 26.0, "score-judge": 70.0}
    plant = plant_with(8, 8, startup=0.0, queue=1420.0, seconds=quick)
    plant = replace(plant, plan=Plan(8, 2, 0, pools=("judge",)))
    assert simulate(plant).seconds <= 1.3 * simulate(never_leave(plant)).seconds


def test_an_update_over_several_gpus_is_given_a_place_by_those_that_hold_them():
    wide = changed(plant_with(4, shards=4), "update", request=PlantRequest(gpus=4))
    found = simulate(wide)
    assert found.is_complete
    assert found.evictions > 0
    assert found.gpu_seconds() == pytest.approx(sum(job.gpus * sum(job.spent.values()) for job in found.jobs))


def test_two_runs_of_one_user_share_the_places():
    plant = plant_with(2)
    found = Simulation([plant, plant]).carry_out()
    assert all(one.is_complete for one in found)
    assert max(one.seconds for one in found) > 1.1 * simulate(plant).seconds


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def took(seed: str) -> list[float]:
        return simulate(plant_with(3, shards=4, spread=0.5, queue_spread=0.5, seed=seed)).iterations

    assert took("a") == took("a")
    assert took("a") != took("b")


@pytest.mark.parametrize("shards", [4, 16])
def test_events_grow_with_the_number_of_iterations_and_no_faster(shards):
    events = [simulate(plant_with(64, number, shards, spread=0.3)).events for number in (6, 12, 24)]
    assert events[2] - events[1] <= 1.2 * 2 * (events[1] - events[0])


def calls_in(plant: Plant) -> int:
    """Return how many calls of functions a simulation takes: its cost, whatever else the machine does."""
    calls, before = count(), sys.getprofile()

    def note(frame, event, argument):
        if event == "call":
            next(calls)

    sys.setprofile(note)
    try:
        simulate(plant)
    finally:
        sys.setprofile(before)
    return next(calls)


def test_a_simulation_costs_as_much_for_each_further_iteration():
    calls = [calls_in(plant_with(32, number, 16, spread=0.3)) for number in (4, 8, 12)]
    assert calls[2] - calls[1] <= 1.3 * (calls[1] - calls[0])
    assert calls[2] / 12 <= MOST_CALLS


def test_nothing_that_is_looked_through_grows_with_the_run():
    def sizes(iterations: int) -> dict[str, int]:
        simulation = Simulation([plant_with(64, iterations, 8, spread=0.3, failures=0.05)])
        simulation.carry_out()
        run = simulation.keepers[0].run
        kept = {
            name: len(getattr(run.progress, name)) for name in ("attempts", "claims", "failures", "passages")
        }
        return kept | {"past": len(run.known.all_beats()), "begun": len(simulation.keepers[0].submitted_for)}

    short, long = sizes(20), sizes(60)
    assert all(long[name] <= 1.5 * short[name] + 20 for name in short), (short, long)
