"""Options that sites ask of every job, and the one cluster of several that a run's jobs go to."""

import shlex
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import SLURM_STAGES, resources_of
from pipeline.config.schema import Config
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.resources import sbatch_options
from slurm.submission import Array, Refused, render
from tests.support.tables import sample


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


@pytest.mark.parametrize("name", ["far", "FAR"])
def test_one_cluster_of_several_is_the_runs_and_no_option_of_a_job(name):
    """Slurm writes names of clusters in small letters, and jobs compare with what it says."""
    given = config(f"scheduler.options={{clusters: {name}}}")
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
        *(
            (f"options={{clusters: {name}}}", f"options.clusters={shown}: {ONE}; give the name of one")
            for name, shown in [
                ("''", ""),
                ("ALL", "ALL"),
                ("true", "True"),
                ("-h", "-h"),
                ("'far;id'", "far;id"),
            ]
        ),
        *(
            (
                f"{of}options={{cluster: far}}",
                f"{of}options.cluster=far: give scheduler.options.clusters=NAME",
            )
            for of in ("", "update.")
        ),
        ("options={no-requeue: true}", "options.no-requeue=True: give scheduler.STAGE.requeue=false instead"),
        *(
            (f"options={{{name}: x}}", f"options.{name}=x: is set by slurm-ppo itself; leave it out")
            for name in ("arr", "depend", "hol", "job", "outp", "test", "uid", "a")
        ),
        ("options={array: 1-3}", "options.array=1-3: is set by slurm-ppo itself; leave it out"),
        ("options={job-name: x}", "options.job-name=x: is set by slurm-ppo itself; leave it out"),
    ],
)
def test_what_cannot_be_says_why_and_the_way_out(words, said):
    (issue,) = contradictions(config(f"scheduler.{words}"))
    assert str(issue).startswith(f"scheduler.{said}")


OPTION = "write text of one line or a number or true or false"
DAYS = "storage.purge_days: Input should be"
MISTAKEN = {
    "options=NONE": "scheduler.options: holds entries that you name; write scheduler.options.NAME=...",
    "options=[export]": "scheduler.options: holds entries that you name",
    "options=null": "scheduler.options: holds entries that you name",
    "options={export: null}": f"scheduler.options.export: {OPTION} (got None)",
    "options={export: [A,B]}": f"scheduler.options.export: {OPTION} (got ['A', 'B'])",
    "options={comment: 1.5}": f"scheduler.options.comment: {OPTION} (got 1.5)",
    "options={comment: {a: b}}": f"scheduler.options.comment: {OPTION}",
    "options={clusters: null}": f"scheduler.options.clusters: {OPTION}",
    "options={Export: NONE}": "scheduler.options.Export: write the option's long name, in lower-case letters",
    "options={--export: NONE}": "scheduler.options.--export: write the option's long name",
    "setup=module load cuda": "scheduler.setup: write a list, such as scheduler.setup=[a,b]",
    "setup={a: b}": "scheduler.setup: write a list",
    "setup=[1]": "scheduler.setup.0: Input should be a valid string (got 1)",
    "setup=['']": "scheduler.setup.0: String should have at least 1 character",
    "rollout.linger=x": "scheduler.rollout.linger: write a number or auto (got 'x')",
    "rollout.linger=-1": "scheduler.rollout.linger: write a number from 0 on or auto (got -1)",
}
DAYS_MISTAKEN = ["0", "-1", "1.5", "'30'", "true", "1e9", "30 days", "inf", "36501", "9" * 400, "[30]", "''"]


@pytest.mark.parametrize("words", sample(list(MISTAKEN), 1 / 4))
def test_a_mistaken_value_is_one_line_that_says_what_is_wanted(words):
    with pytest.raises(ConfigError) as refused:
        config(f"scheduler.{words}")
    (line,) = str(refused.value).splitlines()
    assert line.startswith(MISTAKEN[words])


def test_days_until_a_purge_are_a_number_of_days():
    for value in sample(DAYS_MISTAKEN, 1 / 4):
        with pytest.raises(ConfigError, match=rf"^{DAYS}[^\n]*$"):
            config(f"storage.purge_days={value}")
    assert config("storage.purge_days=36500").storage.purge_days == 36500


@pytest.mark.parametrize(
    "value", [*("", "it's", "$(false)", "`false`", "#", "%j", "; false", "\t"), True, 9**99]
)
def test_whatever_an_option_holds_is_one_word_of_its_line(value):
    """Nothing of it is run, and none begins a line of its own."""
    array = Array("name", [0], ["true"], "/dev/null", Path("/"), {"comment": value})
    (line,) = (one for one in render(array).splitlines() if "comment" in one)
    shown = shlex.split(line.removeprefix("#SBATCH "))
    assert shown == (["--comment"] if value is True else [f"--comment={value}"])


@pytest.mark.parametrize("value", ["a\\b", "a\nb"])
def test_what_no_line_of_sbatch_can_hold_is_refused(value):
    with pytest.raises(Refused, match="comment holds a line break or a backslash"):
        render(Array("name", [0], ["true"], "/dev/null", Path("/"), {"comment": value}))
