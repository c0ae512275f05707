"""Files of one's own groups whose keys lie elsewhere than meant: the file is named, with the way out."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError

GIVEN = {"model.policy": "p", "data.prompts": "d"}
RULE = ["reward=rule", "reward.components.rule.function=a:b"]


def refusal(folder, group: str, text: str) -> list[str]:
    (folder / group).mkdir()
    (folder / group / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose([f"{'+' if group == 'cluster' else ''}{group}=own", *RULE, "iterations=0"], folder)
    return str(refused.value).splitlines()


EVERYTHING = "model: {policy: p}\ndata: {prompts: d}\n"


@pytest.mark.parametrize(
    ("group", "text", "said"),
    [
        (
            "experiment",
            EVERYTHING,
            "experiment/own.yaml: its keys are below 'experiment', as its first line is not "
            "'# @package _global_'; add that line",
        ),
        ("cluster", EVERYTHING, "cluster/own.yaml: its keys are below 'cluster', as its first line is not"),
        (
            "model",
            "model: {policy: p}\n",
            "model/own.yaml: its keys are below 'model' already; leave 'model' out around them",
        ),
        (
            "model",
            EVERYTHING.replace("model: {policy: p}", "policy: p"),
            "model/own.yaml: its keys are below 'model', so that 'data' does too; let its first line be "
            "'# @package _global_'",
        ),
        (
            "model",
            "# @package _global_\npolicy: p\n",
            "model/own.yaml: its first line puts 'policy' at the top; write it below 'model'",
        ),
    ],
)
def test_keys_that_lie_elsewhere_are_explained_and_not_said_to_be_missing(tmp_path, group, text, said):
    lines = refusal(tmp_path, group, text)
    assert lines[0].startswith(said)
    missing = [line.split(":")[0] for line in lines if "must be given" in line]
    written = {"model.policy"} | ({"data.prompts"} if "data" in text else set())
    assert missing == [key for key in GIVEN if key not in written]
    assert lines[-1].startswith("iterations: ")


def test_files_that_are_right_are_as_before(tmp_path):
    for group, text in (("experiment", f"# @package _global_\n{EVERYTHING}"), ("update", "epochs: 3\n")):
        (tmp_path / group).mkdir()
        (tmp_path / group / "own.yaml").write_text(text)
    config = compose(["experiment=own", "update=own", *RULE], tmp_path)
    assert (config.model.policy, config.update.epochs) == ("p", 3)
