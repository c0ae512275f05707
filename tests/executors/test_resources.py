"""What jobs ask for: configuration, and what failures taught."""

import pytest

from pipeline.checks.settings import environment_warnings
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.decide.escalating import Escalation, bad_nodes, escalate
from pipeline.executors.slurm.launcher import broken_since
from pipeline.executors.slurm.resources import command_words, sbatch_options
from pipeline.run import journal
from pipeline.run.failures import NOT_BEGUN, Failure, FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from tests.support.scripted import imagined_run

TASK, OTHER = Task(1, Stage.ROLLOUT, 0), Task(1, Stage.ROLLOUT, 1)


def failed(kind: FailureKind, task: Task = TASK, node: str = "") -> Failure:
    return Failure(task, 1, kind, "", node=node)


def test_out_of_memory_asks_for_twice_as_much_up_to_a_bound():
    given = ResourcesConfig(mem="16G")
    asked = [
        sbatch_options(given, escalate([failed(FailureKind.MEMORY)] * times, []), None)["mem"]
        for times in (0, 1, 2, 9)
    ]
    assert asked == ["16G", "32768M", "65536M", "131072M"]


def test_a_timeout_asks_for_more_time_up_to_what_the_partition_allows():
    given = ResourcesConfig(time="4:00:00")
    escalation = escalate([failed(FailureKind.TIMEOUT)], [])
    assert sbatch_options(given, escalation, None)["time"] == "0-06:00:00"
    assert sbatch_options(given, escalation, 5 * 3600.0)["time"] == "0-05:00:00"
    # A configured time over the limit is not cut behind the user's back.
    assert sbatch_options(given, escalation, 3600.0)["time"] == "0-04:00:00"
    assert sbatch_options(given, Escalation(), 3600.0)["time"] == "4:00:00"


def test_one_task_that_failed_twice_counts_and_not_two_that_failed_once():
    assert escalate([failed(FailureKind.TIMEOUT), failed(FailureKind.TIMEOUT, OTHER)], []).time_factor == 1.5
    assert escalate([failed(FailureKind.TIMEOUT)] * 2, []).time_factor == 1.5**2


def test_a_node_that_failed_twice_is_excluded_with_those_of_the_user():
    everywhere = [failed(FailureKind.LOST, node="n7"), failed(FailureKind.LOST, OTHER, node="n7")]
    everywhere += [failed(FailureKind.LOST, node="n8"), failed(FailureKind.PREEMPTED, node="n9")] * 1
    everywhere += [failed(FailureKind.PREEMPTED, node="n9"), failed(FailureKind.KILLED, node="n6")] * 3
    assert bad_nodes(everywhere) == ("n7",)
    options = sbatch_options(ResourcesConfig(exclude=("n1",)), escalate([], everywhere), None)
    assert options["exclude"] == "n1,n7"


def test_nodes_that_failed_together_are_known_apart():
    """Of two jobs on two nodes each one node is common."""
    everywhere = [failed(FailureKind.LOST, node="n[1-2]"), failed(FailureKind.LOST, node="n[2-3]")]
    assert bad_nodes(everywhere) == ("n2",)


def test_a_broken_gpu_is_known_an_hour_later_and_in_another_iteration(tmp_path):
    events = tmp_path / "events.jsonl"
    for number, (kind, node) in enumerate([("device", "n1"), ("error", "n2"), ("device", "n[3-4]")]):
        journal.event(events, "failed", task="1/rollout/0", attempt=1, kind=kind, message="", node=node)
        moment = journal.read(events)[-1]["time"]
        assert len(list(broken_since(RunPaths(tmp_path), moment))) == (number != 1)
    found = list(broken_since(RunPaths(tmp_path), 0.0))
    assert [(failure.task, failure.node) for failure in found] == [(TASK, "n1"), (TASK, "n[3-4]")]
    assert bad_nodes(found) == ("n1", "n3", "n4")


@pytest.mark.parametrize("kind", sorted(NOT_BEGUN))
def test_what_could_not_begin_goes_to_another_node_and_waits_longer_each_time(kind):
    """From seconds to half an hour; other tasks of a stage do not wait with it."""
    failures = [failed(kind, node="n7")]
    assert escalate(failures, failures) == Escalation(exclude=("n7",), delay=2.0)
    assert [escalate(failures * times, []).delay for times in (0, 2, 3, 10, 11, 49)] == [
        *(0.0, 4.0, 8.0, 1024.0, 1800.0, 1800.0)
    ]


def test_what_the_user_left_open_is_left_to_the_cluster():
    options = sbatch_options(ResourcesConfig(), Escalation(), None)
    assert set(options) == {
        "time", "nodes", "ntasks-per-node", "cpus-per-task", "signal", "requeue",
    }  # fmt: skip


def test_options_of_the_users_own_win():
    given = ResourcesConfig(options={"mail-type": "FAIL", "exclusive": True, "signal": "B:USR2@300"})
    options = sbatch_options(given, Escalation(), None)
    assert (options["mail-type"], options["exclusive"], options["signal"]) == ("FAIL", True, "B:USR2@300")


def test_a_stage_takes_from_the_scheduler_what_it_does_not_say_itself():
    config = SlurmConfig(
        account="a1",
        container="apptainer exec x.sif",
        environment={"A": "1", "B": "2"},
        setup=("module load cuda",),
        python="/env/bin/python",
        reward=ResourcesConfig(account="a2", environment={"B": "3"}, setup=()),
    )
    rollout, reward, driver = (resources_of(config, s) for s in ("rollout", "reward", "driver"))
    assert (rollout.account, reward.account) == ("a1", "a2")
    assert (rollout.setup, reward.setup) == (("module load cuda",), ())
    assert reward.environment == {"A": "1", "B": "3"}
    assert rollout.python == "/env/bin/python"
    # sbatch is not in a training image.
    assert (rollout.container, driver.container) == ("apptainer exec x.sif", None)


def test_several_ranks_start_under_srun_with_counts_of_their_own():
    given = ResourcesConfig(
        nodes=2, ntasks_per_node=4, cpus_per_task=8, python="/py", container="c exec 'a b'"
    )
    words = command_words(given, "/run/t.json")
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8"} <= set(words)
    assert {"--kill-on-bad-exit=1", "--wait=0"} <= set(words)
    assert words[-9:] == ["c", "exec", "a b", "/py", "-P", "-m", "slurm.element", "/run/t.json", "--rank"]
    assert command_words(ResourcesConfig(python="/py"), "/run/t.json")[0] == "/py"


@pytest.mark.parametrize("text", ["rm", "rm,gpu"])
def test_partitions_are_a_list_or_text(text):
    from pydantic import TypeAdapter

    given = TypeAdapter(ResourcesConfig).validate_python({"partition": text})
    assert given.partition == tuple(text.split(","))


def test_a_variable_that_looks_like_a_secret_is_warned_of():
    """Its value would lie in config.yaml and in every batch script, which others may read."""
    rollout = {"environment": {"HF_TOKEN": "x", "LANG": "C"}}
    run = imagined_run(scheduler={"environment": {"WANDB_API_KEY": "x"}, "rollout": rollout})
    found = [line.split(": ")[1] for line in environment_warnings(run.config)]
    assert found == ["scheduler.environment.WANDB_API_KEY", "scheduler.rollout.environment.HF_TOKEN"]
