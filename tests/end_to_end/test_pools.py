"""Pools: components scored in tasks of their own, with the same result as without, byte for byte."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks.nodes import Aim, aims_of, job_kinds_used, judge
from pipeline.checks.requests import ClusterFacts, stage_problems
from pipeline.config.compose import compose, to_mapping
from pipeline.config.issue import ConfigError
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import resources_of
from pipeline.executors.slurm.dry_run import scripts
from pipeline.metrics.catalogue import CHARTS, describe
from pipeline.metrics.costs import Costs, describe_costs, metrics_of
from pipeline.metrics.spans import StageTime
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.report.figures import figure
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.schemas import SCORE, check_schema
from pipeline.run.submissions import is_job_of, job_kind_of, job_name
from pipeline.run.tasks import JOB_KIND_PATTERN, Stage, Task, parse_task, task_key, task_of
from pipeline.status.lanes import TaskState, lanes_of
from pipeline.status.log_files import find_logs, parse_choice
from pipeline.status.text import describe_lanes
from slurm.limits import ClusterLimits
from slurm.probe import ProbeResult
from stages.tasks.score import score_table
from tests.cluster.scenario import policy_of, read_lines, results_of
from tests.support import tiny
from tests.support.composed import composed_of
from tests.support.scripted import imagined_run

RULES = """
import os, signal
from pathlib import Path

def brevity(*, responses, **columns):
    return [-len(response) / 7 for response in responses]

def thirds(*, prompts, responses, **columns):
    # Rules are called by a process of the task's; held-out prompts begin with another word.
    if Path("trap").exists() and any(responses) and prompts[0].startswith("say"):
        os.kill(os.getppid(), signal.SIGKILL)
    return [len(prompt) / 3 for prompt in prompts]
"""
COMPONENTS = (
    "reward.components.rm.weight=0.7",
    "+reward.components.brevity={kind: rule, function: 'my_rules:brevity', weight: 0.1}",
    "+reward.components.thirds={kind: rule, function: 'my_rules:thirds', weight: 0.3, trial: false}",
)
POOLS = (
    "reward.components.rm.pool=models",
    "reward.components.thirds.pool=slow_rules",
    "scheduler.pools.models.slots=2",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_rules.py").write_text(RULES)
    return folder


@pytest.fixture(scope="module")
def words(inputs, tmp_path_factory):
    """One iteration of two shards, evaluated; a reward model and two rules."""
    return lambda run_dir: tiny.overrides(
        inputs,
        run_dir,
        f"data.heldout={inputs / 'heldout.jsonl'}",
        "iterations=1",
        "evaluate.every=1",
        *COMPONENTS,
    )


@pytest.fixture(scope="module")
def plain(slurm_ppo, words, project, tmp_path_factory) -> Path:
    """Without pools."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    done = slurm_ppo("run", *words(run_dir), cwd=project)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def failed(slurm_ppo, words, project, tmp_path_factory):
    """With pools, and a score task that is killed: the run's directory and what was said."""
    run_dir = tmp_path_factory.mktemp("pools") / "run"
    (project / "trap").touch()
    done = slurm_ppo("run", *words(run_dir), *POOLS, "scheduler.max_attempts=1", cwd=project)
    (project / "trap").unlink()
    logs = slurm_ppo("logs", run_dir, "score-slow_rules", "--failed")
    return run_dir, done, logs


@pytest.fixture(scope="module")
def pooled(slurm_ppo, failed, project) -> Path:
    """The same, resumed to its end."""
    run_dir, _, _ = failed
    done = slurm_ppo("resume", run_dir, cwd=project)
    assert done.returncode == 0, done.stderr
    return run_dir


def shards(run: Path, job_kind: str) -> dict[str, bytes]:
    """What the winning attempts wrote, by iteration and shard."""
    found = {}
    for record in sorted((run / "iterations").glob(f"*/{job_kind}/shard-?????.json")):
        (output,) = json.loads(record.read_text())["outputs"]
        found[f"{record.parts[-3]}/{record.stem}"] = (run / output["path"]).read_bytes()
    return found


def test_a_score_task_that_was_killed_is_named_and_the_run_can_be_resumed(failed, pooled):
    _, done, logs = failed
    assert done.returncode == 1
    assert re.search(r"failed: iteration 1 score-slow_rules shard [01], attempt 1 \(killed\)", done.stderr)
    assert re.search(r"iteration 1 score-slow_rules shard [01], attempt 1 \(killed\)", logs.stdout)


def test_pools_change_no_byte_of_rewards_and_policies(plain, pooled):
    assert len(shards(plain, "reward")) == 2
    assert shards(pooled, "reward") == shards(plain, "reward")
    assert shards(pooled, "evaluate") == shards(plain, "evaluate")
    assert policy_of(pooled) == policy_of(plain)
    assert results_of(pooled) == results_of(plain)


def test_each_pool_has_shards_of_its_components_scores(pooled):
    for job_kind, column in (("score-models", "reward/rm"), ("score-slow_rules", "reward/thirds")):
        found = shards(pooled, job_kind)
        assert len(found) == 2
        for data in found.values():
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            check_schema(table.schema, SCORE, job_kind)
            assert table.column_names == ["prompt_id", "sample_index", column]
            assert table.schema.field(column).type == pa.float64()
    records = sorted((pooled / "iterations").glob("*/reward/shard-?????.json"))
    for record in records:  # a score that is made again with other bytes makes the reward stale
        read = json.loads(record.read_text())
        iteration, _, shard = read["task"].split("/")
        assert {f"{iteration}/score-{pool}/{shard}" for pool in ("models", "slow_rules")} <= read[
            "inputs"
        ].keys()


def test_rows_have_each_pools_time_and_what_it_counted(pooled):
    rows = read_lines(pooled / "metrics.jsonl")
    for row in rows:
        assert {"seconds/score-models", "seconds/compute/score-slow_rules"} <= row.keys()
        assert "reward/rm/truncated" in row


def test_a_colour_for_each_stage_and_pool(pooled):
    (chart,) = (chart for chart in CHARTS if chart.title == "Seconds per stage")
    rows = read_lines(pooled / "metrics.jsonl")
    drawn = figure(chart, rows, list(dict.fromkeys(name for row in rows for name in row)))
    colours = {trace["name"]: trace["marker"]["color"] for trace in drawn["data"]}
    assert {"rollout", "score-models", "score-slow_rules", "reward", "update"} <= colours.keys()
    assert len(set(colours.values())) == len(colours)


def test_logs_of_one_pool_and_of_all(pooled):
    run = load_run(pooled)
    one = find_logs(run.paths, parse_choice("score-models@1", run.plan))
    first = [log.name for log in one if log.attempt == 1]  # a second one if it was stopped with the killed
    assert first == ["score-models@1 0", "score-models@1 1"]
    every = find_logs(run.paths, parse_choice("score", run.plan))
    assert {log.job_kind for log in every} == {"score-models", "score-slow_rules"}
    with pytest.raises(RunError, match="legal: prepare, rollout, score-models, score-slow_rules, reward"):
        parse_choice("score-big", run.plan)


def test_plan_and_status_count_pools(slurm_ppo, plain, pooled):
    shown = slurm_ppo("plan", pooled).stdout
    assert re.search(r"^score-slow_rules +0 +2$", shown, re.MULTILINE), shown
    assert "score" not in slurm_ppo("plan", plain).stdout


def test_going_back_to_a_pool_takes_what_follows_from_it(slurm_ppo, project, plain, pooled):
    run = load_run(pooled)
    for point, said in (("score-big", "pools: models, slow_rules"), ("reward-models", "no stage")):
        with pytest.raises(RunError, match=said):
            go_back(run, parse_point(point))
    with pytest.raises(RunError, match="none: no reward component names one"):
        go_back(load_run(plain), parse_point("score"))
    done = slurm_ppo("resume", pooled, "--from", "score-models@1", cwd=project)
    assert done.returncode == 0, done.stderr
    (moved,) = (pooled / "superseded").iterdir()
    assert moved.name.endswith("-from-score-models-1")
    names = {path.name for path in (moved / "iterations" / "00001").iterdir()}
    assert names == {"score-models", "reward", "update", "state", "evaluate"}
    assert shards(pooled, "reward") == shards(plain, "reward")
    assert policy_of(pooled) == policy_of(plain)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_scores_come_through_a_pools_shard_bit_for_bit(values):
    names = {"prompt_id": list(map(str, range(len(values)))), "sample_index": [0] * len(values)}
    table = score_table(pa.table(names), {"a": values}, {})
    assert [value.hex() for value in table["reward/a"].to_pylist()] == [value.hex() for value in values]


# --- names ---

pools = st.from_regex(r"\A[a-z][a-z0-9_]{0,30}\Z")
scores = st.builds(Task, st.integers(0, 10**6), st.just(Stage.SCORE), st.integers(0, 10**5), pools)


@given(scores)
def test_a_pools_name_is_read_back_from_every_name_it_is_part_of(task):
    assert parse_task(task_key(task)) == task
    assert task_of(task.iteration, task.job_kind, task.shard) == task
    name = job_name("a.run-1", "0123456789ab", task.iteration, task.job_kind, 12, 3)
    assert is_job_of("0123456789ab", name)
    assert job_kind_of(name) == task.job_kind
    found = re.fullmatch(rf"({JOB_KIND_PATTERN})-(\d+)-(\d+)\.json", f"{task.job_kind}-12-3.json")
    assert found
    assert found.groups() == (task.job_kind, "12", "3")


@pytest.mark.parametrize(
    "job_kind",
    ["score", "score-", "score-Big", "score-1a", "score-a-b", "rollout-big", "reward-", "-big", ""],
)
def test_what_names_no_pool_is_refused(job_kind):
    with pytest.raises(ValueError, match="is not a"):
        task_of(1, job_kind)


# --- on Slurm ---

LONG = "a_pool_with_quite_a_long_name"


def run_with_pools() -> Run:
    """Not on disk: four shards, a pool with everything of its own and one with a long name."""
    components = {
        "rule": {"kind": "rule", "function": "a:b"},
        "rm": {"kind": "model", "path": "/rm", "pool": "big"},
        "other": {"kind": "rule", "function": "a:b", "pool": LONG},
    }
    pools = {"big": {"partition": "rm", "gpus_per_node": 2, "array_parallelism": 3}, LONG: {}}
    return imagined_run(scheduler={"pools": pools}, reward={"components": components})


def test_the_scripts_of_pools_have_their_own_resources():
    found = re.split(r"^### .*/(.*)\.sh\n", scripts(run_with_pools()), flags=re.MULTILINE)[1:]
    texts = zip(found[::2], found[1::2], strict=True)
    options = {name: dict(re.findall(r"^#SBATCH --(\S+?)=(.*)$", text, re.MULTILINE)) for name, text in texts}
    big, other = options["score-big-1-0"], options[f"score-{LONG}-1-0"]
    assert (big["partition"], big["gpus-per-node"], big["array"]) == ("rm", "2", "1-3%3")
    assert "partition" not in other
    assert big["output"].endswith("/logs/slurm.log")
    watched = set(re.split(r"[?:]", options["driver-1-0"]["dependency"]))
    assert {"JOB-1-score-big", f"JOB-1-score-{LONG}"} <= watched


def test_costs_have_a_line_for_each_pool():
    usage = StageTime(attempts=1, run=1.0, gpu_hours=1.0)
    costs = Costs({(1, job_kind): usage for job_kind in ("driver", "score-big", f"score-{LONG}", "rollout")})
    *table, _ = describe_costs(costs).splitlines()
    names = [line.split()[0] for line in table[1:]]
    assert names == ["rollout", "score-a_pool_…", "score-big", "driver", "total"]
    assert max(map(len, table)) <= 80
    row = metrics_of({stage: costs.of_stage(stage) for stage in costs.stages})
    assert row["slurm/gpu_hours/score-big"] == 1
    assert [name for name in row if describe(name) is None] == []


def test_a_pool_with_a_long_name_fits_into_status():
    run = run_with_pools()
    lanes = lanes_of(map(TaskState, run.plan.tasks(1)), 0.0)
    lines = describe_lanes(lanes)
    assert max(map(len, lines)) <= 80
    (place,) = (number for number, line in enumerate(lines) if "score-a_" in line and "0/4" in line)
    assert lines[place + 1].split() == [f"score-{LONG}"], "the whole name, where it was cut"
    assert [lane.progress.stage for lane in lanes][:3] == ["rollout", "score-big", f"score-{LONG}"]


def test_validate_asks_for_every_pool_whether_the_cluster_has_what_it_wants():
    config = run_with_pools().config
    assert job_kinds_used(config)[-2:] == ["score-big", f"score-{LONG}"]
    cluster = ClusterFacts(ClusterLimits((23, 11), 1001, 10000, 300.0, None), {}, None)
    (problem,) = stage_problems("score-big", resources_of(config.scheduler, "score-big"), cluster)
    assert str(problem) == "scheduler.pools.big.partition=rm: no such partition; legal: none"
    assert any("score-big" in aim.stages for aim in aims_of(config))
    (found,) = judge(
        Aim(("score-big",), config.scheduler.pools["big"]), ProbeResult("n1", "3.11", {}, (), {}, 1)
    )
    assert str(found).startswith("scheduler.pools.big.gpus_per_node=2: 1 GPUs are visible on node n1")


# --- mistakes ---

POOL = "reward.components.rm.pool=big"
MISTAKES = [
    (
        ["scheduler=slurm", POOL],
        "reward.components.rm.pool=big: scheduler.pools has no 'big'; give scheduler.pools.big.partition=...",
    ),
    (
        ["scheduler=slurm", "scheduler.pools.big.partition=rm"],
        "scheduler.pools=big: no component is scored there; give reward.components.NAME.pool=big, "
        "or leave it out",
    ),
    (
        ["scheduler=slurm", POOL, "scheduler.pools.big.nodes=2"],
        "scheduler.pools.big.nodes=2: only the update runs on several; legal: 1. Use rollout.num_shards for "
        "more at once",
    ),
    (
        ["reward.components.rm.pool=a-b"],
        "reward.components.rm.pool: write a word of lower-case letters, digits and '_' (got 'a-b')",
    ),
    (
        [POOL, "scheduler.pools=2"],
        "scheduler.pools: holds entries that you name; write scheduler.pools.NAME=... (got 2)",
    ),
    (
        [POOL, "scheduler.pools.Big.slots=1"],
        "scheduler.pools.Big: write a word of lower-case letters, digits and '_' (got 'Big')",
    ),
]


@pytest.mark.parametrize(("more", "line"), MISTAKES, ids=[" ".join(more) for more, _ in MISTAKES])
def test_a_mistake_about_pools_is_one_line_that_says_the_way_out(inputs, tmp_path, more, line):
    try:
        said = "\n".join(map(str, contradictions(composed_of(inputs, tmp_path / "run", *more))))
    except ConfigError as error:
        said = str(error)
    assert said == line


def test_a_fork_with_another_reward_has_not_its_parents_pools(inputs, tmp_path):
    before = composed_of(inputs, tmp_path / "run", POOL, "scheduler.pools.big.slots=2")
    same = compose(["iterations=3"], base=to_mapping(before))
    assert (same.reward, same.scheduler) == (before.reward, before.scheduler)
    forked = compose(["reward=rule", "reward.components.rule.function=a:b"], base=to_mapping(before))
    assert (forked.reward.pools, forked.scheduler.pools) == ((), {})
    assert list(contradictions(forked)) == []


def test_a_pool_of_this_machine_needs_no_entry(inputs, tmp_path):
    config = composed_of(inputs, tmp_path / "run", POOL)
    assert list(contradictions(config)) == []
