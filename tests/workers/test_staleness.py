"""A worker that a pass has named leaves before it goes ahead, and not before what is at hand."""

import shutil
import sys
from pathlib import Path

import pytest

from pipeline.config.scheduler import ResourcesConfig
from pipeline.run.control import begin_invocation
from pipeline.run.directory import load_run
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Reason
from pipeline.workers.handover import Handover, Instructions, publish_instructions
from tests.support import processes
from tests.support.processes import in_process_of_its_own
from tests.support.pulling import source_of

SHAPE = ("iterations=3", "rollout.num_shards=2", "rollout.staleness=1", "algorithm.correction.level=token")


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory) -> Path:
    run = processes.make_run(inputs, tmp_path_factory.mktemp("prepared") / "run", *SHAPE)
    begin_invocation(run.paths)
    assert processes.stage(run, "prepare").code == 0
    return run.paths.root


def takes_next(root: Path, is_named: bool) -> None:
    """Say which task a worker takes, or why it leaves."""
    run = load_run(root)
    source = source_of(run, Task(1, Stage.ROLLOUT), ResourcesConfig(linger=60))
    if is_named:
        handover = Handover(source.outside.name, "update")
        publish_instructions(run.paths, Instructions((handover,)))
    source.has_loaded = True
    given = source.next()
    (root / "said.txt").write_text(str(given.task if given else source.reason))
    sys.exit(0)


@pytest.mark.parametrize(
    ("done", "is_named", "said"),
    [
        (0, True, Task(1, Stage.ROLLOUT)),
        (2, False, Task(2, Stage.ROLLOUT)),
        (2, True, Reason.NEEDED),
    ],
)
def test_one_that_is_to_make_place_does_what_is_at_hand_and_leaves_then(
    prepared, tmp_path, done, is_named, said
):
    root = shutil.copytree(prepared, tmp_path / "run", symlinks=True)
    for shard in range(done):
        assert processes.stage(load_run(root), "rollout", 1, shard).code == 0
    assert in_process_of_its_own(takes_next, root, is_named) == 0
    assert (root / "said.txt").read_text() == str(said)
