"""Commands that make, continue or fork a run: what is checked and fixed before it goes on."""

import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from pipeline.cli.copied import as_own, check_is_the_only_one
from pipeline.cli.errors import will_change
from pipeline.cli.queue import cancel_run, clear_queue, follow_run, patient_hold, submit_run
from pipeline.cli.settings import change_settings, check_change
from pipeline.cli.summary import announce, say_how_it_ended
from pipeline.cli.take_over import take_over
from pipeline.config.allocation import AllocationConfig
from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigError
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import LocalConfig
from pipeline.config.schema import Config, WandbMode
from pipeline.executors.allocation import allocation_executor
from pipeline.executors.local import drive
from pipeline.executors.local_limits import local_limits
from pipeline.executors.processes import Processes
from pipeline.executors.slurm.passes import LEASE_PATIENCE
from pipeline.notify.events import breakdown, tell
from pipeline.orchestrate.driver import tell_of_pass
from pipeline.orchestrate.publish import note_mended
from pipeline.orchestrate.rewind import Point, checked_point, go_back, parse_point
from pipeline.orchestrate.row_writer import RowWriter
from pipeline.run.control import Control, write_control
from pipeline.run.directory import Run, claimed_run, resume_command
from pipeline.run.engine_use import uses_torch, uses_vllm
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.forecast import Forecast, write_forecast
from pipeline.run.gpus import fork_hazard
from pipeline.run.identity import RunError
from pipeline.run.inside import check_holds_no_links
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, hold
from pipeline.run.losses import find_break, find_damage, find_loss, in_sentences
from pipeline.run.place import original_of
from pipeline.run.plan import Plan
from pipeline.run.records import find_frontier
from pipeline.run.standpoint import check_is_ours, check_may_write
from pipeline.run.tasks import PREPARE, Stage
from pipeline.run.troubles import described
from pipeline.run.versions import version_warning
from pipeline.status.progress import watcher_for
from pipeline.tracking.state import not_followed
from slurm.sharedfiles import is_there
from slurm.submission import Refused


def start(config: Config, found: Findings, watch: bool) -> int:
    """Make a run and carry it out, or submit it. Returns the exit code.

    Args:
        found: what is wrong with ``config`` so far; a run begins only where nothing is.
    """
    executor = None
    with found.collecting("the scheduler"):
        executor = executor_of(config, watch)
    forecast = Forecast()
    check(config, found, forecast=forecast)
    with claimed_run(config) as (run, lease):
        write_forecast(run.paths, forecast)
        will_change("a new run")
        if executor is not None:
            return carry_on(run, executor, lease)
        write_control(run.paths, Control())  # from now on it is in the queue, or about to be
    try:
        return follow_run(run) if watch else submit_run(run)
    except Refused:
        if not is_there(run.paths.task(PREPARE).record):
            cancel_run(run)  # with other settings it is another run: what is queued belongs to none
        raise


def executor_of(config: Config, watch: bool) -> Processes | None:
    """Return what carries out tasks here; None for a run on Slurm. Raises ConfigError where a run cannot be
    left alone."""
    executor = None if config.slurm else local_executor(config)
    if executor and not watch:
        kind = config.scheduler.kind
        raise ConfigError(
            f"scheduler={kind} has no queue to submit to; use slurm-ppo run, or for a run directory "
            "slurm-ppo resume; for jobs choose scheduler=slurm"
        )
    return executor


def check(
    config: Config,
    found: Findings,
    folder: Path | None = None,
    number: int = 0,
    forecast: Forecast | None = None,
) -> None:
    """Check all that a run is made of, and say what is worth knowing on stderr; see
    :func:`pipeline.checks.suites.start`. Raises UserError with every problem, one per line."""
    from pipeline.checks import suites  # slow to import, and resume does without

    checked = suites.start(config, found, folder, number, forecast=forecast)
    for text in suites.lines_of(checked, found):
        print(text, file=sys.stderr)


def resume_run(
    run: Run,
    watch: bool,
    back_to: str | None = None,
    takes_over: bool = False,
    settings: Sequence[str] = (),
    config_dir: Path | None = None,
) -> int:
    """Continue a run where it stands, or from an earlier point. Returns the exit code.

    Args:
        takes_over: of a run on Slurm, whether it becomes this user's, on this cluster, if it is another's.
        settings: words that change settings of it first.
        config_dir: folder of groups for these.
    """
    config = check_change(run, settings, config_dir) if settings else run.config
    executor = executor_of(config, watch)
    is_copy = original_of(run) is not None  # what is said of the owner is of the original's
    if executor is None:
        if not (is_copy or takes_over):
            check_is_ours(run.paths, run.who_acts)
        check_may_write(run.paths)
    point = point_to_go_on_from(run, back_to)
    if takes_over and not is_copy:
        check_is_the_only_one(run)
        take_over(replace(run, config=config))
    say_what_is_not_followed(run)
    # A driver on another node may have been killed with its job: its lease runs out.
    patience = 0.0 if isinstance(run.config.scheduler, LocalConfig) else LEASE_PATIENCE
    run = as_own(run)
    if settings:
        run = change_settings(run, config, hold_to_change(run, patience), settings, config_dir)
    if point is not None:
        if executor is None:
            clear_queue(run)
        moved = go_back(run, point, patience)
        will_change("the run's history")
        print(f"moved aside: {moved}" if moved else "nothing to move aside", file=sys.stderr)
    mend_chain(run, patience)
    mend_rows(run, patience)
    if executor is not None:
        return carry_on(run, executor, patience=patience)
    return follow_run(run) if watch else submit_run(run)


def point_to_go_on_from(run: Run, back_to: str | None) -> Point | None:
    """Return the point to go back to; None: the run goes on where it stands. Raises RunError where it cannot
    go on from there."""
    check_holds_no_links(run.paths, find_frontier(run.plan, run.paths).updated)
    if back_to is None:
        check_is_not_lost(run)
        return None
    point = parse_point(back_to)
    checked_point(run, point)
    return point


def say_what_is_not_followed(run: Run) -> None:
    """Say which other version began the run, and which of this shell's settings of W&B it does not follow."""
    if note := version_warning(run):
        print(note, file=sys.stderr)
    if run.config.tracking.wandb.mode is not WandbMode.DISABLED and (note := not_followed(run, os.environ)):
        print(note, file=sys.stderr)


def hold_to_change(run: Run, patience: float) -> AbstractContextManager[Lease]:
    """Hold the run's lease, to change its settings: on Slurm passes of others are waited for."""
    return patient_hold(run) if run.config.slurm else hold(run.paths.locks, patience)


def check_is_not_lost(run: Run) -> None:
    """Refuse to go on where nothing is left to go on from. Raises RunError, with what is left, and the way
    out."""
    frontier = find_frontier(run.plan, run.paths)
    loss = find_loss(run, frontier.updated, is_trained=frontier.updated >= run.plan.iterations)
    if loss is not None and loss.is_of_all:
        raise RunError(in_sentences(run, loss))


def mend_chain(run: Run, patience: float) -> None:
    """Take back what was made from a policy that has been made again since, with another result.

    Take back the last policy too if it is damaged: no later task would read and verify it.
    """
    updated = find_frontier(run.plan, run.paths).updated
    if updated >= run.plan.iterations > run.plan.start:
        print(
            f"the run is trained; hashing policy {updated}, which no task reads", file=sys.stderr, flush=True
        )
    found = find_break(run.plan, run.paths, updated) or find_damage(run.plan, run.paths, updated)
    if found is None:
        return
    print(f"{found.why}; it is moved aside, with all that came of it, and made again", file=sys.stderr)
    if run.config.slurm:
        clear_queue(run)
    go_back(run, Point(Stage.UPDATE, found.iteration), patience)


def mend_rows(run: Run, patience: float) -> None:
    """Restore lines of metrics.jsonl in which a bit has flipped. Drivers compare the newest ones only."""
    try:
        with hold(run.paths.locks, patience):
            will_change("rows")
            book = RowWriter.open(run.paths, run.plan.start + 1, compared=sys.maxsize)
            book.close()
            note_mended(run, book.mended)
    except OSError as error:  # what people see never stops what trains; the driver tells more
        print(f"rows cannot be compared: {described(error)}", file=sys.stderr)
        return
    if book.mended is not None:
        why = f"row {book.mended} was not what was published; it is written again"
        print(f"{run.paths.metrics}: {why}", file=sys.stderr)


def _fill(plan: Plan) -> str:
    """Say which iterations of a fork have responses of the policy that it begins with; nothing where that is
    only the first, as in every run."""
    last = min(plan.start + 1 + plan.staleness, plan.iterations)
    if last == plan.start + 1:
        return ""
    return (
        f"responses of iterations {plan.start + 1} to {last} are of policy {plan.start} (rollout.staleness)\n"
    )


def _nothing_waits(run: Run) -> str:
    """Say that a fork learns from none of the groups that its parent left; nothing where none may be left."""
    if not run.config.is_refilled or not run.config.rollout.carry:
        return ""
    return f"no groups wait for iteration {run.plan.start + 1} (rollout.carry)\n"


def fork_run(source: str, root: Path, overrides: Sequence[str], config_dir: Path | None) -> str:
    """Make a run that goes on from a policy of another. Returns what to say."""
    from pipeline.orchestrate.fork import find_parent, fork, fork_config
    from pipeline.run.copies import check_is_vacant

    check_is_vacant(root)
    parent = find_parent(source)
    found, forecast = Findings(), Forecast()
    config = fork_config(parent, root, overrides, config_dir, found)
    check(config, found, Path(parent.run.identity.folder), parent.number, forecast)
    run = fork(parent, config)
    write_forecast(run.paths, forecast)
    word = "submit" if config.slurm else "resume"
    return (
        f"forked from {parent}; the fork begins with iteration {parent.number + 1} of {config.iterations}\n"
        f"{_fill(run.plan)}"
        f"{_nothing_waits(run)}"
        f"  start it:  slurm-ppo {word} {shlex.quote(str(run.paths.root))}"
    )


# --- on this machine, or in an allocation: the process that a person started drives until the end ---


def carry_on(run: Run, executor: Processes, lease: Lease | None = None, patience: float = 0.0) -> int:
    """Drive the run on this machine until it ends. Returns the exit code.

    Args:
        lease: held since the run was made; None: it is taken now.
        patience: seconds to wait for another driver that may be about to end.
    """
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    begun = time.time()
    try:
        done = drive(run, executor, watcher, lease, patience)
        tell_of_pass(run, done, begun, watcher.note)
    except (LeaseHeld, LeaseLost):
        raise  # another driver goes on
    except Exception as error:  # notify of any error: the run has stopped
        tell(run, breakdown(run, error, begun), watcher.note)
        raise
    finally:
        watcher.close()
    return say_how_it_ended(run, done, f"interrupted; to continue: {resume_command(run)}")


def local_executor(config: Config) -> Processes:
    """Make an executor of processes of this machine, which run
    :func:`stages.workers.start.serve`, or of job steps.

    Raises:
        ConfigError: the training libraries are not installed, a task needs more GPUs than there are, or more
            than the allocation has.
    """
    if isinstance(config.scheduler, AllocationConfig):
        return allocation_executor(config)
    needed = [*["torch", "transformers", "deepspeed"] * uses_torch(config), *["vllm"] * uses_vllm(config)]
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"scheduler.kind=local runs tasks on this machine, which lacks {', '.join(missing)}; "
            "install them with: pip install 'slurm-ppo[train]'"
        )
    limits = local_limits(config)
    os.environ.update(TASK_ENVIRONMENT)
    return Processes("stages.workers.start:serve", modules_to_preload(config, fork_hazard()), limits)


def modules_to_preload(config: Config, hazard: str) -> list[str]:
    """Return the modules that the server which tasks are forked from imports.

    Args:
        hazard: why libraries would initialise CUDA in that server, so that no task could use a GPU: it
            imports none of them then. Empty: they would not.
    """
    modules = ["stages.preload"]
    if hazard:
        return modules
    if uses_torch(config):
        modules += ["stages.preload.models", *model_modules(config)]
    if uses_vllm(config):
        modules.append("stages.preload.vllm")
    if config.scheduler.num_update_ranks > 1:
        modules.append("stages.ranks")  # ranks meet by a store of torch's
    return modules


def model_modules(config: Config) -> list[str]:
    """Return the modules that define the run's models, to be imported once instead of in every task."""
    rewards = [c.path for c in config.reward.components.values() if isinstance(c, RewardModelConfig)]
    teachers = [teacher.path for teacher in config.reward.teachers.values()]
    kinds = set()
    for directory in (config.model.policy, *rewards, *teachers):
        kind = json.loads((Path(directory) / "config.json").read_text()).get("model_type", "")
        if kind.isidentifier():
            kinds.add(kind)
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]
