"""Environments of the package verifiers, in a virtual environment that the package index fills."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.plugins.hosted import HostedEnvironment, connect
from pipeline.plugins.interpreter.contract import DescribedError
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.schemas import ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from tests.support import ROOT, tiny
from tests.support.tables import LONG

pytestmark = LONG
RELEASES = {"oldest": "verifiers==0.1.14", "newest": "verifiers>=0.3,<0.4"}
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module", params=RELEASES)
def python(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("verifiers") / request.param
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    found = str(folder / "bin" / "python")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", found]
    subprocess.run([*uv, RELEASES[request.param]], check=True, timeout=300)
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copy(ROOT / "tests" / "support" / "toy_games.py", packages)
    return found


@pytest.fixture(scope="module")
def connected(python):
    """Makes the environment of toy_games of a kind, in one process."""
    make = connect("data.environment.components.toy.source", "verifiers", python, 4)
    found: list[HostedEnvironment] = []

    def made(kind: str, **arguments) -> HostedEnvironment:
        found.append(make(environment="toy-games", kind=kind, **arguments))
        return found[-1]

    yield made
    for one in found[:1]:
        one.close()


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_its_data_sets_rubrics_conversations_and_tools_are_used(connected):
    """In one test: what is waited for is the import of the package."""
    made = connected("single")
    assert not made.has_step
    assert not made.compares
    tasks, heldout = list(made.tasks(99, 3, False)), list(made.tasks(99, 3, True))
    assert (len(tasks), len(heldout)) == (32, 8)
    assert tasks == list(made.tasks(99, 3, False)) != list(made.tasks(99, 4, False))
    assert {task.prompt[1]["content"] for task in tasks}.isdisjoint(
        one.prompt[1]["content"] for one in heldout
    )
    task, row = tasks[0], json.loads(tasks[0].metadata)
    a = row["info"]["a"]
    assert task.prompt == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{a}+{a + 1}="},
    ]
    rows = [{"response": text, "metadata": row, "messages": None} for text in (task.answer, "x")]
    assert made.scores(rows) == pytest.approx([1 + (len(task.answer) / 100 + a) / 2, (0.01 + a) / 2])

    made = connected("game")
    assert made.has_step
    said = [answer("one")]
    said += made.step(said, row)
    said += [answer("two")]
    assert made.step(said, row) == [{"role": "user", "content": "no 2"}]
    assert made.step([*said[:2], answer(task.answer)], row) is None
    ended = [*said[:2], answer(task.answer)]
    scored = [{"response": "", "metadata": row, "messages": messages} for messages in (ended, said)]
    assert made.scores(scored) == pytest.approx([1 + (0.03 + a) / 2, (0.03 + a) / 2])
    with pytest.raises(DescribedError, match=r"after turn 1 it says .*no 1.*, and has said .*no 7"):
        made.step([said[0], {"role": "user", "content": "no 7"}, answer("two")], row)

    made = connected("tools")
    (task,) = made.tasks(1, 3, False)
    assert task.tools[0]["function"]["name"] == "add"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    said = made.step([answer(f"I call {call}")], row)
    assert said == [{"role": "tool", "content": "5", "tool_call_id": "call_1_0"}]
    assert made.step([answer(f"I call {call}"), *said, answer("5")], row) is None

    made = connected("group")
    assert made.compares
    rows = [{"response": text, "metadata": row, "messages": None} for text in ("a", "bbb", "cc")]
    best = [
        score - (len(text) / 100 + a) / 2
        for score, text in zip(made.scores(rows), ["a", "bbb", "cc"], strict=True)
    ]
    assert best == pytest.approx([0.0, 1.0, 0.0])
    with pytest.raises(DescribedError, match=r"raised RuntimeError: .*unexpected keyword argument 'color'"):
        connected("game", color="red")


def test_a_run_converses_with_it(python, inputs, tmp_path, slurm_ppo):
    policy = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
    for name, more in {
        "config.json": {"max_position_embeddings": 400},
        "tokenizer_config.json": {"chat_template": TEMPLATE + "{% if add_generation_prompt %}[a]{% endif %}"},
    }.items():
        given = json.loads((policy / name).read_text())
        (policy / name).write_text(json.dumps(given | more))
    words = [
        f"model.policy={policy}",
        f"data.environment.components.toy.python={python}",
        "data.environment.components.toy.source=verifiers",
        "data.environment.components.toy.arguments={environment: toy-games, kind: game}",
        "data.environment.size=24",
        "data.prompts_per_iteration=4",
        "iterations=1",
        "rollout.max_new_tokens=150",
        "rollout.multi_turn.scheduler=environment",
        "rollout.multi_turn.max_turn_tokens=30",
    ]
    given = tiny.overrides(inputs, tmp_path / "run", "reward=environment", *words)
    given = [word for word in given if not word.startswith(("data.prompts=", "data.id_column="))]
    done = slurm_ppo("run", *given, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = load_run(tmp_path / "run")
    said = []
    for shard in range(2):
        rows = read_shard(run.paths, read_record(run.paths, Task(1, Stage.ROLLOUT, shard)), ROLLOUT)
        said += map(json.loads, rows["response_messages"].to_pylist())
    answers = [one["content"] for messages in said for one in messages if one["role"] == "user"]
    assert answers
    assert set(answers) <= {"no 1", "no 2", "no 3"}
