"""Export: a policy as a plain model directory, verified, whole or not at all, without links into the run."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.run.commits import FileEntry, require_record
from pipeline.run.directory import load_run
from pipeline.run.durable import digest_file
from pipeline.run.export import export
from pipeline.run.identity import RunError
from pipeline.run.plan import policy_maker
from pipeline.run.versions import find_version, split
from tests.support.exporting import export_without_torch

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def quiet(text: str) -> None:
    raise AssertionError(f"nothing here is large enough to speak of: {text}")


def add_adapter(run: Path, version: int) -> None:
    """Give a policy the subfolder that update.lora gives it."""
    paths = load_run(run).paths
    record = require_record(paths, policy_maker(version))
    entries = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = paths.task(record.task).policy(record.attempt) / "adapter" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        entries.append(FileEntry(paths.relative(path), *digest_file(path)))
    changed = replace(record, outputs=(*record.outputs, *entries))
    paths.task(record.task).record.write_text(json.dumps(changed.to_json()))


def test_what_is_exported_is_the_policy_and_loads_without_the_run(complete_real_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copied_run = Path(shutil.copytree(complete_real_run, tmp_path / "run", symlinks=True))
    weights = (copied_run / "policy/00002/model.safetensors").read_bytes()
    said = export(str(copied_run), tmp_path / "model", adapter=False, say=quiet)
    shutil.rmtree(copied_run)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == FILES
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in (tmp_path / "model").iterdir())
    assert (tmp_path / "model/model.safetensors").read_bytes() == weights
    code = re.search(r"load: +(.*)", said)[1]
    assert eval(code, {"AutoModelForCausalLM": AutoModelForCausalLM}).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("say a")["input_ids"]


def test_the_command_needs_no_torch_and_says_how_to_go_on(complete_run, tmp_path):
    done = export_without_torch(f"{complete_run}@1", tmp_path / "deep/model")
    lines = done.stdout.splitlines()
    assert lines[0] == f"exported policy 1 of {complete_run}"
    assert lines[1] == f"  files:  ls {tmp_path}/deep/model"
    assert f'from_pretrained("{tmp_path}/deep/model")' in lines[2]
    weights = complete_run / "policy/00001/model.safetensors"
    assert (tmp_path / "deep/model/model.safetensors").read_bytes() == weights.read_bytes()


def test_the_best_is_the_best_of_the_evaluated(complete_run):
    best = json.loads((complete_run / "best.json").read_text())
    version = find_version(f"{complete_run}@best", "policy", "policy")
    assert version.number == best["iteration"]
    assert version.record.outputs[0].folder == best["policy"]


def test_a_run_whose_name_has_an_at_sign_is_not_misread(copied_run):
    odd = copied_run.rename(copied_run.with_name("run@2"))
    assert split(str(odd)) == (odd, "")
    assert split(f"{odd}@1") == (odd, "1")
    assert split("runs/first@3") == (Path("runs/first"), "3")
    assert split("@3") == (Path("@3"), "")


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("@3", r"policy 3 of .* is not there yet; choose 1, 2; the nearest is .*@2$"),
        (
            "@0",
            r"policy 0 of .* is the model that it began with, .*/policy; choose 1, 2; the nearest is .*@1$",
        ),
        ("@last", r"@last: write RUN, RUN@ITERATION or RUN@best"),
    ],
)
def test_a_policy_that_is_not_there_is_answered_with_those_that_are(complete_run, tmp_path, which, said):
    with pytest.raises(RunError, match=said):
        export(f"{complete_run}{which}", tmp_path / "model", adapter=False, say=quiet)
    assert list(tmp_path.iterdir()) == []


def test_without_evaluations_there_is_no_best(copied_run, tmp_path):
    (copied_run / "best.json").unlink()
    with pytest.raises(RunError, match="none was evaluated"):
        export(f"{copied_run}@best", tmp_path / "model", adapter=False, say=quiet)


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_a_target_that_is_taken_is_left_alone(complete_run, tmp_path, kind):
    target = tmp_path / "model"
    if kind == "full":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    if kind == "file":
        target.write_text("years of work")
    if kind == "link":
        target.symlink_to(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RunError, match="choose another folder"):
        export(str(complete_run), target, adapter=False, say=quiet)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_empty_folder_is_filled(complete_run, tmp_path):
    (tmp_path / "model").mkdir()
    export(str(complete_run), tmp_path / "model", adapter=False, say=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == FILES


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "xxh3_128"),
        (lambda path: path.write_bytes(b"short"), "has 5 bytes instead of"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_damaged_policy_is_named_and_nothing_is_left(copied_run, tmp_path, harm, said):
    harm(next(copied_run.glob("policy/00002.*/tokenizer.json")))
    with pytest.raises(RunError, match=f"no longer holds what was committed: .*{said}"):
        export(str(copied_run), tmp_path / "model", adapter=False, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_export_leaves_no_half_directory(complete_run, tmp_path, monkeypatch):
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(str(complete_run), tmp_path / "model", adapter=False, say=quiet)
    assert list(tmp_path.iterdir()) == []


def test_large_files_are_spoken_of(complete_run, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.run.export._WORTH_A_LINE", 1000)
    said: list[str] = []
    export(str(complete_run), tmp_path / "model", adapter=False, say=said.append)
    assert any(re.fullmatch(r"model.safetensors: \d+\.\d of \d+\.\d GiB", line) for line in said)


# --- adapters ---


def test_the_adapter_is_exported_alone_and_the_model_without_it(copied_run, tmp_path):
    add_adapter(copied_run, 2)
    said = export(str(copied_run), tmp_path / "adapter", adapter=True, say=quiet)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == names
    assert "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(" in said
    export(str(copied_run), tmp_path / "model", adapter=False, say=quiet)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == FILES


def test_without_lora_there_is_no_adapter(complete_run, tmp_path):
    with pytest.raises(RunError, match=r"has no adapter: .*update.lora is null.*leave --adapter out"):
        export(str(complete_run), tmp_path / "model", adapter=True, say=quiet)
    assert list(tmp_path.iterdir()) == []
