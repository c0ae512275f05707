"""Processes of rules that a worker keeps from task to task."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.reward import RuleConfig
from pipeline.plugins.called import Plugin, score
from pipeline.plugins.sandbox import open_calls
from stages.engines import release_all
from stages.rewards.rules import rule_scores
from tests.support.rollouts import table
from tests.support.user_rules import module
from tests.support.waiting import eventually, wait_for


@pytest.fixture
def staying() -> Iterator[None]:
    yield
    release_all()


def test_a_worker_keeps_the_processes_of_a_rule_from_task_to_task(project, staying):
    """The import, of a second here, is paid once."""
    (project / "slow_import.py").write_text(
        "import os, time\ntime.sleep(1)\n\ndef pid(*, responses, **columns):\n    return [os.getpid()]\n"
    )
    config = RuleConfig(function="slow_import:pid")
    first = rule_scores("mine", config, table(), stays=True)
    began = time.monotonic()
    assert rule_scores("mine", config, table(), stays=True) == first
    assert time.monotonic() - began < 0.5
    release_all()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[0][0]), 0)


def test_processes_that_stay_have_the_rule_as_it_is_now(project, staying):
    rule = project / "changing.py"
    config = RuleConfig(function="changing:f")
    for value in (1.0, 2.0):
        rule.write_text(f"def f(*, responses, **columns):\n    return [{value}]  # {'x' * int(value)}\n")
        assert rule_scores("mine", config, table(), stays=True)[0] == [value] * 4


def test_rules_of_two_components_keep_processes_side_by_side_and_one_may_be_late(project, staying):
    name = module(project)
    late = RuleConfig(function=f"{name}:hangs", time_limit=0.2, timeout_score=-3.0)
    for _ in range(2):
        assert rule_scores("late", late, table(), stays=True)[0] == [1.0, -3.0, 1.0, 1.0]
        assert rule_scores("mine", RuleConfig(function=f"{name}:length"), table(), stays=True)[0][0] == 0.3
    began = time.monotonic()
    release_all()
    assert time.monotonic() - began < 5


def test_processes_that_stay_end_with_a_worker_that_is_killed(project):
    code = (
        "import os, signal, sys\nfrom pipeline.config.reward import RuleConfig\n"
        "from tests.support.rollouts import table\nfrom stages.rewards.rules import rule_scores\n"
        "if __name__ == '__main__':\n"
        f"    config = RuleConfig(function='{module(project)}:process')\n"
        "    print(int(rule_scores('mine', config, table(), stays=True)[0][0]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(project), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout, done.stderr
    status = Path("/proc", done.stdout.strip(), "stat")
    assert eventually(lambda: not status.exists() or ") Z " in status.read_text())


def test_a_process_whose_pipe_closes_says_nothing_of_the_signal_that_comes_too(project, staying):
    """It ends of itself, and is sent SIGTERM: Python, while it takes itself down, would write a traceback."""
    mask = project / "mask"
    (project / "leaving.py").write_text(
        "import _signal, os\n"
        f"file = os.open({str(mask)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "class Last:\n"
        "    def __del__(self, mask=_signal.pthread_sigmask, block=_signal.SIG_BLOCK,\n"
        "                write=os.write, file=file, repr=repr):\n"
        "        write(file, repr(mask(block, [])).encode())\n"
        "last = Last()\n"
        "def score(*, responses, **columns):\n"
        "    return [0.0 for _ in responses]\n"
    )
    with open_calls(Plugin("reward.components.mine.function", "leaving:score"), 1) as calls:
        assert calls.call(10, score, {"responses": ["a"]}, 1) == [0.0]
        calls.pool._pool_manager.worker_manager.close_channels()
        said = wait_for(mask.read_text, "the process to end of itself", 30)
    assert str(int(signal.SIGTERM)) in said.strip("{}").split(", ")
