"""Data sets of reasoning-gym as environments: entries survive being JSON, and no response is an error."""

import importlib.util
import json
import os

import pytest

from tests.support import tiny

HAS_IT = importlib.util.find_spec("reasoning_gym") is not None
needs_it = pytest.mark.skipif(
    not HAS_IT and "CI" not in os.environ, reason="reasoning-gym is not here: make test installs it"
)


def gym(dataset: str, **arguments):
    from stages.rewards.gym import ReasoningGym

    return ReasoningGym(dataset, **arguments)


def first(made, count: int = 3) -> list[dict]:
    """Tasks as they are after they were JSON."""
    return json.loads(json.dumps(list(made.tasks(size=count, seed=7))))


@needs_it
@pytest.mark.parametrize(
    "dataset", ["basic_arithmetic", "leg_counting", "rearc", "countdown", "zebra_puzzles"]
)
def test_the_right_answer_scores_most_and_the_same_seed_makes_the_same_tasks(dataset):
    """Of rearc's entries tuples are compared, which JSON has not."""
    made = gym(dataset)
    tasks = first(made)
    assert tasks == first(gym(dataset)) != json.loads(json.dumps(list(made.tasks(size=3, seed=8))))
    assert [made.score(task["answer"], task["metadata"]) for task in tasks] == [1.0] * 3
    assert made.score("no idea", tasks[0]["metadata"]) < 1


@needs_it
def test_a_response_that_a_scorer_cannot_read_scores_nothing():
    made = gym("prime_factorization")
    (task,) = first(made, 1)
    with pytest.raises(ValueError, match="invalid literal"):
        made._scorer.score_answer("nonsense", task["metadata"])
    assert made.score("nonsense", task["metadata"]) == 0


@needs_it
def test_prompts_and_answers_are_as_the_arguments_say():
    given = {"system": "Be brief.", "instruction": "Answer in <a></a>.", "pattern": "<a>(.*?)</a>"}
    made = gym("basic_arithmetic", max_terms=2, **given)
    (task,) = first(made, 1)
    system, question = task["prompt"]
    assert system == {"role": "system", "content": "Be brief."}
    assert question["content"].endswith("\n\nAnswer in <a></a>.")
    answer, metadata = task["answer"], task["metadata"]
    assert made.score(f"<a>1e9</a> no, <a>\n{answer} </a>", metadata) == 1
    assert made.score(answer, metadata) == 0
    assert isinstance(first(gym("basic_arithmetic", chat=False), 1)[0]["prompt"], str)


@needs_it
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"dataset": "basic_aritmetic"}, "no data set 'basic_aritmetic' .did you mean 'basic_arithmetic'"),
        (
            {"dataset": "basic_arithmetic", "max_term": 2},
            "'basic_arithmetic' refuses its settings: .*max_term",
        ),
        (
            {"dataset": "composite", "datasets": []},
            "give each data set of composite a component of its own",
        ),
        ({"dataset": "basic_arithmetic", "min_terms": 9, "max_terms": 2}, "refuses its settings"),
        ({"dataset": "basic_arithmetic", "pattern": r"= \d+"}, "has no group; put parentheses around the"),
        ({"dataset": "leg_counting", "chat": False, "system": "x"}, "system is a chat message"),
    ],
)
def test_a_data_set_that_cannot_be_is_refused(arguments, why):
    with pytest.raises(ValueError, match=why):
        gym(**arguments)


def test_without_the_package_one_line_says_how_to_get_it(inputs, tmp_path, slurm_ppo):
    stub = tmp_path / "reasoning_gym.py"
    stub.write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\", name='reasoning_gym')\n")
    source = "data.environment.components.sums.source=reasoning_gym"
    given = [
        word
        for word in tiny.overrides(inputs, tmp_path / "run", "reward=environment", source)
        if not word.startswith(("data.prompts=", "data.id_column="))
    ]
    done = slurm_ppo("validate", *given, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    said = f"error: {source}: reasoning_gym needs reasoning-gym: pip install 'slurm-ppo[reasoning-gym]' where"
    assert [line for line in done.stderr.splitlines() if line.startswith(said)], done.stderr
    assert "Traceback" not in done.stderr
