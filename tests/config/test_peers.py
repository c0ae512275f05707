"""Words of other systems are answered with the key here, and the page of them is made from the same table."""

import typing

import pytest

from docs.generate import FOLDER
from pipeline.config.choices import known_groups
from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.keys import fields_of, is_mapping, mistake_in_key
from pipeline.config.peers import OPTIONS, PEERS, peer_table
from pipeline.config.schema import Config

GIVEN = ["model.policy=p", "data.prompts=d", "reward=model", "reward.components.rm.path=r"]


def refusal(*words: str, config_dir=None) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        compose([*GIVEN, *words], config_dir)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("lr=1e-5", "update.learning_rate"),
        ("update.lr=1e-5", "update.learning_rate"),
        ("learning_rate=1e-5", "update.learning_rate"),
        ("batch_size=64", "data.prompts_per_iteration"),
        ("data.train_batch_size=64", "data.prompts_per_iteration"),
        ("num_generations=8", "rollout.samples_per_prompt"),
        ("rollout.n=8", "rollout.samples_per_prompt"),
        ("+actor_rollout_ref.rollout.n=8", "rollout.samples_per_prompt"),
        ("num_iterations=2", "update.epochs"),
        ("gradient_accumulation_steps=8", "update.tokens_per_micro_batch"),
        ("kl_coef=0.1", "algorithm.kl.coef"),
        ("beta=0.1", "algorithm.kl.coef"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl.coef"),
        ("eps_clip=0.1", "algorithm.clip_range_low and algorithm.clip_range_high"),
        ("per-device-train-batch-size=4", "update.tokens_per_micro_batch"),
        ("algorithm=GRPO", "algorithm=grpo"),
        ("algorithm=reinforce++", "algorithm=reinforce_plus_plus"),
        ("rollout=VLLM", "rollout=vllm"),
        ("model=Qwen", "model.policy"),
    ],
)
def test_a_word_of_others_is_answered_with_the_key_here(word, here):
    (line,) = refusal(word)
    assert line.startswith(word.lstrip("+").split("=")[0])
    assert f"here: {here}" in line or f"e.g. {here}=" in line


def test_a_word_of_others_in_a_file_is_too_also_in_their_sections(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = (
        "# @package _global_\nactor_rollout_ref:\n  actor:\n    strategy: fsdp\n    optim: {lr: 1e-6}\n"
        "update:\n  num_iterations: 2\nalgorithm:\n  betas: 1\n"
    )
    (tmp_path / "experiment" / "own.yaml").write_text(text)
    lines = refusal("experiment=own", config_dir=tmp_path)
    assert lines[0].startswith("update.num_iterations: ")
    assert "here: update.epochs (passes over" in lines[0]
    assert lines[1].startswith("algorithm.betas: ")
    assert lines[1].endswith("did you mean update.betas?")
    assert lines[2:] == [
        "actor_rollout_ref.actor.strategy: unknown key; nothing here is set so; leave it out",
        "actor_rollout_ref.actor.optim.lr: unknown key; here: update.learning_rate",
    ]


def test_a_slip_of_the_finger_is_no_word_of_others():
    (line,) = refusal("update.beta=[0.9,0.9]")
    assert "did you mean 'betas'" in line
    (line,) = refusal("num_shard=2")
    assert "legal: name" in line


def test_a_key_of_ours_in_the_wrong_place_is_found():
    (line,) = refusal("num_shards=4")
    assert line.endswith("did you mean rollout.num_shards?")
    (line,) = refusal("partition=a100")
    assert "legal: name" in line  # every stage has one


# --- the table ---


def exists(key: str) -> bool:
    """Whether the configuration has a key, names of entries included."""
    node: typing.Any = Config
    for part in key.split("."):
        if is_mapping(node):
            node = typing.get_args(node)[1]
            node = typing.get_args(node)[0] if typing.get_origin(node) is typing.Annotated else node
        elif part in fields_of(node):
            node = fields_of(node)[part]
        else:
            return False
    return not fields_of(node)


def test_every_key_of_the_table_is_there():
    assert [key for row in peer_table() for key in row.here if not exists(key)] == []
    assert not exists("update.learning_rat")
    assert not exists("reward.components.rm.pth")
    assert not exists("update")


def test_every_option_of_the_table_is_there():
    groups = known_groups(None)
    for word, here in OPTIONS.items():
        group, option = here.split("=")
        assert option in groups[group], here
        assert word.split("=")[1] not in groups[group], word
        assert word == word.lower()


def test_no_word_has_two_meanings():
    meanings: dict[str, set[tuple[str, ...]]] = {}
    for row in peer_table():
        for word in row.words:
            meanings.setdefault(word, set()).add(tuple(row.here))
    assert {word: here for word, here in meanings.items() if len(here) > 1} == {}


def test_the_page_has_the_table():
    text = (FOLDER / "peers.md").read_text()
    words = {word for row in peer_table() for peer in PEERS for word in getattr(row, peer)}
    assert [word for word in words if f"`{word}`" not in text] == []
    # Words that are keys here too need no advice, and are there to be compared.
    same = {word for word in words if mistake_in_key(word, {}) is None}
    assert same == {"algorithm.gamma", "algorithm.lam"}
