"""The trainer: any ZeRO stage is plain AdamW with clipping, and going on from disk is going on.

DeepSpeed keeps its process group for as long as a process lives, so trainers live in another one: a fork of
the server that has imported everything.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.update import Precision, Schedule, UpdateConfig
from pipeline.run.commits import hash_tree
from pipeline.run.paths import RunPaths
from stages.context import NumericalError, UserError
from stages.models.loading import DTYPES, load_causal_lm
from stages.ppo.critics import load_critic
from stages.ppo.math.rates import learning_rate
from stages.ppo.trainer import StepOutcome, Trainer
from stages.ranks import start_distributed
from tests.support import ROOT, tiny
from tests.support.processes import in_process_of_its_own
from tests.support.tables import LONG
from tests.support.trainers import (
    RATE,
    TOTAL,
    accumulate,
    advance,
    into_file,
    largest_difference,
    micro_batches,
    precision_of,
    same_bytes,
    save_state,
    seen_in,
    settings,
    share_of_loss,
    state_of,
    weights,
)

OFFLOADED = ["fp32-zero1-offload", "fp16-zero2-offload", "bf16-zero3-offload"]
CASES = ["fp32-zero0", *(f"{p}-zero{stage}" for p in ("fp32", "bf16") for stage in (1, 2, 3)), "fp16-zero2"]
COMPILER = os.environ.get("CXX", "c++")
if shutil.which(COMPILER):  # else see what is said without
    CASES += OFFLOADED


def new_trainer(directory: Path, case: str) -> Trainer:
    model = load_causal_lm(directory, precision_of(case), trust_remote_code=False)
    return Trainer("policy", model, RATE, settings(case))


def accumulate_spoiled(trainer: Trainer, step: int, spoil: float) -> None:
    """A gradient that is not finite although the loss is."""
    parameter = next(p for name, p in trainer.model.named_parameters() if name.endswith("norm.weight"))
    hook = parameter.register_hook(lambda gradient: gradient * spoil)
    accumulate(trainer, step)
    hook.remove()


def skip(trainer: Trainer, spoil: float) -> dict:
    """A step that cannot be taken. The loss scale is put back: it may change the rounding of what follows."""
    before, scaler = state_of(trainer), trainer._scaler_state()
    accumulate_spoiled(trainer, 9, spoil)
    step = trainer.step(trainer.steps, TOTAL)
    after, scale = state_of(trainer), trainer._loss_scale
    trainer._set_scaler_state(scaler)
    return {
        "step": step,
        "steps": trainer.steps,
        "is_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "scales": (scaler.get("cur_scale", 1.0), scale),
    }


def skip_at_lowest_scale(trainer: Trainer) -> StepOutcome:
    scaler = trainer._scaler_state()
    trainer._set_scaler_state({"cur_scale": 1.0})
    accumulate_spoiled(trainer, 9, math.nan)
    step = trainer.step(trainer.steps, TOTAL)
    trainer._set_scaler_state(scaler)
    return step


def discard_two(trainer: Trainer) -> None:
    """A batch that nobody wants, and one that nobody can use."""
    accumulate(trainer, 9)
    trainer.discard()
    accumulate_spoiled(trainer, 9, math.nan)
    trainer.discard()


def build_quickly(folder: Path) -> None:
    """DeepSpeed builds its AdamW for CPUs once per session, and in seconds: not optimised, and with the
    headers that it needs instead of all that torch has."""
    headers = ROOT / "tests/support/headers"
    script = folder / f"compiler-{os.getpid()}"
    script.write_text(f'#!/bin/sh\nexec {COMPILER} -I{headers} "$@" -O0 -g0\n')
    script.chmod(0o755)
    compiler = script.rename(folder / "compiler")  # of the same name everywhere, or it is built again
    os.environ |= {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}


@contextlib.contextmanager
def noted_sums() -> Iterator[set[torch.dtype]]:
    """Number formats of what ranks add up, but for single numbers."""
    from deepspeed.comm import comm

    formats: set[torch.dtype] = set()

    def noting(call: Callable) -> Callable:
        def noted(*args: object, **given: object) -> object:
            tensor = [*args, *given.values()][0]
            if tensor.is_floating_point() and tensor.numel() > 1:
                formats.add(tensor.dtype)
            return call(*args, **given)

        return noted

    names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
    for name in names:
        setattr(comm.cdb, name, noting(getattr(comm.cdb, name)))
    try:
        yield formats
    finally:
        for name in names:
            delattr(comm.cdb, name)


def life_of_a_trainer(case: str, policy: Path, folder: Path) -> dict:
    """Three steps, a checkpoint, two more; the same two from the checkpoint; then one has bad luck."""
    torch.set_num_threads(1)
    build_quickly(folder.parent)
    start_distributed()
    trainer = new_trainer(policy, case)
    start = weights(trainer)
    with noted_sums() as summed:
        steps = advance(trainer, range(3))
    after_three = weights(trainer)
    trainer.save_model(folder / "model")
    save_state(trainer, folder / "state")
    advance(trainer, range(3, 5))

    again = new_trainer(folder / "model", case)
    again.load_state(folder / "state")
    restored = weights(again)
    advance(again, range(3, 5))
    for name, one in (("straight", trainer), ("resumed", again)):
        one.save_model(folder / name)
        save_state(one, folder / f"{name}-state")
    skips = [skip(trainer, spoil) for spoil in (math.nan, math.inf)]
    at_lowest_scale = skip_at_lowest_scale(trainer) if precision_of(case) is Precision.FP16 else None
    discard_two(trainer)
    seen = [advance(one, range(5, 7)) for one in (trainer, again)]
    for name, one in (("unlucky", trainer), ("lucky", again)):
        save_state(one, folder / f"{name}-state")
    return {
        "start": start,
        "steps": steps,
        "summed": summed,
        "after_three": after_three,
        "restored": restored,
        "skips": skips,
        "at_lowest_scale": at_lowest_scale,
        "unlucky": seen[0],
        "lucky": seen[1],
    }


def life_with_tied_embeddings(case: str, policy: Path, folder: Path) -> dict:
    torch.set_num_threads(1)
    start_distributed()
    trainer = new_trainer(policy, case)
    advance(trainer, range(2))
    trainer.save_model(folder / "model")
    save_state(trainer, folder / "state")
    again = new_trainer(folder / "model", case)
    again.load_state(folder / "state")
    advance(trainer, range(2, 3))
    advance(again, range(2, 3))
    return {"straight": weights(trainer), "resumed": weights(again)}


def save_poisoned(case: str, policy: Path, folder: Path) -> str:
    torch.set_num_threads(1)
    start_distributed()
    model = load_causal_lm(policy, precision_of(case), trust_remote_code=False)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = math.nan
    try:
        Trainer("policy", model, RATE, settings(case)).save_model(folder)
    except NumericalError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def lives(processes, models, tmp_path_factory) -> dict[str, tuple[Path, Future]]:
    """All cases, started at once; each test waits for its own."""
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    return {
        case: (folder, processes.submit(into_file, life_of_a_trainer, case, models / "policy", folder))
        for case, folder in folders.items()
    }


@pytest.fixture(scope="module")
def by_hand(models) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after three steps of a plain torch loop, and its gradient norms."""
    torch.set_num_threads(1)
    model = load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)
    config = settings("fp32-zero0")
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, config.betas, config.epsilon, weight_decay=config.weight_decay
    )
    norms = []
    for step in range(3):
        batches = micro_batches(step)
        tokens = sum(ids[:, 1:].numel() for ids in batches)
        for ids in batches:
            share_of_loss(model, ids, tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)))
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / TOTAL)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("fp32")])
def test_every_zero_stage_is_plain_adamw_with_clipping(lives, by_hand, case):
    seen = seen_in(lives[case][1])
    expected, norms = by_hand
    assert largest_difference(seen["after_three"], expected) < 1e-6
    assert [step.norm for step in seen["steps"]] == pytest.approx(norms, rel=1e-5)
    assert [step.rate for step in seen["steps"]] == pytest.approx([1e-2, 8.75e-3, 7.5e-3])
    assert all(step.is_taken and not step.is_overflow for step in seen["steps"])
    assert min(norms) > 0.5, "nothing was clipped, so clipping was not tested"


@pytest.mark.parametrize("case", CASES)
def test_training_moves_the_weights_and_making_a_trainer_does_not(lives, models, case):
    seen = seen_in(lives[case][1])
    precision = precision_of(case)
    model = load_causal_lm(models / "policy", precision, trust_remote_code=False)
    assert largest_difference(seen["start"], dict(model.named_parameters())) == 0
    assert largest_difference(seen["start"], seen["after_three"]) > 1e-3


@pytest.mark.parametrize("case", [case for case in CASES if "zero0" not in case])
def test_ranks_add_their_gradients_up_in_full_precision(lives, case):
    """The sum over many ranks of numbers in half precision loses what each of them has to say."""
    assert seen_in(lives[case][1])["summed"] == {torch.float32}


@pytest.mark.parametrize("case", CASES)
def test_going_on_from_disk_is_bit_exact(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    assert largest_difference(seen["after_three"], seen["restored"]) == 0
    assert same_bytes(folder / "straight", folder / "resumed")
    assert same_bytes(folder / "straight-state", folder / "resumed-state")


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_loads_with_from_pretrained_and_equals(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    dtype = DTYPES[precision_of(case)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == dtype
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, seen["after_three"][parameter_name].to(dtype)), parameter_name


@pytest.mark.parametrize("case", CASES)
def test_a_step_whose_gradient_is_not_finite_is_skipped_and_changes_nothing(lives, case):
    for skipped in seen_in(lives[case][1])["skips"]:
        step, (before, after) = skipped["step"], skipped["scales"]
        assert not math.isfinite(step.norm)
        assert not step.is_taken
        assert step.is_overflow == case.startswith("fp16")
        assert after == (before / 2 if step.is_overflow else before)
        assert skipped["is_unchanged"]
        assert skipped["steps"] == 5


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("fp16")])
def test_at_the_lowest_loss_scale_a_skipped_step_is_no_overflow(lives, case):
    step = seen_in(lives[case][1])["at_lowest_scale"]
    assert not step.is_taken
    assert not step.is_overflow


@pytest.mark.parametrize("case", CASES)
def test_after_skipped_and_discarded_gradients_training_goes_on_as_if_they_had_never_been(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    assert seen["unlucky"] == seen["lucky"]
    assert same_bytes(folder / "unlucky-state", folder / "lucky-state")


@pytest.mark.parametrize("case", CASES)
def test_optimizer_state_of_half_precision_holds_fp32_weights(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    state = load_file(folder / "state" / "policy-rank-00000-000.safetensors")
    kinds = {key.split("/")[0] for key in state}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"weight"} if "16" in case else set())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    if "16" in case:
        found = {key.removeprefix("weight/"): t for key, t in state.items() if key.startswith("weight/")}
        expected = {name: weight.flatten() for name, weight in seen["after_three"].items()}
        assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("case", ["fp32-zero0", "bf16-zero2", "fp32-zero3"])
def test_tied_embeddings_stay_tied(processes, tmp_path, case):
    tokenizer = tiny.byte_tokenizer(("<pad>", "<eos>"))
    torch.manual_seed(3)
    LlamaForCausalLM(tiny.llama_config(tokenizer, tie_word_embeddings=True)).save_pretrained(
        tmp_path / "tied"
    )
    life = processes.submit(into_file, life_with_tied_embeddings, case, tmp_path / "tied", tmp_path)
    seen = seen_in(life)
    assert largest_difference(seen["straight"], seen["resumed"]) == 0
    assert "lm_head.weight" not in seen["straight"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("case", ["fp32-zero0", "fp32-zero3", "bf16-zero1"])
def test_a_poisoned_weight_is_never_written(processes, models, tmp_path, case):
    folder = tmp_path / "model"
    message = processes.submit(save_poisoned, case, models / "policy", folder).result()
    assert "layers.1.mlp.up_proj.weight" in message
    assert not folder.exists()


def test_committed_files_are_readable_as_the_umask_says(lives, tmp_path):
    folder, life = lives["fp32-zero0"]
    life.result()
    state = folder / "state" / "policy-rank-00000-000.safetensors"
    hash_tree(RunPaths(folder), state.parent)
    probe = tmp_path / "probe"
    probe.touch()
    assert stat.S_IMODE(state.stat().st_mode) == stat.S_IMODE(probe.stat().st_mode)


@pytest.mark.parametrize("setting", ["precision=bf16", "precision=fp16", "offload_optimizer=true"])
def test_what_needs_zero_is_refused_without(models, tmp_path, setting):
    given = tiny.overrides(models, tmp_path / "run", f"update.{setting}", "update.zero_stage=0")
    with pytest.raises(ConfigError, match=rf"(?i)update\.{setting}.*zero_stage.*1, 2 or 3"):
        resolve(compose(given))
    resolve(compose([*given[:-1], "update.zero_stage=1"]))


def test_learning_rate_schedules():
    def rates(**given: object) -> list[float]:
        return [learning_rate(1.0, step, 6, UpdateConfig(**given)) for step in range(6)]

    assert rates() == [1.0] * 6
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule=Schedule.LINEAR) == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(schedule=Schedule.LINEAR, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    cosine = [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert rates(schedule=Schedule.COSINE) == pytest.approx(cosine, abs=1e-6)
    # A warm-up longer than the run never ends, and no rate is ever negative or zero.
    assert rates(schedule=Schedule.COSINE, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert all(rate > 0 for schedule in Schedule for rate in rates(schedule=schedule, warmup_steps=5))


def test_the_state_file_has_its_own_counters(lives):
    for case in ("fp32-zero0", "fp16-zero2"):
        folder, life = lives[case]
        life.result()
        counters = json.loads((folder / "state" / "counters.json").read_text())["policy"]
        scaler = {"cur_scale": 2**16, "cur_iter": 3, "last_overflow_iter": -1}
        assert counters == {"steps": 3} | (scaler if case.startswith("fp16") else {})


def norms_of_many_micro_batches(case: str, policy: Path, folder: Path) -> dict[int, list[float]]:
    """By ZeRO stage, gradient norms of the same batch in 8 and in 512 micro-batches."""
    torch.set_num_threads(1)
    start_distributed()
    norms: dict[int, list[float]] = {1: [], 2: []}
    ids = micro_batches(0)[0][:1].repeat(512, 1)  # all pull the same way: the sum outgrows what is added
    for stage, pieces in itertools.product(norms, (8, 512)):
        trainer = new_trainer(policy, f"{case}-zero{stage}")
        for number, piece in enumerate(ids.chunk(pieces)):
            trainer.backward(share_of_loss(trainer.engine, piece, ids.numel()), number == pieces - 1)
        norms[stage].append(trainer.step(0, 10).norm)
    return norms


def test_a_bf16_gradient_does_not_depend_on_how_many_micro_batches_it_is_the_sum_of(processes, tmp_path):
    torch.manual_seed(0)
    config = tiny.llama_config(tiny.byte_tokenizer(("<pad>", "<eos>")))
    config.num_hidden_layers = 1
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    norms = processes.submit(norms_of_many_micro_batches, "bf16", tmp_path / "policy", tmp_path).result()
    for few, many in norms.values():
        assert many == pytest.approx(few, rel=0.02)


def two_steps_with_and_without_checkpointing(case: str, policy: Path, folder: Path) -> dict:
    torch.set_num_threads(1)
    start_distributed()
    seen = {}
    for name in (case, f"{case}-checkpointing"):
        trainer, forwards = new_trainer(policy, name), []
        trainer.model.model.layers[0].self_attn.register_forward_hook(lambda *_, f=forwards: f.append(1))
        steps = advance(trainer, range(2))
        state = state_of(trainer)
        trainer.save_model(folder / name)
        seen[name] = (len(forwards), steps, state, (folder / name / "config.json").read_text())
    return seen


@pytest.mark.parametrize("case", ["fp32-zero0", "bf16-zero1", "fp16-zero2", "fp32-zero3"])
def test_activation_checkpointing_computes_twice_and_changes_nothing(processes, models, tmp_path, case):
    life = processes.submit(
        into_file, two_steps_with_and_without_checkpointing, case, models / "policy", tmp_path
    )
    (once, *one), (twice, *other) = seen_in(life).values()
    assert twice == 2 * once
    assert one[0] == other[0]
    assert largest_difference(one[1], other[1]) == 0
    assert one[2] == other[2]


def offload_without_a_compiler(case: str, policy: Path, folder: Path) -> None:
    start_distributed()
    os.environ |= {"PATH": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    os.environ.pop("CXX", None)
    with pytest.raises(UserError) as error:
        new_trainer(policy, case)
    (folder / "error").write_text(str(error.value))


def test_without_a_compiler_offload_says_what_is_missing(models, tmp_path):
    """In a process that has not loaded what another built."""
    given = ("fp32-zero1-offload", models / "policy", tmp_path)
    assert in_process_of_its_own(offload_without_a_compiler, *given) == 0
    said = (tmp_path / "error").read_text()
    assert "update.offload_optimizer=true needs" in said
    assert "compiler" in said


def offload_after_a_killed_build(case: str, policy: Path, folder: Path) -> None:
    build_quickly(folder.parent)
    start_distributed()
    new_trainer(policy, case)
    (lock,) = [path / "lock" for path in (folder.parent / "extensions").rglob("cpu_adam")]
    lock.touch()
    os.utime(lock, (time.time() - 1000,) * 2)
    new_trainer(policy, case)
    assert not lock.exists()


@LONG
def test_a_process_that_was_killed_as_it_compiled_keeps_no_other_from_it(models, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    assert (
        in_process_of_its_own(offload_after_a_killed_build, "fp32-zero1-offload", models / "policy", place)
        == 0
    )


def test_attention_is_the_one_that_was_asked_for(models, tmp_path):
    directory, precision = models / "policy", Precision.FP32
    for attention in ("eager", "sdpa"):
        for model in (
            load_causal_lm(directory, precision, False, attention=attention),
            load_critic(directory, precision, False, attention=attention),
        ):
            assert model.config._attn_implementation == attention
            model.save_pretrained(tmp_path / attention / type(model).__name__)
    one, other = (sorted((tmp_path / a).glob("*/config.json")) for a in ("eager", "sdpa"))
    assert [file.read_text() for file in one] == [file.read_text() for file in other]


@pytest.mark.parametrize("attention", ["nonsense", "flash_attention_2"])
def test_attention_that_cannot_be_had_is_named(models, attention):
    for load in (load_causal_lm, load_critic):
        with pytest.raises(UserError, match=rf"update\.attention={attention}: .*policy cannot be loaded"):
            load(models / "policy", Precision.FP32, False, attention=attention)
