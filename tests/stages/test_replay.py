"""A trainer's state that was lost is learned again: same machine, same bytes; and never a failed run."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.plan import state_of
from pipeline.run.tasks import Stage, Task
from stages import ranks
from tests.support.processes import make_run
from tests.support.ranks import ended, said, start_ranks
from tests.support.scored import commit_scored
from tests.support.tables import IS_SOAK, sample
from tests.support.updates import with_high_loss_scale

SIZES = (1, 2)
CASES = {
    "fp32-zero0": ["update.zero_stage=0"],
    "bf16-zero2": ["update.zero_stage=2", "update.precision=bf16"],
    "bf16-zero3": ["update.zero_stage=3", "update.precision=bf16"],
    "overflow": ["update.zero_stage=2", "update.precision=fp16", "update.epochs=8"],
    "stopped": ["algorithm.target_kl=1e-9"],
    "skipped": ["update.zero_stage=1", "update.precision=bf16"],
    "lora": ["update.zero_stage=3", "update.lora.rank=2"],
    "reference": ["algorithm.kl.reference_in=update", "update.zero_stage=3"],
    "no-shards": ["update.zero_stage=1"],
}
"""Precision and ZeRO stage, or what happens in the iteration whose state is lost.

tests/stages/test_killed_updates.py has fp32 at each ZeRO stage."""
SHARED_OUT = ("bf16-zero2", "bf16-zero3", "lora")
TRIED = [
    *[(1, case) for case in CASES if IS_SOAK or case not in SHARED_OUT],
    *[(2, case) for case in (CASES if IS_SOAK else sample(SHARED_OUT, 1 / 3))],
]
"""Two ranks learn one of those, one the others; make soak has all by both."""


def update(
    run: Run, iteration: int, case: str, loses_state: bool = False, detaches: bool = False
) -> list[str]:
    """What the ranks do; returns what they say. The last one may find that its disk is full; all may keep a
    copy of their part, as on GPUs."""
    from stages.attempts.arguments import Arguments
    from stages.attempts.execution import execute
    from stages.models.loading import load_causal_lm
    from stages.ppo import reference, resuming, trainer, training
    from stages.ppo.state import writer

    def fails(*_: object) -> None:
        raise OSError("no space left")

    def spoiled(tally: object, experience: object, place: training.StepPosition) -> str | None:
        return "made up" if place.number == 1 else None

    with said() as lines, pytest.MonkeyPatch.context() as patch:
        if loses_state and ranks.rank() == ranks.size() - 1:
            patch.setattr(writer, "write_slices", fails)
        if case == "reference":
            patch.setattr(resuming, "load_models", noted(resuming.load_models, "what is trained", lines))
            patch.setattr(reference, "load_causal_lm", noted(load_causal_lm, "the reference", lines))
        if detaches:
            patch.setattr(writer, "device", lambda: torch.device("cuda"))
        if case == "overflow":
            patch.setattr(trainer, "engine_settings", with_high_loss_scale)
        if case == "skipped" and iteration == 1:
            patch.setattr(training, "problem_of", spoiled)
        execute(Arguments(Task(iteration, Stage.UPDATE), run.paths.root, "1-aa", None), time.time())
    ranks.share(None)
    return lines


def noted(load: Callable, what: str, lines: list[str]) -> Callable:
    """Loads, and notes it."""

    def load_and_note(*given: object) -> object:
        lines.append(f"loaded {what}")
        return load(*given)

    return load_and_note


def cases_of(size: int) -> list[str]:
    return [case for number, case in TRIED if number == size]


def sizes_of(case: str) -> list[int]:
    return [size for size, name in TRIED if name == case]


def lose_and_learn_again(folder: Path, rank: int) -> None:
    """Two updates, and the same two when the state of the first is lost; of every case of so many ranks."""
    ranks.start_distributed()
    for case in cases_of(ranks.size()):
        seen = {}
        for name in ("whole", "lost"):
            run = load_run(folder / f"{case}-{name}")
            first = update(run, 1, case, loses_state=name == "lost")
            if case == "no-shards" and name == "lost" and ranks.is_first():
                next((run.paths.iterations / "00001/rollout").glob("*.arrow")).unlink()
            ranks.share(None)
            seen[name] = [first, update(run, 2, case, detaches=name == "lost")]
        (folder / f"{case}-{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def given(models, tmp_path_factory) -> Run:
    """A run that has all shards of two iterations."""
    return commit_scored(make_run(models, tmp_path_factory.mktemp("given") / "run"))


@pytest.fixture(scope="module")
def learned(given, models, tmp_path_factory) -> dict[int, Path]:
    """Where the runs of each case are, by the number of ranks."""
    folders = {size: tmp_path_factory.mktemp(f"by-{size}") for size in SIZES}
    for size, folder in folders.items():
        for case in cases_of(size):
            for name in ("whole", "lost"):
                run = make_run(models, folder / f"{case}-{name}", "update.epsilon=1e-3", *CASES[case])
                shutil.copytree(given.paths.data, run.paths.data, dirs_exist_ok=True)
                for part in ("rollout", "reward"):
                    for source in given.paths.iterations.glob(f"*/{part}"):
                        target = run.paths.iterations / source.parent.name / part
                        shutil.copytree(source, target, dirs_exist_ok=True)
        started = start_ranks(size, folder / "meeting", lose_and_learn_again, folder)
        for process in started:
            process.join(timeout=600)
        assert ended(started) == [0] * size
    return folders


def lines_of(folder: Path, case: str) -> dict[str, list[list[str]]]:
    return json.loads((folder / f"{case}-0.json").read_text())


@pytest.mark.soak
@pytest.mark.parametrize(("size", "case"), [one for one in TRIED if one[1] != "no-shards"])
def test_after_a_lost_state_the_same_is_learned_to_the_last_bit(learned, case, size):
    whole, lost = (load_run(learned[size] / f"{case}-{name}").paths for name in ("whole", "lost"))
    for iteration in (1, 2):
        one, other = (read_record(paths, Task(iteration, Stage.UPDATE)) for paths in (whole, lost))
        assert one.fingerprint == other.fingerprint, iteration
        assert one.promises_state
        assert other.promises_state
    assert read_record(whole, state_of(1)) is not None
    assert read_record(lost, state_of(1)) is None
    assert read_record(lost, state_of(2)).fingerprint == read_record(whole, state_of(2)).fingerprint
    assert not list(lost.states.glob("00001.*"))
    first, second = lines_of(learned[size], case)["lost"]
    assert any("the trainer's state was not saved; the policy is committed" in line for line in first)
    assert "state of iteration 1 was lost" in "".join(second)
    assert any("its weights differ from the committed ones by 0.0e+00" in line for line in second)
    assert not any(line.startswith(("ERROR", "WARNING: iteration")) for line in second)


@pytest.mark.parametrize("size", sizes_of("reference"))
def test_the_reference_is_gone_before_what_is_trained_is_there(learned, size):
    """Once, also where iteration 1 is learned again: its reference is the policy."""
    whole, lost = (lines_of(learned[size], "reference")[name] for name in ("whole", "lost"))
    loaded = [[line for line in lines if line.startswith("loaded")] for lines in (whole[1], lost[1])]
    assert loaded == [["loaded the reference", "loaded what is trained"]] * 2


def test_what_the_cases_are_about_has_happened(learned):
    def numbers(case: str) -> list[dict]:
        all_paths = [load_run(learned[size] / f"{case}-whole").paths for size in sizes_of(case)]
        files = [
            file for paths in all_paths for file in paths.iterations.glob("00001/update/*.learned.*.json")
        ]
        assert len(files) == len(all_paths) > 0
        return [json.loads(file.read_text()) for file in files]

    for found in numbers("overflow"):
        assert found["overflows"] > 0
        assert {"taken", "skipped"} == {d["policy"] for d in found["decisions"]}
    for found in numbers("stopped"):
        assert found["stopped"]
        assert [d["policy"] for d in found["decisions"]][-1] == "discarded"
    for found in numbers("skipped"):
        assert found["skipped"] == 2
        assert [d["critic"] for d in found["decisions"]] == ["taken", "discarded"] * 2
    assert all(found["state"]["responses"] == 8 for found in numbers("fp32-zero0"))


@pytest.mark.parametrize("size", sizes_of("no-shards"))
def test_where_an_iteration_cannot_be_learned_again_learning_goes_on_and_says_so(learned, size):
    paths = load_run(learned[size] / "no-shards-lost").paths
    _, second = lines_of(learned[size], "no-shards")["lost"]
    assert any("iteration 1 cannot be learned again" in line and "shard" in line for line in second)
    record = read_record(paths, Task(2, Stage.UPDATE))
    assert record.metrics["policy/ratio_error_first"] == 0
    assert read_record(paths, state_of(2)) is not None
    assert set(record.inputs) == {
        "0/prepare/0",
        "1/update/0",
        *(f"2/{s}/{i}" for s in ("rollout", "reward") for i in (0, 1)),
    }
