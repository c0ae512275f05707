"""What orders the tasks, on a real Slurm, with tasks that do nothing: quick, and disturbed at will."""

import re

import pytest

from benchmarks.noop import make_record
from benchmarks.slurm_scale import timed_pass
from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.executors.slurm.queue import cancel_all
from pipeline.run.commits import publish
from pipeline.run.control import begin_invocation
from pipeline.run.directory import create_run, load_run
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.cluster.scenario import policy_of, room_on
from tests.support import ALONE, light_training, tiny
from tests.support.tables import ON_CLUSTER


@ON_CLUSTER
def test_a_run_is_submitted_while_nodes_are_drained_and_starts_when_they_are_back(
    cluster, make_run, tmp_path
):
    """sbatch --test-only says of such a partition that no job could ever run there."""
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=1")
    drained = cluster.call("scontrol", "update", "nodename=reward0", "state=drain", "reason=maintenance")
    assert drained.returncode == 0, drained.stderr
    try:
        impossible = run.command(
            "validate", "--no-probe", *run.words, "scheduler.reward.constraint=no-such-feature"
        )
        assert impossible.returncode == 2
        assert "scheduler.reward=reward: sbatch failed: " in impossible.stderr
        assert "Invalid feature specification" in impossible.stderr
        told = run.command("validate", "--no-probe", *run.words)
        assert told.returncode == 0, told.stderr
        assert "scheduler.reward.partition=reward: its jobs wait for nodes" in told.stdout + told.stderr
        assert "reward0 (sinfo -R)" in told.stdout + told.stderr
        assert not cluster.call("squeue", "-h").stdout, "what was asked with is cancelled"
        run.submit()
        run.wait_for(lambda: run.has_committed(1, "rollout", 1), "the first stage")
    finally:
        cluster.call("scontrol", "update", "nodename=reward0", "state=resume")
    run.wait_until_complete()


@ON_CLUSTER
def test_rollouts_start_while_the_update_s_job_writes_the_state_and_the_next_update_when_it_has_ended(
    cluster, make_run, complete_run, tmp_path
):
    """With this variable a state is written only once the next iteration's rollouts have begun to commit."""
    words = [*ALONE, f"scheduler.update.environment={{{light_training.STATE_WAITS}: '1'}}"]
    words += [f"data.heldout={make_run.inputs / 'prompts.jsonl'}", "evaluate.every=1"]
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", *words)
    run.submit()
    run.wait_until_complete()
    assert run.policy() == policy_of(complete_run)
    assert run.events("state_lost") == []
    state = run.record(1, "state")
    assert run.record(2, "rollout")["started"] < state["ended"] < run.record(2, "update")["started"]


@ON_CLUSTER
def test_an_update_that_ends_while_it_writes_the_state_does_not_train_again(
    cluster, make_run, complete_run, tmp_path
):
    """Nothing waits for the last one's, and the run is complete; that it was lost is said."""
    words = [*ALONE, f"scheduler.update.environment={{{light_training.STATE_SECONDS}: '600'}}"]
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", *words)
    run.submit()
    first = run.wait_for(lambda: writing(run, 1), "an update's job that writes the state")
    lines = shown(run, "status")
    assert f"the trainer's state of iteration 1 is being written (job {first.id} on {first.node})" in lines
    examined = " ".join(run.command("doctor", run.root, "--no-probe").stdout.split())
    assert f"that of iteration 1 is being written (job {first.id} on {first.node})" in examined, examined
    run.wait_for(lambda: run.has_committed(2, "rollout"), "the next rollout, while the state is written")
    assert run.events("state_lost") == []
    cluster.call("scancel", first.id)
    second = run.wait_for(lambda: writing(run, 2), "the last update's job that writes the state")
    examined = " ".join(run.command("doctor", run.root, "--no-probe").stdout.split())
    assert f"that of iteration 2 is being written (job {second.id} on {second.node})" in examined
    cluster.call("scancel", second.id)
    run.wait_until_complete()
    assert run.policy() == policy_of(complete_run)
    assert [event["iteration"] for event in run.events("state_lost")] == [1, 2]
    learnt = [
        log.count("iteration 1 is learned again") for log in run.logs("00002-update/attempt-*/*").values()
    ]
    assert sum(learnt) == 1
    lost = "the trainer's state of iteration 2 was lost; no update follows that needs it"
    assert lost in shown(run, "status")


def writing(run, iteration):
    """The update's job, if it runs and has committed its policy."""
    found = [job for job in run.jobs("RUNNING") if (job.stage, job.iteration) == ("update", iteration)]
    return found[0] if found and run.has_committed(iteration, "update") else None


def shown(run, *command) -> list[str]:
    return run.command(*command, run.root).stdout.splitlines()


@ON_CLUSTER
def test_of_two_people_who_submit_at_once_one_is_refused(cluster, make_run, tmp_path):
    """With other settings each; what the second typed leaves no trace in the first one's run."""
    run = make_run(cluster, tmp_path / "run", "iterations=1")
    typed = [run.begin("submit", *run.words, f"seed={seed}") for seed in (5, 6)]
    said = [call.communicate(timeout=120)[1] for call in typed]
    assert sorted(call.returncode for call in typed) == [0, 2], said
    winner = [call.returncode for call in typed].index(0)
    # The later one finds the winner's run, or the winner at it.
    assert re.search("already holds a run|another call is making a run", said[1 - winner])
    run.wait_until_complete()
    assert load_run(run.root).config.seed == 5 + winner
    names = [job.name for job in run.jobs_ever()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("what", ["submitted", "reconciled"])
def test_slurms_commands_do_not_grow_with_the_shards(counted_calls, what):
    few, many = counted_calls[4][what], counted_calls[40][what]
    assert few == many
    assert many["squeue"] <= 2  # before the lease is taken, and under it where no driver job waits yet
    assert many["sbatch"] <= 6


@pytest.fixture(scope="module")
def counted_calls(cluster, inputs, tmp_path_factory):
    """Shards -> pass -> commands of a driver, on partitions that start nothing."""
    rows = [{"id": f"q{i}", "prompt": f"say {i}"} for i in range(40)]
    prompts = tiny.write_jsonl(tmp_path_factory.mktemp("many") / "prompts.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])
        return {
            shards: count(inputs, prompts, tmp_path_factory.mktemp("count"), shards) for shards in (4, 40)
        }


def count(inputs, prompts, folder, shards) -> dict:
    words = tiny.overrides(
        inputs,
        folder / "run",
        "scheduler=devcluster",
        # Nothing may start: what is counted are two passes over a queue that stands still.
        *(f"scheduler.{s}.options={{begin: now+1hour}}" for s in ("rollout", "reward", "update", "driver")),
        f"data.prompts={prompts}",
        f"data.prompts_per_iteration={shards}",
        f"rollout.num_shards={shards}",
        "update.minibatches=1",
    )
    run = create_run(resolve(compose(words)))
    publish(run.paths, make_record(PREPARE))
    begin_invocation(run.paths)
    counts = {"submitted": timed_pass(run)[2]}
    for shard in range(shards):
        publish(run.paths, make_record(Task(1, Stage.ROLLOUT, shard)))
    counts["reconciled"] = timed_pass(run)[2]
    cancel_all(run)
    return counts
