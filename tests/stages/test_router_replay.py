"""Router replay: responses say which experts their tokens went through, and the update takes these, in every
layout and also where layers are computed again; the routers weigh them, and learn."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.config.routing_rules import REPLAYED, replay_problems, why_not_replayed
from pipeline.run.schemas import ROUTED_EXPERTS, FinishReason
from pipeline.run.tasks import Stage
from stages.context import UserError
from stages.engines.base import BadAnswer, Response, Sampling
from stages.engines.transformers import TransformersGenerator
from stages.files.routes import routes_column, routes_in
from stages.generation.episodes import BEFORE_THE_FIRST_TURN, Episode
from stages.generation.progress import from_table, to_table
from stages.generation.responding import with_routes
from stages.models.routing import routing_of
from stages.ppo.batching import MicroBatch, Row, collate, collate_shared, micro_batches, shared_lines
from stages.ppo.experience import Experience
from stages.ppo.forward import response_log_probs
from stages.ppo.refill import Candidates, candidates_of, table_of
from stages.ppo.replay import Replay
from stages.ppo.sharing import can_share
from tests.support import tiny
from tests.support.families import family, make_mixture, requests
from tests.support.learning import (
    difference,
    experience,
    make_learner,
    metrics_of,
    process_group,
    updated,
    weights,
)
from tests.support.rollouts import rollout_table
from tests.support.tables import sample

REPLAY = "algorithm.router_replay=true"
SETTINGS = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2", REPLAY)


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group():
        yield


@pytest.fixture
def learner_of(models, tmp_path):
    """Make a learner of the same tiny Qwen3-MoE each time, from which rollouts are to be replayed."""

    def made(*more: str):
        folder = tmp_path / "inputs"
        if not folder.exists():
            make_mixture(models, folder, "qwen3_moe", initializer_range=0.2)
        return make_learner(folder, tmp_path / "run", *SETTINGS, "model.context_length=64", *more)

    return made


def written(name: str) -> tuple[torch.nn.Module, list[Row]]:
    """A model, and what it has answered to prompts of several lengths, two of them twice."""
    model = family(name)
    generator = TransformersGenerator(model, 4096, routing=routing_of(model))
    asked = requests()
    asked = [dataclasses.replace(one, seed=i) for i, one in enumerate([*asked, *asked[1:3]])]
    said = generator.generate(asked, Sampling())
    return model, [Row(a.prompt_tokens, s.tokens, s.routes) for a, s in zip(asked, said, strict=True)]


def replayed(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    sums: dict[str, float] = {}
    with Replay(routing_of(model)).of(batch, lambda name, value: sums.update({name: float(value)})):
        return response_log_probs(model, batch, temperature=1.0), sums


def elsewhere(rows: list[Row], layers: int = 2, top_k: int = 2, num_experts: int = 4) -> list[Row]:
    """The same rows through experts that no router has chosen; those of one prompt have its experts alike."""

    def drawn(row: Row) -> np.ndarray:
        draw = np.random.default_rng(sum(row.prompt))
        order = draw.random((row.length - 1, layers, num_experts)).argsort(axis=2)[:, :, :top_k]
        return order.reshape(len(order), -1).astype(np.uint8)

    return [dataclasses.replace(row, routes=drawn(row) if len(row.response) else None) for row in rows]


def given_elsewhere(**settings: object) -> Experience:
    found = experience(samples=4, **settings)
    return dataclasses.replace(found, rows=elsewhere(list(found.rows)))


@pytest.mark.parametrize("name", sample(REPLAYED, 1 / 4))
def test_a_policy_that_chooses_as_in_the_rollout_computes_what_it_does_without_replay(name):
    model, rows = written(name)
    assert all(row.routes.shape == (row.length - 1, routing_of(model).width) for row in rows)
    layouts = [collate(rows, range(len(rows)))]
    if name not in ("gpt_oss", "qwen3_next"):  # whose packed rows see each other
        layouts.append(collate(rows, range(len(rows)), packed=True))
    if can_share(model):
        layouts.append(collate_shared(rows, list(shared_lines(rows, range(len(rows)), 4096).values())))
    with torch.no_grad():
        for batch in layouts:
            own = response_log_probs(model, batch, temperature=1.0)
            found, sums = replayed(model, batch)
            assert sums["replayed"] == (batch.routes[..., 0] >= 0).sum() * len(routing_of(model).modules)
            assert sums["replayed_differ"] == 0
            torch.testing.assert_close(found, own, rtol=0, atol=1e-6)


def test_tokens_go_through_the_recorded_experts_and_the_routers_weigh_these_and_learn():
    model, rows = written("qwen3_moe")
    with torch.no_grad():
        for router in routing_of(model).modules:
            router.weight.copy_(torch.randn(router.weight.shape) * router.weight.std())
    taken = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):  # the first pass tries the output layer, with a few tokens
            module.register_forward_pre_hook(lambda _, arguments: taken.append(arguments[1:]))
    likely: list[torch.Tensor] = []
    for router in routing_of(model).modules:
        router.register_forward_hook(lambda _, arguments, given: likely.append(given[0].softmax(dim=1)))
    batch = collate(rows, range(len(rows)))
    found, sums = replayed(model, batch)
    is_given = batch.routes[..., 0].flatten() >= 0
    for layer, (experts, shares) in enumerate(taken[-2:]):
        wanted = batch.routes.flatten(0, 1)[:, 2 * layer : 2 * layer + 2]
        assert torch.equal(experts[is_given], wanted[is_given].long())
        torch.testing.assert_close(shares, likely[-2:][layer].gather(1, experts))
    assert 0 < sums["replayed_differ"] <= sums["replayed"]
    own = response_log_probs(model, batch, temperature=1.0)
    assert float((found - own).detach().abs().max()) > 1e-3
    found.sum().backward()
    assert all(bool(router.weight.grad.any()) for router in routing_of(model).modules)


def test_old_and_new_policy_agree_to_the_last_bit_whatever_experts_are_replayed(learner_of):
    metrics = metrics_of(learner_of("update.tokens_per_micro_batch=64"), given_elsewhere())
    assert metrics["policy/ratio_error_first"] == 0.0
    assert 0.5 < metrics["policy/replayed_differ"] < 1


def test_what_is_learned_does_not_depend_on_layout_micro_batches_or_layers_computed_again(learner_of):
    given, learned = given_elsewhere(), {}
    for case, more in {
        "plain": (),
        "micro-batches": ("update.tokens_per_micro_batch=24",),
        "packed": ("update.remove_padding=true",),
        "again": ("update.activation_checkpointing=true", "update.zero_stage=3"),
        "own": ("algorithm.router_replay=false",),
    }.items():
        learner = learner_of(*more)
        updated(learner, given)
        learned[case] = weights(learner)
    own = learned.pop("own")
    assert max(difference(learned["plain"], other) for other in learned.values()) < 1e-5
    assert difference(learned["plain"], own) > 1e-4


def test_prompts_go_through_a_model_once_where_their_experts_are_the_same():
    prompt, first, second = [5] * 40, np.zeros((42, 4), np.uint8), np.zeros((42, 4), np.uint8)
    second[3] = 1
    for other, number in ((first, 1), (second, 2)):
        rows = [Row(prompt, [6, 7, 8], first), Row(prompt, [6, 7, 9], other)]
        (batch,) = micro_batches(rows, [0, 1], 4096, shared=True)
        assert len(batch.input_ids) == number
        assert batch.routes.shape == (*batch.input_ids.shape, 4)


ROUTES = given_elsewhere().rows[0].routes
REFUSED = {
    "no column": (None, "the rollout shards have no column routed_experts; leave it out"),
    "a cut column": (ROUTES[:-1], "experts, and this policy wants"),
    "fewer layers": (ROUTES[:, :2], "x 2 experts, and this policy wants "),
    "an expert too many": (ROUTES + 4, "a response has expert 7, and this policy has 4"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_experts_that_are_not_those_of_all_tokens_are_refused(case):
    routes, said = REFUSED[case]
    given = given_elsewhere()
    replay = Replay(routing_of(family("qwen3_moe")))
    replay.check(given.rows)
    given.rows[0] = dataclasses.replace(given.rows[0], routes=routes)
    with pytest.raises(UserError, match=said) as refused:
        replay.check(given.rows)
    assert str(refused.value).startswith("algorithm.router_replay=true: ")


def test_a_shard_without_experts_is_refused_before_a_step(learner_of):
    with pytest.raises(UserError, match="the rollout shards have no column routed_experts"):
        updated(learner_of(), experience(samples=4))


def test_an_engine_that_leaves_experts_out_is_named_with_the_way_out(models, tmp_path):
    folder = make_mixture(models, tmp_path / "inputs", "qwen3_moe")
    config = resolve(compose(tiny.overrides(folder, tmp_path / "run", *SETTINGS)))
    context = SimpleNamespace(config=config, task=SimpleNamespace(stage=Stage.ROLLOUT))
    rows = rollout_table([[5, 6], []], prompt_tokens=[[3, 4], [9]])
    refused = Episode([], [], [], FinishReason.REFUSED, 0)
    said = Episode([5, 6], [True] * 2, [-1.0] * 2, FinishReason.STOP, 1, routes=np.full((3, 4), 3))
    table = with_routes(context, rows, [said, refused])
    assert table[ROUTED_EXPERTS].to_pylist() == [[[3, 3, 3, 3]] * 3, []]
    assert table[ROUTED_EXPERTS].type == pa.list_(pa.list_(pa.uint8(), 4))
    with pytest.raises(BadAnswer) as error:
        with_routes(context, rows, [dataclasses.replace(said, routes=said.routes[1:]), refused])
    assert str(error.value) == (
        "rollout.engine=transformers gave the experts of 2 tokens instead of 3 for prompt_id p0; "
        "set algorithm.router_replay=false"
    )


def test_a_conversation_keeps_the_experts_of_the_turn_that_computed_a_token_first():
    first = Response([7, 1], [-1.0] * 2, FinishReason.STOP, np.full((3, 4), 1))
    second = Response([8, 1], [-1.0] * 2, FinishReason.STOP, np.full((7, 4), 300))
    said = BEFORE_THE_FIRST_TURN.with_turn(first, "a").with_answer([5, 5], []).with_turn(second, "b")
    assert said.routes[:, 0].tolist() == [1, 1, 1, 300, 300, 300, 300]
    one = Episode.of(first)
    saved = from_table(to_table({0: said, 3: one, 5: BEFORE_THE_FIRST_TURN}))
    assert [len(saved[i].routes) for i in (0, 3, 5)] == [7, 3, 0]
    assert np.array_equal(saved[0].routes, said.routes)
    assert ROUTED_EXPERTS not in to_table({5: BEFORE_THE_FIRST_TURN}).column_names


def test_groups_that_wait_for_a_later_update_keep_their_experts():
    given = given_elsewhere()
    found = candidates_of(table_of(Candidates(given, [1] * 8)), given.rewarded).experience
    for one, other in zip(found.rows, given.rows, strict=True):
        assert np.array_equal(one.routes, other.routes)


def test_a_column_reads_as_it_was_also_from_a_slice():
    routes = [np.full((3, 4), 2), None, np.arange(8).reshape(2, 4)]
    for num_experts, kind in ((256, pa.uint8()), (257, pa.uint16())):
        column = pa.chunked_array([routes_column(routes, num_experts)])
        assert column.type.value_type.value_type == kind
        assert [one.tolist() for one in routes_in(column.slice(1))] == [[], routes[2].tolist()]


def test_validate_refuses_what_cannot_be_replayed_in_one_line(models, tmp_path, slurm_ppo):
    done = slurm_ppo("validate", *tiny.overrides(models, tmp_path / "run", REPLAY))
    assert done.returncode == 2
    assert (
        "algorithm.router_replay=True: the policy cannot replay: it has no experts; leave it" in done.stderr
    )
    kind = {"model_type": "llama4_text", "num_local_experts": 4}
    assert why_not_replayed(kind).startswith("the policy cannot replay: its routers (llama4_text) are not ")
    assert why_not_replayed({**kind, "model_type": "qwen3_moe"}) is None
    (issue,) = replay_problems(compose(tiny.overrides(models, tmp_path / "run", REPLAY, "rollout=vllm")))
    assert str(issue).startswith("algorithm.router_replay=True: vLLM is not asked for the experts")
