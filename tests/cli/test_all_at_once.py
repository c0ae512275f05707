"""Several mistakes of one command: each is a line of its own, all in one go, and none hides another."""

import sys

import pytest

from pipeline.checks import settings
from pipeline.cli.app import main
from tests.support import tiny

EXPERIMENT = """\
# @package _global_
modle:
  critic: c
update:
  zero_stage: many
"""


@pytest.mark.parametrize("command", ["run", "submit", "validate"])
def test_keys_models_data_rules_and_the_place_are_named_in_one_go(
    command, inputs, complete_run, tmp_path, slurm_ppo
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(EXPERIMENT)
    rows = "".join(f'{{"id": {id_}, "prompt": ""}}\n' for id_ in range(4))
    (tmp_path / "empty.jsonl").write_text(rows)
    before = sorted(complete_run.rglob("*"))
    words = [
        *("experiment=own", "seeed=1", f"model.reference={tmp_path / 'absent'}", "update.minibatches=3"),
        *(f"data.prompts={tmp_path / 'empty.jsonl'}", "scheduler=slurm" if command == "submit" else "seed=1"),
        "reward.components.style={kind: rule, function: 'tests.support.user_rules:absent'}",
    ]
    done = slurm_ppo(
        command, "--config-dir", tmp_path, *tiny.overrides(inputs, complete_run), *words, timeout=60
    )
    assert done.returncode == 2
    told = [line.removeprefix("error: ").split(":")[0].split("=")[0] for line in done.stderr.splitlines()]
    assert told == [
        *("seeed", "modle", "update.zero_stage"),
        *("model.reference", "update.minibatches", "data.prompts", "reward.components.style.function"),
        *(["scheduler"] if command == "submit" else []),  # there is no Slurm here
        "run_dir already holds a run. To continue it",
    ]
    assert done.stdout == ""
    assert sorted(complete_run.rglob("*")) == before


def test_a_rule_is_imported_also_where_no_row_can_be_tried(inputs, tmp_path, slurm_ppo):
    words = ["data.prompts=absent.jsonl", "reward.components.style={kind: rule, function: 'json:absent'}"]
    words.append("reward.components.worse={kind: rule, function: 'json:other'}")
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run", *words))
    told = [line.split("=")[0].removeprefix("error: ") for line in done.stderr.splitlines()]
    assert told == ["data.prompts", *(f"reward.components.{name}.function" for name in ("style", "worse"))]


def test_every_file_and_every_plug_in_of_a_kind_is_named(inputs, tmp_path, slurm_ppo):
    (tmp_path / "spoilt.parquet").write_text("no table")
    (tmp_path / "other.parquet").write_text("nor this")
    words = [f"data.prompts={tmp_path}/spoilt.parquet", f"data.heldout={tmp_path}/other.parquet"]
    words += ["evaluate.every=1", *(f"{stage}.engine=json:absent" for stage in ("rollout", "update"))]
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run", *words))
    said = done.stderr.splitlines()
    assert [name in line for line, name in zip(said[:2], ("spoilt", "other"), strict=True)] == [True, True]
    assert [line.split("=")[0] for line in said[2:]] == ["error: rollout.engine", "error: update.engine"]


def test_where_nothing_is_wrong_with_the_rest_it_is_not_spoken_of(inputs, tmp_path, slurm_ppo):
    """A policy that is not there keeps its tokenizer, its length and its disk space from being known."""
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run", "model.policy=absent"))
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model.policy=")
    assert done.stdout == ""


def test_a_check_that_stumbles_after_a_problem_is_named_with_what_it_stumbled_over(
    inputs, tmp_path, monkeypatch, capsys
):
    """Without a problem before it the same is a mistake of the program, and not hidden."""

    def stumble(*_: object, **__: object) -> None:
        raise KeyError("blocks")

    monkeypatch.setattr(settings, "check_disk", stumble)
    words = ["slurm-ppo", "validate", *tiny.overrides(inputs, tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [*words, "seeed=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    first, last = capsys.readouterr().err.splitlines()
    assert "seeed" in first
    assert last == "error: not checked: disk space: KeyError: 'blocks'"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyError):
        main()
