"""What validate finds out about a cluster, and how it says it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checks.cluster import check_cluster
from pipeline.checks.finding import line, refuse
from pipeline.checks.machine import way_out
from pipeline.checks.nodes import Aim, aims_of, judge, judge_node, probe_of
from pipeline.checks.requests import ClusterFacts, judge_memory, limit_problems, needs_of, stage_problems
from pipeline.checks.sight import image_of, paths_of, way_in
from pipeline.cli.app import main
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import ResourcesConfig
from pipeline.run.identity import version
from slurm import probe_task
from slurm.associations import Associations, parse_associations, parse_ceilings
from slurm.limits import (
    ClusterLimits,
    NodeKind,
    Partition,
    given_memory,
    parse_cluster_memory,
    parse_defaults,
    parse_unavailable,
)
from slurm.probe import Probe, ProbeResult, ProbeTimeout, _send
from tests.support import tiny
from tests.support.composed import composed_of

HOUR = 3600.0
LIMITS = ClusterLimits((23, 11), 1001, 10000, 300.0, None)


def partition(name: str, **more: object) -> Partition:
    kinds = (NodeKind(4, 64, 256_000, {"gpu": 4, "gpu:a100": 4}), NodeKind(8, 32, 500_000, {}))
    given = {
        "name": name,
        "max_time": 4 * HOUR,
        "state": "UP",
        "nodes": 12,
        "default": False,
        "allowed_accounts": None,
        "allowed_qos": None,
        "kinds": kinds,
    }
    return Partition(**given | more)


PARTITIONS = {
    "gpu": partition("gpu"),
    "long": partition("long", max_time=48 * HOUR, nodes=2),
    "old": partition("old", state="DRAIN"),
    "vip": partition("vip", allowed_accounts=frozenset({"lab"}), allowed_qos=frozenset({"high"})),
}
MINE = Associations(frozenset({"lab", "other"}), frozenset({"normal", "high"}), enforced=True)


def problems(given: ResourcesConfig, associations: Associations | None = None) -> list[str]:
    return [str(p) for p in stage_problems("rollout", given, ClusterFacts(LIMITS, PARTITIONS, associations))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"partition": ("gpu",)}, []),
        ({"partition": ("gpu", "nope")}, ["partition=nope: no such partition; legal: gpu, long, old, vip"]),
        ({}, ["partition=null: the cluster has no default; legal: gpu, long, old, vip"]),
        ({"partition": ("old",)}, ["partition=old: it is DRAIN: no job starts there"]),
        (
            {"time": "5:00:00"},
            ["time=5:00:00: longer than partition gpu allows; legal: up to 0-04:00:00"],
        ),
        ({"time": "5:00:00", "partition": ("gpu", "long")}, []),
        (
            {"gpus_per_node": 8},
            ["gpus_per_node=8: 8 on a node, and no node of partition gpu has more than 4; legal: up to 4"],
        ),
        (
            {"gpus_per_node": "h100:1"},
            ["gpus_per_node=h100:1: no node of partition gpu has gpu:h100; legal: gpu, gpu:a100"],
        ),
        ({"gres": "gpu:a100:4"}, []),
        ({"gres": "fpga:1"}, ["gres=fpga:1: no node of partition gpu has fpga; legal: gpu, gpu:a100"]),
        (
            {"cpus_per_task": 128},
            [
                "cpus_per_task=128: 128 on a node, and no node of partition gpu has more than 64; "
                "legal: up to 64"
            ],
        ),
        ({"mem": "900G"}, ["mem=900G: no node of partition gpu has so much; legal: up to 500000M"]),
        ({"nodes": 3, "partition": ("long",)}, ["nodes=3: partition long has fewer; legal: 1 to 2"]),
    ],
)
def test_what_a_stage_asks_for_is_compared_with_what_there_is(given, said):
    found = problems(ResourcesConfig(**{"partition": ("gpu",)} | given if given else {}))
    assert found == [f"scheduler.rollout.{line}" for line in said]


def test_more_than_any_node_has_together():
    (found,) = problems(ResourcesConfig(partition=("gpu",), gpus_per_node=1, mem="400G"))
    assert found == (
        "scheduler.rollout=cpus_per_task=1, mem=400G, gpus_per_node=1: "
        "nodes of partition gpu have each of these, but none has all of them"
    )


@pytest.mark.parametrize(
    ("given", "known", "said"),
    [
        ({"account": "lab"}, MINE, None),
        ({"account": "theirs"}, MINE, "account=theirs: not one of yours; legal: lab, other"),
        ({"account": "theirs"}, None, None),
        ({"qos": "urgent"}, MINE, "qos=urgent: not one of yours; legal: high, normal"),
        (
            {"account": "other", "partition": ("vip",)},
            MINE,
            "account=other: partition vip does not take it; legal: lab",
        ),
        (
            {"qos": "normal", "partition": ("vip",)},
            None,
            "qos=normal: partition vip does not take it; legal: high",
        ),
    ],
)
def test_accounts_and_qos_are_the_users_and_the_partitions(given, known, said):
    found = problems(ResourcesConfig(**{"partition": ("gpu",)} | given), known)
    assert found == ([f"scheduler.rollout.{said}"] if said else [])


def test_nodes_that_take_no_job_now():
    states = [
        "idle",
        "mixed",
        "allocated-",
        "completing",
        "idle~",
        "down*",
        "drained",
        "idle*",
        "maint",
        "inval",
    ]
    shown = "".join(f"n{number}|{state}\n" for number, state in enumerate(states))
    assert parse_unavailable(shown) == [f"n{number}" for number in range(5, 10)]


def test_associations_count_where_the_controller_enforces_them():
    rows = "lab|normal,high|normal\nother||\n"
    config = "Configuration data\nAccountingStorageEnforce = associations,limits\nSLURM_VERSION = 23.11.1\n"
    assert parse_associations(rows, config) == Associations(
        frozenset({"lab", "other"}), frozenset({"normal", "high"}), True, True
    )
    assert not parse_associations(rows, "AccountingStorageEnforce = none\n").enforced


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "1:00:00", "qos": "high"}, []),
        (
            {"qos": "short"},
            ["time=4:00:00: longer than QOS short allows (MaxWall), so its jobs would never start"],
        ),
        ({"gpus_per_node": 2, "qos": "high"}, []),
        (
            {"gpus_per_node": 2, "qos": "one", "time": "1:00:00"},
            ["gpus_per_node=2: 2 gres/gpu in one job, and QOS one allows 1: it would wait for ever"],
        ),
        (
            {"gres": "gpu:a100:2", "qos": "one", "time": "1:00:00"},
            ["gres=gpu:a100:2: 2 gres/gpu in one job, and QOS one allows 1: it would wait for ever"],
        ),
        (
            {"gpus_per_node": 2, "account": "lab"},
            ["cpus_per_task=9: 9 cpu in one job, and account lab allows 8"],
        ),
    ],
)
def test_what_an_account_or_qos_never_starts_is_refused_before_it_waits(given, said):
    known = parse_ceilings("lab||||cpu=8|\nother|||||\n", "high||||||\nshort|30||||||\none||||gres/gpu=1||\n")
    cluster = ClusterFacts(LIMITS, PARTITIONS, None, known)
    asked = {"partition": ("gpu",), "cpus_per_task": 9 if "account" in given else 1, **given}
    found = [str(p) for p in stage_problems("rollout", ResourcesConfig(**asked), cluster)]
    assert len(found) == len(said)
    assert all(words in line for line, words in zip(found, said, strict=True))


def test_a_qos_that_the_run_names_and_that_takes_few_jobs_is_refused(inputs, tmp_path):
    few = parse_ceilings("", "tiny|||||5|\n")
    given = config(inputs, tmp_path, "scheduler.qos=tiny").slurm
    assert "you may queue 5 jobs" in str(next(limit_problems(given, LIMITS, few)))
    assert list(limit_problems(given, LIMITS, parse_ceilings("", "tiny|||||6|\n"))) == []


# --- without a cluster ---


def config(inputs, tmp_path, *more):
    return composed_of(inputs, tmp_path / "run", "scheduler=slurm", *more)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scheduler.reward.gres=gpu:1", ": give it or scheduler.reward.gpus_per_node=1, not both"),
        ("scheduler.rollout.nodes=2", ": only the update runs on several; legal: 1."),
        ("scheduler.driver.ntasks_per_node=2", ": only the update runs on several"),
        ("scheduler.update.signal=14400", ": the warning would come before the start"),
        ("scheduler.update.array_parallelism=2", ": its arrays have one element"),
        (
            "scheduler.update.ntasks_per_node=4",
            ": each rank computes on a GPU of its own, and scheduler.update.gpus_per_node=1 gives 1 to all "
            "of a node; ask for 4 there, or give scheduler.update.ntasks_per_node=1",
        ),
    ],
)
def test_settings_that_no_cluster_can_follow(inputs, tmp_path, override, said):
    (found,) = contradictions(config(inputs, tmp_path, override))
    assert str(found).startswith(f"{override}{said}")


def test_update_may_have_nodes_and_defaults_contradict_nothing(inputs, tmp_path):
    more = (
        "scheduler.update.nodes=2",
        "scheduler.update.ntasks_per_node=4",
        "scheduler.update.gpus_per_node=a100:4",
        "scheduler.rollout.array_parallelism=3",
    )
    assert list(contradictions(config(inputs, tmp_path, *more))) == []


def test_a_machine_without_slurm_is_told_so(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^scheduler=slurm: sbatch, squeue, scontrol, scancel, srun not f"):
        refuse(check_cluster(resolve(config(inputs, tmp_path))))


RECORDED = Path(__file__).parents[1] / "golden" / "slurm" / "24.11"


@pytest.fixture
def without_accounting(tmp_path, monkeypatch) -> Path:
    """A cluster of two partitions, gpu and cpu, as Slurm's commands show it: nothing keeps its accounts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = dict.fromkeys(("sbatch", "squeue", "scancel", "srun"), "exit 0")
    shown = f'case "$*" in *config*) cat {RECORDED}/config.txt ;; *) cat {RECORDED}/partitions.txt ;; esac'
    lines |= {"scontrol": shown, "sinfo": f"cat {RECORDED}/sinfo.txt", "sacctmgr": "echo none >&2; exit 1"}
    for name, text in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


SHORT = [f"scheduler.{one}.time='1:00:00'" for one in ("prepare", "rollout", "reward", "update", "driver")]


def test_validate_says_what_nobody_could_be_asked_and_what_memory_jobs_get(
    inputs, tmp_path, monkeypatch, capsys, without_accounting
):
    words = tiny.overrides(
        *(inputs, tmp_path / "run", "scheduler=slurm", "scheduler.account=lab", "scheduler.reward.qos=high"),
        *(
            "scheduler.rollout.cpus_per_task=2",
            "scheduler.update.cpus_per_task=4",
            "scheduler.reward.mem=2G",
            "scheduler.driver.mem=1G",
        ),
        *("scheduler.update.partition=cpu", "scheduler.update.gpus_per_node=null", *SHORT),
    )
    monkeypatch.setattr(sys, "argv", ["slurm-ppo", "validate", "--no-probe", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    lines = said.out.splitlines()
    accounts = next(line for line in lines if line.startswith("not checked: account"))
    assert accounts.startswith("not checked: account=lab, qos=high; no accounting answers here (sacctmgr)")
    memory = [line for line in lines if line.startswith("memory: ")]
    unset = "scheduler.prepare.mem, scheduler.rollout.mem are not set"
    assert memory == [
        f"memory: {unset}; partition gpu gives a job 200M on a node (DefMemPerCPU=100 x 2)",
        "memory: scheduler.update.mem is not set; partition cpu gives a job 400M on a node "
        "(DefMemPerCPU=100 x 4)",
    ]


def test_validate_as_json_has_every_problem_at_once_and_the_worst_first(
    inputs, tmp_path, monkeypatch, capsys, without_accounting
):
    wrong = (
        "scheduler.rollout.partition=nope",
        "scheduler.update.partition=none",
        "reward.components.rm.weight=x",
    )
    monkeypatch.setattr("pipeline.checks.settings.try_models", lambda config: iter(()))
    ends = {}
    for name, more in (("two", wrong[:2]), ("unreadable", wrong[2:]), ("fine", ())):
        words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", *SHORT, *more)
        monkeypatch.setattr(sys, "argv", ["slurm-ppo", "validate", "--no-probe", "--json", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        found = json.loads(capsys.readouterr().out)
        assert list(found) == ["schema", "subject", "problems", "warnings", "findings"]
        verdicts = [one["verdict"] for one in found["findings"]]
        assert verdicts == sorted(verdicts, key=["problem", "warning", "ok", "skipped"].index)
        ends[name] = (ended.value.code, found["problems"])
        if name == "two":
            assert [one["title"] for one in found["findings"][:2]] == list(wrong[:2])
            assert found["findings"][0]["measured"] == "no such partition; legal: cpu, down, gpu, low"
    assert ends == {"two": (2, 2), "unreadable": (2, 1), "fine": (0, 0)}
    assert not (tmp_path / "run").exists()


def test_where_memory_is_given_and_no_account_is_nothing_is_said_of_them(
    inputs, tmp_path, without_accounting
):
    given = [f"scheduler.{stage}.mem=1G" for stage in ("prepare", "rollout", "update", "driver")]
    given.append("scheduler.reward.options.mem-per-cpu=1G")
    seen = check_cluster(resolve(config(inputs, tmp_path, *given, *SHORT)))
    assert {one.verdict for one in seen} == {"ok"}
    assert {one.title.partition(" of ")[0] for one in seen} == {"your limits", "jobs"}


@pytest.mark.parametrize(
    ("partition", "cluster", "given"),
    [
        ({}, {}, (None, "no DefMemPerCPU, no DefMemPerNode")),
        ({"DefMemPerNode": "UNLIMITED"}, {"DefMemPerCPU": "100"}, (400, "DefMemPerCPU=100 x 4")),
        ({"DefMemPerNode": "9000"}, {"DefMemPerCPU": "100"}, (9000, "DefMemPerNode=9000")),
        ({}, {"JobDefaults": "DefCpuPerGPU=8,DefMemPerGPU=500"}, (1000, "DefMemPerGPU=500 x 2")),
        ({"JobDefaults": "(null)", "DefMemPerCPU": "50"}, {}, (200, "DefMemPerCPU=50 x 4")),
    ],
)
def test_a_partitions_default_memory_goes_before_the_clusters(partition, cluster, given):
    found = parse_defaults(partition) or parse_cluster_memory(cluster).defaults
    assert given_memory(found, cpus=4, gpus=2) == given


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            "CR_CORE_MEMORY",
            "warning: memory: scheduler.update.mem is not set; partition gpu gives a job all the memory of "
            "its node, so that no other job fits beside it (no DefMemPerCPU, no DefMemPerNode)",
        ),
        (
            "CR_CORE",
            "memory: scheduler.update.mem is not set; this cluster does not count memory: a job may use what "
            "its node has",
        ),
    ],
)
def test_jobs_that_ask_for_no_memory_may_get_a_whole_node(parameters, said):
    cluster = parse_cluster_memory({"SelectTypeParameters": parameters, "DefMemPerNode": "UNLIMITED"})
    asked = {"update": ResourcesConfig(partition=("gpu",))}
    assert [line(found) for found in judge_memory(asked, PARTITIONS, cluster)] == [said]


# --- probes ---


def test_stages_that_go_to_the_same_place_share_a_probe(inputs, tmp_path):
    given = config(inputs, tmp_path, "scheduler.reward.partition=rm", "scheduler.update.mem=64G")
    aims = aims_of(given)
    assert [aim.stages for aim in aims] == [("prepare",), ("rollout", "update"), ("reward",), ("driver",)]
    probe = probe_of(given, aims[1])
    assert {"time", "mem", "cpus-per-task"} & set(probe.options) == set()
    assert probe.options["gpus-per-node"] == "1"
    assert given.model.policy in probe.paths
    assert [bool(probe_of(given, aim).trial) for aim in aims] == [False, True, True, False]
    driver = probe_of(given, aims[3])
    assert (driver.paths, driver.programs[0]) == ((), "sbatch --version")


SETUP = ("module load cuda", "conda x")
AIM = Aim(
    ("rollout", "evaluate"),
    ResourcesConfig(partition=("gpu",), gpus_per_node="a100:2", python="/env/python", setup=SETUP),
)
TOO_OLD = "RuntimeError: The NVIDIA driver on your system is too old"
FINE = ProbeResult("gpu07", "3.11.7", {}, [], {}, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (FINE, []),
        (ProbeResult("gpu07", "3.11.7", {}, [], {}, None), []),
        (
            ProbeResult("gpu07", "3.11.7", {"?torch": "not installed"}, [], {}, 2),
            ["scheduler.rollout.python=/env/python: cannot be imported on node gpu07: torch (not installed)"],
        ),
        (
            ProbeResult("gpu07", "3.11.7", {}, ["/m"], {"sbatch --version": "not on PATH"}, 1),
            [
                "scheduler.rollout.partition=gpu: /m does not exist on node gpu07; use a shared filesystem",
                "scheduler.rollout.partition=gpu: sbatch cannot be used on node gpu07: not on PATH",
                "scheduler.rollout.gpus_per_node=a100:2: 1 GPUs are visible on node gpu07, 2 were asked for",
            ],
        ),
        (
            ProbeTimeout("job 3 left no answer", is_late=False),
            ["scheduler.rollout.partition=gpu: job 3 left no answer"],
        ),
        (
            ProbeTimeout("job 3 left no answer", False, True, "line 2 of setup failed on node n1"),
            [
                "scheduler.rollout.setup=module load cuda; conda x: line 2 of setup failed on node n1; "
                "fix it, or let it fail with || true"
            ],
        ),
        (ProbeTimeout("waiting for free resources", is_late=True), []),
        (
            replace(FINE, trial_error=TOO_OLD),
            [
                f"scheduler.rollout.partition=gpu: the GPUs do not compute on node gpu07: {TOO_OLD}; "
                f"{way_out(TOO_OLD)}"
            ],
        ),
    ],
)
def test_what_a_probe_saw_is_judged(answer, said):
    assert [str(problem) for problem in judge(AIM, answer)] == said


# --- images ---

WORDS = "apptainer exec --nv --bind /scratch /images/ppo.sif"
INSIDE = Aim(
    ("rollout", "reward"),
    ResourcesConfig(partition=("gpu",), gpus_per_node=1, python="/opt/python", container=WORDS),
    {"rollout": ("/models/sft",), "reward": ("/models/rm",)},
    "/scratch/runs",
)
SEEN = ProbeResult("gpu07", "3.11.7", {}, [], {}, 1, missing_outside=[])
AT = "in its image on node gpu07"
BOTH = f"scheduler.rollout.container={WORDS}: rollout, reward"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SEEN, []),
        (
            replace(SEEN, missing_paths=["/models/rm"]),
            [
                f"scheduler.reward.container={WORDS}: reward: cannot see /models/rm {AT}; "
                "bind it: --bind /models/rm"
            ],
        ),
        (
            replace(SEEN, missing_paths=["/models/sft"], missing_outside=["/models/sft"]),
            [
                "scheduler.rollout.partition=gpu: /models/sft does not exist on node gpu07; "
                "use a shared filesystem"
            ],
        ),
        (
            replace(SEEN, place_error="Read-only file system"),
            [
                f"{BOTH}: cannot write into /scratch/runs, where the run is, {AT} (Read-only file system); "
                "bind it: --bind /scratch/runs"
            ],
        ),
        (
            replace(SEEN, driver_error="libcuda.so.1: cannot open shared object file"),
            [
                f"{BOTH}: the GPUs' driver is not visible {AT} (libcuda.so.1: cannot open shared object "
                "file); add --nv"
            ],
        ),
        (
            replace(SEEN, version="0.0.1"),
            [
                f"scheduler.rollout.python=/opt/python: slurm-ppo 0.0.1 is installed {AT}, and {version()} "
                "here; install the same in both"
            ],
        ),
        (
            ProbeTimeout("job 3 left no answer (exit code 255); it said: no such file", False, True),
            [
                f"{BOTH}: job 3 left no answer (exit code 255); it said: no such file; "
                "does this image have /opt/python?"
            ],
        ),
        (
            ProbeTimeout("sbatch failed: Invalid account", is_late=False),
            ["scheduler.rollout.partition=gpu: sbatch failed: Invalid account"],
        ),
    ],
)
def test_what_an_image_does_not_show_is_named_with_the_words_that_show_it(answer, said):
    assert [str(problem) for problem in judge(INSIDE, answer)] == said


@pytest.mark.parametrize(
    ("container", "shown", "words"),
    [
        ("ch-run --bind /scratch /images/ppo --", None, "--bind /m"),
        ("podman run --rm image", None, "--volume /m:/m"),
        ("srun --container-image=/images/ppo.sqsh", None, "--container-mounts=/m:/m"),
        ("srun --export=ALL apptainer exec /images/ppo.sif", None, "--bind /m"),
        ("our-own-wrapper image", None, "bind it"),
        (
            f"/opt/bin/apptainer exec --bind {'/scratch,' * 9}/data /images/ppo.sif",
            "/opt/bin/apptainer ... /images/ppo.sif",
            "--bind /m",
        ),
        (
            f"srun --container-image=/images/ppo.sqsh --container-mounts={'/scratch:/scratch,' * 9}/a:/a",
            "srun ... --container-image=/images/ppo.sqsh",
            "--container-mounts=/m:/m",
        ),
        (f"ch-run --bind={'/scratch' * 9} /images/ppo --", "ch-run ... /images/ppo", "--bind /m"),
    ],
)
def test_every_container_program_has_its_own_words(container, shown, words):
    given = ResourcesConfig(python="/opt/python", container=container)
    assert way_in(given, "/m").endswith(words)
    assert image_of(given) == (shown or container)


def test_an_image_among_sbatchs_options_is_one_too():
    given = ResourcesConfig(python="/opt/python", options={"container-image": "/images/ppo.sqsh"})
    (found,) = judge(
        Aim(("update",), given), replace(SEEN, gpus=0, missing_paths=["/m"], missing_outside=None)
    )
    assert str(found) == (
        f"scheduler.update.options.container-image=/images/ppo.sqsh: update: cannot see /m {AT}; "
        "bind it: /m:/m among options.container-mounts"
    )


def test_each_stage_is_asked_for_what_it_reads(inputs, tmp_path):
    (tmp_path / "my_rules.py").touch()
    rule = "+reward.components.mine={kind: rule, function: 'my_rules:score', pool: big}"
    more = ("model.critic=/critic", "model.reference=/reference", "algorithm.kl.reference_in=reward", rule)
    given = config(inputs, tmp_path, *more, "data.heldout=/heldout", "evaluate.every=1")
    policy, rm, prompts = (str(inputs / name) for name in ("policy", "reward_model", "prompts.jsonl"))
    code = str(tmp_path / "my_rules.py")

    def read(job_kind: str) -> set[str]:
        return set(paths_of(given, job_kind, tmp_path))

    assert read("prepare") == {policy, rm, prompts, code, "/heldout", "/critic", "/reference"}
    assert read("rollout") == {policy}
    assert read("reward") == {rm, "/reference"}
    assert read("score-big") == {code}
    assert read("update") == {policy, "/critic"}
    assert read("evaluate") == {policy, rm, code}
    assert read("driver") == set()


def test_the_tokenizer_of_a_reward_service_is_read_where_responses_are_scored(inputs, tmp_path):
    fields = "kind: remote, url: 'http://judge:8000/classify', tokenizer: /judge"
    given = config(inputs, tmp_path, f"+reward.components.judge={{{fields}}}")
    kinds = ("prepare", "rollout", "reward", "update", "evaluate")
    assert [kind for kind in kinds if "/judge" in paths_of(given, kind, tmp_path)] == [
        *("prepare", "reward", "evaluate")
    ]
    pooled = config(inputs, tmp_path, f"+reward.components.judge={{{fields}, pool: big}}")
    assert list(paths_of(pooled, "score-big", tmp_path)) == ["/judge"]
    without = config(inputs, tmp_path, f"+reward.components.judge={{{fields.partition(', tok')[0]}}}")
    assert None not in set(paths_of(without, "reward", tmp_path))


# --- the program of a probe ---


def probed(folder, request, answer, *before):
    """What it prints, read from standard input as in a job."""
    command = [*before, sys.executable, "-P", "-", json.dumps(request), str(answer)]
    with open(probe_task.__file__) as program:  # noqa: PTH123 - a descriptor is what is wanted
        done = subprocess.run(command, stdin=program, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_probe_answers_in_a_file_or_where_there_is_no_folder_for_it_by_its_log(tmp_path):
    request = {"modules": ["json", "?nonsense"], "paths": [str(tmp_path), "/no/where"], "programs": []}
    assert probed(tmp_path, request, tmp_path / "answer") == ""
    written = json.loads((tmp_path / "answer").read_text())
    assert written["missing_paths"] == ["/no/where"]
    assert written["missing_modules"] == {"?nonsense": "not installed"}
    said = probed(tmp_path, request, tmp_path / "missing/answer")
    (line,) = said.splitlines()
    answer = json.loads(line.removeprefix(probe_task.ANSWER))
    assert answer == written | {"place_error": "No such file or directory"}
    assert ProbeResult(**answer).place_error


def test_a_probe_imports_nothing_of_the_folder_that_it_runs_in(tmp_path):
    """As tasks do not: a checkout in the working directory is not installed in an image."""
    (tmp_path / "only_here.py").touch()
    probed(tmp_path, {"modules": ["only_here"], "paths": [], "programs": []}, tmp_path / "answer")
    assert list(json.loads((tmp_path / "answer").read_text())["missing_modules"]) == ["only_here"]


def test_a_probe_without_a_problem_is_one_line():
    def told(answer) -> list[str]:
        return [line(found) for found in judge_node("rollout", AIM, answer)]

    assert told(FINE) == ["node for rollout: gpu07, Python 3.11.7, GPUs: 2; what the stage needs is there"]
    assert told(ProbeTimeout("waiting for free resources", is_late=True)) == [
        "warning: node for rollout: its job had to wait too long (waiting for free resources)"
    ]
    assert [need.count for need in needs_of(AIM.given)] == [1, 2, 2]


def test_a_probe_asks_for_one_node_unless_told_otherwise(tmp_path, monkeypatch):
    """As the jobs that it speaks for: some sites refuse a job that does not say."""
    scripts = []
    monkeypatch.setattr("slurm.probe.submit", lambda script, name: scripts.append(script.read_text()))
    for name, options in (("plain", {}), ("wide", {"nodes": 2})):
        _send(Probe(name, options, ["python3"]), tmp_path, tmp_path)
    assert ["#SBATCH --nodes=1" in text for text in scripts] == [True, False]
    assert "#SBATCH --nodes=2" in scripts[1]
