"""A ``~`` that no shell has replaced is the home directory, in values and arguments, or it is explained."""

import shutil
import sys
from pathlib import Path

import pytest

from pipeline.cli.app import main
from pipeline.config.home import arguments_with_home, full_path, with_home, with_homes
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from slurm.errors import UserError
from tests.support import tiny


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_paths_of_settings_begin_with_the_home_directory(inputs, tmp_path, home):
    for name in ("policy", "reward_model"):
        shutil.copytree(inputs / name, home / name)
    for name in ("prompts.jsonl", "heldout.jsonl"):
        shutil.copy(inputs / name, home / name)
    (home / "tell").touch(0o755)
    (home / "groups" / "experiment").mkdir(parents=True)
    (home / "groups" / "experiment" / "own.yaml").write_text(
        "# @package _global_\nmodel: {policy: ~/policy}\nscheduler:\n  python: ~/venv/bin/python\n"
        "  container: apptainer exec --nv ~/images/ppo.sif\n  environment: {HF_HOME: ~/hf, OTHER: a~/b}\n"
    )
    words = [
        *("experiment=own", "scheduler=slurm", "data.prompts=~/prompts.jsonl", "run_dir=~/runs/first"),
        *("data.heldout={easy: ~/heldout.jsonl}", "reward.components.rm.path=~/reward_model"),
        "notify.command='~/tell --log ~/log.txt'",
    ]
    given = [w for w in tiny.overrides(inputs, tmp_path) if not w.startswith(("model.policy", "run_dir"))]
    config = configure([*given, *arguments_with_home(words)], home / "groups")
    assert config.model.policy == f"{home}/policy"
    assert config.run_dir == f"{home}/runs/first"
    assert (config.data.prompts, config.data.heldout) == (
        f"{home}/prompts.jsonl",
        {"easy": f"{home}/heldout.jsonl"},
    )
    assert config.reward.components["rm"].path == f"{home}/reward_model"
    assert config.notify.command == (f"{home}/tell", "--log", f"{home}/log.txt")
    assert config.slurm is not None
    assert config.slurm.python == f"{home}/venv/bin/python"
    assert config.slurm.container == f"apptainer exec --nv {home}/images/ppo.sif"
    assert config.slurm.environment == {"HF_HOME": f"{home}/hf", "OTHER": "a~/b"}


@pytest.mark.parametrize("key", ["run_dir", "model.policy", "data.prompts", "reward.components.rm.path"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "~nobody-at-all/x",
            "no user is called 'nobody-at-all'; for a folder with this name write ./~nobody-at",
        ),
        ("'~'", "write ~/ for your home directory; for a folder with this name write ./~"),
    ],
)
def test_a_home_that_there_is_not_is_explained(inputs, tmp_path, home, key, value, said):
    with pytest.raises(ConfigError) as refused:
        configure(tiny.overrides(inputs, tmp_path / "run", f"{key}={value}"))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{key}={value.strip(chr(39))}: ")
    assert said in line


def test_arguments_begin_with_it_too_also_behind_an_option(complete_run, home, monkeypatch, capsys):
    (home / "run").symlink_to(complete_run)
    for words in (
        ["plan", "~/run"],
        ["config", "--config-dir=~/absent", "seed=1"],
        ["export", "~/run", "~no-one/x"],
    ):
        monkeypatch.setattr(sys, "argv", ["slurm-ppo", *words])
        with pytest.raises(SystemExit):
            main()
    said = capsys.readouterr()
    assert "nothing" in said.out
    first, second = said.err.splitlines()
    assert first == f"error: --config-dir {home}/absent: no such directory"
    assert second.startswith("error: ~no-one/x: no user is called 'no-one'")


def test_only_the_beginning_of_a_path_is_a_home(home):
    assert arguments_with_home(["~update.epochs", "~", "a=~/b", "--prompt=~", "--out=~/a=b", "~/x y"]) == [
        *("~update.epochs", "~", f"a={home}/b", "--prompt=~", f"--out={home}/a=b", f"{home}/x y"),
    ]
    assert arguments_with_home(["a=[~/b,~/c]", "a={b: ~/c, d: e~/f}", "a='~/b'", "a=~/b,~no-one/c"]) == [
        *(f"a=[{home}/b,{home}/c]", f"a={{b: {home}/c, d: e~/f}}", "a='~/b'", f"a={home}/b,~no-one/c"),
    ]
    assert with_home("~//x/../~/y") == f"{home}//x/../~/y"
    assert with_homes({"a": [None, 3, {"command": "a~/ ~/b '~/c'"}]}) == {
        "a": [None, 3, {"command": f"a~/ {home}/b '~/c'"}]
    }
    with pytest.raises(UserError, match="no user is called 'no-one'"):
        full_path("~no-one")
