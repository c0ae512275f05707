"""Teachers and references that follow the policy: what they need of other settings, and where they are
refused."""

import json
import shutil

import pytest

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from tests.support import tiny
from tests.support.composed import composed_of
from tests.support.tables import sample

ALONE = ("reward=teacher", "algorithm=reinforce_plus_plus")
LOSS = "algorithm.distillation.placement=loss"
OURS = "update.engine=deepspeed"


@pytest.fixture
def teacher(inputs, tmp_path):
    return shutil.copytree(inputs / "policy", tmp_path / "teacher")


def config(inputs, tmp_path, *words):
    return resolve(composed_of(inputs, tmp_path / "run", *words))


def test_a_teacher_alone_is_a_run_and_has_a_pool(inputs, tmp_path, teacher):
    path, pool = f"reward.teachers.teacher.path={teacher}", "reward.teachers.teacher.pool=big"
    made = config(inputs, tmp_path, *ALONE, path, pool)
    assert made.reward.components == {}
    assert made.reward.pools == ("big",)
    assert made.reward.teachers_of("big").keys() == {"teacher"}


REFUSED = [
    (("reward=teacher",), "so a critic has nothing to learn; choose algorithm=reinforce_plus_plus"),
    ((*ALONE, "algorithm.policy_loss=gspo"), "such as gspo-token, or algorithm.distillation.placement=loss"),
    ((*ALONE, "algorithm.distillation.estimator=k3"), "needs algorithm.distillation.placement=loss"),
    (
        (*ALONE, LOSS, "algorithm.distillation.estimator=k1"),
        "give algorithm.distillation.straight_through=true",
    ),
    (
        (
            "reward=teacher",
            "algorithm=grpo",
            "rollout.samples_per_prompt=2",
            "algorithm.shaping.filter_groups=true",
        ),
        "all prompts would be left out; set it to false",
    ),
    ((*ALONE, "data.heldout=/dev/null", "evaluate.every=1"), "add a component with weight 0, or set it to 0"),
    ((*ALONE, "algorithm.distillation.top_k=4"), "needs algorithm.distillation.placement=loss"),
    (
        (*ALONE, LOSS, "algorithm.distillation={top_k: 4, estimator: k2}"),
        "is for an estimate, and top_k needs none; leave one of them out",
    ),
    ((*ALONE, LOSS, "algorithm.distillation.top_k=100000"), r"tokens; legal: 1 to \d+"),
    (
        (*ALONE, LOSS, "algorithm.distillation.top_k=100", "data.prompts_per_iteration=10000000"),
        r"has more than 2\^31 of the teacher's numbers; give \d+ at most, or more shards",
    ),
    (
        (*ALONE, LOSS, "algorithm.distillation.top_k=4", "reward.teachers.b.path=${model.policy}"),
        "a response may have one teacher, and teacher teaches all of them; give reward.teachers.teacher.only",
    ),
    ((LOSS,), "there is no teacher; give reward.teachers.NAME.path=DIR, or leave it out"),
    (
        ("algorithm.kl.sync_every=2", "algorithm.kl.coef=0", "algorithm.kl.reference_in=reward"),
        "there is no reference",
    ),
    (("algorithm.kl.sync_weight=0.5", OURS), "give it too, or leave it out"),
    (
        ("algorithm.kl.sync_every=2", "algorithm.kl.sync_weight=0.5"),
        "makes no average of weights; set it to 1",
    ),
    (
        ("algorithm.kl.sync_every=2", "algorithm.kl.sync_weight=0.5", OURS, "update.lora={rank: 4}"),
        r"adapters \(update.lora\), of which no average is made",
    ),
    (
        ("algorithm.kl.sync_every=2", OURS, "update.lora={rank: 4}", "update.zero_stage=3"),
        "update.zero_stage=3 has parts; set algorithm.kl.reference_in=reward",
    ),
]


@pytest.mark.parametrize(("words", "why"), sample(REFUSED, 1 / 2))
def test_what_does_not_go_together_is_refused_with_the_way_out(inputs, tmp_path, teacher, words, why):
    path = (f"reward.teachers.teacher.path={teacher}",) if "reward=teacher" in words else ()
    with pytest.raises(ConfigError, match=why):
        config(inputs, tmp_path, *words, *path)


def test_a_teacher_of_another_tokenizer_is_refused(inputs, tmp_path, teacher):
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = [*ALONE, f"reward.teachers.teacher.path={teacher}", "model.tokenizer=null"]
    with pytest.raises(ConfigError, match=r"teacher.path=.*: its tokenizer has other ids than the policy's"):
        config(inputs, tmp_path, *words)


def test_a_teacher_whose_context_is_too_short_is_refused(inputs, tmp_path, teacher):
    settings = json.loads((teacher / "config.json").read_text()) | {"max_position_embeddings": 32}
    (teacher / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"has positions for 32 tokens, and model\.context_length=64"):
        config(inputs, tmp_path, *ALONE, f"reward.teachers.teacher.path={teacher}")


def test_more_likely_tokens_than_the_policy_s_tokenizer_has_are_refused_before_the_run(
    inputs, slurm_ppo, tmp_path
):
    padded = tiny.make_policy(tmp_path / "padded", vocab_size=512)
    words = (*ALONE, LOSS, "algorithm.distillation.top_k=300", f"reward.teachers.teacher.path={padded}")
    given = tiny.overrides(inputs, tmp_path / "run", *words, f"model.policy={padded}", "model.tokenizer=null")
    done = slurm_ppo("validate", *given)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "top_k" in line]
    assert (
        "algorithm.distillation.top_k=300: the policy writes 258 of its 512 tokens; legal: 1 to 258" in line
    )
