"""One table says of each of Slurm's reasons whether it passes by itself, and what helps where it does not."""

import re
from dataclasses import replace

import pytest

from slurm.reasons import (
    REASONS,
    WaitEnds,
    explain,
    help_with_refusal,
    is_at_limit,
    lacks_room,
    way_to_release,
)
from slurm.states import SlurmState
from tests.support import ROOT
from tests.support.jobs import element

NAMES = (ROOT / "tests/golden/slurm/reasons.txt").read_text().split()


@pytest.mark.parametrize("name", NAMES)
def test_every_reason_passes_or_says_what_helps(name):
    reason = explain(name)
    assert reason.words != name
    assert bool(reason.helps) is reason.is_stuck
    if reason.frees:
        assert not reason.is_stuck
    if name.startswith(("QOS", "Assoc")) and reason.ends is WaitEnds.NEVER:
        assert not lacks_room(name), "nobody leaves for what would never start"


def test_the_table_has_no_row_that_says_nothing():
    assert all(bool(reason.helps) is reason.is_stuck for reason in REASONS.values())


@pytest.mark.parametrize(
    ("ends", "names"),
    [
        (WaitEnds.ITSELF, "None Priority Resources BeginTime Licenses JobArrayTaskLimit AssocMaxJobsLimit"),
        (
            WaitEnds.ITSELF,
            "QOSMaxJobsPerUserLimit AssocGrpGRES QOSMaxSubmitJobPerUserLimit JobHoldMaxRequeue",
        ),
        (WaitEnds.OTHERS, "JobHeldUser (JobHeldAdmin) PartitionDown PartitionInactive QOSGrpWallLimit"),
        (WaitEnds.OTHERS, "ReqNodeNotAvail,_UnavailableNodes:a1 AssocGrpCPUMinutesLimit"),
        (WaitEnds.NEVER, "QOSMaxWallDurationPerJobLimit AssocMaxWallDurationPerJobLimit PartitionTimeLimit"),
        (WaitEnds.NEVER, "BadConstraints InvalidAccount InvalidQOS QOSMaxGRESPerJob AssocMaxCpuPerJobLimit"),
        (WaitEnds.NEVER, "QOSMinGRES QOSMaxGRESMinutesPerJob AccountNotAllowed ReservationDeleted"),
    ],
)
def test_what_passes(ends, names):
    assert {name: explain(name).ends for name in names.split()} == dict.fromkeys(names.split(), ends)


def test_a_limit_of_what_runs_at_once_is_one_that_workers_make_place_for():
    assert is_at_limit("QOSMaxJobsPerUserLimit")
    assert not is_at_limit("QOSMaxGRESPerJob")


@pytest.mark.parametrize(
    ("words", "helps"),
    [
        ("Required partition not available (inactive or drain)", "other partitions"),
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Invalid qos specification", "another QOS"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "shorter time"),
        ("Requested node configuration is not available", "ask for less"),
        ("Job violates accounting/QOS policy (QOSMaxWallDurationPerJobLimit)", "shorter time"),
        ("a site's own words", ""),
    ],
)
def test_what_helps_against_a_refusal(words, helps):
    assert re.search(helps, help_with_refusal(f"sbatch: error: Batch job submission failed: {words}"))
    assert bool(help_with_refusal(words)) is bool(helps)


# --- jobs that are held ---


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (["Resources", "Priority"], None),
        (["JobHeldUser", "Resources"], "to let it start: scontrol release 12"),
        (["(JobHeldAdmin)"], "to let it start, an administrator runs: scontrol release 12"),
        (["job requeued in held state"], "to let it start: scontrol release 12"),
        (["JobHeldUser"] * 6, "to let it start: scontrol release 12 13 14 15 (and 2 more)"),
    ],
)
def test_what_lets_held_jobs_start(reasons, words):
    pending = [element(0, SlurmState.PENDING, reason=reason) for reason in reasons]
    waiting = [replace(one, array_id=str(12 + i)) for i, one in enumerate(pending)]
    assert way_to_release(waiting) == words
