"""The simulator has no rules of its own: change one of the program's, and both its passes and a simulated run
change."""

import functools

import pytest

from pipeline.decide import choosing, estimates, expectations, staffing, staying
from pipeline.decide import passages as inputs
from pipeline.decide.reconcile import Actions
from pipeline.executors.slurm import crew as slurm_expectations
from pipeline.executors.slurm import launcher
from pipeline.orchestrate import driver, jobs
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage
from pipeline.simulate import keeper, knowledge, looks, passes
from pipeline.simulate.plant import Plant
from pipeline.simulate.simulation import simulate
from pipeline.workers import looking
from stages.workers import measuring, pulling, waiting
from tests.support.plants import plant_with
from tests.support.toyworld import Luck, make_world

PLANT = plant_with(3, shards=4, spread=0.5, every=2, state_seconds=5.0, failures=0.1, disturbed_every=100.0)


@functools.cache
def as_it_is() -> tuple[object, ...]:
    return outcome()


def outcome(plant: Plant = PLANT) -> tuple[object, ...]:
    """Return what came of a run: when each policy was there, and what each job held."""
    found = simulate(plant, until=20_000)
    return found.iterations, found.seconds, [(job.name, job.held) for job in found.jobs]


def always(value):
    return lambda *arguments, **named: value


def times(number: float):
    def change(real):
        def changed(*arguments, **named):
            found = real(*arguments, **named)
            return None if found is None else found * number

        return changed

    return change


RULES = {
    "plan: what a reward waits for": (
        Plan,
        "inputs",
        lambda real: lambda plan, task: (PREPARE,) if task.stage is Stage.REWARD else real(plan, task),
    ),
    "plan: what is evaluated": (Plan, "evaluations", lambda real: always(())),
    "reconcile: what is due": (passes, "reconcile", lambda real: always(Actions())),
    "crew: who holds a task": (passes, "held_tasks", lambda real: always({})),
    "crew: which claims failed": (passes, "failed_claims", lambda real: always([])),
    "staffing: who makes place": (
        staffing,
        "make_places",
        lambda real: lambda s, m, d: ((), real(s, m, d)[1]),
    ),
    "staffing: who starts early": (staffing, "_early", lambda real: always(())),
    "cancelling: who leaves the queue": (staffing, "elements_to_cancel", lambda real: always(())),
    "staffing: how many of each kind": (
        staffing,
        "targets_by_group",
        lambda real: lambda works, room, slots: dict.fromkeys(works, 1),
    ),
    "staffing: who is worth a place": (
        staffing,
        "worthwhile",
        lambda real: lambda works, most: dict.fromkeys(most, 1),
    ),
    "expectations: what a pass expects": (
        expectations,
        "_estimate",
        lambda real: always(staffing.Estimate()),
    ),
    "looking: how old an answer may be": (looking, "allowed_age", lambda real: always(120.0)),
    "looking: how long one rests before asking": (looks, "resting", lambda real: always(60.0)),
    "elements: how many may be submitted": (keeper, "free_elements", lambda real: always(1)),
    "choosing: what is free": (choosing, "is_free", lambda real: lambda a, most, is_given=False: not a),
    "staying: how long one waits": (staying, "bound", times(0.1)),
    "staying: how long for others": (staying, "allowance", times(0.0)),
    "passages: when an input comes": (inputs, "expected_ready", times(1.5)),
    "estimates: how long a start takes": (estimates, "startup", lambda real: always(None)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_changed_rule_changes_the_simulation(rule, monkeypatch):
    where, name, change = RULES[rule]
    expected = as_it_is()
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert outcome() != expected


MEASURING = plant_with(8, every=2, startup=60.0, measures=True)
BESIDES = {
    "choosing: whether one measures": (choosing, "has_time_to_measure", lambda real: always(False)),
    "measuring: who stays for the last": (knowledge, "stays_for_last", lambda real: always(False)),
    "staffing: whether anybody measures": (staffing, "are_measuring", lambda real: always(False)),
    "staffing: for what nobody is submitted": (
        staffing,
        "measured_besides",
        lambda real: always(frozenset()),
    ),
}
"""Rules of what workers of rollouts do besides."""


@pytest.mark.parametrize("rule", BESIDES)
def test_a_changed_rule_of_what_is_done_besides_changes_the_simulation(rule, monkeypatch):
    where, name, change = BESIDES[rule]
    expected = outcome(MEASURING)
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert outcome(MEASURING) != expected


TOLD = {
    "plan: what a reward waits for": (Plan, "inputs"),
    "reconcile: what is due": (driver, "reconcile"),
    "crew: which claims failed": (jobs, "failed_claims"),
    "staffing: who starts early": (staffing, "_early"),
}
"""Rules that show on a toy without nodes, on which tasks take no time, and where the program finds them."""


def test_what_decides_is_the_same():
    assert passes.staff is jobs.staff
    assert passes.held_tasks is jobs.held_tasks
    assert passes.estimates_of is slurm_expectations.estimates_of
    assert knowledge.staying is waiting.staying
    assert knowledge.choosing is pulling.choosing is measuring.choosing
    assert knowledge.stays_for_last is measuring.stays_for_last
    assert keeper.free_elements is launcher.free_elements
    assert keeper.most_elements is launcher.most_elements


def told(folder, monkeypatch) -> list[str]:
    """Return what happens on the toy Slurm with the program's own passes, until it ends or for a while."""
    world = make_world(folder, monkeypatch, 5, Luck(mishaps=2))
    try:
        world.submit()
        for _ in range(150):
            if world.outcome is not None or not world.happen():
                break
    except AssertionError as error:  # a run that stands still, or fails
        world.story.append(str(error)[:80])
    return [line.replace(world.run.identity.id, "RUN") for line in world.story]


@pytest.mark.parametrize("rule", TOLD)
def test_a_changed_rule_changes_what_passes_do(rule, monkeypatch, tmp_path, clock):
    (where, name), (_, _, change) = TOLD[rule], RULES[rule]
    with monkeypatch.context() as before:
        expected = told(tmp_path / "run", before)
    (tmp_path / "run").rename(tmp_path / "before")
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert told(tmp_path / "run", monkeypatch) != expected


def test_without_a_change_passes_do_the_same(monkeypatch, tmp_path, clock):
    with monkeypatch.context() as before:
        expected = told(tmp_path / "run", before)
    (tmp_path / "run").rename(tmp_path / "before")
    assert told(tmp_path / "run", monkeypatch) == expected
