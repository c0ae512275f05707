"""The simulator has no rules of its own: change one of the program's, and a simulated run changes too."""

import functools

import pytest

from pipeline.orchestrate import expectations, staffing
from pipeline.orchestrate.reconcile import Actions
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage
from pipeline.simulate import passes
from pipeline.simulate.simulation import simulate
from pipeline.workers import choosing, estimates, staying
from tests.support.plants import plant_with

PLANT = plant_with(3, shards=4, spread=0.5, every=2, state_seconds=5.0, failures=0.1, disturbed_every=100.0)


@functools.cache
def as_it_is() -> tuple[object, ...]:
    return outcome()


def outcome() -> tuple[object, ...]:
    """Return what came of a run: when each policy was there, and what each job held."""
    found = simulate(PLANT, until=20_000)
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
    "staffing: who starts early": (staffing, "_early", lambda real: always(None)),
    "staffing: how many of each kind": (
        staffing,
        "targets_by_group",
        lambda real: lambda works, room: dict.fromkeys(works, 1),
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
    "choosing: what is free": (choosing, "is_free", lambda real: lambda a, most, is_given=False: not a),
    "staying: how long one waits": (staying, "bound", times(0.1)),
    "staying: how long for others": (staying, "allowance", times(0.0)),
    "estimates: when an input comes": (estimates, "expected_ready", times(1.5)),
    "estimates: how long a start takes": (estimates, "startup", lambda real: always(None)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_changed_rule_changes_the_simulation(rule, monkeypatch):
    where, name, change = RULES[rule]
    expected = as_it_is()
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert outcome() != expected
