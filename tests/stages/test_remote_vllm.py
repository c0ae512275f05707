"""vLLM's own server as a remote reward: its scores are the model's logits. One server for all tests."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.reward import RemoteConfig
from stages.context import UserError
from stages.rewards.remote import remote_scores
from tests.support import ROOT, tiny
from tests.support.rollouts import asked_table as table
from tests.support.tables import LONG

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

START_SECONDS = 300
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in the engine's process
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    folder = tiny.make_reward_model(tmp_path_factory.mktemp("served") / "judge", chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(judge, environment, tmp_path_factory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [
        "--runner",
        "pooling",
        "--dtype",
        "float32",
        "--max-model-len",
        str(tiny.CONTEXT),
        "--enforce-eager",
    ]
    command = [sys.executable, ROOT / "tests/support/vllm_server.py", "--model", judge, *settings]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "judge"],
            env=environment | CPU,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(server, port, log)
        yield f"http://127.0.0.1:{port}/classify"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        time.sleep(0.5)
    pytest.fail(f"vllm serve did not start within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def logit(judge: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    ids = AutoTokenizer.from_pretrained(judge)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids[:, -tiny.CONTEXT :]).logits[0, 0])


TEXTS = ["xyz", "a longer answer", "ü", "b", "and one more"]


@LONG
def test_text_scores_as_the_model_does(context, judge, url):
    config = RemoteConfig(url=url, model="judge", batch_size=2, max_concurrency=2)
    scores, metrics = remote_scores(context, "far", config, table(TEXTS))
    assert scores == pytest.approx([logit(judge, f"q: {text}") for text in TEXTS], abs=1e-4)
    assert metrics == {"retries/far": 0.0}
    assert any(not 0 <= score <= 1 for score in scores), "an activation was applied"


def test_messages_score_by_the_models_own_template_and_long_ones_are_cut(context, judge, url):
    config = RemoteConfig(url=url, model="judge", tokenizer=str(judge), max_model_len=tiny.CONTEXT)
    messages = [json.dumps([{"role": "user", "content": "hello"}])] * 2
    long = "x" * 70
    scores, metrics = remote_scores(context, "far", config, table(["hi", long], messages=messages))
    wanted = [logit(judge, f"[user]hello[assistant]{text}") for text in ("hi", long)]
    assert scores == pytest.approx(wanted, abs=1e-4)
    assert metrics == {"retries/far": 0.0, "truncated/far": 1.0}


@pytest.mark.parametrize(
    ("model", "texts", "why"),
    [
        (
            "judge",
            ["a", "x" * 70],
            "refused prompt_id p0, sample 0 to prompt_id p1, sample 0: 400 Bad Request",
        ),
        ("jugde", ["a"], "refused prompt_id p0, sample 0: 404 Not Found: .*jugde"),
    ],
)
def test_what_the_server_refuses_is_shown_in_its_words(context, url, model, texts, why):
    with pytest.raises(UserError, match=why):
        remote_scores(context, "far", RemoteConfig(url=url, model=model), table(texts))
