"""Options that sites ask of every job, and the one cluster of several that a run's jobs go to."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import SLURM_STAGES, resources_of
from pipeline.config.schema import Config
from pipeline.executors.slurm.resources import Escalation, sbatch_options


def config(*more: str) -> Config:
    return compose(
        [
            *("name=r", "run_dir=/runs/r", "model.policy=/policy", "data.prompts=/prompts"),
            *("data.prompts_per_iteration=8", "reward=rule", "reward.components.rule.function=a:b"),
            *("scheduler=slurm", *more),
        ]
    )


def asked(given: Config, job_kind: str) -> dict[str, object]:
    return sbatch_options(resources_of(given.slurm, job_kind), Escalation(), None)


def test_options_of_every_job_come_below_those_of_a_stage():
    given = config(
        "scheduler.options={export: NONE, exclusive: true, comment: all}",
        "scheduler.driver.options={exclusive: false}",
        "scheduler.rollout.options={comment: mine}",
    )
    assert list(contradictions(given)) == []
    assert {asked(given, kind)["export"] for kind in SLURM_STAGES} == {"NONE"}
    assert (asked(given, "rollout")["comment"], asked(given, "update")["comment"]) == ("mine", "all")
    assert (asked(given, "driver")["exclusive"], asked(given, "update")["exclusive"]) == (False, True)


def test_the_environment_of_jobs_is_the_users_to_choose():
    """It was refused once, as set by slurm-ppo, which sets none."""
    for value in ("NONE", "NIL", "ALL", "HOME,PATH"):
        given = config(f"scheduler.rollout.options={{export: '{value}'}}")
        assert list(contradictions(given)) == []
        assert asked(given, "rollout")["export"] == value


def test_one_cluster_of_several_is_the_runs_and_no_option_of_a_job():
    given = config("scheduler.options={clusters: far}")
    assert list(contradictions(given)) == []
    assert given.slurm.cluster == "far"
    assert not any("clusters" in asked(given, kind) for kind in SLURM_STAGES)


ONE = "all jobs of a run are on one cluster"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("options={clusters: 'a,b'}", f"options.clusters=a,b: {ONE}; give the name of one"),
        ("options={clusters: all}", f"options.clusters=all: {ONE}; give the name of one"),
        (
            "update.options={clusters: far}",
            f"update.options.clusters=far: {ONE}; give scheduler.options.clusters=far instead",
        ),
        ("options={array: 1-3}", "options.array=1-3: is set by slurm-ppo itself; leave it out"),
        ("options={job-name: x}", "options.job-name=x: is set by slurm-ppo itself; leave it out"),
    ],
)
def test_what_cannot_be_says_why_and_the_way_out(words, said):
    (issue,) = contradictions(config(f"scheduler.{words}"))
    assert str(issue).startswith(f"scheduler.{said}")
