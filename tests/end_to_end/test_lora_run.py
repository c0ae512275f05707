"""A run that trains adapters: it commits them alone, and everything that wants a whole model gets one."""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.config.update import Precision
from pipeline.forecast.shapes import num_adapted
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.export import export
from pipeline.run.identity import RunError
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier
from pipeline.run.tasks import Stage, Task
from stages.context import Context, UserError
from stages.models.loading import load_causal_lm
from tests.support import tiny
from tests.support.exporting import export_without_torch

LORA = "+update.lora={rank: 4, alpha: 8}"
MEASURE = """
import hashlib, json, os, sys
policy, output, iteration, calls = sys.argv[1:]
names = os.listdir(policy)
if not {"config.json", "model.safetensors", "tokenizer.json"} <= {*names} or "adapter" in names:
    sys.exit(f"no whole model: {names}")
with open(policy + "/model.safetensors", "rb") as file:
    weights = hashlib.sha256(file.read()).digest()
with open(calls, "a") as file:
    file.write(f"{iteration} {policy}\\n")
with open(output, "w") as file:
    json.dump({"weights": int.from_bytes(weights[:6])}, file)
"""
"""A program that measures a whole model, as those of others do: its number tells weights apart."""


def carried_out(slurm_ppo, models: Path, root: Path, *more: str) -> Path:
    heldout = (f"data.heldout={models / 'heldout.jsonl'}", "evaluate.every=1")
    done = slurm_ppo("run", *tiny.overrides(models, root, *heldout, LORA, *more))
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def run(slurm_ppo, models, tmp_path_factory) -> Path:
    return carried_out(slurm_ppo, models, tmp_path_factory.mktemp("lora") / "run")


@pytest.fixture(scope="module")
def merging_run(slurm_ppo, models, tmp_path_factory) -> Path:
    """The same for an engine and a program that want whole models. The program notes in ``calls`` where it
    found them."""
    folder = tmp_path_factory.mktemp("merging")
    (folder / "measure.py").write_text(MEASURE)
    given = f"'{{policy}}','{{output}}','{{iteration}}',{folder / 'calls'}"
    command = f"evaluate.command=[{sys.executable},{folder / 'measure.py'},{given}]"
    return carried_out(slurm_ppo, models, folder / "run", "rollout.merge_adapters=true", command)


@pytest.fixture
def copied_run(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def quiet(text: str) -> None:
    pass


def fingerprints(root: Path, *tasks: Task) -> list[str]:
    return [require_record(load_run(root).paths, task).fingerprint for task in tasks]


def test_an_update_commits_the_adapter_and_the_tokenizer_and_no_model(run):
    for policy in ("00001", "00002", "best"):
        names = sorted(
            str(p.relative_to(run / "policy" / policy)) for p in (run / "policy" / policy).rglob("*.*")
        )
        assert names == [
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
            "base.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]


def test_the_need_for_room_counts_the_numbers_that_an_adapter_has(run):
    config = load_run(run).config
    written = (run / "policy/00001/adapter/adapter_model.safetensors").stat().st_size
    counted = 4 * num_adapted(Path(config.model.policy), config.update.lora)
    assert counted < written < counted + 10_000, "the file has a header"


def test_engines_that_get_merged_models_end_in_the_same_policy(run, merging_run):
    tasks = [Task(2, Stage.ROLLOUT, 0), Task(2, Stage.ROLLOUT, 1), Task(2, Stage.EVALUATE), policy_maker(2)]
    assert fingerprints(run, *tasks) == fingerprints(merging_run, *tasks)


def test_a_program_that_measures_policies_gets_whole_models_which_go_afterwards(
    merging_run, models, tmp_path
):
    measured = read_measured(load_run(merging_run).paths)
    assert [(one.policy_version, one.missing) for one in measured] == [(0, ""), (1, ""), (2, "")]
    export(f"{merging_run}@2", tmp_path / "model", adapter=False, say=quiet)
    whole = [models / "policy/model.safetensors", tmp_path / "model/model.safetensors"]
    numbers = [int.from_bytes(hashlib.sha256(file.read_bytes()).digest()[:6]) for file in whole]
    found = [one.numbers["eval/weights"] for one in measured]
    assert [found[0], found[2]] == numbers
    assert found[1] not in numbers
    calls = dict(line.split(" ", 1) for line in (merging_run.parent / "calls").read_text().splitlines())
    assert calls.pop("0") == str(models / "policy"), "the first policy is a whole model as it is"
    assert sorted(calls) == ["1", "2"]
    assert not any(Path(folder).exists() for folder in calls.values())


def test_a_fork_goes_on_from_the_adapter(run, slurm_ppo, tmp_path):
    made = slurm_ppo("fork", f"{run}@1", tmp_path / "fork")
    assert made.returncode == 0, made.stderr
    assert not list((tmp_path / "fork" / "policy").rglob("model.safetensors"))
    done = slurm_ppo("resume", tmp_path / "fork")
    assert done.returncode == 0, done.stderr
    assert fingerprints(run, policy_maker(2)) == fingerprints(tmp_path / "fork", policy_maker(2))


def test_a_lost_adapter_is_learnt_again(copied_run, slurm_ppo):
    before = fingerprints(copied_run, policy_maker(2))
    (file,) = copied_run.glob("policy/00002.*/adapter/adapter_model.safetensors")
    file.unlink()
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert find_frontier(load_run(copied_run).plan, load_run(copied_run).paths).updated == 2
    assert fingerprints(copied_run, policy_maker(2)) == before


def test_a_trainer_that_wants_whole_models_is_told_what_the_policy_is(run):
    found = load_run(run)
    context = Context(found.paths, found.config, Task(2, Stage.UPDATE), "1-ab")
    with pytest.raises(UserError, match=r"policy 1 is an adapter for .*policy \(update.lora\)"):
        context.policy_directory(1)


# --- export ---


def test_what_is_exported_is_a_whole_model_that_loads_without_the_run(copied_run, models, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = export_without_torch(str(copied_run), tmp_path / "model")
    assert re.fullmatch(r"model.safetensors: (\S+ KiB) of \1\n", done.stderr)
    said = export(str(copied_run), tmp_path / "adapter", adapter=True, say=quiet)
    assert "PeftModel.from_pretrained(" in said
    shutil.rmtree(copied_run)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o666 & ~umask()}
    base = AutoModelForCausalLM.from_pretrained(models / "policy")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    expected = dict(adapted.named_parameters())
    loaded = load_causal_lm(tmp_path / "model", Precision.FP32, trust_remote_code=False)
    for name, weight in loaded.named_parameters():
        assert (weight - expected[name]).abs().max() < 1e-5, name
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("say a")["input_ids"]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_without_torch_export_says_where_to_merge_and_still_gives_the_adapter(run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"takes torch, which .* lacks; run this where tasks run .*--adapter"):
        export(str(run), tmp_path / "model", adapter=False, say=quiet)
    export(str(run), tmp_path / "adapter", adapter=True, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(("harm", "said"), [("change", "has changed"), ("remove", "is gone")])
def test_a_base_that_is_not_what_it_was_is_named(run, tmp_path, monkeypatch, harm, said):
    monkeypatch.setattr("pipeline.run.export.is_unchanged", lambda path, state: path.name != "config.json")
    if harm == "remove":
        monkeypatch.setattr(Path, "exists", lambda path: path.name != "config.json")
    with pytest.raises(RunError, match=rf"config.json there {said} since the run began; restore it, or take"):
        export(str(run), tmp_path / "model", adapter=False, say=quiet)


def test_a_merging_that_fails_says_why_and_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hooks"))
    (tmp_path / "hooks").mkdir()
    broken = "import sys\nif 'stages.models.merging' in sys.orig_argv: sys.exit('no room left')\n"
    (tmp_path / "hooks" / "sitecustomize.py").write_text(broken)
    with pytest.raises(RunError, match=r"could not be merged \(ended with exit code 1\): .*no room left"):
        export(str(run), tmp_path / "model", adapter=False, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["hooks"]
