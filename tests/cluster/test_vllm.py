"""vLLM in rollout and reward: array jobs of a real Slurm end in the policy that this machine alone makes."""

import pytest
import tiny

from cluster.scenario import kill_job, policy_of, prepare

UNEVALUATED = ("data.heldout=null", "evaluate.every=0")
"""Every task on Slurm imports vLLM anew, which is most of what this test spends."""


def settings(iterations: int) -> list[str]:
    """The experiment, with models of a few thousand weights instead of the demo's."""
    small = ("model.context_length=64", "data.max_prompt_tokens=null", "seed=0")
    return ["experiment=quickstart_vllm", f"iterations={iterations}", *small]


@pytest.fixture(scope="module")
def local(inputs, slurm_ppo, tmp_path_factory):
    """The experiment on the local scheduler."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    heldout = f"data.heldout={inputs / 'heldout.jsonl'}"
    done = slurm_ppo("run", *tiny.overrides(inputs, run_dir), *settings(3), heldout)
    assert done.returncode == 0, done.stderr
    assert "iteration 3/3" in done.stderr
    return run_dir


def test_three_iterations_on_this_machine(local):
    logs = [path.read_text() for path in sorted((local / "logs").rglob("*-rollout/*/*.log"))]
    assert len(logs) == 6
    for log in logs:
        assert "committed" in log.splitlines()[-1]
        assert "Traceback" not in log
    assert not list((local / "logs").rglob("attempt-2")), "nothing was tried twice"
    assert list((local / "cache" / "compiled").iterdir()), "what starting it needs is kept"


@pytest.mark.timeout(900)
def test_and_as_array_jobs_of_which_one_is_killed(cluster, inputs, local, environment, tmp_path):
    run = prepare(cluster, inputs, tmp_path / "run", environment, *settings(1), *UNEVALUATED)
    run.submit()
    job = run.wait_for_job("rollout")
    run.wait_for(lambda: kill_job(job), f"processes of {job}", 30)
    run.wait_until_complete(limit=800)
    assert run.policy() == policy_of(local, 1)
    assert {job.stage for job in run.jobs_ever()} >= {"rollout", "reward", "update"}
    assert max(event["elements"] for event in run.events("submitted")) == 2
