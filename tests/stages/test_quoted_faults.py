"""Words about a GPU that an error quotes: of a user's rule, a service, or a response of the policy."""

import pytest

from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage, Task
from stages.attempts.failures import explain
from stages.generation.conversations import SchedulerFailed
from stages.rewards.posting import RemoteFailed
from stages.rewards.rules import RuleFailed

QUOTED = (
    "reward component 'far' (http://gpu.host/score) is down: answered 503: CUDA out of memory",
    "reward component 'mine' failed with ValueError for 'CUDA error: no kernel image is available for "
    "execution on the device'",
)


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("kind", [RuleFailed, RemoteFailed, SchedulerFailed])
def test_they_are_not_taken_for_a_fault_of_the_tasks_own(kind, text):
    why = explain(kind(text), Task(1, Stage.REWARD))
    assert (why.kind, why.is_of_device) == (FailureKind.ERROR, False)
    assert why.message == f"{kind.__name__}: {text}"
    assert explain(RuntimeError(text), Task(1, Stage.REWARD)).is_of_device, "an error of its own says so"
