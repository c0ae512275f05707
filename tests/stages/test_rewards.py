"""Reward models in their own words, rules as the user wrote them, and one clear error for what cannot be."""

import datetime
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.commits import read_record
from pipeline.run.directory import Run, create_run, load_run
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context, NumericalError, UserError
from stages.engines import kept, release_all
from stages.engines.base import Scorer, SequenceLimits
from stages.engines.vllm_arguments import scorer_arguments
from stages.rewards.components import component_scores
from stages.rewards.reference import load_reference
from stages.tasks.reward import reward_table
from tests.support import tiny
from tests.support.processes import make_run, stage
from tests.support.scoring import TEXTS, context, responses

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SHARD = Task(1, Stage.ROLLOUT, 0)


def score_of_ids(directory: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def score_of_text(directory: Path, text: str) -> float:
    return score_of_ids(directory, AutoTokenizer.from_pretrained(directory)(text)["input_ids"])


# reward models


@pytest.fixture
def made_with(monkeypatch) -> Iterator[list[float | None]]:
    """Pretend that there is a GPU; the shares of its memory that vLLM was started with, for a scorer that
    gives 0."""
    shares: list[float | None] = []

    class Zero(Scorer):
        limits = SequenceLimits(tiny.CONTEXT, 260)

        def _score(self, sequences):
            return [0.0 for _ in sequences]

        def reset(self) -> bool:
            return True

    def make_scorer(config, name, path):
        shares.append(scorer_arguments(config, path, Zero.limits)["gpu_memory_utilization"])
        return Zero()

    monkeypatch.setattr(Context, "source", lambda self, given: Path(given))  # no record of prepare is here
    monkeypatch.setattr(Context, "fingerprint_of", lambda self, directory: directory)
    monkeypatch.setattr("stages.rewards.models.make_scorer", make_scorer)
    monkeypatch.setattr(kept, "has_gpu", lambda: True)
    yield shares
    release_all()


@pytest.mark.parametrize(
    ("task", "words", "shares"),
    [
        (Task(1, Stage.REWARD), (), [0.6]),
        (Task(1, Stage.REWARD), ("reward.vllm.gpu_memory_utilization=0.9",), [0.9, 0.9]),
        (Task(1, Stage.SCORE, pool="big"), ("reward.components.rm.pool=big",), [0.9]),
        (Task(1, Stage.EVALUATE), (), [0.9]),
    ],
    ids=str,
)
def test_a_reward_model_in_vllm_and_the_reference_stay_from_task_to_task(
    models, tmp_path, made_with, task, words, shares
):
    run = make_run(models, tmp_path / "run", "reward.engine=vllm", *words)
    rows = responses(models, TEXTS)
    for attempt in ("1-a", "2-a"):
        context = Context(run.paths, run.config, task, attempt)
        component_scores(context, rows)
        if task.stage is Stage.REWARD:
            load_reference(context)
    assert made_with == shares


def test_a_reward_model_with_another_tokenizer_reads_the_text_in_its_own_ids(models, tmp_path):
    scores, _ = component_scores(context(models, tmp_path), responses(models, TEXTS))
    expected = [score_of_text(models / "reward_model", prompt + response) for prompt, response in TEXTS]
    assert scores["rm"] == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_with_the_policys_tokenizer_reads_the_ids_as_they_are(models, tmp_path):
    """With the end-of-sequence id, which the text does not have."""
    twin = tiny.make_reward_model(tmp_path / "twin", specials=("<pad>", "<eos>"))
    rows = responses(models, TEXTS)
    scores, _ = component_scores(context(models, tmp_path, f"reward.components.rm.path={twin}"), rows)
    ids = [
        p + r
        for p, r in zip(rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist(), strict=True)
    ]
    assert scores["rm"] == pytest.approx([score_of_ids(twin, row) for row in ids], abs=1e-5)
    as_text = [score_of_text(twin, prompt + response) for prompt, response in TEXTS]
    assert scores["rm"] != pytest.approx(as_text, abs=1e-3)


MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_reward_models_template_gets_the_tools_and_the_date_of_the_run(models, tmp_path, monkeypatch):
    """The same score in a task that is repeated after midnight, or on a node of another time zone."""
    judge = tiny.make_reward_model(
        tmp_path / "judge",
        chat_template="{{ strftime_now('%d %b %Y') }}{{ (tools or [])[0].name }}" + TEMPLATE,
    )
    tools = [json.dumps([{"name": "w"}])]
    rows = responses(models, [("<user>hello", "hi")], [json.dumps(MESSAGES)], prompt_tools=tools)
    run = context(models, tmp_path, f"reward.components.rm.path={judge}")
    made = datetime.datetime.fromtimestamp(run.rendering.moment, datetime.UTC)
    assert run.rendering.moment == load_run(run.paths.root).identity.created
    expected = score_of_text(judge, f"{made:%d %b %Y}w[user]hello[assistant]hi")
    for zone in ("Pacific/Kiritimati", "Pacific/Midway"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert component_scores(run, rows)[0]["rm"] == pytest.approx([expected], abs=1e-5)
    monkeypatch.undo()
    time.tzset()


def test_messages_are_joined_as_lines_for_a_reward_model_without_a_template(models, tmp_path):
    rows = responses(models, [("<user>hello<assistant>", "hi")], [json.dumps(MESSAGES)])
    scores, _ = component_scores(context(models, tmp_path), rows)
    assert scores["rm"] == pytest.approx([score_of_text(models / "reward_model", "hello\nhi")], abs=1e-5)


TURNS = [
    {"role": "assistant", "content": "hi"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "bye"},
]


def test_messages_go_through_the_reward_models_own_template_turn_by_turn(models, tmp_path):
    judge = tiny.make_reward_model(tmp_path / "judge", chat_template=TEMPLATE)
    texts = [("<user>hello<assistant>", "hi"), ("<user>hello<assistant>", "hi<tool>42<assistant>bye")]
    rows = responses(models, texts, [json.dumps(MESSAGES)] * 2, [None, json.dumps(TURNS)])
    scores, _ = component_scores(context(models, tmp_path, f"reward.components.rm.path={judge}"), rows)
    said = ["[user]hello[assistant]hi", "[user]hello[assistant]hi[tool]42[assistant]bye"]
    assert scores["rm"] == pytest.approx([score_of_text(judge, text) for text in said], abs=1e-5)


def test_a_conversation_that_the_reward_models_template_refuses_is_named(models, tmp_path):
    """Prepare has tried the prompts; what tools add to conversations nobody knows before."""
    judge = tiny.make_reward_model(
        tmp_path / "judge",
        chat_template=("{% for m in messages %}{{ {'user': 1, 'assistant': 2}[m.role] + 1 }}{% endfor %}"),
    )
    texts = [("<user>hello<assistant>", "hi"), ("<user>hello<assistant>", "hi<tool>42<assistant>bye")]
    turns = [json.dumps(TURNS[:1]), json.dumps(TURNS)]
    rows = responses(models, texts, [json.dumps(MESSAGES)] * 2, turns)
    with pytest.raises(
        UserError, match=f"^reward model {judge}: its chat template refuses prompt_id p1, sample 0:"
    ):
        component_scores(context(models, tmp_path, f"reward.components.rm.path={judge}"), rows)


@pytest.mark.parametrize("specials", [("<pad>", "<eos>"), ("<eos>", "<x>", "<pad>")], ids=["ids", "text"])
def test_a_row_that_the_engine_refused_is_scored_0_and_spoils_no_other(models, tmp_path, specials):
    """Its prompt's tokens may be none that the reward model has."""
    judge = tiny.make_reward_model(tmp_path / "judge", specials=specials)
    settings = context(models, tmp_path, f"reward.components.rm.path={judge}")
    rows = responses(models, TEXTS)
    expected, _ = component_scores(settings, rows)
    refused = responses(models, TEXTS, refused=[1])
    scores, _ = component_scores(settings, refused)
    assert scores["rm"][1] == 0.0
    assert scores["rm"][::2] == pytest.approx(expected["rm"][::2], abs=1e-5)


def test_what_does_not_fit_the_reward_models_context_is_cut_on_the_left_and_counted(models, tmp_path):
    texts = [("p" * 60, "an answer"), ("short", "one")]
    scores, metrics = component_scores(context(models, tmp_path), responses(models, texts))
    kept = ("p" * 60 + "an answer")[-tiny.CONTEXT :]
    assert scores["rm"][0] == pytest.approx(score_of_text(models / "reward_model", kept), abs=1e-5)
    assert metrics == {"truncated/rm": 1.0, "unscored/rm": 0.0}


def test_normalisation_that_is_given(models, tmp_path):
    rows = responses(models, TEXTS)
    (tmp_path / "a").mkdir()
    raw, _ = component_scores(context(models, tmp_path / "a"), rows)
    given = context(models, tmp_path, "+reward.components.rm.normalization={mean: 0.5, std: 2.0}")
    scores, _ = component_scores(given, rows)
    assert scores["rm"] == pytest.approx([(score - 0.5) / 2 for score in raw["rm"]], abs=1e-6)


def test_normalisation_that_is_measured_gives_reference_samples_mean_0_and_variance_1(models, tmp_path):
    rows = [{"prompt": p, "response": r, "reward": [r]} for p, r in [*TEXTS, ("more", "of it")]]
    samples = tiny.write_jsonl(tmp_path / "samples.jsonl", rows)
    given = f"+reward.components.rm.normalization={{reference_samples: '{samples}'}}"
    run = make_run(models, tmp_path / "run", given, "data.columns=[answer]")  # reward is a reserved name
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    rows = responses(models, [*TEXTS, ("more", "of it")])
    scores, _ = component_scores(Context(run.paths, run.config, Task(1, Stage.REWARD, 0), "t"), rows)
    assert statistics.fmean(scores["rm"]) == pytest.approx(0, abs=1e-5)
    assert statistics.pstdev(scores["rm"]) == pytest.approx(1, rel=1e-5)
    assert f"file:{samples}" in read_record(run.paths, PREPARE).inputs


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"prompt": "a", "answer": "b"}], "has no column 'response'"),
        ([{"prompt": "a", "response": None}], "must hold text in every row"),
        ([{"prompt": "a", "response": "b"}], "do not differ"),
        ([{"prompt": " ", "response": "b"}], "no usable row"),
    ],
)
def test_reference_samples_that_give_no_scale_stop_the_run(models, tmp_path, rows, why):
    samples = tiny.write_jsonl(tmp_path / "samples.jsonl", rows)
    run = make_run(
        models, tmp_path / "run", f"+reward.components.rm.normalization={{reference_samples: '{samples}'}}"
    )
    done = stage(run, "prepare")
    assert done.code == 2, done.log
    assert f"reward.components.rm.normalization.reference_samples={samples}" in done.log
    assert why in done.log


def test_a_reward_model_that_gives_nan_names_component_and_row(models, tmp_path):
    broken = tiny.make_reward_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"][:] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        NumericalError, match=r"reward component 'rm' gives nan instead of a finite number for "
    ):
        component_scores(
            context(models, tmp_path, f"reward.components.rm.path={broken}"), responses(models, TEXTS)
        )


def test_a_sum_beyond_single_precision_is_refused_where_it_arises(models, tmp_path):
    """Stored as infinite it would end the update, as a loss that is no number."""
    rows = responses(models, TEXTS)
    config = context(models, tmp_path, "reward.components.rm.weight=1e30").config
    scores = {"rm": [0.5, *[1e9] * (rows.num_rows - 1)]}
    with pytest.raises(
        NumericalError,
        match=r"sum of the reward components.* gives 1\.0\d*e\+39 instead .*prompt_id p1, sample 0",
    ):
        reward_table(config, rows, scores, None)


# the whole

RULES = """
def length(*, prompts, responses, **columns):
    return [len(r) / 10 for r in responses]

def answer(*, prompts, responses, answer, **columns):
    return [a + 0.5 for a in answer]
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The user's own folder, with a module of rules. Every test gets a module name of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"{tmp_path.name}_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_reward_is_the_weighted_sum_and_every_component_is_kept(models, tmp_path, project):
    module = next(project.glob("*_rules.py")).stem
    mine = f"+reward.components.mine={{kind: rule, function: '{module}:answer', weight: 2.0}}"
    run = make_run(models, tmp_path / "run", mine)
    for task in (("prepare",), ("rollout", 1, 0), ("reward", 1, 0)):
        done = stage(run, *task, cwd=project)
        assert done.code == 0, done.log
    rewards = read_shard(run.paths, read_record(run.paths, Task(1, Stage.REWARD, 0)), REWARD)
    rollout = read_shard(run.paths, read_record(run.paths, SHARD), ROLLOUT)
    for row, source in zip(rewards.to_pylist(), rollout.to_pylist(), strict=True):
        assert row["reward/mine"] == source["answer"] + 0.5
        text = source["prompt_text"] + source["response_text"]
        assert row["reward/rm"] == pytest.approx(score_of_text(models / "reward_model", text), abs=1e-5)
        assert row["reward"] == pytest.approx(row["reward/rm"] + 2 * row["reward/mine"], abs=1e-5)


# the reference


def rule_only(models: Path, folder: Path, project: Path, *more: str) -> Run:
    """A rollout scored by a rule only, with a policy of its own, which is also the reference."""
    policy = shutil.copytree(models / "policy", folder / "policy")
    given = [word for word in tiny.overrides(models, folder / "run") if not word.startswith("reward")]
    module = next(project.glob("*_rules.py")).stem
    given += ["reward=rule", f"reward.components.rule.function={module}:length", f"model.policy={policy}"]
    run = create_run(resolve(compose([*given, *more])))
    for task in (("prepare",), ("rollout", 1, 0)):
        done = stage(run, *task, cwd=project)
        assert done.code == 0, done.log
    return run


def references(run: Run) -> list[list[float] | None]:
    table = read_shard(run.paths, read_record(run.paths, Task(1, Stage.REWARD, 0)), REWARD)
    return table["reference_logprobs"].to_pylist()


def test_where_the_update_scores_the_reference_rules_need_no_model(models, tmp_path, project):
    run = rule_only(models, tmp_path, project, "algorithm.kl.reference_in=update")
    (tmp_path / "policy" / "model.safetensors").unlink()
    done = stage(run, "reward", 1, 0, cwd=project)
    assert done.code == 0, done.log
    assert set(references(run)) == {None}


def test_otherwise_the_reference_is_scored_here_and_must_be_there(models, tmp_path, project):
    run = rule_only(models, tmp_path, project)
    weights = tmp_path / "policy" / "model.safetensors"
    weights.rename(tmp_path / "aside")
    failed = stage(run, "reward", 1, 0, cwd=project)
    assert failed.code == 2
    assert "model.safetensors has changed since the run began" in failed.log
    (tmp_path / "aside").rename(weights)
    done = stage(run, "reward", 1, 0, cwd=project)
    assert done.code == 0, done.log
    assert None not in references(run)
