"""Several ranks do what one does, agree on every failure, and never wait for each other without a limit.

Ranks are forks that run the real command, told apart by the environment as under srun.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import socket
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from pipeline.config.update import Precision, UpdateConfig
from pipeline.run.commits import Record, read_record
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, Task
from stages import ranks
from stages.context import NumericalError, UserError
from stages.models import devices
from stages.models.devices import DevicePlace, shared_device
from stages.models.loading import load_causal_lm
from stages.ppo.state import model_files
from stages.ppo.state.saved_state import SavedState
from stages.ppo.trainer import Trainer
from stages.ppo.zero import engine_settings
from stages.ranks import Meeting, RankPlace, gpu_index
from stages.workers.start import Following, Leading, meet
from tests.support import processes
from tests.support.families import make_mixture
from tests.support.processes import make_run
from tests.support.ranks import (
    TIMING,
    assert_close,
    ended,
    respond_and_score,
    start_ranks,
    update_stage,
    updated,
)
from tests.support.scored import commit_scored
from tests.support.tables import sample
from tests.support.trainers import advance, same_bytes, save_state, state_of, whole_state

TRIAL = pytest.mark.trial(1 / 2)
COMMON = ("update.epsilon=1e-3",)
"""The smaller AdamW's epsilon, the more it makes of the rounding of gradients that are almost zero."""
KINDS = {
    "gae": ["update.tokens_per_micro_batch=64"],
    "grpo": [
        "algorithm=grpo",
        "rollout.samples_per_prompt=3",
        "data.prompts_per_iteration=4",
        "update.tokens_per_micro_batch=100",
    ],
}
CASES = [("gae", 3), ("grpo", 2)]
"""Of the command; tests/stages/test_invariance.py has all ZeRO stages, by one rank and by two."""
OF_GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=2", "data.prompts_per_iteration=4")
STEPPED = "reward.components.rm={kind: rule, function: 'rules:turns', steps: turns}"
PARTS = {
    "refill": (
        *("algorithm=grpo", "rollout.samples_per_prompt=2", "data.prompts_per_iteration=2"),
        *("rollout.oversample=2", "algorithm.shaping.filter_groups=true", "algorithm.correction.level=token"),
        *("reward.components={}", STEPPED, "reward.teachers.teacher.path={policy}"),
    ),
    "reference": ("algorithm.kl.reference_in=update", "algorithm.kl.sync_every=1"),
    "average": (
        *OF_GROUPS,
        *("algorithm.kl.placement=loss", "algorithm.kl.reference_in=update"),
        *("algorithm.kl.sync_every=1", "algorithm.kl.sync_weight=0.25"),
    ),
    "teacher": (*OF_GROUPS, "reward.teachers.teacher.path={policy}"),
    "teacher in the loss": (
        *("reward.teachers.teacher.path={policy}", "algorithm.distillation.placement=loss"),
        *("algorithm.critic_warmup=1", "iterations=3"),
    ),
    "likeliest": (
        *("algorithm=grpo", "rollout.samples_per_prompt=2", "data.prompts_per_iteration=2"),
        *("rollout.oversample=2", "algorithm.shaping.filter_groups=true", "algorithm.correction.level=token"),
        *("reward.teachers.teacher.path={policy}", "algorithm.distillation={placement: loss, top_k: 3}"),
    ),
    "routers": (
        *(*OF_GROUPS, "algorithm.router_aux_loss_coef=0.1", "model.context_length=64"),
        *("update.tokens_per_micro_batch=1", "update.minibatches=8"),
    ),
}
"""Two iterations of each. Refills have teachers and rewards of steps too, also of what waits; the critic of
a teacher in the loss learns alone first; a step of the mixture is of one row, and one rank has none."""
PLACES = tuple(itertools.product(PARTS, (1, 2, 3)))


# runs


@pytest.fixture(scope="module")
def new_run(models, tmp_path_factory) -> Callable[..., Run]:
    """Make a run with the given settings, and all that another run has committed so far."""

    def call(kind: str, *settings: str, like: Run | None = None) -> Run:
        given = [*COMMON, *KINDS[kind], *settings]
        run = make_run(models, tmp_path_factory.mktemp(kind) / "run", *given)
        for part in ("data", "iterations", "policy", "state"):
            if like and (like.paths.root / part).exists():
                shutil.copytree(
                    like.paths.root / part, run.paths.root / part, symlinks=True, dirs_exist_ok=True
                )
        return run

    return call


@pytest.fixture(scope="module")
def scored(new_run) -> Callable[..., Run]:
    """Fresh runs that want their first update; what comes before it is computed once and copied."""

    @functools.cache
    def original(kind: str) -> Run:
        run = new_run(kind)
        assert processes.stage(run, "prepare").code == 0
        return respond_and_score(run, 1)

    def call(kind: str, zero_stage: int, precision: str = "fp32") -> Run:
        settings = (f"update.zero_stage={zero_stage}", f"update.precision={precision}")
        return new_run(kind, *settings, like=original(kind))

    return call


@pytest.fixture(scope="module")
def first_update(scored) -> Callable[..., tuple[Run, Record]]:
    """A run's first update, of each kind once."""

    @functools.cache
    def call(kind: str, zero_stage: int, size: int, precision: str = "fp32") -> tuple[Run, Record]:
        run = scored(kind, zero_stage, precision)
        return run, updated(run, size)

    return call


@pytest.mark.parametrize(("kind", "zero_stage"), CASES)
def test_two_ranks_learn_what_one_learns(first_update, kind, zero_stage):
    run, record = first_update(kind, zero_stage, 2)
    assert record.metrics["policy/ratio_error_first"] == 0
    assert record.metrics["policy/ratio"] != 1
    assert_close(run, record, *first_update(kind, 0, 1))


@TRIAL
def test_three_ranks_of_which_one_has_nothing_to_do_in_some_passes(scored, first_update):
    run = scored("grpo", 2)
    assert_close(run, updated(run, 3), *first_update("grpo", 0, 1))


@TRIAL
@pytest.mark.parametrize(("part", "zero_stage"), sample(PLACES, 1 / len(PLACES)))
def test_two_ranks_learn_what_one_learns_with_any_part(models, tmp_path, part, zero_stage):
    inputs = make_mixture(models, tmp_path / "mixture", "qwen3_moe") if part == "routers" else models
    words = [word.replace("{policy}", str(models / "policy")) for word in PARTS[part]]
    one, two = (
        commit_scored(make_run(inputs, tmp_path / f"{size}", f"update.zero_stage={stage}", *COMMON, *words))
        for size, stage in ((1, 0), (2, zero_stage))
    )
    for iteration in (1, 2):
        expected, found = updated(one, 1, iteration), updated(two, 2, iteration)
        assert found.metrics.get("policy/ratio_error_first", 0) == 0
        assert_close(two, found, one, expected)
    if part in ("refill", "likeliest"):
        assert [found.metrics[f"refill/{name}"] for name in ("taken", "carried", "flat")] == [2, 1, 3]


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_bf16_by_two_ranks_is_fp32_by_one_but_for_its_rounding(first_update, zero_stage):
    """Not bf16 by one: rows share micro-batches otherwise there, and each rounds in its own way, by 2 %."""
    _, one = first_update("gae", 2, 1)
    _, two = first_update("gae", zero_stage, 2, "bf16")
    assert two.metrics["policy/ratio_error_first"] == 0
    for name in ("policy/loss", "policy/grad_norm", "value/grad_norm", "policy/entropy"):
        assert two.metrics[name] == pytest.approx(one.metrics[name], rel=0.02, abs=2e-3), name


@TRIAL
def test_the_same_two_ranks_give_the_same_bytes(scored, first_update):
    records = [first_update("gae", 3, 2)[1], updated(scored("gae", 3), 2)]
    assert records[0].fingerprint == records[1].fingerprint
    first, second = ({k: v for k, v in r.metrics.items() if not k.startswith(TIMING)} for r in records)
    assert first == second


@TRIAL
def test_any_ranks_hold_exactly_what_one_wrote_and_write_the_same_policy(first_update):
    """The state of bf16 has fp32 weights in it; the policy is made of many files here."""
    root = first_update("gae", 2, 1, "bf16")[0].paths.root
    for size in (1, 2):
        started = start_ranks(size, root / "meeting" / "copy", read_and_write_state, root)
        assert ended(started) == [0] * size
    (original,) = root.glob("state/00001.*")
    read = whole_state(original)
    for size, zero_stage in itertools.product((1, 2), (1, 2, 3)):
        copy = root / f"copy-{size}-{zero_stage}"
        written = whole_state(copy)
        assert len(list(copy.glob("policy-rank-*"))) == size
        assert written.keys() == read.keys()
        assert all(torch.equal(written[name], read[name]) for name in read)
        assert len(list(copy.glob("model/*.safetensors"))) == 8
        assert same_bytes(copy / "model", root / "copy-1-1" / "model")


def fails(*_: object) -> None:
    raise OSError("no such disk")


def read_and_write_state(root: Path, rank: int) -> None:
    ranks.start_distributed()
    model_files._SMALLEST_FILE = model_files._LARGEST_FILE = 10_000
    (policy,), (state,) = (list(root.glob(f"{name}/00001.*")) for name in ("policy", "state"))
    for zero_stage in (1, 2, 3):
        model = load_causal_lm(policy, Precision.BF16, trust_remote_code=False)
        config = UpdateConfig(zero_stage=zero_stage, precision=Precision.BF16)
        trainer = Trainer("policy", model, 1e-3, config)
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank() == ranks.size() - 1:
                patch.setattr(SavedState, "read_into", fails)
            with pytest.raises(OSError, match="no such disk"):  # on every rank
                trainer.load_state(state)
        trainer.load_state(state)
        copy = root / f"copy-{ranks.size()}-{zero_stage}"
        save_state(trainer, copy)
        trainer.save_model(copy / "model")


# failures


@TRIAL
def test_ranks_that_find_a_corrupt_input_all_say_so_and_commit_nothing(scored):
    run = scored("grpo", 0)
    (shard,) = (run.paths.root / "iterations/00001/rollout").glob("shard-00001.*.arrow")
    shard.write_bytes(shard.read_bytes()[:-1])
    done = update_stage(run, 2)
    assert [one.code for one in done] == [4, 4]
    assert all("shard-00001" in one.log for one in done)
    failure = json.loads((run.paths.root / "failure.json").read_text())
    assert failure["kind"] == "inputs"
    assert read_record(run.paths, Task(1, Stage.UPDATE)) is None


def join(limit: float, folder: Path, dies: int, rank: int) -> None:
    """Join the others, but for rank ``dies``, which ends before it does."""
    if rank == dies:
        raise SystemExit(7)
    begin = time.monotonic()
    try:
        ranks.start_distributed(limit)
    except TimeoutError as error:
        (folder / "error").write_text(f"{time.monotonic() - begin:.1f} {error}")
        raise SystemExit(3) from None


@TRIAL
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_never_comes_is_not_waited_for_without_end(tmp_path, dies):
    meeting = tmp_path / "nowhere" / "meeting.json"
    codes = ended(start_ranks(2, meeting, join, 2.0, tmp_path, dies))
    assert codes == [7, 3] if dies == 0 else [3, 7]
    seconds, message = (tmp_path / "error").read_text().split(maxsplit=1)
    assert 2 <= float(seconds) < 10
    expected = (
        f"rank 1 waited 2 s for rank 0 to write {meeting}"
        if dies == 0
        else "rank 0 waited 2 s for ranks [1] of 2"
    )
    assert message == expected


def test_a_file_that_leads_nowhere_is_an_error_with_a_limit(tmp_path):
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("localhost", 0))
        meeting = Meeting(["localhost"], taken.getsockname()[1], "token")
        (tmp_path / "file").write_text(json.dumps(dataclasses.asdict(meeting)))
        with pytest.raises(
            TimeoutError, match=r"rank 1 waited 1 s for rank 0 to answer at port .*file names"
        ):
            ranks.find_store(tmp_path / "file", RankPlace(1, 2, 1), limit=1)


def test_another_store_is_not_mistaken_for_rank_0(tmp_path):
    store = ranks.open_store(tmp_path / "file", limit=5)
    meeting = Meeting(**json.loads((tmp_path / "file").read_text()))
    assert meeting.port == store.port
    assert ranks.connect("localhost", meeting, limit=5) is not None
    assert ranks.connect("localhost", dataclasses.replace(meeting, token="other"), limit=5) is None
    assert any(ranks.connect(host, meeting, limit=5) for host in meeting.hosts)


class Nothing:
    """Source of a worker that is to leave at once."""

    def next(self) -> None:
        return None

    def left(self) -> None:
        pass


def part(slow: int, rank: int) -> None:
    """Meet as the ranks of a worker do, and leave; one of them asks for its first task late."""
    store = meet(os.environ)
    if rank == slow:
        time.sleep(1)
    source = Following(store, rank) if rank else Leading(Nothing(), store, 3)
    assert source.next() is None
    source.left()
    os._exit(0)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_worker_that_leaves_before_one_of_its_ranks_has_begun_fails_in_none(tmp_path, slow):
    assert ended(start_ranks(3, tmp_path / "meeting", part, slow)) == [0, 0, 0]


def die_in_the_middle(folder: Path, rank: int) -> None:
    """Rank 1 ends between two collectives."""
    ranks.start_distributed()
    ranks.sum_over_ranks(torch.ones(3))
    if rank == 1:
        os._exit(9)
    try:
        ranks.sum_over_ranks(torch.ones(3))
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
        raise SystemExit(3) from None


@TRIAL
def test_a_rank_that_dies_later_makes_the_other_fail(tmp_path):
    begin = time.monotonic()
    assert ended(start_ranks(2, tmp_path / "meeting", die_in_the_middle, tmp_path)) == [3, 9]
    assert time.monotonic() - begin < 20


def spoil_one_gradient(policy: Path, folder: Path, rank: int) -> None:
    """At each ZeRO stage a step whose gradient is not finite on rank 1 alone, though its loss is; one that
    both discard; a good one. And the good one alone."""
    ranks.start_distributed()

    def backward(trainer: Trainer, spoil: float) -> None:
        parameter = next(p for name, p in trainer.model.named_parameters() if name.endswith("norm.weight"))
        hook = parameter.register_hook(lambda gradient: gradient * (spoil if rank == 1 else 1.0))
        trainer.backward(
            trainer.engine(input_ids=torch.tensor([[3, 4, 5 + rank]])).logits.mean(), is_last=True
        )
        hook.remove()

    def fresh(zero_stage: int) -> Trainer:
        model = load_causal_lm(policy, Precision.FP32, trust_remote_code=False)
        return Trainer("policy", model, 1e-3, UpdateConfig(precision=Precision.FP32, zero_stage=zero_stage))

    seen = {}
    for zero_stage in range(4):
        unlucky, lucky = fresh(zero_stage), fresh(zero_stage)
        backward(unlucky, math.nan)
        is_taken = unlucky.step(0, 10).is_taken
        backward(unlucky, math.nan)
        unlucky.discard()
        steps = []
        for trainer in (unlucky, lucky):
            backward(trainer, 1.0)
            steps.append(trainer.step(0, 10))
        states = [state_of(trainer) for trainer in (unlucky, lucky)]
        is_same = steps[0] == steps[1] and all(torch.equal(states[0][n], states[1][n]) for n in states[0])
        seen[zero_stage] = [is_taken, steps[1].is_taken, is_same]
    (folder / f"seen-{rank}").write_text(json.dumps(seen))


@TRIAL
def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip_the_step_at_any_zero_stage(
    models, tmp_path
):
    given = (models / "policy", tmp_path)
    assert ended(start_ranks(2, tmp_path / "meeting", spoil_one_gradient, *given)) == [0, 0]
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert seen == {str(zero_stage): [False, True, True] for zero_stage in range(4)}


def overlap(policy: Path, folder: Path, rank: int) -> None:
    """Three steps with and without communication beside the backward pass, and buckets that fill often."""
    ranks.start_distributed()
    seen = []
    for zero_stage, overlaps in itertools.product((1, 2), (False, True)):

        def rendered(config: UpdateConfig, number: int, backend: str, overlaps: bool = overlaps) -> dict:
            settings = engine_settings(config, 3000, backend)
            settings["zero_optimization"]["overlap_comm"] = overlaps
            return settings

        with unittest.mock.patch("stages.ppo.trainer.engine_settings", rendered):
            model = load_causal_lm(policy, Precision.BF16, trust_remote_code=False)
            config = UpdateConfig(zero_stage=zero_stage, precision=Precision.BF16)
            trainer = Trainer("policy", model, 1e-3, config)
        steps = advance(trainer, range(rank, rank + 3))  # other rows on each
        seen.append((steps, state_of(trainer)))
    for (steps, state), (other_steps, other) in (seen[:2], seen[2:]):
        assert steps == other_steps
        assert all(torch.equal(state[name], other[name]) for name in state)


@TRIAL
def test_gradients_that_are_reduced_while_others_are_computed_are_the_same(models, tmp_path):
    assert ended(start_ranks(2, tmp_path / "meeting", overlap, models / "policy", tmp_path)) == [0, 0]


def spoil_one_score(policy: Path, folder: Path, rank: int) -> None:
    """An update in which the advantages of one row are not a number: one rank has it."""
    from tests.support.learning import experience, make_learner, updated

    ranks.start_distributed()
    settings = ("algorithm=rloo", "rollout.samples_per_prompt=2", "data.prompts_per_iteration=4")
    learner = make_learner(policy.parent, folder / f"run-{rank}", *settings, "update.minibatches=1")
    given = experience(samples=2)
    given.outcome.scores[5] = math.nan
    try:
        updated(learner, given)
    except NumericalError as error:
        (folder / f"error-{rank}").write_text(str(error))


@TRIAL
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_the_same_words(models, tmp_path):
    given = (models / "policy", tmp_path)
    assert ended(start_ranks(2, tmp_path / "meeting", spoil_one_score, *given)) == [0, 0]
    first, second = ((tmp_path / f"error-{rank}").read_text() for rank in range(2))
    assert first == second
    assert "the policy loss is nan in iteration 1, epoch 1, mini-batch 1; rows (prompt_id/sample)" in first
    assert "shard 1: p2/" in first  # rows 4 and 5, which are compared with each other


def meet_on(given: list[DevicePlace], folder: Path, rank: int) -> None:
    """Meet, each rank on the GPU that it is given."""
    ranks.start_distributed()
    try:
        ranks.check_own_devices(given[rank])
    except UserError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise SystemExit(2) from None


def test_two_ranks_that_were_given_one_gpu_both_refuse_to_begin(tmp_path):
    same = [DevicePlace("node7", "GPU-8f1c"), DevicePlace("node7", "GPU-8f1c")]
    assert ended(start_ranks(2, tmp_path / "meeting", meet_on, same, tmp_path)) == [2, 2]
    first, second = ((tmp_path / f"error-{rank}").read_text() for rank in range(2))
    assert first == second
    assert first.startswith(
        "ranks 0, 1 of the update on host node7 were all given the GPU GPU-8f1c; give each"
    )
    assert "\n" not in first


# without processes


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3")], None),
        ([("a", "GPU-1"), ("b", "GPU-1")], None),
        ([("a", ""), ("a", "")], None),
        ([("a", "GPU-1")], None),
        ([("a", "GPU-1"), ("b", "GPU-2"), ("b", "GPU-2")], "ranks 1, 2 of the update on host b were all"),
        ([("a", "MIG-1"), ("a", "GPU-2"), ("a", "MIG-1")], "ranks 0, 2 of the update on host a were all"),
        ([("a", "GPU-1")] * 4, "ranks 0, 1, 2, 3 of the update on host a were all given the GPU GPU-1;"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(devices, said):
    problem = shared_device([DevicePlace(*place) for place in devices])
    assert problem is None if said is None else problem.startswith(said)


@pytest.mark.parametrize(
    ("uuid", "shown"),
    [("8f1c-2", "GPU-8f1c-2"), ("GPU-8f1c", "GPU-8f1c"), ("MIG-77", "MIG-77"), ("", ""), (devices._NIL, "")],
)
def test_the_gpu_of_a_rank_is_named_as_nvidia_smi_does(monkeypatch, uuid, shown):
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert devices.device_place(0) == DevicePlace(socket.gethostname(), shown)


def test_the_place_of_a_process():
    assert RankPlace.of({}) == RankPlace(0, 1, 0)
    assert RankPlace.of({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == RankPlace(0, 1, 0)
    assert RankPlace.of({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == RankPlace(5, 8, 1)
    with pytest.raises(UserError, match="each needs three numbers"):
        RankPlace.of({"WORLD_SIZE": "2", "RANK": "1"})
    with pytest.raises(UserError, match="there can be no rank"):
        RankPlace.of({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(UserError, match="need RENDEZVOUS_FILE to find"):
        ranks.meet(RankPlace(0, 2, 0), {}, limit=1)


def test_the_gpu_of_a_rank():
    assert gpu_index(RankPlace(5, 8, 1), num_visible=4) == 1
    assert gpu_index(RankPlace(5, 8, 1), num_visible=1) == 0
    with pytest.raises(UserError, match="number 3 on its node"):
        gpu_index(RankPlace(3, 8, 3), num_visible=2)


def test_the_interface_is_the_one_towards_rank_0_if_any_rank_is_elsewhere():
    assert ranks.interface_towards(["", "127.0.0.1", "::1"]) is None
    for address in filter(lambda address: "." in address, ranks.addresses()):
        name = ranks.interface_towards(["", "127.0.0.1", address])
        assert address in [entry.address for entry in psutil.net_if_addrs()[name]]


def test_addresses_lead_to_this_machine_from_elsewhere():
    found = ranks.addresses()
    assert found
    assert not any(address.startswith(("127.", "::1", "fe80")) for address in found)
