"""Jobs that are held: what lets them start is said."""

from dataclasses import replace

import pytest

from slurm.held import way_to_release
from slurm.query import Element
from slurm.states import SlurmState

PENDING = Element(
    *("12", 0, "name", SlurmState.PENDING, "Resources", "", "gpu", None, None, None, None, None, 0, None)
)


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (["Resources", "Priority"], None),
        (["JobHeldUser", "Resources"], "to let it start: scontrol release 12"),
        (["(JobHeldAdmin)"], "to let it start an administrator types: scontrol release 12"),
        (["job requeued in held state"], "to let it start: scontrol release 12"),
        (["JobHeldUser"] * 6, "to let it start: scontrol release 12 13 14 15 (and 2 more)"),
    ],
)
def test_what_lets_held_jobs_start(reasons, words):
    waiting = [replace(PENDING, array_id=str(12 + i), reason=reason) for i, reason in enumerate(reasons)]
    assert way_to_release(waiting) == words
