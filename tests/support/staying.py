"""Updates in processes that stay, of runs whose shards are all there."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.run.commits import read_record, verify_outputs
from pipeline.run.directory import Run, create_run, load_run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import Stage, Task
from stages import ranks
from stages.workers.kept_trainer import save_kept_trainer
from tests.support.killed_updates import Kill, dying
from tests.support.processes import config_of
from tests.support.ranks import said
from tests.support.scored import commit_scored
from tests.support.used import settled_bytes

ITERATIONS = 4
CASES = {
    "fp32-zero0": ["update.zero_stage=0"],
    "bf16-zero1": ["update.zero_stage=1", "update.precision=bf16"],
    "bf16-zero2": ["update.zero_stage=2", "update.precision=bf16"],
    "bf16-zero3": ["update.zero_stage=3", "update.precision=bf16"],
    "overflow": ["update.zero_stage=2", "update.precision=fp16", "update.epochs=4"],
    "stopped": ["algorithm.target_kl=1e-9"],
    "skipped": ["update.zero_stage=1", "update.precision=bf16"],
    "lora": ["update.zero_stage=3", "update.lora.rank=2"],
    "no-critic": ["algorithm.estimator=reinforce++", "update.zero_stage=2", "update.precision=bf16"],
}
"""Precision and ZeRO stage, or what happens on the way."""


def scored_run(
    models: Path,
    root: Path,
    case: str,
    save_every: int,
    given: Run | None = None,
    iterations: int = ITERATIONS,
) -> Run:
    """A run that wants its first update; its shards are those of another, if one is given."""
    config = config_of(models, root, f"iterations={iterations}", "update.epsilon=1e-3", *CASES[case])
    run = create_run(replace(config, update=replace(config.update, save_every=save_every)))
    if given is None:
        return commit_scored(run)
    for part in ("data", "iterations"):
        shutil.copytree(given.paths.root / part, run.paths.root / part, dirs_exist_ok=True)
    return run


@contextlib.contextmanager
def happening(case: str, iteration: int) -> Iterator[pytest.MonkeyPatch]:
    """What the case is about happens."""
    from stages.ppo import trainer, training
    from stages.ppo.zero import engine_settings

    def with_high_loss_scale(*given: object) -> dict:
        settings = engine_settings(*given)
        return settings | {"fp16": settings["fp16"] | {"initial_scale_power": 24}}

    def spoiled(tally: object, experience: object, place: training.StepPosition) -> str | None:
        return "made up" if place.number == 1 else None

    with pytest.MonkeyPatch.context() as patch:
        if case == "overflow":
            patch.setattr(trainer, "engine_settings", with_high_loss_scale)
        if case == "skipped" and iteration == 2:
            patch.setattr(training, "problem_of", spoiled)
        yield patch


@dataclass(frozen=True)
class Updates:
    """Updates of a run, one after the other in the same process."""

    root: Path
    case: str
    iterations: Sequence[int]
    stays: bool = True
    """Whether the process may get another one, so that it keeps its learner."""
    loads_ahead: bool = False
    """Whether the process has loaded what each needs before."""
    is_slow: bool = False
    """Whether a replay takes so long that it saves each state on its way."""
    leaves: bool = False
    """Whether the process leaves afterwards as planned, and saves what it has kept."""
    process: int = 1
    """Number among those that have been at the run: attempts of each have names of their own."""


def update(updates: Updates, iteration: int, name: str = "1-aa") -> list[str]:
    """One update by all ranks. Returns what this one says."""
    from stages.attempts.arguments import Arguments
    from stages.attempts.execution import execute, load
    from stages.ppo import replay

    task = Task(iteration, Stage.UPDATE)
    with said() as lines, happening(updates.case, iteration) as patch:
        if updates.is_slow:
            patch.setattr(replay, "longest_replay", lambda config: 0.0)
        if updates.loads_ahead:
            load(Arguments(task, updates.root, name, None, stays=True, loads=True))
        execute(Arguments(task, updates.root, name, None, stays=updates.stays), time.time())
    ranks.share(None)
    return lines


def update_all(wanted: Sequence[Updates], kill: Kill | None, rank: int) -> None:
    """Updates of several runs. The last one of all may be killed. What they say is left in files."""
    ranks.start_distributed()
    for updates in wanted:
        for iteration in updates.iterations:
            with contextlib.ExitStack() as stack:
                if kill is not None and updates is wanted[-1] and iteration == updates.iterations[-1]:
                    stack.enter_context(dying(updates.root, iteration, kill))
                name = f"{updates.process}-{iteration}-{'kept' if updates.stays else 'loaded'}"
                lines = update(updates, iteration, name)
                (updates.root / f"said-{iteration}-{rank}.json").write_text(json.dumps(lines))
                if updates.leaves and iteration == updates.iterations[-1]:
                    save_kept_trainer()


def assert_same_learned(root: Path, expected: Path, states: Sequence[int] = (ITERATIONS,)) -> None:
    """All policies, and some states, as committed and as they lie on the disk, to the last byte."""
    ours, theirs = load_run(root).paths, load_run(expected).paths
    policies = map(policy_maker, range(1, ITERATIONS + 1))
    for task in (*policies, *map(state_of, states)):
        found, wanted = read_record(ours, task), read_record(theirs, task)
        assert found is not None, task
        assert found.fingerprint == wanted.fingerprint, task
        verify_outputs(ours, found)


def states_of(root: Path) -> list[int]:
    """Iterations whose states are committed."""
    paths = load_run(root).paths
    return [i for i in range(1, ITERATIONS + 1) if read_record(paths, state_of(i)) is not None]


def memory_of_updates(root: Path, said_to: Path) -> None:
    """Do all updates of a run in this process, and write how many bytes it held after each."""
    ranks.start_distributed()
    sizes = []
    for iteration in range(1, load_run(root).plan.iterations + 1):
        lines = update(Updates(root, "", ()), iteration)
        assert any("going on from memory" in line for line in lines) is (iteration > 1)
        sizes.append(settled_bytes())
    said_to.write_text(json.dumps(sizes))
