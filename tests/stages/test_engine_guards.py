"""What goes wrong with engines on a cluster, each answered in one line: GPUs, caches, settings."""

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from pipeline.config.engines import VllmConfig
from pipeline.config.issue import ConfigError, UserError
from pipeline.config.resolve import resolve
from pipeline.run.commits import read_record
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import FinishReason
from pipeline.run.tasks import Stage, Task
from stages.engines.base import BadAnswer, Generator, Request, Response, Sampling, Scorer, SequenceLimits
from stages.engines.compiled import private_cache
from stages.engines.vllm_arguments import check_gpus
from stages.models import devices
from stages.models.loading import check_gpus_are_seen, missing_gpus
from tests.support import ROOT
from tests.support.composed import composed_of
from tests.support.processes import config_of, make_run, stage

ON_SLURM = ("scheduler=slurm", "scheduler.update.cpus_per_task=1")


# keys that do not go together


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["rollout.top_p=0.9", "algorithm.correction.level=token"],
            "rollout.top_p=0.9: importance weights need the probability",
        ),
        (
            ["rollout.top_k=20", "algorithm.correction.level=sequence", "rollout=vllm"],
            "rollout.top_k=20: importance weights need the probability",
        ),
        (
            ["rollout=vllm", "rollout.top_p=0.9", "rollout.temperature=0.7"],
            "rollout.top_p=0.9: vLLM gives log-probabilities before the temperature or after the cut",
        ),
        (
            ["rollout=vllm", "rollout.device_map=auto"],
            "rollout.device_map=auto: vLLM places the model itself",
        ),
        (
            ["rollout=vllm", "rollout.vllm.max_model_len=52"],
            "rollout.vllm.max_model_len=52: leaves no room for one new token",
        ),
        (
            [*ON_SLURM, "rollout=vllm", "rollout.vllm.tensor_parallel_size=4"],
            "scheduler.rollout.gpus_per_node=1: rollout.vllm.tensor_parallel_size=4 times "
            "pipeline_parallel_size=1 uses 4",
        ),
        (
            [*ON_SLURM, "reward.engine=vllm", "scheduler.reward.gpus_per_node=a100:8"],
            "scheduler.reward.gpus_per_node=8: reward.vllm.tensor_parallel_size=1",
        ),
        (
            [
                *ON_SLURM,
                "rollout=vllm",
                "rollout.vllm.tensor_parallel_size=4",
                "scheduler.rollout.gpus_per_node=4",
                "evaluate.every=1",
                "data.heldout=INPUTS/heldout.jsonl",
            ],
            "scheduler.evaluate.gpus_per_node=1: it runs models as rollout does",
        ),
        (
            [
                *ON_SLURM,
                "+reward.components.rm.engine=vllm",
                "+reward.components.rm.pool=big",
                "+scheduler.pools.big.gpus_per_node=2",
            ],
            "scheduler.pools.big.gpus_per_node=2: reward.vllm.tensor_parallel_size=1",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(models, tmp_path, given, said):
    words = [word.replace("INPUTS", str(models)) for word in given]
    with pytest.raises(ConfigError) as refusal:
        resolve(composed_of(models, tmp_path / "run", *words))
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(said), line


def test_what_goes_together_is_not_refused(models, tmp_path):
    large_reference = [*ON_SLURM, "reward.engine=vllm", "scheduler.reward.gpus_per_node=2"]
    for given in (
        ["rollout.top_p=0.9", "rollout.temperature=0.7"],
        ["rollout=vllm", "rollout.top_k=5"],
        [*large_reference, "reward.device_map=auto"],
    ):
        resolve(composed_of(models, tmp_path / "run", *given))


# GPUs


@pytest.mark.parametrize("given", ["0", "0,1", "GPU-8f1c", "MIG-1"])
def test_given_gpus_that_cannot_be_seen_are_an_error_and_not_a_slow_run(given):
    assert missing_gpus(given, is_for_gpus=True, is_any_seen=True) is None
    assert missing_gpus(given, is_for_gpus=False, is_any_seen=False) is None
    problem = missing_gpus(given, is_for_gpus=True, is_any_seen=False)
    assert problem.startswith(f"CUDA_VISIBLE_DEVICES={given}: none of these GPUs can be used on this node")


def test_the_drivers_reason_is_named_too(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("stages.models.loading.ask_nvml", lambda: "NVML: Driver/library version mismatch")
    with pytest.raises(UserError, match=r"can be used on this node; .* \(NVML: Driver/library version mism"):
        check_gpus_are_seen({"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize("given", ["", "-1", "NoDevFiles"])
def test_no_gpus_given_are_none_missed(given):
    assert missing_gpus(given, is_for_gpus=True, is_any_seen=False) is None


@pytest.mark.parametrize(("given", "wanted"), [({}, "0"), ({"VLLM_USE_FLASHINFER_SAMPLER": "1"}, "1")])
def test_a_node_without_a_compiler_starts_vllm_and_users_may_ask_for_its_other_sampler(
    monkeypatch, given, wanted
):
    import torch._dynamo

    from stages.engines.vllm_setup import set_up

    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1", **given})
    with torch._dynamo.config.patch(disable=torch._dynamo.config.disable):
        set_up(VllmConfig())
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == wanted


@pytest.mark.parametrize("where", ["rollout", "reward"])
def test_more_gpus_than_the_task_has_are_one_error_and_not_a_hang(models, tmp_path, where, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    run = make_run(
        models,
        tmp_path / "run",
        f"{where}.engine=vllm",
        f"{where}.vllm.tensor_parallel_size=2",
    )
    assert stage(run, "prepare").code == 0
    if where == "reward":
        assert stage(run, "rollout", 1).code == 0
    done = stage(run, where, 1)
    assert done.code == 2
    said = (
        f"{where}.vllm: tensor_parallel_size=2 times pipeline_parallel_size=1 needs 2 GPUs, and this task "
        "sees 0 (CUDA_VISIBLE_DEVICES=7); let each task of this stage have as many (gpus_per_node=2), or"
    )
    assert said in done.log.splitlines()[-1]
    assert "Traceback" not in done.log


@pytest.mark.parametrize(
    ("given", "cuda", "said"),
    [
        (
            "MIG-5555",
            "13.0",
            "CUDA_VISIBLE_DEVICES=MIG-5555: vLLM takes MIG-5555, a part of",
        ),
        (
            "0,GPU-8f1c",
            "13.0",
            "CUDA_VISIBLE_DEVICES=0,GPU-8f1c: vLLM does not find GPU-8f1c",
        ),
        ("MIG-5555", None, None),
        ("NoDevFiles", "13.0", None),
        ("1", "13.0", None),
        (None, "13.0", None),
    ],
)
def test_a_task_refuses_gpus_that_vllm_would_take_for_others(
    models, tmp_path, monkeypatch, given, cuda, said
):
    config = config_of(models, tmp_path / "run", "reward.engine=vllm")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    if said is None:
        check_gpus("reward", config)
        return
    with pytest.raises(UserError) as refusal:
        check_gpus("reward", config)
    assert str(refusal.value).startswith(f"reward.engine=vllm: {said}")
    assert str(refusal.value).endswith(", or take engine=transformers")


@pytest.fixture
def cards(monkeypatch):
    """Two GPUs, as far as the driver's library for monitoring says."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    devices.check_gpus_compute.cache_clear()


def too_old(*shape, device):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")


def hangs(*shape, device):
    time.sleep(60)


def aborts(*shape, device):
    os._exit(7)


@pytest.mark.parametrize(
    ("ones", "said"),
    [
        (too_old, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        (hangs, "no answer in 0.2 s"),
        (aborts, "a process that tried them ended with exit code 7"),
    ],
)
def test_a_task_whose_gpus_do_not_compute_says_so_before_it_loads_a_model(monkeypatch, cards, ones, said):
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(devices, "_TRIAL_SECONDS", 0.2 if ones is hangs else 60.0)
    with pytest.raises(RuntimeError) as refusal:
        devices.check_gpus_compute()
    assert str(refusal.value) == (
        f"the GPUs of this task do not compute: {said}; look at nvidia-smi on this node"
    )
    assert not torch.cuda.is_initialized()


def test_gpus_that_compute_are_tried_once_in_a_process(monkeypatch, cards):
    tried = []
    monkeypatch.setattr(devices, "tried_in_child", lambda numbers, seconds: tried.append(numbers) or "")
    for _ in range(2):
        devices.check_gpus_compute()
    assert tried == [[0, 1]]
    devices.check_gpus_compute.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices.check_gpus_compute()
    assert len(tried) == 1, "without a GPU nothing is started"
    assert devices.own_numbers({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 4) == [3]
    assert devices.own_numbers({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 1) == [0]
    assert devices.own_numbers({}, 4) == [0], "others may compute on those that it was not given"
    devices.check_gpus_compute.cache_clear()


# what was compiled


@pytest.fixture(autouse=True)
def node(tmp_path_factory, monkeypatch) -> Path:
    """The node's temporary folder."""
    folder = tmp_path_factory.mktemp("node")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


KILLED = """
import sys
from pathlib import Path
from stages.engines.compiled import private_cache
cache = private_cache(Path(sys.argv[1]), "key", is_kept=True)
(cache.folder / "graphs").mkdir()
(cache.folder / "graphs/code.py").touch()
print("made", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path, node):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = os.environ | {"TMPDIR": str(node)}
    with Popen(command, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=environment) as process:
        assert process.stdout.readline() == b"made\n"
        one = private_cache(tmp_path, "key", is_kept=True)
        assert len(list(node.iterdir())) == 2, "one that is in use stays"
        process.kill()
        process.wait()
        other = private_cache(tmp_path, "key", is_kept=True)
    assert sorted(node.iterdir()) == sorted([one.folder.parent, other.folder.parent])


def test_what_one_process_has_compiled_the_next_ones_find(tmp_path):
    one = private_cache(tmp_path, "key", is_kept=True)
    (one.folder / "graphs").mkdir()
    (one.folder / "graphs/code.py").write_text("1")
    assert not RunPaths(tmp_path).compiled.exists(), "nobody sees what is not whole"
    one.publish()
    one.discard()
    assert not one.folder.exists()
    other = private_cache(tmp_path, "key", is_kept=True)
    assert (other.folder / "graphs/code.py").read_text() == "1"
    (other.folder / "graphs/code.py").write_text("2")
    other.publish()
    assert (private_cache(tmp_path, "key", is_kept=True).folder / "graphs/code.py").read_text() == "1"
    assert not any(private_cache(tmp_path, "another key", is_kept=True).folder.iterdir())
    assert not any(private_cache(tmp_path, "key", is_kept=False).folder.iterdir())


def publish_mine(root: str, number: int, barrier) -> None:
    cache = private_cache(Path(root), "key", is_kept=True)
    for name in range(30):
        (cache.folder / f"{name}").write_text(str(number))
    barrier.wait()
    cache.publish()


def test_of_many_array_elements_one_publishes(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=publish_mine, args=(str(tmp_path), i, barrier)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    (published,) = RunPaths(tmp_path).compiled.iterdir()
    assert len({path.read_text() for path in published.iterdir()}) == 1
    assert len(list(published.iterdir())) == 30


@pytest.mark.parametrize("harm", ["writable", "link"])
def test_what_others_may_have_written_is_not_loaded(tmp_path, harm, caplog):
    cache = private_cache(tmp_path, "key", is_kept=True)
    (cache.folder / "code.py").write_text("1")
    cache.publish()
    (published,) = RunPaths(tmp_path).compiled.iterdir()
    if harm == "writable":
        (published / "code.py").chmod(0o664)
    else:
        (published / "more.py").symlink_to("/etc/hostname")
    again = private_cache(tmp_path, "key", is_kept=True)
    assert not any(again.folder.iterdir())
    assert "is not used" in caplog.text
    again.publish()
    assert (published / "code.py").read_text() == "1"


def test_a_group_writable_umask_does_not_keep_a_cache_from_being_used(tmp_path):
    before = os.umask(0o002)
    try:
        cache = private_cache(tmp_path, "key", is_kept=True)
        (cache.folder / "code.json").write_text(json.dumps(1))
        cache.publish()
    finally:
        os.umask(before)
    assert (private_cache(tmp_path, "key", is_kept=True).folder / "code.json").exists()


# an engine that gives something else than it was asked for


class Careless(Generator):
    """Answers as it was made to."""

    limits = SequenceLimits(context=64, vocabulary=300)

    def __init__(self, answers) -> None:
        self._answers = answers

    def _stream(self, requests, sampling, done, should_stop, turns):
        for index in range(len(requests)):
            turns.ended(index, self._answers)
            if self._answers is not Ellipsis:
                yield {index: self._answers}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "Careless gave None for request 0"),
        (Response([5, 6], [-1.0], FinishReason.STOP), "gave 2 tokens and 1 log-probabilities for request 0"),
        (Response([], [], FinishReason.STOP), "gave no token for request 0"),
        (Response([300], [-1.0], FinishReason.STOP), "gave token ids outside the vocabulary for request 0"),
        (Response([None], [-1.0], FinishReason.STOP), "gave token ids outside the vocabulary for request 0"),
        (Response([5], [None], FinishReason.STOP), "gave log-probabilities that are not numbers"),
        (Ellipsis, "Careless ended without an answer to 2 of 2 requests, the first of them request 0"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_that_names_it(answer, said):
    """It used to travel on as None, or to be taken for a warned task that is tried again for ever."""
    with pytest.raises(BadAnswer, match=re.escape(said)):
        Careless(answer).generate([Request([5], 3), Request([6], 3)], Sampling())


class CarelessScorer(Scorer):
    limits = SequenceLimits(context=64, vocabulary=300)

    def __init__(self, answers) -> None:
        self._answers = answers

    def _score(self, sequences):
        return self._answers


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([1.0], "gave 1 scores for 2 sequences"),
        ([1.0, None], "gave None for sequence 1"),
        ([1.0, "2"], "gave '2' for sequence 1"),
    ],
)
def test_so_is_a_score(answers, said):
    with pytest.raises(BadAnswer, match=re.escape(said)):
        CarelessScorer(answers).score([[5], [6]])


def rolled_out(models, tmp_path, engine):
    run = make_run(models, tmp_path / "run", f"rollout.engine=tests.support.bad_engines:{engine}")
    assert stage(run, "prepare").code == 0
    return run, stage(run, "rollout", 1)


def test_what_was_finished_before_an_engine_broke_is_kept(models, tmp_path):
    run, broken = rolled_out(models, tmp_path, "breaks_once")
    assert broken.code == 1
    assert "RuntimeError: the engine's worker process is gone" in broken.log
    again = stage(run, "rollout", 1)
    assert again.code == 0, again.log
    assert "continues from 3 of 4 responses" in again.log


def test_an_engine_that_cannot_be_closed_takes_nothing_back(models, tmp_path):
    run, done = rolled_out(models, tmp_path, "cannot_be_closed")
    assert done.code == 0, done.log
    assert "closing the generator failed; what the task has done stands" in done.log
    assert read_record(run.paths, Task(1, Stage.ROLLOUT)).rows == 4


def test_a_function_that_makes_no_engine_is_one_error(models, tmp_path):
    _, done = rolled_out(models, tmp_path, "no_engine")
    assert done.code == 2
    assert (
        "tests.support.bad_engines:no_engine made NoneType, not a stages.engines.base.Generator" in done.log
    )
    assert "Traceback" not in done.log
