"""The recipe of 7B, answered by a cluster that has its partitions. Its cards are names."""

import pytest

from pipeline.cli.app import main
from slurm.devcluster import Layout, PracticeNode, PracticePartition
from tests.support import tiny
from tests.support.large_models import eight_billion
from tests.support.recipes import RECIPES, SPECIALS, TEMPLATE, make_gsm8k
from tests.support.tables import ON_CLUSTER

pytestmark = ON_CLUSTER
LAYOUT = Layout(
    nodes=(
        PracticeNode("old0", gpu_type="l4", gpus=4, memory_mb=256_000),
        PracticeNode("new0", gpus=4, memory_mb=512_000),
        PracticeNode("cpu0", gpus=0),
    ),
    partitions=(
        PracticePartition("cpu", ("cpu0",), default=True),
        PracticePartition("older", ("old0",), max_time="4:00:00"),
        PracticePartition("a100", ("new0",), max_time="4:00:00"),
    ),
)
"""The partitions of two_partitions.yaml, with cards of 24 GB in the older one."""


@pytest.fixture
def typed(tmp_path, environment, monkeypatch, capfd):
    """``validate`` of the recipe in a folder with its data and room for its policies; its 7B is a model of
    eight billion weights. Returns exit code and output."""
    (tmp_path / "models").mkdir()
    model = eight_billion(tmp_path / "models/Qwen2.5-7B-Instruct", tokenizer_of=tmp_path)
    tiny.byte_tokenizer(SPECIALS, TEMPLATE).save_pretrained(model)
    make_gsm8k(tmp_path)
    words = (f"--config-dir={RECIPES}", "experiment=gsm8k_7b", "scheduler=two_partitions", "run_dir=runs/7b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.checks.disk.room", lambda folder: (10**13, None))

    def typed(cluster, *more: str) -> tuple[int, str]:
        for name, value in {**environment, **cluster.environment()}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["slurm-ppo", "validate", *words, *more])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        said = capfd.readouterr()
        return code, said.out + said.err

    return typed


def test_the_recipe_of_7b_is_sound_on_its_two_partitions_or_what_lacks_is_named(own_cluster, typed):
    cluster = own_cluster(LAYOUT)
    code, said = typed(cluster)
    assert code == 0, said
    assert "partitions, limits and sizes allow what is asked for" in said
    assert "on each GPU of 22 (l4)" in said, "by cards that the cluster names"
    code, said = typed(cluster, "scheduler.rollout.partition=old", "scheduler.update.time=9:00:00")
    assert code == 2
    assert "scheduler.rollout.partition=old: no such partition; legal: a100, cpu, older" in said
    assert "scheduler.update.time=9:00:00: longer than partition a100 allows" in said
