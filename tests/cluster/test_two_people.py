"""Two commands typed at once at one run on Slurm: nothing is lost, and who is refused is told why."""

import pytest

from tests.cluster.scenario import assert_same_policy, room_on, staying, take
from tests.support.tables import ON_CLUSTER, sample

PAIRS = (
    ("submit", "cancel"),
    ("submit", "submit"),
    ("cancel", "cancel"),
    ("submit", "clean --yes"),
    ("cancel", "clean --yes"),
)
REASONS = ("active on this run", "are in the queue", "another driver took", "sent a heartbeat")
"""Words of a refusal that say what goes on."""


@ON_CLUSTER
@pytest.mark.parametrize(("first", "second"), sample(PAIRS, 0.2))
def test_whatever_two_people_type_at_once_a_run_goes_on_to_the_same_end(
    cluster, make_run, complete_run, tmp_path, first, second
):
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(cluster, root, "iterations=2", *staying(5), *take("0.1", "rollout"))
    run.submit()
    run.wait_for(lambda: run.has_committed(1, "rollout"), "the first rollout")
    typed = [words.split() for words in (first, second)]
    for process in [run.begin(command, root, *options) for command, *options in typed]:
        said = "".join(process.communicate(timeout=200))
        assert "Traceback" not in said
        assert process.returncode in (0, 1, 2, 3), said  # 3: the run was cancelled meanwhile
        assert process.returncode != 2 or any(reason in said for reason in REASONS), said
    again = run.command("submit", root)
    assert again.returncode == 0, again.stderr
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
