"""Plants at random: they can be drawn again, are as different as they should be, and no run stands still."""

import math
from dataclasses import replace

from benchmarks import plants as benchmark
from pipeline.simulate.cluster import SimulatedCluster
from pipeline.simulate.plant import Plant, PlantKind
from pipeline.simulate.plants import PlantVerdict, in_words, job_for_each_task, judge, plant_of, size_of
from pipeline.simulate.results import JobRecord, SimulationResult
from pipeline.simulate.simulation import simulate

MANY = [plant_of("many", number) for number in range(300)]


def test_a_seed_gives_the_same_plants_again():
    assert plant_of("a", 3) == plant_of("a", 3)
    assert plant_of("a", 3) != plant_of("a", 4) != plant_of("b", 4)


def test_they_are_drawn_over_the_whole_range():
    shards = sorted(plant.plan.num_shards for plant in MANY)
    assert shards[0] == 1
    assert shards[-1] > 240
    assert 10 <= shards[len(shards) // 2] <= 26  # the middle of 1 and 256 is 16
    assert {len(plant.partitions) > 1 for plant in MANY} == {True, False}
    assert {math.isfinite(plant.disturbed_every) for plant in MANY} == {True, False}
    assert max(plant.slurm.queue for plant in MANY) > 1000
    assert max(kind.startup for plant in MANY for kind in plant.kinds.values()) > 100


def test_what_jobs_ask_for_and_what_is_limited_differs_too():
    requests = [plant.kinds["update"].request for plant in MANY]
    assert {one.gpus for one in requests} >= {1, 2, 4}
    assert any(one.memory > 2**17 * one.gpus for one in requests), "more than its share of a node's"
    assert min(one.limit for one in requests) < 7200 < 50_000 < max(one.limit for one in requests)
    assert any(plant.limits.jobs for plant in MANY)
    assert any(plant.limits.submitted for plant in MANY)
    shared = [sum(len(part.nodes) for part in plant.partitions) - len(plant.nodes) for plant in MANY]
    assert any(number > 0 for number in shared), "partitions that overlap"
    assert "jobs run; " in in_words(next(p for p in MANY if p.limits.jobs and p.limits.submitted))


def test_workers_of_rollouts_measure_policies_where_their_jobs_ask_for_what_evaluations_do():
    evaluated = [plant for plant in MANY if plant.plan.evaluate_every]
    assert {plant.measures for plant in evaluated} == {True, False}
    assert not any(plant.measures for plant in MANY if plant not in evaluated)
    alike = [[(kind.request, kind.partitions) for kind in kinds_of(plant)] for plant in evaluated]
    assert [plant.measures for plant in evaluated] == [own == other for own, other in alike]
    assert not any(job_for_each_task(plant).measures for plant in MANY), "whoever does one task leaves"


def kinds_of(plant: Plant) -> list[PlantKind]:
    return [plant.kinds[job_kind] for job_kind in ("rollout", "evaluate")]


def test_every_job_has_a_place_on_an_empty_cluster():
    for plant in MANY:
        cluster = SimulatedCluster(plant.nodes, plant.partitions)
        assert all(cluster.could_start(kind.request, kind.partitions) for kind in plant.kinds.values())


def test_a_few_of_them_end_and_their_books_add_up():
    small = [n for n in range(60) if plant_of("few", n).plan.num_shards <= 12][:6]
    for number in small:
        found = simulate(plant_of("few", number))
        assert found.is_complete, in_words(plant_of("few", number))
        assert found.adds_up
        assert sum(job.tasks for job in found.jobs) >= plant_of("few", number).plan.iterations


def test_the_benchmark_says_now_and_then_what_it_has_found_so_far(capsys):
    good = PlantVerdict(7, SimulationResult(seconds=10.0), "never leave", 10.0)
    slow = replace(good, number=8, best_seconds=5.0, wrong=("takes 2.00 times as long as never leave",))
    job = JobRecord("1_0r0", "rollout", 1, 0.0, 1.0, dict.fromkeys(("startup", "busy"), 0.5), 1, None)
    found = [replace(one, result=replace(one.result, jobs=[job])) for one in [good] * 49 + [slow, good]]
    assert list(benchmark.told("a", found)) == found
    said = capsys.readouterr().out
    assert "plant 8: takes 2.00 times as long as never leave" in said
    assert "50 plants, 1 with something wrong" in said
    assert "worst 2.00, 1 over 1.3" in said


def test_of_plants_those_with_few_tasks_come_first_if_asked_for():
    sizes = [size_of(plant) for plant in MANY]
    small, large = MANY[sizes.index(min(sizes))], MANY[sizes.index(max(sizes))]
    assert small.plan.num_shards <= 2 < 200 < large.plan.num_shards


def test_a_verdict_says_which_simple_strategy_is_quickest():
    verdict = judge("verdict", 1)
    assert verdict.best in ("never leave", "a job for each task", "one worker a place")
    assert verdict.times == max(1.0, verdict.result.seconds / verdict.best_seconds)
