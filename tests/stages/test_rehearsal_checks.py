"""What the checks of a rehearsal call a failure, by the faults that they are there to find."""

import contextlib
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.update import Precision
from pipeline.forecast.corrections import Corrected
from pipeline.run.failures import FailureKind
from stages.context import OutOfMemory
from stages.rehearsal import allocation, devices, engines, full, memory, nodes, storage, training
from stages.rehearsal.answers import CheckFailed, CheckInput, NotShown
from stages.rehearsal.models import config_of
from stages.rehearsal.program import answer_of
from stages.rehearsal.training import Case


@pytest.fixture
def given(tmp_path) -> CheckInput:
    return CheckInput(tmp_path, num_mib=1)


# --- devices ---


@pytest.mark.parametrize("shown", [None, "", "-1", "NoDevFiles"])
def test_a_job_that_got_no_device_is_named(given, monkeypatch, shown):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(
        CheckFailed, match=r"2 GPUs were asked for, CUDA_VISIBLE_DEVICES=.*this node shows none"
    ):
        devices.check_expected(replace(given, gpus=2))


def test_a_torch_for_cpus_on_a_node_with_cards_is_named(given, monkeypatch):
    monkeypatch.setattr(devices, "has_card", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(CheckFailed, match="can use none of this machine's") as error:
        devices.check_expected(replace(given, gpus=1))
    assert "install a torch for CUDA" in error.value.advice


def test_gpus_that_are_names_only_are_no_failure(given, monkeypatch):
    monkeypatch.setattr(devices, "has_card", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(NotShown, match="they are names only"):
        devices.check_expected(replace(given, gpus=2))


def test_device_files_tell_that_there_is_a_card(tmp_path):
    assert not devices.has_card(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert devices.has_card(tmp_path)


def test_a_card_that_computes_wrong_numbers_is_named(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda one, other: torch.full((64, 64), 1023.0))
    with pytest.raises(CheckFailed, match=r"a product of ones in torch.float32 is 1023.0, not 1024"):
        allocation.compute()


def test_two_ranks_on_one_device_are_named(given, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    monkeypatch.setattr(devices.ranks, "start_distributed", lambda limit: None)
    monkeypatch.setattr(devices.ranks, "share", lambda mine: [mine, mine])
    with pytest.raises(CheckFailed, match="two ranks have the same device: gpu7/GPU-7, gpu7/GPU-7"):
        devices.own_device.__wrapped__(given)
    monkeypatch.setattr(devices.ranks, "share", lambda mine: [mine, "gpu8/GPU-7"])
    assert (
        devices.own_device.__wrapped__(given).measured == "2 ranks on gpu7/GPU-7, gpu8/GPU-7, named by UUIDs"
    )


def test_a_device_that_is_another_by_another_name_is_named():
    assert devices.forms_of("3,4", "8f1c") == ["3", "GPU-8f1c"]
    assert devices.forms_of("", "8f1c") == ["0", "GPU-8f1c"]
    assert devices.forms_of("GPU-8f1c", "8f1c") == ["GPU-8f1c"]
    assert devices.forms_of("MIG-22", "8f1c") == ["MIG-22"]
    assert devices.judged_names({"3": "8f1c"}, "8f1c").measured == "one device by each of its names: 3"
    with pytest.raises(CheckFailed, match="the device is 8f1c, and a process sees by GPU-8f1c 77aa"):
        devices.judged_names({"3": "8f1c", "GPU-8f1c": "77aa"}, "8f1c")


# --- memory ---


def test_a_formula_that_is_far_off_is_named_and_corrects_nothing():
    near = [memory.Sized(100.0, 110.0), memory.Sized(300.0, 330.0)]
    assert memory.slope_of(near) == pytest.approx(1.1)
    shown = memory.judged("batches", near, (8, 32), {Corrected.UPDATE: 1.1})
    assert shown.numbers == {"correction/CPU/update": 1.1}
    assert "off by -9% and -9%" in shown.measured
    with pytest.raises(CheckFailed, match=r"takes 3\.00 times as much as they say"):
        memory.judged("batches", near, (8, 32), {Corrected.UPDATE: 3.0})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"), None),
        (OutOfMemory("a rank has 2 GiB; change", FailureKind.MEMORY), None),
        (RuntimeError("the kernel failed"), "the error does not say so: the kernel failed"),
        (None, "no error although almost no memory was allowed"),
    ],
)
def test_memory_that_runs_out_in_other_words_is_named(monkeypatch, error, said):
    monkeypatch.setattr(full, "almost_no_memory", contextlib.nullcontext)

    def call() -> None:
        if error is not None:
            raise error

    if said is None:
        full.run_out(call)
    else:
        with pytest.raises(CheckFailed, match=said):
            full.run_out(call)


# --- storage ---


def test_a_file_is_written_and_read_by_another_process_and_from_another_node(given):
    sent = given.folder / storage.SENT
    _, digest = storage.written(sent, 1)
    sent.with_suffix(".digest").write_text(digest)
    shown = storage.storage(given)
    assert {"written_gb_per_s", "read_from_another_node_gb_per_s"} < set(shown.numbers)
    assert sorted(path.name for path in given.folder.iterdir()) == [storage.SENT, f"{storage.SENT}.digest"]


def test_other_bytes_than_another_node_wrote_are_named(given):
    sent = given.folder / storage.SENT
    storage.written(sent, 1)
    sent.with_suffix(".digest").write_text("0" * 32)
    with pytest.raises(CheckFailed, match="from-the-command has other bytes than were written"):
        storage.storage(given)


def test_slow_storage_is_named():
    with pytest.raises(CheckFailed, match=r"written at 0.00 GB/s, read at 1.00 GB/s") as error:
        storage.judged({"written": 0.004, "read": 1.0}, 256)
    assert "fast filesystem" in error.value.advice


def test_a_full_disk_is_named(given, monkeypatch):
    def full(path: Path, num_mib: int) -> tuple[float, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(storage, "written", full)
    answer = answer_of("stages.rehearsal.storage:storage", given)
    assert answer["verdict"] == "problem"
    assert "No space left on device" in answer["measured"]


# --- engines ---


@pytest.mark.parametrize(
    ("nats", "same", "is_repeated", "said"),
    [
        (
            {"1": 1e-5, "0.7": 0.2},
            4,
            True,
            "log-probabilities differ from transformers' in nats: 0.7 2.0e-01",
        ),
        ({"1": float("nan")}, 4, True, "log-probabilities differ from transformers' in nats: 1 nan"),
        ({"1": 1e-5}, 0, True, "seeds have no effect"),
        ({"1": 1e-5}, 4, False, "after requests were thrown away the same seeds give other responses"),
    ],
)
def test_an_engine_with_wrong_numbers_is_named(nats, same, is_repeated, said):
    with pytest.raises(CheckFailed, match=said):
        engines.check_numbers(nats, same, is_repeated)
    engines.check_numbers({"1": 1e-5}, 1, True)


def test_vllm_is_missed_only_where_it_is_asked_for(given, monkeypatch):
    monkeypatch.setattr(engines, "is_installed_vllm", lambda: False)
    with pytest.raises(NotShown, match="no stage asks for it"):
        engines.check_vllm(given)
    with pytest.raises(CheckFailed, match="vLLM is not installed"):
        engines.check_vllm(replace(given, needs_vllm=True))


def test_numbers_of_an_engine_are_compared(given):
    shown = engines.transformers_numbers.__wrapped__(given)
    assert "new weights are taken" in shown.measured
    assert max(shown.numbers[f"nats/{key}"] for key in ("1", "0.7", "reloaded")) < 1e-3


# --- ranks ---


def test_losses_that_are_not_one_rank_s_are_named(given, monkeypatch):
    monkeypatch.setattr(training.ranks, "start_distributed", lambda limit: None)
    monkeypatch.setattr(training, "losses", lambda folder, case: [0.5, 2.0])
    short = replace(given, is_short=True)
    assert training.same_loss.__wrapped__(short).measured == "3 updates by one rank"
    monkeypatch.setattr(training.ranks, "size", lambda: 2)
    assert "2 ranks have one rank's losses" in training.same_loss.__wrapped__(short).measured
    kept = given.folder / "losses-of-one-rank.json"
    alone = json.loads(kept.read_text())
    kept.write_text(json.dumps(alone | {"ZeRO 3 fp32": [0.5, 2.1]}))
    with pytest.raises(CheckFailed, match=r"losses of 2 ranks differ from one rank's: ZeRO 3 fp32 4.8e-02"):
        training.same_loss.__wrapped__(short)


def test_a_slow_network_is_named():
    assert nodes.judged("2 ranks on 2 nodes, nccl, interface ib0", 12.0, 2).numbers["nodes"] == 2
    with pytest.raises(CheckFailed, match=r"interface eth0: 0.00 GB/s") as error:
        nodes.judged("2 ranks on 2 nodes, nccl, interface eth0", 0.001, 2)
    assert "NCCL_SOCKET_IFNAME" in error.value.advice


@pytest.mark.parametrize("is_short", [False, True])
def test_every_way_to_train_is_one_that_a_configuration_may_name(given, is_short):
    from pipeline.config.rules import contradictions

    for case in training.cases(is_short):
        config = config_of(given.folder, *case.words)
        assert [str(one) for one in contradictions(config) if str(one).startswith("update.")] == []
    assert Case(3, Precision.FP32) in training.cases(is_short)
