"""What a status says of tasks that compute less at once, as tries ran out of GPU memory."""

from dataclasses import replace

import pytest

from benchmarks.noop import make_record
from pipeline.metrics.row import stage_metrics
from pipeline.run.endings import Ending, Endings, note_endings
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.status.budgets import SmallerBudget, smaller_budgets
from pipeline.status.snapshot import read_status
from pipeline.status.text import About, describe, said, to_json
from tests.support.reportrun import make_run
from tests.support.scripted import imagined_run
from tests.support.toyworld import Luck, make_world

CONFIG, PLAN = (one := imagined_run(scheduler={})).config, one.plan
ROLLOUTS = [Task(2, Stage.ROLLOUT, shard) for shard in range(PLAN.num_shards)]


def ended(task: Task, halvings: int = 0, kind: FailureKind = FailureKind.DEVICE_MEMORY) -> Ending:
    return Ending(f"1-{task.shard}.{halvings}", task_key(task), 1, kind=kind, halvings=halvings)


def endings_of(*endings: Ending) -> Endings:
    return Endings({ending.attempt: ending for ending in endings})


def test_budgets_of_done_tasks_are_their_records_and_of_others_what_their_next_try_has():
    records = {ROLLOUTS[0]: replace(make_record(ROLLOUTS[0]), halvings=1)}
    endings = endings_of(ended(ROLLOUTS[0], 1), ended(ROLLOUTS[1]), ended(ROLLOUTS[1], 1))
    (found,) = smaller_budgets(CONFIG, ROLLOUTS, records, endings)
    whole = CONFIG.rollout.tokens_per_batch
    assert found == SmallerBudget(
        *(2, "rollout", 2, len(ROLLOUTS), 2),
        f"rollout of iteration 2: 2 of {len(ROLLOUTS)} tasks compute with 1/4 of the batch budget "
        f"(rollout.tokens_per_batch={whole // 4} instead of {whole}), as a try ran out of GPU memory",
    )


def test_a_task_that_is_alone_has_no_count():
    task = Task(1, Stage.EVALUATE)
    (found,) = smaller_budgets(CONFIG, [task], {}, endings_of(ended(task)))
    assert found.words.startswith("evaluate of iteration 1: half of the batch budget (")


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.DEVICE_MEMORY])
def test_after_other_failures_budgets_are_whole(kind):
    assert not list(smaller_budgets(CONFIG, ROLLOUTS, {}, endings_of(ended(ROLLOUTS[0], kind=kind))))


@pytest.mark.parametrize("is_on_slurm", [True, False])
def test_status_says_so_in_a_line_and_in_its_json(tmp_path, monkeypatch, is_on_slurm):
    place = tmp_path / "run"
    run = make_world(place, monkeypatch, 1, Luck()).run if is_on_slurm else make_run(place)
    assert read_status(run).smaller_budgets == ()
    note_endings(run.paths, [ended(PREPARE)])
    status = read_status(run)
    (words,) = [one.text for one in said(status) if one.about is About.BUDGET]
    assert words.endswith("as a try ran out of GPU memory")
    assert words in " ".join(describe(status).split())
    (found,) = to_json(status)["smaller_budgets"]
    assert (found["stage"], found["halvings"]) == ("prepare", 1)


def test_a_row_says_what_went_through_models_and_how_much_of_it_was_padding():
    counts = {"model_tokens": 300.0, "model_positions": 400.0}
    first, second = (make_record(task) for task in ROLLOUTS[:2])
    records = [first, replace(second, metrics=second.metrics | counts)]
    wall = max(one.ended for one in records) - min(one.started for one in records)
    row = stage_metrics("rollout", records)
    assert row["padding/rollout"] == 0.25
    assert row["model_tokens_per_second/rollout"] == pytest.approx(300.0 / wall)
    assert "padding/rollout" not in stage_metrics("rollout", records[:1]), "an engine that does not count"


def test_a_row_has_the_largest_number_of_halvings_where_there_was_one():
    records = [make_record(task) for task in ROLLOUTS[:2]]
    assert "halvings/rollout" not in stage_metrics("rollout", records)
    records[1] = replace(records[1], halvings=2)
    assert stage_metrics("rollout", records)["halvings/rollout"] == 2
