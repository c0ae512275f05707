"""Remote rewards against a real HTTP server: what is asked, what may come back, and how failure reads."""

import functools
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.reward import RemoteApi, RemoteConfig
from pipeline.config.rules import contradictions
from pipeline.run.commits import read_record
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from stages.context import UserError
from stages.rewards.posting import RemoteFailed
from stages.rewards.remote import ANSWERS, Unreadable, remote_scores
from tests.support import ROOT, tiny
from tests.support.processes import make_run, stage
from tests.support.rollouts import asked_table as table
from tests.support.services import Answer, service

KEY = "sk-a-secret-that-nobody-may-see"
FAST = {"backoff": 0.01, "max_backoff": 0.02}


@pytest.fixture(autouse=True, scope="module")
def authorities_read_once() -> Iterator[None]:
    """To read the list of those that sign certificates takes longer than all that a call does here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def ask(context) -> Callable[..., tuple[list[float], dict[str, float]]]:
    """Scores and metrics of rows by a service; retries wait next to nothing."""

    def call(
        url: str, rows: pa.Table, api: str = "classify", **settings: Any
    ) -> tuple[list[float], dict[str, float]]:
        config = RemoteConfig(url=url, api=RemoteApi(api), **FAST | settings)
        return remote_scores(context, "far", config, rows)

    return call


def lengths(body: Any, number: int) -> Answer:
    """The length of each text, in vLLM's format, in another order."""
    data = [{"index": i, "probs": [9.0, float(len(text))]} for i, text in enumerate(body["input"])]
    return Answer({"object": "list", "data": data[::-1]})


def plain(scores: Any) -> Callable[[Any, int], Answer]:
    return lambda body, number: Answer({"scores": scores})


def reply(text: Any) -> Answer:
    return Answer({"choices": [{"message": {"role": "assistant", "content": text}}]})


# what is asked, and what comes back


def test_classify_asks_in_batches_and_tells_rows_apart_by_their_index(ask):
    rows = table(["a" * i for i in range(10)])
    with service(lengths) as seen:
        scores, metrics = ask(seen.url, rows, batch_size=4, model="rm", parameters={"priority": 1})
    assert scores == [3.0 + i for i in range(10)]
    assert metrics == {"retries/far": 0.0}
    asked = sorted(seen.bodies, key=lambda body: body["input"][0])
    assert [len(body["input"]) for body in asked] == [4, 4, 2]
    assert {key: asked[0][key] for key in asked[0] if key != "input"} == {
        "model": "rm",
        "use_activation": False,
        "priority": 1,
    }


def test_plain_gets_prompts_responses_and_columns(ask):
    with service(lambda body, number: Answer({"scores": body["columns"]["answer"]})) as seen:
        scores, _ = ask(seen.url, table(["x", "y"], answer=[2, 5]), api="plain")
    assert scores == [2.0, 5.0]
    body = {"prompts": ["q: ", "q: "], "responses": ["x", "y"], "columns": {"answer": [2, 5]}}
    assert seen.bodies == [body]


def test_a_judge_gets_the_template_and_its_last_match_is_the_score(ask):
    with service(lambda body, number: reply("Score: 1? No.\nScore: -2.5")) as seen:
        scores, _ = ask(
            seen.url,
            table(["x {y}"], answer=[7]),
            api="chat",
            model="judge",
            template="{prompt}{response} is {answer}? {{}}",
            score_pattern=r"Score: (\S+)",
            parameters={"max_tokens": 9},
        )
    assert scores == [-2.5]
    message = {"role": "user", "content": "q: x {y} is 7? {}"}
    assert seen.bodies == [{"model": "judge", "messages": [message], "temperature": 0, "max_tokens": 9}]


CHAT = {"api": "chat", "model": "judge", "template": "{response}"}


def test_a_judges_reply_may_be_the_number_alone_and_an_unreadable_one_may_have_a_score(ask):
    with service(lambda body, number: reply(body["messages"][0]["content"])) as seen:
        assert ask(seen.url, table([" 4\n", "0.5"]), **CHAT)[0] == [4.0, 0.5]
        scores, metrics = ask(seen.url, table(["4", "nan", "good"]), **CHAT, unreadable_score=-1.0)
    assert scores == [4.0, -1.0, -1.0]
    assert metrics == {"retries/far": 0.0, "unreadable/far": 2.0}


def test_what_the_policys_engine_refused_is_not_asked_about_and_scores_0(ask):
    with service(lengths) as seen:
        assert ask(seen.url, table(["a", "", "abc"], refused=(1,)))[0] == [4.0, 0.0, 6.0]
        assert ask(seen.url, table([""], refused=(0,)))[0] == [0.0]
    assert seen.bodies == [{"input": ["q: a", "q: abc"], "use_activation": False}]


def test_with_the_services_tokenizer_ids_are_sent_by_its_own_template(ask, tmp_path):
    judge = tiny.make_reward_model(
        tmp_path / "judge", chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    rows = table(["hi", "there"], messages=[json.dumps([{"role": "user", "content": "hello"}])] * 2)
    with service(lengths) as seen:
        _, metrics = ask(seen.url, rows, tokenizer=str(judge), max_model_len=26)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    sent = [tokenizer.decode(ids) for ids in seen.bodies[0]["input"]]
    assert sent == ["[user]hello[assistant]hi", "[user]hello[assistant]there"[-26:]]
    assert metrics == {"retries/far": 0.0, "truncated/far": 1.0}


def test_no_more_requests_are_under_way_than_allowed_and_replies_keep_their_order(ask):
    def slow(body: Any, number: int) -> Answer:
        return Answer({"scores": [float(body["responses"][0])]}, seconds=0.05 if number % 2 else 0.02)

    with service(slow) as seen:
        scores, _ = ask(
            seen.url, table([str(i) for i in range(24)]), api="plain", batch_size=1, max_concurrency=3
        )
    assert scores == [float(i) for i in range(24)]
    assert seen.most_at_once == 3


# failures of the service


def test_a_status_of_500_is_asked_again(ask):
    def failing_first(body: Any, number: int) -> Answer | None:
        return [Answer("busy", 500), None, Answer("", 503), lengths(body, number)][number]

    with service(failing_first) as seen:
        assert ask(seen.url, table(["a"])) == ([4.0], {"retries/far": 3.0})


def test_a_service_that_stays_down_is_one_error_with_url_reason_and_tries(ask):
    with (
        service(lambda body, number: Answer("overloaded", 503)) as seen,
        pytest.raises(
            RemoteFailed, match=r"'far' \(http://127.0.0.1:\d+/score\) is down: answered 503 "
        ) as error,
    ):
        ask(seen.url, table(["a", "b"]), max_retries=2)
    assert str(error.value).endswith(
        'overloaded"; 3 tries over 0 s; asked about prompt_id p0, sample 0 to prompt_id p1, sample 0'
    )
    assert len(seen.bodies) == 3


def test_a_port_where_nobody_listens(ask):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        with pytest.raises(
            RemoteFailed, match=r"is down: ConnectError .*; 3 tries over 0 s; asked about prompt"
        ):
            ask(url, table(["a"]), max_retries=2)


def test_the_service_may_ask_for_a_longer_pause_but_not_for_an_endless_one(ask):
    def busy(body: Any, number: int) -> Answer:
        return lengths(body, number) if number else Answer("", 503, {"Retry-After": "100000"})

    with service(busy) as seen:
        assert ask(seen.url, table(["a"]))[0] == [4.0]


def test_a_service_that_hangs_is_given_up_after_the_timeout_and_not_asked_again(ask):
    with (
        service(lambda body, number: Answer("", seconds=60)) as seen,
        pytest.raises(
            RemoteFailed, match=r"gave no answer within 0.2 s \(timeout\); asked about prompt_id p0"
        ),
    ):
        ask(seen.url, table(["a"]), timeout=0.2)
    assert len(seen.bodies) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301])
def test_a_refusal_is_the_users_to_mend_and_never_asked_again_nor_shows_the_key(ask, monkeypatch, status):
    monkeypatch.setenv("MY_KEY", KEY)
    with (
        service(lambda body, number: Answer(f"no, {KEY}", status, {"Location": "/else"})) as seen,
        pytest.raises(
            UserError, match=rf"refused prompt_id p0, sample 0: {status} [\w ]+: \"no, \*\*\*\""
        ) as error,
    ):
        ask(seen.url, table(["a"]), api_key_env="MY_KEY")
    assert KEY not in str(error.value)
    assert len(seen.bodies) == 1
    assert seen.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_service_that_is_too_busy_ends_the_task_but_not_the_run(ask):
    busy = pytest.raises(RemoteFailed, match=r"429 Too Many Requests.*; lower max_concurrency")
    with service(lambda body, number: Answer("later", 429)) as seen, busy:
        ask(seen.url, table(["a"]))
    assert len(seen.bodies) == 1


def test_a_key_that_is_not_set_is_named_before_anything_is_asked(ask, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with (
        service(lengths) as seen,
        pytest.raises(UserError, match=r"far\.api_key_env=MY_KEY: this variable is not set"),
    ):
        ask(seen.url, table(["a"]), api_key_env="MY_KEY")
    assert seen.bodies == []


def test_a_proxy_of_the_environment_is_not_asked_for_what_runs_here(ask, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with service(lengths) as seen:
        assert ask(seen.url, table(["a"]), max_retries=0)[0] == [4.0]


# answers without a score


@pytest.mark.parametrize(
    ("content", "row", "why"),
    [
        (b"<html>", None, "answered no JSON: 200 OK: <html>"),
        ([], 0, r"its answer has no list 'data', but is \[\]"),
        ({"data": None}, 0, "its answer has no list 'data'"),
        ({"data": [{"index": 0, "probs": [1.0]}]}, 1, "its answer has 1 of 2 rows"),
        ({"data": [{"index": 0, "probs": [1.0]}] * 2}, 0, "index 0, twice or not of 2 rows"),
        ({"data": [{"index": 2, "probs": [1.0]}]}, 0, "index 2, twice or not of 2 rows"),
        ({"data": [{"index": True, "probs": [1.0]}]}, 0, "index True"),
        ({"data": [None]}, 0, "index None"),
        ({"data": [{"index": 0, "probs": []}, {"index": 1}]}, 0, r"probs is \[\]"),
        ({"data": [{"index": 0, "probs": [1.0]}, {"index": 1}]}, 1, "probs is None"),
        ({"data": [{"index": i, "probs": [[1.0, None][i]]} for i in (0, 1)]}, 1, "None is not a finite"),
        ({"data": [{"index": i, "probs": [["1.0", 1.0][i]]} for i in (0, 1)]}, 0, "'1.0' is not a finite"),
        (b'{"data": [{"index": 0, "probs": [1]}, {"index": 1, "probs": [NaN]}]}', 1, "nan is not a finite"),
        (b'{"data": [{"index": 0, "probs": [true]}, {"index": 1, "probs": [1]}]}', 0, "True is not a finite"),
    ],
)
def test_a_score_that_is_missing_or_no_number_names_the_row(ask, content, row, why):
    with (
        service(lambda body, number: Answer(content)) as seen,
        pytest.raises(RemoteFailed, match=why) as error,
    ):
        ask(seen.url, table(["a", "b"]))
    assert row is None or f"gave no score for prompt_id p{row}, sample 0: " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "content", "row", "why"),
    [
        ({"api": "plain"}, {"scores": [1.0]}, 1, "its answer has 1 scores for 2 rows"),
        ({"api": "plain"}, {"scores": [1.0, 2.0, 3.0]}, 1, "its answer has 3 scores for 2 rows"),
        ({"api": "plain"}, {"scores": [1.0, None]}, 1, "None is not a finite number"),
        ({"api": "plain"}, {"scores": "12"}, 0, "its answer has no list 'scores'"),
        (CHAT, {"choices": []}, 0, "its answer has no text"),
        (CHAT, {"choices": [{"message": {"content": None}}]}, 0, "its answer has no text"),
        (CHAT, {"choices": [{"message": {"content": "good"}}]}, 0, "the reply 'good' is not a number and"),
        ({**CHAT, "score_pattern": "S(.)"}, {"choices": [{"message": {"content": "4"}}]}, 0, "score_pattern"),
    ],
)
def test_so_do_the_other_apis(ask, settings, content, row, why):
    with (
        service(lambda body, number: Answer(content)) as seen,
        pytest.raises(RemoteFailed, match=why) as error,
    ):
        ask(seen.url, table(["a", "b"]), **settings)
    assert f"gave no score for prompt_id p{row}, sample 0: " in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(-1, 3) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["data", "index", "probs", "scores", "choices", "message", "content"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.sampled_from(sorted(ANSWERS)), JSON, st.integers(1, 3))
def test_whatever_the_answer_is_there_is_a_number_per_row_or_an_error(api, content, num_rows):
    config = RemoteConfig(url="http://there/", api=api)
    try:
        scores = ANSWERS[config.api](config, content, 1 if api == "chat" else num_rows)
    except Unreadable as error:
        assert error.index in range(num_rows)  # noqa: PT017 (both are right)
    else:
        assert len(scores) == (1 if api == "chat" else num_rows)
        assert all(type(score) is float and abs(score) < float("inf") for score in scores)


def test_a_column_that_json_cannot_say_is_the_users(ask):
    rows = table(["a"], weight=[float("nan")])
    with service(plain([1.0])) as seen, pytest.raises(UserError, match="cannot be asked about prompt_id p0"):
        ask(seen.url, rows, api="plain")


# the configuration, and the run


REMOTE = ["reward=remote", "reward.components.remote.url=http://there:8000/classify"]


def settings(*words: str) -> list[str]:
    return [f"reward.components.remote.{word}" for word in words]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["url=ftp://there/"], "write an address such as http://gpu07:8000/classify"),
        (["url=http://me:secret@there/"], "without user name and password"),
        (["url=http://there:99999999/"], "is not an address"),
        (["api=clasify"], "remote.api: Input should be 'classify', 'chat' or 'plain'"),
        (["api=chat"], "remote.model=None: must be given"),
        (["api=chat", "model=m", "template=good?"], "has no {response}"),
        (["api=chat", "model=m", "template='{response.x}'"], "{response.x} is not a name"),
        (["api=chat", "model=m", "template='{response'"], "braces that stand for nothing are doubled: {{ }}"),
        (
            ["api=chat", "model=m", "template='{response}'", "score_pattern='('"],
            "is not a regular expression",
        ),
        (
            ["api=chat", "model=m", "template='{response}'", "score_pattern='a'"],
            "has 0 groups; one is wanted",
        ),
        (
            ["api=chat", "model=m", "template='{response}'", "batch_size=2"],
            "one response per request; legal: 1",
        ),
        (
            ["score_pattern='(.)'"],
            "is for reward.components.remote.api=chat, and that is classify; leave this out",
        ),
        (["max_model_len=9"], "only tokens can be counted and cut"),
        (["max_concurrency=0"], "max_concurrency: Input should be greater than 0"),
        (["timeout=0.0"], "timeout: Input should be greater than 0"),
        (["backoff=50.0"], "is less than reward.components.remote.backoff=50.0"),
        (["api_key_env='sk-123 456'"], "the name of an environment variable; the key itself belongs into no"),
        (["parameters.input=3"], "is set by slurm-ppo itself; leave it out"),
        (["retries=3"], "unknown key 'retries'; legal: api, "),
    ],
)
def test_a_remote_component_that_cannot_work_is_refused_before_the_run(inputs, tmp_path, given, why):
    base = [word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("reward")]
    assert why in problems_of([*base, *REMOTE, *settings(*given)])


def problems_of(words: list[str]) -> str:
    try:
        return "\n".join(map(str, contradictions(compose(words))))
    except ConfigError as error:
        return str(error)


def test_validate_warns_of_a_missing_key_and_refuses_a_template_of_unknown_columns(
    inputs, tmp_path, slurm_ppo
):
    base = [word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("reward")]
    chat = [*REMOTE, *settings("api=chat", "model=m", "api_key_env=NO_SUCH_KEY", "trial=false")]
    done = slurm_ppo("validate", *base, *chat, *settings("template='{response}: {answer}'"))
    assert done.returncode == 0, done.stderr
    assert "reward remote: chat at http://there:8000/classify, weight 1\n" in done.stdout
    assert "warning: reward.components.remote.api_key_env=NO_SUCH_KEY: is not set here" in done.stdout
    done = slurm_ppo("validate", *base, *chat, *settings("template='{response}: {right}'"))
    assert done.returncode == 2
    assert "remote.template: {right} is not a column of the prompts; known: prompt, response, " in done.stderr


def remote(url: str, *more: str) -> str:
    given = ", ".join(["kind: remote", f"url: '{url}'", "backoff: 0.01", *more])
    return f"+reward.components.far={{{given}}}"


def test_a_run_is_scored_by_a_service_and_its_log_has_no_key(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with service(lengths) as seen:
        run = make_run(inputs, tmp_path / "run", remote(seen.url, "api_key_env: MY_KEY"))
        for task in (("prepare",), ("rollout", 1, 0), ("reward", 1, 0)):
            done = stage(run, *task)
            assert done.code == 0, done.log
            assert KEY not in done.log
    rewards = read_shard(run.paths, read_record(run.paths, Task(1, Stage.REWARD, 0)), REWARD)
    rollout = read_shard(run.paths, read_record(run.paths, Task(1, Stage.ROLLOUT, 0)), ROLLOUT)
    texts = zip(rollout["prompt_text"].to_pylist(), rollout["response_text"].to_pylist(), strict=True)
    assert rewards["reward/far"].to_pylist() == [float(len(p + r)) for p, r in texts]
    assert KEY not in "".join(path.read_text() for path in run.paths.root.glob("*.*"))


@pytest.mark.parametrize(("status", "code"), [(503, 1), (404, 2)])
def test_a_service_that_is_down_fails_the_task_and_one_that_refuses_is_the_users(
    inputs, tmp_path, status, code
):
    with service(lambda body, number: Answer("no", status)) as seen:
        run = make_run(inputs, tmp_path / "run", remote(seen.url, "max_retries: 1"))
        for task in (("prepare",), ("rollout", 1, 0)):
            assert stage(run, *task).code == 0
        done = stage(run, "reward", 1, 0)
    assert done.code == code, done.log
    assert f"reward component 'far' ({seen.url}) " in done.log
    assert read_record(run.paths, Task(1, Stage.REWARD, 0)) is None


def test_the_command_line_needs_neither_httpx_nor_pebble_until_it_calls_them():
    code = (
        "import pipeline.checks.settings, sys; "
        "print([m for m in ('httpx', 'pebble', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
