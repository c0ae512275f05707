"""Two commands typed at one run at the same moment: nothing is lost, and who comes too late is told who is at
work.

With SOAK_ROUNDS=20, as `make soak` has it, all pairs are tried, each at several moments.
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.every_state import stopped_copy
from tests.support.killing import policy_bytes
from tests.support.tables import IS_SOAK, sample

WORDS = (
    ("resume",),
    ("resume", "--from", "reward@2"),
    ("resume", "--from", "update@1"),
    ("clean", "--yes"),
    ("report",),
    ("submit",),
    ("cancel",),
    ("plan",),
)
"""Commands about a run of this machine, to be typed with its directory after the first word."""
NO_QUEUE = ("submit", "cancel")
"""What a run of this machine has no use for: refused, whoever is at work."""
APART = (0.0, 0.05, 0.15, 0.4, 1.0) if IS_SOAK else (0.0, 0.15)
"""Seconds between the two."""
PAIRS = [
    (first, second, seconds)
    for (first, second), seconds in itertools.product(itertools.product(WORDS, WORDS), APART)
    if "resume" in (first[0], second[0]) or "clean" in (first[0], second[0])
]


REFUSED = ("a driver is active on this run", "another driver", "so it cannot go back to")
"""What who is late may be told: the last where the other has gone further back."""


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second", "apart"), sample(PAIRS, 0.04), ids=str)
def test_of_two_commands_at_once_none_loses_anything_and_who_is_late_is_told(
    first, second, apart, complete_run, slurm_ppo, tmp_path
):
    run = stopped_copy(complete_run, tmp_path / "run")
    with ThreadPoolExecutor(2) as people:
        both = [people.submit(slurm_ppo, first[0], run, *first[1:])]
        time.sleep(apart)
        both.append(people.submit(slurm_ppo, second[0], run, *second[1:]))
    for words, done in zip((first, second), (one.result() for one in both), strict=True):
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode in ((2,) if words[0] in NO_QUEUE else (0, 1, 2)), done.stderr
        if done.returncode and words[0] not in NO_QUEUE:
            assert any(said in done.stderr for said in REFUSED), done.stderr
    assert slurm_ppo("resume", run).returncode == 0
    assert policy_bytes(run) == policy_bytes(complete_run)
