"""Warned or killed while it generates, a task goes on where it was and ends in the same bytes."""

import errno
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.update import Precision
from pipeline.data.prompts import Message
from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.failures import DISK_EXIT
from pipeline.run.schemas import FinishReason
from pipeline.run.superseded import move_aside, remove_losers
from pipeline.run.tasks import Stage, Task
from stages.context import Context
from stages.engines.base import Request, Response, Sampling
from stages.engines.transformers import TransformersGenerator
from stages.generation.episodes import BEFORE_THE_FIRST_TURN, Episode
from stages.generation.progress import (
    PartialKey,
    Progress,
    Saved,
    from_table,
    load,
    merge,
    origin_of,
    to_table,
)
from stages.models.loading import load_causal_lm
from stages.process.preemption import StoppedOnWarning
from tests.support import ROOT, processes
from tests.support.damage import cut, flip_bit
from tests.support.processes import (
    fork_server,
    in_process_of_its_own,
    make_run,
    stage,
    stage_arguments,
    stopping,
)
from tests.support.waiting import wait_for

ROLLOUT = Task(1, Stage.ROLLOUT)
EVALUATE = Task(0, Stage.EVALUATE)
NUM_RESPONSES = 64


# a rollout of many small batches, in processes of its own


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory) -> Run:
    """One rollout, never disturbed, and what it was made from. Tests must not change it."""
    run = make_run(
        models,
        tmp_path_factory.mktemp("undisturbed") / "run",
        "rollout.num_shards=1",
        "rollout.samples_per_prompt=8",
        "rollout.max_new_tokens=20",
        "rollout.tokens_per_batch=100",
        f"data.heldout={models / 'heldout.jsonl'}",
        "evaluate.every=1",
    )
    for task in (("prepare", 0), ("rollout", 1), ("evaluate", 0)):
        done = stage(run, *task)
        assert done.code == 0, done.log
    return run


def asked(count: int = 9) -> list[Request]:
    return [Request([2 + i] * (1 + 5 * i % 7), 12, seed=i) for i in range(count)]


@pytest.fixture
def run(undisturbed, tmp_path) -> Run:
    """The same run before its rollout and its evaluation."""
    shutil.copytree(undisturbed.paths.root, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "iterations")
    return load_run(tmp_path / "run")


def fingerprint(run: Run, task: Task = ROLLOUT) -> str:
    record = read_record(run.paths, task)
    assert record is not None
    return record.fingerprint


def failure_file(run: Run) -> Path:
    return run.paths.root / "failure.json"


def more(run: Run) -> list[str]:
    return ["--failure-file", str(failure_file(run))]


def why(run: Run) -> tuple[str, str]:
    said = json.loads(failure_file(run).read_text())
    return said["kind"], said["message"]


def continued_from(log: str) -> int | None:
    """What the log says that an attempt found."""
    found = re.findall(r" INFO iteration 1 rollout shard 0 continues from (\d+) of 64 responses$", log, re.M)
    assert len(found) == log.count("continues from") <= 1
    return int(found[0]) if found else None


def stop_after(run: Run, steps: int, name: str = "rollout", iteration: int = 1) -> tuple[int | None, str]:
    """Exit code and log of an attempt that is warned after some token steps."""
    log = run.paths.root / f"stopped-{os.urandom(4).hex()}.log"
    arguments = [*stage_arguments(run, name, iteration), *more(run)]
    code = in_process_of_its_own(stopping, arguments, str(log), steps)
    return code, log.read_text()


def saving_always(arguments: list[str], log: str) -> None:
    """A rollout that saves after each batch."""
    from stages.tasks import rollout

    rollout.run = functools.partial(rollout.run, save_every=0.0)  # type: ignore[assignment]
    processes._main(arguments, log, str(ROOT))


def signalled_at(arguments: list[str], log: str, number: int, step: int) -> None:
    """A rollout that gets a signal before a certain token."""
    from stages.generation import responding

    warned, steps = responding.warned, itertools.count()

    def get_signal() -> bool:
        if next(steps) == step:
            os.kill(os.getpid(), number)
        return warned()

    responding.warned = get_signal  # type: ignore[assignment]
    processes._main(arguments, log, str(ROOT))


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_warned_again_and_again_at_any_moment_it_ends_in_the_same_bytes(number, run, undisturbed):
    moments = random.Random(int(number))
    codes, saved = [], 0
    for attempt in range(20):
        log = run.paths.root / f"{attempt}.log"
        arguments = [*stage_arguments(run, "rollout", 1), *more(run)]
        code = in_process_of_its_own(signalled_at, arguments, str(log), int(number), moments.randrange(150))
        codes.append(code)
        assert continued_from(log.read_text()) == (saved or None)
        if code == 0:
            break
        kind, message = why(run)
        if kind == "paused":
            before, saved = saved, int(message.split()[5])
            assert message == f"stopped on a warning with {saved} of {NUM_RESPONSES} responses saved"
            assert saved > before
        else:
            assert kind == "timeout", log.read_text()
    assert codes[-1] == 0
    assert set(codes[:-1]) == {5}
    assert saved > 0
    assert fingerprint(run) == fingerprint(undisturbed)


def test_killed_without_a_warning_it_goes_on_from_the_last_save(run, undisturbed):
    moments = random.Random(5)
    folder = run.paths.task(ROLLOUT).folder
    arguments = [*stage_arguments(run, "rollout", 1), *more(run)]
    found = []
    for attempt in range(3):
        log = run.paths.root / f"{attempt}.log"
        process = fork_server().Process(target=saving_always, args=(arguments, str(log)))
        process.start()
        wait_for(lambda n=attempt: len(list(folder.glob("*.partial.*.json"))) > n, "a save")
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()
        found.append(continued_from(log.read_text()))
    done = stage(run, "rollout", 1)
    assert done.code == 0, done.log
    found.append(continued_from(done.log))
    assert found[0] is None
    assert 0 < found[1] < found[2] < found[3] < NUM_RESPONSES
    assert fingerprint(run) == fingerprint(undisturbed)
    record = read_record(run.paths, ROLLOUT)
    earlier = [json.loads(p.read_text()) for p in run.paths.task(ROLLOUT).partial_records()]
    longest = max(save["metrics"]["compute_seconds"] for save in earlier)
    assert record.metrics["compute_seconds"] > longest, "time of earlier attempts is counted"


def test_a_warning_before_any_response_leaves_nothing(run):
    code, log = stop_after(run, steps=3)
    assert code == 5
    assert why(run) == ("timeout", "stopped on a warning before any response was finished")
    assert "Traceback" not in log
    assert run.paths.task(ROLLOUT).partial_records() == []


def test_a_warning_before_another_response_keeps_what_is_saved(run, undisturbed):
    assert stop_after(run, steps=50)[0] == 5
    kind, message = why(run)
    assert kind == "paused"
    (record,) = run.paths.task(ROLLOUT).partial_records()
    count = json.loads(record.read_text())["rows"]
    assert stop_after(run, steps=3)[0] == 5
    kind, message = why(run)
    assert kind == "timeout"
    assert message == f"stopped on a warning before another response was finished; {count} of 64 are saved"
    assert run.paths.task(ROLLOUT).partial_records() == [record]
    done = stage(run, "rollout", 1)
    assert continued_from(done.log) == count
    assert fingerprint(run) == fingerprint(undisturbed)


def test_a_warning_after_the_last_token_is_too_late_to_stop(run, undisturbed):
    code, log = stop_after(run, steps=10**5)
    assert code == 0, log
    assert fingerprint(run) == fingerprint(undisturbed)


def test_an_evaluation_goes_on_too(run, undisturbed):
    code, log = stop_after(run, 25, "evaluate", 0)
    assert code == 5, log
    assert why(run)[0] == "paused"
    done = stage(run, "evaluate", 0)
    assert "iteration 0 evaluate continues from" in done.log
    assert fingerprint(run, EVALUATE) == fingerprint(undisturbed, EVALUATE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_stage_that_cannot_save_goes_on_when_warned_and_ends_when_told(number, code, run):
    run.paths.task(Task(0, Stage.PREPARE)).record.unlink()
    log = run.paths.root / "prepare.log"
    arguments = stage_arguments(run, "prepare")
    assert in_process_of_its_own(signalled, arguments, str(log), int(number)) == code, log.read_text()


def signalled(arguments: list[str], log: str, number: int) -> None:
    """A task that gets a signal when it begins to compute."""
    from stages.tasks import prepare

    run = prepare.run

    def get_signal(task: Task, context: Context) -> Any:
        os.kill(os.getpid(), number)
        return run(task, context)

    prepare.run = get_signal
    processes._main(arguments, log, str(ROOT))


@pytest.mark.parametrize("damage", [flip_bit, cut, Path.unlink])
@pytest.mark.parametrize("kind", ["arrow", "json"])
def test_a_damaged_save_is_not_used(damage, kind, run):
    progress_of(run, save_every=0).add(some(range(8)))
    (path,) = run.paths.task(ROLLOUT).folder.glob(f"shard-00000.partial.*.{kind}")
    damage(path)
    assert progress_of(run, attempt="2-b").num_found == 0


def test_a_damaged_save_costs_its_own_responses_only(run, undisturbed):
    """And the log says which it was."""
    assert stop_after(run, steps=50)[0] == 5
    (first,) = run.paths.task(ROLLOUT).partial_records()
    count = json.loads(first.read_text())["rows"]
    assert stop_after(run, steps=50)[0] == 5
    (second,) = set(run.paths.task(ROLLOUT).partial_records()) - {first}
    flip_bit(run.paths.root / json.loads(second.read_text())["outputs"][0]["path"])
    done = stage(run, "rollout", 1)
    assert done.code == 0, done.log
    assert continued_from(done.log) == count
    assert f"iterations/00001/rollout/{second.name} is not used: " in done.log
    assert "xxh3_128" in done.log
    assert fingerprint(run) == fingerprint(undisturbed)


def test_what_a_full_disk_could_not_take_is_not_the_tasks_fault(run):
    log = run.paths.root / "full.log"
    arguments = [*stage_arguments(run, "rollout", 1), *more(run)]
    assert in_process_of_its_own(on_a_full_disk, arguments, str(log)) == DISK_EXIT
    kind, message = why(run)
    assert kind == "disk"
    assert "No space left on device" in message
    assert "partial" in message
    assert list(run.paths.task(ROLLOUT).folder.iterdir()) == []


def on_a_full_disk(arguments: list[str], log: str) -> None:
    os.fsync = out_of_space
    saving_always(arguments, log)


def out_of_space(descriptor: int) -> None:
    """In place of fsync: no room for what is saved."""
    if ".partial." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# saves without a model


def some(indices: range | list[int], length: int = 3) -> dict[int, Episode]:
    """Some of one turn, some of several."""
    return {i: conversation(i, length) if i % 3 == 0 else Episode.of(response(i, length)) for i in indices}


def response(i: int, length: int) -> Response:
    reason = FinishReason.STOP if i % 2 else FinishReason.LENGTH
    return Response([i + 2] * length, [-0.5 * i] * length, reason)


def conversation(i: int, length: int) -> Episode:
    begun = BEFORE_THE_FIRST_TURN.with_turn(response(i, length), "ä")
    return begun.with_answer([9, 9], [Message("tool", '"quoted"\n')]).with_turn(response(i, 1), "\U0001f642")


def origin(**others: Any) -> PartialKey:
    fields = {
        "task": ROLLOUT,
        "inputs": {"0/prepare/0": "a", "requests": "b"},
        "policy_version": 0,
        "seed": 7,
    }
    return PartialKey(**(fields | others))


def context_of(run: Run, attempt: str) -> Context:
    return Context(run.paths, run.config, ROLLOUT, attempt)


def progress_of(run: Run, attempt: str = "1-a", save_every: float = 1e9, **others: Any) -> Progress:
    return Progress(context_of(run, attempt), origin(**others), NUM_RESPONSES, save_every)


def test_a_table_holds_responses_in_any_order():
    responses = some([5, 0, 63])
    assert from_table(to_table(responses)) == responses
    assert to_table(responses)["request"].to_pylist() == [0, 5, 63]
    assert from_table(to_table({})) == {}


def test_merging_takes_everything_once_and_the_longest_time():
    first, second = some(range(4)), some(range(2, 6), length=9)
    merged = merge([Saved(first, 3.0), Saved(second, 2.0), Saved({})])
    assert merged == Saved(first | {4: second[4], 5: second[5]}, 3.0)
    assert merge([]) == Saved({}, 0.0)


def test_saves_of_several_attempts_are_taken_together(run):
    progress_of(run, "1-a", save_every=0).add(some(range(3)))
    other = progress_of(run, "2-b", seed=8, save_every=0)  # as if both had begun at once
    assert other.num_found == 0
    other._origin = origin()
    other.add(some(range(2, 6)))
    third = progress_of(run, "3-c")
    assert third.responses == some(range(6))
    assert not third.is_complete
    third.add(some(range(6, NUM_RESPONSES)))
    assert third.is_complete


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        ({"inputs": {"0/prepare/0": "other", "requests": "b"}}, "inputs"),
        ({"inputs": {"0/prepare/0": "a", "requests": "other"}}, "inputs"),
        ({"policy_version": 1}, "policy_version"),
        ({"seed": 8}, "seed"),
    ],
)
def test_a_save_of_another_origin_is_not_used(differing, said, run, caplog):
    progress_of(run, save_every=0).add(some(range(3)))
    assert progress_of(run, "2-b", **differing).responses == {}
    assert f"is not used: iteration 1 rollout shard 0 is stale: this attempt differs in {said}" in (
        caplog.text
    )
    assert progress_of(run, "2-b").responses == some(range(3))


def test_the_origin_tells_requests_sampling_and_groups_apart(run):
    context = context_of(run, "1-a")
    context.lineage["1/update/0"] = "policy"
    asked = [Request([1, 2], 5, 0), Request([3], 5, 1)]
    base = origin_of(context, 1, asked, Sampling(), [[0, 1]])
    assert base.inputs["1/update/0"] == "policy"
    assert origin_of(context, 1, asked, Sampling(), [[0, 1]]) == base
    assert origin_of(context, 1, asked, Sampling(), [[0], [1]]) != base
    assert origin_of(context, 1, asked, Sampling(0.9), [[0, 1]]) != base
    for other in (Request([3], 5, 2), Request([3], 5, 1, greedy=True), Request([3], 6, 1)):
        assert origin_of(context, 1, [asked[0], other], Sampling(), [[0, 1]]) != base


def test_saves_are_made_when_they_are_due_and_hold_something_new(run):
    progress = progress_of(run, save_every=1e9)
    files = run.paths.task(ROLLOUT)
    progress.save()
    progress.add(some(range(3)))
    assert files.partial_records() == []
    progress.save()
    (first,) = files.folder.glob("*.arrow")
    progress.save()
    assert list(files.folder.glob("*.arrow")) == [first]
    progress._saved_at -= 2e9
    progress.add(some([7]))
    (second,) = files.folder.glob("*.arrow")
    assert second != first
    assert len(files.partial_records()) == 1
    assert progress_of(run, "2-b").responses == some([0, 1, 2, 7])


def save_and_die(run_dir: str, step: int) -> None:
    """Killed at the ``step``-th system call that makes a second save durable."""
    progress = progress_of(load_run(Path(run_dir)), save_every=0)
    progress.add(some(range(3)))
    calls = iter(range(100))

    def dying(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, functools.partial(dying, getattr(os, name)))
    progress.add(some(range(3, 6)))


def test_killed_within_a_save_the_one_before_or_the_new_one_is_there(run):
    found = []
    for step in range(20):
        shutil.rmtree(run.paths.task(ROLLOUT).folder, ignore_errors=True)
        code = in_process_of_its_own(save_and_die, str(run.paths.root), step)
        responses = progress_of(run, "2-b").responses
        assert responses in (some(range(3)), some(range(6)))
        found.append(len(responses))
        if code == 0:
            break
    assert code == 0
    assert len(found) > 4
    assert found == sorted(found)
    assert {3, 6} == set(found)


def test_a_save_that_fails_leaves_the_one_before(run, monkeypatch):
    progress = progress_of(run, save_every=0)
    progress.add(some(range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", out_of_space)
        with pytest.raises(OSError, match=r"No space left on device: .*partial"):
            progress.add(some(range(3, 6)))
    assert load(context_of(run, "2-b"), origin()).responses == some(range(3))


def test_finished_iterations_are_swept_of_saves_and_going_back_moves_them(undisturbed, tmp_path):
    shutil.copytree(undisturbed.paths.root, tmp_path / "run")
    run = load_run(tmp_path / "run")
    folder = run.paths.task(ROLLOUT).folder
    before = sorted(folder.iterdir())
    progress_of(run, save_every=0).add(some(range(3)))
    saved = set(folder.iterdir()) - set(before)
    assert len(saved) == 2
    remove_losers(run.paths, [read_record(run.paths, ROLLOUT)])
    assert sorted(folder.iterdir()) == before
    progress_of(run, save_every=0).add(some(range(3)))
    aside = move_aside(run.paths, [ROLLOUT], "aside")
    assert list(folder.iterdir()) == []
    assert len(list(aside.rglob("*.partial.*"))) == 2


@pytest.mark.parametrize(
    ("counts", "kind", "said"),
    [
        ((0, 60, 128), "paused", "stopped on a warning with 60 of 128 responses saved"),
        ((0, 0, 128), "timeout", "stopped on a warning before any response was finished"),
        (
            (60, 60, 128),
            "timeout",
            "stopped on a warning before another response was finished; 60 of 128 are saved",
        ),
    ],
)
def test_how_a_warned_task_says_what_it_has(counts, kind, said):
    error = StoppedOnWarning(*counts)
    assert (str(error), error.failure_kind) == (said, kind)


# the engine's part


@pytest.fixture(scope="module")
def generator(models):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)
    yield TransformersGenerator(model, token_budget=40)
    torch.set_num_threads(before)


def test_what_is_left_is_generated_in_the_same_batches_to_the_same_numbers(generator):
    whole = generator.generate(asked(), Sampling())
    batches = generator.plan(asked())
    assert len(batches) > 3
    assert sorted(i for batch in batches for i in batch) == list(range(9))
    for done in (set(batches[0]), {*batches[1], *batches[-1]}):
        rest = list(generator.stream(asked(), Sampling(), done))
        assert [list(item) for item in rest] == [b for b in batches if not done.issuperset(b)]
        for item in rest:
            assert all(response == whole[i] for i, response in item.items())
    assert list(generator.stream(asked(), Sampling(), range(9))) == []


def test_a_batch_of_which_a_part_is_done_is_generated_whole(generator):
    batches = generator.plan(asked())
    done = set(range(9)) - {batches[1][0]}
    (item,) = generator.stream(asked(), Sampling(), done)
    assert list(item) == batches[1]


@pytest.mark.parametrize("steps", [0, 1, 5, 14, 40])
def test_told_to_stop_it_stops_before_the_next_token_and_drops_the_batch(generator, steps):
    whole = generator.generate(asked(), Sampling())
    count = 0

    def should_stop() -> bool:
        nonlocal count
        count += 1
        return count > steps

    finished: dict[int, Response] = {}
    for item in generator.stream(asked(), Sampling(), should_stop=should_stop):
        finished |= item
    assert count == steps + 1, "asked once per token step, and not again"
    assert len(finished) < 9
    assert all(response == whole[i] for i, response in finished.items())
    assert generator.generate(asked(), Sampling()) == whole, "nothing stays behind"
