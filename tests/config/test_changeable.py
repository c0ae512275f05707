"""Which settings may change while a run goes on, and that a change can be made and taken back."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.config_page import dataclasses_of
from pipeline.config.changeable import (
    CHANGEABLE,
    FROZEN,
    FROZEN_CLASSES,
    asked_for,
    differences,
    effect_of,
    of_worker,
    refusals,
)
from pipeline.config.compose import to_mapping
from pipeline.config.resolve import configure
from pipeline.config.schema import Config
from pipeline.run.changes import SettingsChange, with_changes, without_changes
from tests.support.changed import CHANGES, REFUSED
from tests.support.processes import config_of
from tests.support.tables import sample


def unsaid(owner: type, is_frozen: bool = False) -> Iterator[str]:
    """Fields of which nothing says whether they may change, or of which both is said."""
    is_frozen = (is_frozen or owner in FROZEN_CLASSES) and owner not in CHANGEABLE
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        nested = [one for one, _ in dataclasses_of(hints[field.name])]
        stays = any(field.name in FROZEN.get(one, ()) for one in owner.__mro__)
        changes = effect_of(owner, field.name) is not None
        if (stays and changes) or not (nested or is_frozen or stays or changes):
            yield f"{owner.__name__}.{field.name}"
        for one in nested:
            yield from unsaid(one, is_frozen or stays)


def test_of_every_key_it_is_said_whether_it_may_change():
    assert list(unsaid(Config)) == []


def test_the_tables_name_no_key_that_there_is_not():
    tables = [*((owner, names) for owner, (_, names) in CHANGEABLE.items()), *FROZEN.items()]
    for owner, names in tables:
        assert set(names) <= {field.name for field in dataclasses.fields(owner)}, owner


@pytest.fixture
def begun(request, inputs: Path, tmp_path: Path) -> Config:
    return config_of(inputs, tmp_path / "run", f"scheduler={request.param}")


@pytest.mark.parametrize(("begun", "word"), sample(CHANGES, 1 / 3), indirect=["begun"])
def test_a_setting_that_may_change_is_changed_and_taken_back(begun, word):
    changed = configure([word], None, to_mapping(begun))
    found = differences(begun, changed)
    key = word.partition("=")[0].lstrip("+")
    assert [one.key for one in found if one.key.startswith(key) or key.startswith(one.key)] == [
        one.key for one in found
    ]
    assert found
    assert list(refusals(begun, changed)) == []
    changes = (SettingsChange(0.0, "ada", 1, found),)
    assert with_changes(begun, changes) == changed
    assert without_changes(changed, changes) == begun


@pytest.mark.parametrize(("begun", "word"), sample(REFUSED, 1 / 3), indirect=["begun"])
def test_a_setting_that_results_depend_on_is_refused(begun, word):
    changed = configure([word], None, to_mapping(begun))
    (refused,) = refusals(begun, changed)
    assert refused.key == word.partition("=")[0].lstrip("+")
    assert "while the run goes on" in str(refused)


@pytest.mark.parametrize("begun", ["slurm"], indirect=True)
@pytest.mark.parametrize(
    "word", ["scheduler.update.gpus_per_node=null", "scheduler.options.clusters=other", "scheduler=local"]
)
def test_a_stage_keeps_its_kind_of_device_and_a_run_its_scheduler(begun, word):
    changed = configure([word], None, to_mapping(begun))
    assert list(refusals(begun, changed))


@pytest.mark.parametrize("begun", ["slurm"], indirect=True)
def test_options_that_come_and_go_are_taken_back_in_turn(begun):
    changes, config = [], begun
    for word in (
        "+scheduler.update.options={comment: a}",
        "scheduler.update.options.comment=b",
        "scheduler.update.options={}",
    ):
        after = configure([word], None, to_mapping(config))
        changes.append(SettingsChange(0.0, "ada", 1, differences(config, after)))
        config = after
    assert with_changes(begun, changes) == config
    assert without_changes(config, changes) == begun
    assert without_changes(config, changes[1:]).scheduler.update.options == {"comment": "a"}


@pytest.mark.parametrize("begun", ["slurm"], indirect=True)
def test_workers_mind_what_they_work_with_and_jobs_what_they_are_submitted_with(begun):
    def after(word: str) -> Config:
        return configure([word], None, to_mapping(begun))

    for word, matters in {
        "scheduler.update.time=8:00:00": (True, True),
        "scheduler.update.linger=7": (True, False),
        "rollout.vllm.kv_cache_gib=2.0": (True, False),
        "scheduler.rollout.time=8:00:00": (False, False),
        "update.keep_last=5": (False, False),
    }.items():
        changed = after(word)
        of_workers = of_worker(begun, "update") != of_worker(changed, "update")
        of_jobs = asked_for(begun.slurm, "update") != asked_for(changed.slurm, "update")
        assert (of_workers, of_jobs) == matters, word
