"""vLLM: an experiment on this machine, and its rollout as a job of a real Slurm."""

import pytest

from tests.cluster.scenario import kill_job, read_record
from tests.support import light, tiny

EXPERIMENT = [
    "experiment=quickstart_vllm",
    *("iterations=1", "rollout.num_shards=1", "data.heldout=null", "evaluate.every=0", "seed=0"),
    # with models of a few thousand weights instead of the demo's
    *("model.context_length=64", "data.max_prompt_tokens=null"),
]
"""One iteration in one shard: each task starts an engine anew, which is nearly all that these tests spend."""


@pytest.fixture(scope="module")
def local(models, slurm_ppo, tmp_path_factory):
    """The experiment on the local scheduler: vLLM in rollout and reward."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    done = slurm_ppo("run", *tiny.overrides(models, run_dir), *EXPERIMENT)
    assert done.returncode == 0, done.stderr
    assert "iteration 1/1" in done.stderr
    return run_dir


def test_an_iteration_on_this_machine(local):
    for stage in ("rollout", "reward"):
        (log,) = [path.read_text() for path in (local / "logs").rglob(f"*-{stage}/*/*.log")]
        assert "committed" in log.splitlines()[-1]
        assert "Traceback" not in log
    assert not list((local / "logs").rglob("attempt-2")), "nothing was tried twice"
    assert list((local / "cache" / "compiled").iterdir()), "what starting it needs is kept"


def test_a_rollout_as_a_job_that_is_killed(cluster, make_real_run, local, tmp_path):
    """Another makes the bytes that this machine alone makes. What comes after it is light."""
    rest = [word for word in light.WORDS if not word.startswith("rollout.")]
    run = make_real_run(cluster, tmp_path / "run", *EXPERIMENT, *rest)
    run.submit()
    job = run.wait_for_job("rollout")
    run.wait_for(lambda: kill_job(job), f"processes of {job}", 30)
    run.wait_until_complete()
    assert [event["task"] for event in run.events("failed")] == ["1/rollout/0"]
    (mine,), (wanted,) = (read_record(root, 1, "rollout")["outputs"] for root in (run.root, local))
    assert (mine["xxh3_128"], mine["bytes"]) == (wanted["xxh3_128"], wanted["bytes"])
