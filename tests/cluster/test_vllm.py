"""vLLM: an experiment on this machine, and its rollout as a job of a real Slurm."""

import pytest

from tests.cluster.scenario import kill_job, read_lines, read_record
from tests.support import light, tiny
from tests.support.tables import LONG, ON_CLUSTER

EXPERIMENT = [
    "experiment=quickstart_vllm",
    *("rollout.num_shards=1", "data.heldout=null", "evaluate.every=0", "seed=0"),
    # with models of a few thousand weights instead of the demo's
    *("model.context_length=64", "data.max_prompt_tokens=null"),
]
"""One shard: to start an engine is nearly all that these tests spend."""


@pytest.fixture(scope="module")
def local(models, slurm_ppo, tmp_path_factory):
    """The experiment on the local scheduler: vLLM in rollout and reward, in processes that stay."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    done = slurm_ppo("run", *tiny.overrides(models, run_dir), *EXPERIMENT, "iterations=2")
    assert done.returncode == 0, done.stderr
    assert "iteration 2/2" in done.stderr
    return run_dir


@LONG
def test_iterations_on_this_machine_in_one_process_for_each_stage(local):
    """The second policy is in the engine, in place of the first."""
    for stage in ("rollout", "reward"):
        logs = [path.read_text() for path in sorted((local / "logs").rglob(f"*-{stage}/*/*.log"))]
        assert all("committed" in log.splitlines()[-1] for log in logs)
        assert not any("Traceback" in log for log in logs)
        first, second = (read_record(local, iteration, stage) for iteration in (1, 2))
        assert first["pid"] == second["pid"]
    rows = read_lines(local / "metrics.jsonl")
    how = {name: value for name, value in rows[-1].items() if name.startswith("engine/")}
    assert how == {
        f"engine/{name}/{role}": value
        for role in ("generator", "scorer")
        for name, value in (("model_runner", 1), ("async_scheduling", 0), ("own_process", 0))
    }, "as vLLM does it on CPUs"
    gaps = [row["mismatch/max"] for row in rows]
    assert max(gaps) < 1e-4, "the trainer computes the same log-probabilities with each policy"
    assert not list((local / "logs").rglob("attempt-2")), "nothing was tried twice"
    assert list((local / "cache" / "compiled").iterdir()), "what starting it needs is kept"


@ON_CLUSTER
def test_a_rollout_as_a_job_that_is_killed(cluster, make_real_run, local, tmp_path):
    """Another makes the bytes that this machine alone makes. What comes after it is light."""
    rest = [word for word in light.WORDS if not word.startswith("rollout.")]
    run = make_real_run(cluster, tmp_path / "run", *EXPERIMENT, "iterations=1", *rest)
    run.submit()
    job = run.wait_for_job("rollout")
    run.wait_for(lambda: kill_job(job), f"processes of {job}", 30)
    run.wait_until_complete()
    assert [event["task"] for event in run.events("failed")] == ["1/rollout/0"]
    (mine,), (wanted,) = (read_record(root, 1, "rollout")["outputs"] for root in (run.root, local))
    assert (mine["xxh3_128"], mine["bytes"]) == (wanted["xxh3_128"], wanted["bytes"])
