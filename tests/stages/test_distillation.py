"""Distillation on the policy's own responses: teachers' log-probabilities, and what is learned from them."""

import dataclasses
import math

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from pipeline.config.algorithm import DistillationConfig, KLEstimator
from pipeline.config.model_files import read_tensors
from pipeline.config.reward import TeacherConfig
from pipeline.config.update import Precision
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import (
    GREEDY_SAMPLE,
    REWARD,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHER_WEIGHT,
)
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context, UserError
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm
from stages.ppo.averaging import averaged_weight, named_alike, write_average
from stages.ppo.batching import micro_batches
from stages.ppo.distillation import teacher_loss
from stages.ppo.experience import read_experience
from stages.ppo.logits import AskedTokens, TokenOutputs, token_outputs
from stages.ppo.math.kl import top_kl
from stages.ppo.targets import Targets, teacher_advantages
from stages.rewards.teachers import combined, taught, teacher_log_probs
from tests.support import tiny
from tests.support.learning import experience, metrics_of, updated
from tests.support.processes import config_of, make_run
from tests.support.rollouts import rollout_table
from tests.support.scored import commit_scored

TAUGHT = ("reward=teacher", "algorithm=reinforce_plus_plus", "algorithm.kl.coef=0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny.make_policy(tmp_path_factory.mktemp("teacher") / "model", seed=5)


def with_teacher(log_probs, weights):
    """Eight responses that have these log-probabilities of a teacher, and weights of theirs."""
    given = experience(with_kl=False)
    return dataclasses.replace(given, teacher_log_probs=log_probs, teacher_weights=weights)


def test_a_token_s_advantage_is_its_log_ratio_of_teacher_to_old_policy_times_the_weight():
    """log 0.5 - log 0.2 is 0.916291; log 0.1 - log 0.4 is -1.386294."""
    given = experience(rows=2, with_kl=False)
    theirs, mine = torch.zeros_like(given.rollout_log_probs), torch.zeros_like(given.rollout_log_probs)
    theirs[:, 0], mine[:, 0] = math.log(0.5), math.log(0.2)
    theirs[:, 1], mine[:, 1] = math.log(0.1), math.log(0.4)
    given = dataclasses.replace(given, teacher_log_probs=theirs, teacher_weights=torch.tensor([[1.0], [0.5]]))
    found = teacher_advantages(given, mine)
    assert found[0, :3].tolist() == pytest.approx([0.916291, -1.386294, 0], abs=1e-6)
    assert found[1, :3].tolist() == pytest.approx([0.458145, -0.693147, 0], abs=1e-6)
    no_teacher = dataclasses.replace(given, teacher_weights=torch.zeros(2, 1))
    assert not teacher_advantages(no_teacher, mine).any()


@pytest.mark.parametrize(
    ("estimator", "straight_through", "value", "gradient"),
    [
        (KLEstimator.K3, False, 0.5 / 0.2 - math.log(0.5 / 0.2) - 1, 1 - 0.5 / 0.2),
        (KLEstimator.K2, False, math.log(0.5 / 0.2) ** 2 / 2, -math.log(0.5 / 0.2)),
        (KLEstimator.K1, True, -math.log(0.5 / 0.2), -math.log(0.5 / 0.2)),
    ],
)
def test_in_the_loss_it_is_the_estimator_times_the_weight(estimator, straight_through, value, gradient):
    given = experience(rows=2, with_kl=False)
    (batch,) = micro_batches(given.rows, [0, 1], 512)
    nothing = torch.zeros_like(given.rollout_log_probs)
    targets = Targets(
        mask=given.mask,
        old_log_probs=None,
        old_values=None,
        advantages=nothing,
        returns=None,
        weights=None,
        reference_log_probs=None,
        kl_coef=0.0,
        teacher_log_probs=nothing + math.log(0.5),
        teacher_weights=torch.tensor([[2.0], [0.0]]),
    )
    settings = DistillationConfig(estimator=estimator, straight_through=straight_through)
    log_probs = torch.full((2, batch.num_response_columns), math.log(0.2), requires_grad=True)
    of_row = batch.rows.tolist().index
    found = teacher_loss(settings, targets, batch, TokenOutputs(log_probs, None))
    assert float(found[of_row(0), 0].detach()) == pytest.approx(2 * value, abs=1e-6)
    assert not found[of_row(1)].any()
    found.sum().backward()
    assert float(log_probs.grad[of_row(0), 0]) == pytest.approx(2 * gradient, abs=1e-6)
    assert not log_probs.grad[of_row(1)].any()


@st.composite
def two_models(draw):
    """Logits [n, V] of policy and teacher, the temperature, and k."""
    rows, size = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    numbers = st.lists(st.floats(-6, 6, width=32), min_size=rows * size, max_size=rows * size)
    mine, theirs = (torch.tensor(draw(numbers), dtype=torch.float64).view(rows, size) for _ in "ab")
    return mine, theirs, draw(st.sampled_from([0.7, 1.0])), draw(st.integers(1, size))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(two_models())
def test_over_the_likeliest_tokens_the_kl_is_its_definition_with_its_gradient_and_whole_over_all(models):
    """Of the distributions in which all tokens that the teacher does not give count as one."""
    mine, theirs, temperature, k = models
    places, tokens = torch.arange(len(mine)), torch.zeros(len(mine), dtype=torch.long)
    found = token_outputs(theirs, AskedTokens(places, tokens, temperature, top=k))
    expected, ids = torch.log_softmax(theirs / temperature, dim=1).topk(k)
    assert torch.equal(found.top, ids)
    assert torch.allclose(found.others, expected, rtol=0, atol=1e-9)

    def of_definition(logits: torch.Tensor) -> torch.Tensor:
        p, q = (torch.softmax(one / temperature, dim=1) for one in (logits, theirs))
        kl = (p.gather(1, ids) * (p / q).log().gather(1, ids)).sum(1)
        r, s = ((one * torch.ones_like(one).scatter(1, ids, 0)).sum(1).clamp(min=1e-6) for one in (p, q))
        return kl + r * (r / s).log()

    def by_head(logits: torch.Tensor) -> torch.Tensor:
        asked = AskedTokens(places, tokens, temperature, others=found.top)
        return top_kl(token_outputs(logits, asked).others, found.others)

    values, gradients = [], []
    for function in (of_definition, by_head):
        leaf = mine.clone().requires_grad_()
        values.append(function(leaf))
        (values[-1] * torch.arange(1, len(mine) + 1)).sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(values[0], values[1], rtol=0, atol=1e-6)
    assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-6)
    p, q = (torch.log_softmax(one / temperature, dim=1) for one in (mine, theirs))
    whole = (p.exp() * (p - q)).sum(1)
    assert (values[1] <= whole + 1e-6).all()
    if k == mine.shape[1]:
        assert torch.allclose(values[1], whole, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def over_the_likeliest(models, teacher, tmp_path_factory) -> Run:
    words = (f"reward.teachers.teacher.path={teacher}", "algorithm.distillation={placement: loss, top_k: 4}")
    return make_run(models, tmp_path_factory.mktemp("likeliest") / "run", *TAUGHT, *words)


def test_a_teacher_s_likeliest_tokens_are_those_of_its_whole_logits(over_the_likeliest, teacher):
    config, prompts, responses = over_the_likeliest.config, [[3, 2], [9], [4, 4]], [[4, 9, 7], [5], [6, 8]]
    rows = rollout_table(responses, prompt_tokens=prompts, sample_index=[0, GREEDY_SAMPLE, 0])
    context = Context(over_the_likeliest.paths, config, PREPARE, "test")
    found = combined(config.reward.teachers, teacher_log_probs(context, rows, config.reward.teachers))
    model = hide_unknown_ids(load_causal_lm(teacher, Precision.FP32, trust_remote_code=False), config)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / config.rollout.temperature, dim=1).topk(4)
        ids, log_probs = (found[name][row].as_py() for name in (TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS))
        if row == 1:
            assert ids is log_probs is None, "of a greedy response, which has no teacher"
            continue
        assert ids == expected.indices.flatten().tolist()
        assert log_probs == pytest.approx(expected.values.flatten().tolist(), abs=1e-5)


def test_ids_that_the_policy_has_no_place_for_are_none_of_a_larger_teacher_s(over_the_likeliest, tmp_path):
    config = over_the_likeliest.config
    size = len(tiny.byte_tokenizer(("<pad>", "<eos>")))
    padded = tiny.make_policy(tmp_path / "padded", seed=5, vocab_size=size + 64, tie_word_embeddings=False)
    weights = load_file(padded / "model.safetensors")
    weights["lm_head.weight"][size:] *= 100
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    teachers = {"teacher": dataclasses.replace(config.reward.teachers["teacher"], path=str(padded))}
    run = dataclasses.replace(config, reward=dataclasses.replace(config.reward, teachers=teachers))
    rows = rollout_table([[4, 9, 7], [5]], prompt_tokens=[[3, 2], [9]])
    context = Context(over_the_likeliest.paths, run, PREPARE, "test")
    found = combined(teachers, teacher_log_probs(context, rows, teachers))
    flat = np.array(found[TEACHER_TOP_TOKENS].combine_chunks().values)
    assert flat.size == 4 * 4
    assert flat.max() < size
    assert np.isfinite(found[TEACHER_TOP_LOGPROBS].combine_chunks().values).all()


def test_a_flipped_bit_among_the_likeliest_tokens_is_noticed(over_the_likeliest):
    run, task = commit_scored(over_the_likeliest), Task(1, Stage.REWARD, 0)
    context, path = (
        Context(run.paths, run.config, policy_maker(1), "1-x"),
        run.paths.task(task).data("1-noop"),
    )
    given = read_experience(context, 1)
    assert given.teacher_top_tokens.shape == (*given.mask.shape, 4)
    ids = read_shard(run.paths, read_record(run.paths, task), REWARD)[TEACHER_TOP_TOKENS].combine_chunks()
    content = bytearray(path.read_bytes())
    content[content.index(ids.flatten().to_numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptData) as caught:
        read_experience(context, 1)
    assert caught.value.task == task


def test_several_teachers_of_a_response_are_one_with_their_weighted_mean():
    teachers = {"a": TeacherConfig(path="/a", weight=3.0), "b": TeacherConfig(path="/b")}
    found = combined(
        teachers,
        {
            "teacher/a": pa.array([[-1.0, -2.0], None, [-4.0]], pa.list_(pa.float32())),
            "teacher/b": pa.array([[-3.0, -6.0], None, None], pa.list_(pa.float32())),
        },
    )
    assert found[TEACHER_LOGPROBS].to_pylist() == [[-1.5, -3.0], None, [-4.0]]
    assert found[TEACHER_WEIGHT].to_pylist() == [4.0, 0.0, 3.0]
    assert combined({}, {}).num_columns == 0


def test_over_the_likeliest_tokens_each_response_has_one_teacher():
    teachers = {"a": TeacherConfig(path="/a", only={"x": 1}), "b": TeacherConfig(path="/b", only={"y": 1})}

    def given(a: list, b: list) -> dict[str, pa.Array]:
        both = {"a": pa.array(a, pa.list_(pa.float32())), "b": pa.array(b, pa.list_(pa.float32()))}
        kinds = {"teacher": pa.float32(), TEACHER_TOP_TOKENS: pa.int32(), TEACHER_TOP_LOGPROBS: pa.float32()}
        return {
            f"{kind}/{name}": column.cast(pa.list_(type_))
            for kind, type_ in kinds.items()
            for name, column in both.items()
        }

    found = combined(teachers, given([[-1.0], None, None], [None, [-2.0], None]))
    assert found[TEACHER_TOP_TOKENS].to_pylist() == [[-1], [-2], None]
    assert found[TEACHER_TOP_LOGPROBS].to_pylist() == [[-1.0], [-2.0], None]
    with pytest.raises(UserError, match=r"a and b teach the same response, .*; give them an only that"):
        combined(teachers, given([[-1.0]], [[-2.0]]))


def test_a_teacher_is_for_the_prompts_that_have_its_values():
    rows = rollout_table([[4], [5], [6]], subject=["maths", "law", "maths"], level=[1, 1, 2])
    assert taught("t", TeacherConfig(path="/t"), rows).tolist() == [True, True, True]
    assert taught("t", TeacherConfig(path="/t", only={"subject": "maths"}), rows).tolist() == [
        True,
        False,
        True,
    ]
    both = TeacherConfig(path="/t", only={"subject": "maths", "level": 2})
    assert np.flatnonzero(taught("t", both, rows)).tolist() == [2]
    with pytest.raises(UserError, match=r"reward.teachers.t.only: topic is not a column .*: subject, level"):
        taught("t", TeacherConfig(path="/t", only={"topic": 1}), rows)


def test_an_update_brings_the_policy_nearer_to_its_teacher_and_starts_from_a_ratio_of_1(make, teacher):
    """The responses were sampled by neither, so that only their own tokens say how near it is."""
    learner = make(*TAUGHT, f"reward.teachers.teacher.path={teacher}", "update.epochs=4")
    given = experience(with_kl=False)
    wanted = torch.where(given.mask, -2.0, 0.0)  # more than the 1 in 260 that the policy gives each token
    given = dataclasses.replace(given, teacher_log_probs=wanted, teacher_weights=torch.ones(len(given), 1))
    before = metrics_of(learner, given)
    after = metrics_of(learner, given)
    assert before["policy/ratio_error_first"] == 0
    assert before["policy/advantage_mean"] == pytest.approx(-before["teacher/kl_per_token"], rel=1e-5)
    assert before["teacher/kl_per_token"] < after["teacher/kl_per_token"] < 0
    assert before["teacher/responses"] == len(given)


def test_without_a_teacher_for_any_response_there_is_nothing_to_measure_or_learn(make, teacher):
    learner = make(*TAUGHT, f"reward.teachers.teacher.path={teacher}")
    given = with_teacher(torch.zeros_like(experience().rollout_log_probs), torch.zeros(8, 1))
    given = dataclasses.replace(
        given, outcome=dataclasses.replace(given.outcome, scores=torch.zeros_like(given.outcome.scores))
    )
    start = [one.detach().clone() for one in learner.policy.model.parameters()]
    done = updated(learner, given)
    assert not done.targets.advantages.any()
    for one, was in zip(learner.policy.model.parameters(), start, strict=True):
        assert torch.equal(one, was)


def test_the_average_is_the_share_of_the_policy_and_the_rest_of_the_reference(models, teacher, tmp_path):
    write_average(models / "policy", read_tensors(teacher), 0.25, tmp_path / "average")
    policy, theirs, found = (
        load_file(folder / "model.safetensors")
        for folder in (models / "policy", teacher, tmp_path / "average")
    )
    assert found.keys() == policy.keys()
    for name, weight in found.items():
        assert weight.dtype is torch.float32
        assert torch.allclose(weight, 0.25 * policy[name] + 0.75 * theirs[name], rtol=0, atol=1e-7)
    lacking = {name: header for name, header in read_tensors(teacher).items() if "embed" not in name}
    with pytest.raises(UserError, match=r"no weight model.embed_tokens.weight .* or set it to 1"):
        write_average(models / "policy", lacking, 0.25, tmp_path / "none")


def test_an_average_moves_by_less_than_bf16_can_say(tmp_path):
    """By the closed form: 1.0 plus 0.0078125 times what 20 syncs of a thousandth have brought."""
    file, policy = tmp_path / "model.safetensors", torch.full((4,), 1.0078125, dtype=torch.bfloat16)
    average = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(20):
        save_file({"w": average}, file)
        average = averaged_weight("w", policy, read_tensors(tmp_path), 1e-3)
    assert average.dtype is torch.float32
    expected = torch.full((4,), 1 + 0.0078125 * (1 - 0.999**20))
    torch.testing.assert_close(average, expected, rtol=0, atol=20 * 2**-24)
    assert bool((average.bfloat16() == 1).all()), "else this shows nothing"


def test_a_reference_whose_weights_have_other_names_is_read_without_rounding(models, tmp_path):
    model = LlamaForCausalLM.from_pretrained(models / "policy", dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.model.save_pretrained(tmp_path / "reference")
    model.save_pretrained(tmp_path / "policy")
    config = config_of(models, tmp_path / "run", "update.precision=bf16", "update.zero_stage=1")
    assert not read_tensors(tmp_path / "reference").keys() & read_tensors(tmp_path / "policy").keys()
    with named_alike(config, tmp_path / "policy", tmp_path / "reference") as stored:
        for name, header in stored.items():
            with safe_open(header.path, "pt") as file:
                assert torch.equal(file.get_tensor(name), model.state_dict()[name])
