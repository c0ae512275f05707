"""What the checks of a rehearsal call a failure, by the faults that they are there to find."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.forecast.corrections import Corrected
from pipeline.run.failures import FailureKind
from stages.context import OutOfMemory, UserError
from stages.engines import kept
from stages.engines.base import Scorer, SequenceLimits
from stages.rehearsal import (
    allocation,
    beside,
    copies,
    determinism,
    devices,
    engines,
    full,
    memory,
    network,
    nodes,
    speed,
    storage,
    training,
)
from stages.rehearsal.answers import CheckFailed, CheckInput, NotShown, Shown
from stages.rehearsal.models import config_of
from stages.rehearsal.program import answer_of
from stages.rehearsal.training import Case
from tests.support.tables import LONG


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


# --- speed ---


def test_copies_to_the_host_are_told_by_the_memory_they_go_to(given):
    told = copies.judged(pageable=0.5, locking=0.8, locked=0.05).measured
    said = "to new memory 2.1 GB/s, to memory page-locked for it 1.3 GB/s, once that is locked 21.5 GB/s"
    assert told == said
    assert answer_of("stages.rehearsal.copies:host_copies", given)["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "400 model TFLOP/s, 40% of its peak of 989 (goal 45%)"),
        ("NVIDIA H100 PCIe", "400 model TFLOP/s, 53% of its peak of 756 (goal 45%)"),
        ("Tesla P100", "400 model TFLOP/s; the peak of this device is not known"),
    ],
)
def test_the_speed_of_an_update_is_told_beside_the_cards_peak(card, said):
    assert speed.utilisation("1.5b", 5000.0, 400.0, speed.peak_tflops(card)).measured.endswith(said)


def test_vllm_is_told_beside_its_bare_loop_and_on_a_gpu_beside_the_goal():
    told = [speed.against_bare(5000.0, 0.912, has_gpu).measured for has_gpu in (True, False)]
    assert (
        told[0]
        == f"{told[1]} (goal 0.95)"
        == "vLLM gives 0.91 times the tokens/s of its bare loop (goal 0.95)"
    )


def test_an_update_whose_speed_is_measured_fits_into_the_free_memory():
    assert [speed.load_for(free).size for free in (0.0, 15.0, 16.0, 79.0)] == ["tiny", "tiny", "0.5b", "1.5b"]


def test_model_flops_are_those_of_each_product_of_matrices():
    shape = speed.Shape(layers=1, width=2, inner=3, heads=1, key_value_heads=1, vocabulary=5)
    weights, tokens, response = 4 * 2 * 2 + 3 * 2 * 3, 7, 4
    attention = 2 * 2 * tokens**2
    once = 2 * weights * tokens + 2 * 2 * 5 * response + attention
    assert speed.update_flops(shape, [(3, response)], 1, has_critic=False) == 4 * once


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


@pytest.mark.parametrize(("precision", "far"), [(Precision.BF16, 0.2), (Precision.FP16, 0.02)])
def test_an_engine_with_wrong_numbers_in_half_precision_is_named(precision, far):
    shown = engines.judged_half(precision, {"1": 0.003, "0.7": 0.004})
    assert shown.numbers[f"nats/{precision}/0.7"] == 0.004
    with pytest.raises(CheckFailed, match=rf"in {precision} differ from .* on average: 0.7 2.0e-0"):
        engines.judged_half(precision, {"1": 0.003, "0.7": far})
    with pytest.raises(CheckFailed, match="1 nan"):
        engines.judged_half(precision, {"1": float("nan"), "0.7": 0.004})


@pytest.mark.parametrize(("card", "precision"), [((9, 0), Precision.BF16), ((7, 5), Precision.FP16)])
def test_vllm_is_tried_in_the_half_precision_that_its_users_have(given, monkeypatch, card, precision):
    monkeypatch.setattr(engines, "check_vllm", lambda given: None)
    monkeypatch.setattr(engines, "numbers_of", lambda given, name: Shown("exact", {"nats/1": 1e-5}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    monkeypatch.setattr(engines, "half_numbers", lambda folder, asked: Shown(f"in {asked}", {"nats/half": 1}))
    shown = engines.vllm_numbers.__wrapped__(given)
    assert shown.measured == f"exact; in {precision}"
    assert shown.numbers == {"nats/1": 1e-5, "nats/half": 1}


def test_an_engine_is_held_against_transformers_in_its_own_precision(given, monkeypatch):
    """With transformers' engine in the place of vLLM, which takes a minute to start."""
    made = engines.make_generator
    monkeypatch.setattr(engines, "_PROMPTS", 4)
    monkeypatch.setattr(engines, "engine_config", partial(in_transformers, engines.engine_config))
    shown = engines.half_numbers(given.folder, Precision.BF16)
    assert 0 < shown.numbers["nats/bf16/0.7"] < 0.1

    def other(config: Config, model: str) -> object:
        return made(config, str(engines.policy(given.folder, seed=1)))

    monkeypatch.setattr(engines, "make_generator", other)
    with pytest.raises(CheckFailed, match="in bf16 differ from transformers'"):
        engines.half_numbers(given.folder, Precision.BF16)


def in_transformers(
    config_of_engine: Callable[..., Config], folder: Path, name: Engine, *words: str
) -> Config:
    assert name is Engine.VLLM
    return config_of_engine(folder, Engine.TRANSFORMERS, *words)


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


class Scores(Scorer):
    """A scorer whose scores grow by so much with each call."""

    limits = SequenceLimits(64, 260)

    def __init__(self, by: float = 0.0) -> None:
        self._by, self._calls = by, 0

    def _score(self, sequences):
        self._calls += 1
        return [self._by * self._calls for _ in sequences]

    def reset(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("by", "share", "said"),
    [
        (0.0, None, None),
        (0.0, "0.9", "side by side with another engine the reference, scorer does not stay"),
        (0.5, None, "they compute other numbers each time: off by 5.0e-01"),
    ],
)
def test_engines_that_do_not_stay_side_by_side_are_named(given, monkeypatch, by, share, said):
    monkeypatch.setattr(beside, "check_vllm", lambda given: None)
    monkeypatch.setattr(beside, "make_scorer", lambda config, name, path: Scores(by))
    monkeypatch.setattr(kept, "has_gpu", lambda: True)
    if share:
        words = (f"reward.vllm.gpu_memory_utilization={share}",)
        monkeypatch.setattr(beside, "config_of", lambda *given: config_of(*given, *words))
    if said is None:
        assert "stay in one process, off by 0.0e+00" in beside.side_by_side.__wrapped__(given).measured
        assert kept._kept == {}
    else:
        with pytest.raises(CheckFailed, match=said):
            beside.side_by_side.__wrapped__(given)


def test_vllm_is_warned_where_it_has_a_process_of_its_own_as_on_a_gpu(given, monkeypatch):
    def make(config, directory):
        assert config.rollout.vllm.own_process
        raise NotShown("made")

    monkeypatch.setattr(engines, "check_vllm", lambda given: None)
    monkeypatch.setattr(engines, "listen", lambda can_save: None)
    monkeypatch.setattr(engines, "make_generator", make)
    with pytest.raises(NotShown, match="made"):
        engines.warned_vllm.__wrapped__(given)


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


NCCL_WITH_INFINIBAND = """
gpu7:2101:2101 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
gpu7:2101:2130 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.7<0>
gpu7:2101:2130 [0] NCCL INFO Initialized NET plugin IB
gpu7:2101:2130 [0] NCCL INFO Using network IB
gpu7:2101:2130 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/3/GDRDMA
gpu7:2101:2130 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/2(1)/GDRDMA
gpu7:2101:2130 [0] NCCL INFO Channel 02/0 : 0[0] -> 2[1] via P2P/CUMEM
"""
NCCL_WITH_SOCKETS = """
gpu7:2101:2130 [0] NCCL INFO NET/IB : No device found.
gpu7:2101:2130 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0> [1]ib0:192.168.0.7<0>
gpu7:2101:2130 [0] NCCL INFO Using network Socket
gpu7:2101:2130 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct
"""
NCCL_WITH_A_PLUGIN = """
gpu7:2101:2130 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 4 nics)
gpu7:2101:2130 [0] NCCL INFO Using network AWS Libfabric
gpu7:2101:2130 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (
            NCCL_WITH_INFINIBAND,
            "network IB (mlx5_0:1/IB, mlx5_1:1/RoCE), data by NET/IB/GDRDMA, P2P/CUMEM",
        ),
        (NCCL_WITH_SOCKETS, "network Socket (eth0, ib0), data by SHM/direct"),
        (NCCL_WITH_A_PLUGIN, "network AWS Libfabric, data by NET/AWS Libfabric/GDRDMA"),
        ("gpu7:2101:2130 [0] NCCL INFO cudaDriverVersion 13000", ""),
    ],
)
def test_what_nccl_says_of_its_network_is_read(said, chosen):
    assert network.chosen_by_nccl(said) == chosen


def test_nccl_is_asked_before_ranks_meet(given, monkeypatch):
    class Met(Exception):
        pass

    def meet(limit: float) -> None:
        path = Path(os.environ["NCCL_DEBUG_FILE"])
        assert path.parent == given.folder
        assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
        raise Met(path.name)

    monkeypatch.setattr(os, "environ", dict(os.environ, RANK="1"))
    monkeypatch.setattr(nodes.ranks, "start_distributed", meet)
    with pytest.raises(Met, match=r"nccl-1\.log"):
        nodes.all_reduce.__wrapped__(given)


def test_the_interface_that_gloo_takes_by_itself_is_named(monkeypatch):
    assert network.chosen_by_gloo({"GLOO_SOCKET_IFNAME": "ib0"}) == "ib0"
    addresses = {"eth7": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: addresses)
    assert network.interface_of("10.0.0.7") == "eth7 (by this host's name)"
    assert network.interface_of("127.0.1.1") == "lo (by this host's name)"
    assert network.own_address("no-such-host.invalid") == "127.0.0.1"
    assert network.own_address("localhost") in ("127.0.0.1", "::1")


# --- speed ---


def test_deterministic_kernels_that_cost_much_are_advised_against():
    dear = determinism.judged({True: 1.2, False: 1.0}, is_gpu=True)
    assert dear.numbers["deterministic_ratio"] == pytest.approx(1.2)
    assert "an update takes 1.200 times as long with deterministic kernels" in dear.measured
    assert "scheduler.update.environment.CUBLAS_WORKSPACE_CONFIG=''" in dear.advice
    assert determinism.judged({True: 1.04, False: 1.0}, is_gpu=True).advice == ""
    on_cpus = determinism.judged({True: 9.0, False: 1.0}, is_gpu=False)
    assert on_cpus.advice == ""
    assert on_cpus.numbers == {}


def test_advice_without_a_failure_is_passed_on(given):
    answer = answer_of("tests.support.rehearsed:advises", given)
    assert (answer["verdict"], answer["advice"]) == ("ok", "take the faster one")


@LONG
def test_updates_are_timed_by_processes_with_and_without_deterministic_kernels(given, monkeypatch):
    for is_deterministic in (True, False):
        assert determinism.measured(given.folder, is_deterministic) > 0
    monkeypatch.setenv("RANK", "no number")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="updates without deterministic kernels: UserError: of several"):
        determinism.measured(given.folder, False)


def test_a_slow_network_is_named():
    assert nodes.judged("2 ranks on 2 nodes, nccl, interface ib0", 12.0, 2).numbers["nodes"] == 2
    with pytest.raises(CheckFailed, match=r"interface eth0: 0.00 GB/s") as error:
        nodes.judged("2 ranks on 2 nodes, nccl, interface eth0", 0.001, 2)
    assert "NCCL_SOCKET_IFNAME" in error.value.advice


@pytest.mark.parametrize("is_short", [False, True])
def test_every_way_to_train_is_one_that_a_configuration_may_name(given, is_short):
    from pipeline.config.rules import contradictions

    for case in training.cases(is_short, Precision.BF16):
        config = config_of(given.folder, *case.words)
        assert [str(one) for one in contradictions(config) if str(one).startswith("update.")] == []
    assert Case(3, Precision.FP32) in training.cases(is_short, Precision.BF16)


@pytest.fixture
def turing(monkeypatch):
    """A T4, which has no bf16 and for which there is no flash attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))


@pytest.mark.parametrize("is_short", [False, True])
def test_a_card_without_bf16_trains_in_fp16(given, monkeypatch, turing, is_short):
    tried = []
    monkeypatch.setattr(training.ranks, "start_distributed", lambda limit: None)
    monkeypatch.setattr(training, "losses", lambda folder, case: tried.append(case) or [0.5, 2.0])
    given = replace(given, is_short=is_short)
    training.same_loss.__wrapped__(given)
    assert {case.precision for case in tried} == {Precision.FP32, Precision.FP16}
    monkeypatch.setattr(training.ranks, "size", lambda: 2)
    assert "ZeRO 3 fp16" in str(training.same_loss.__wrapped__(given).numbers)


def test_flash_attention_is_not_called_missing_where_the_card_has_no_code_for_it(given, monkeypatch, turing):
    def load(folder: Path, precision: Precision, trust: bool, attention: str) -> None:
        if precision is Precision.BF16:
            raise UserError("some card: the GPUs here have compute capability 7.5, and bf16 needs 8.0")

    monkeypatch.setattr(training, "policy", lambda folder: folder)
    monkeypatch.setattr(training, "load_causal_lm", load)
    monkeypatch.setattr(training, "check_packing", lambda model, rows, device: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    said = training.rows.__wrapped__(given).measured
    assert "flash_attention_2 was not tried: it needs compute capability 8.0" in said
    assert "sdpa keeps rows apart" in said


def test_attention_that_is_not_installed_or_mixes_rows_is_named(given, monkeypatch):
    def load(folder: Path, precision: Precision, trust: bool, attention: str) -> str:
        if attention == "eager":
            cause = ImportError("the package is not installed. Please refer to its page")
            raise UserError("update.attention=eager: it cannot be loaded; leave it out") from cause
        return attention

    def check(model: str, rows: object, device: object) -> None:
        if model == "flex_attention":
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in CXX. Set it")
        if model == "sdpa":
            raise UserError("log-probabilities are off; set update.remove_padding=false")

    monkeypatch.setattr(training, "load_causal_lm", load)
    monkeypatch.setattr(training, "check_packing", check)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    said = training.rows.__wrapped__(given).measured
    assert "eager was not tried: the package is not installed" in said.split("; ")
    assert "sdpa does not keep rows apart" in said.split("; ")
    no_compiler = "RuntimeError: InvalidCxxCompiler: No working C++ compiler found in CXX"
    assert f"flex_attention cannot be compiled here: {no_compiler}" in said.split("; ")
    assert "flash_attention_2 was not tried: no GPU" in said.split("; ")
