"""Disk that a run needs, by its models' file headers or its last iteration, and the room for it."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.checks.finding import Check, CheckGroup, Finding, Verdict, ok, problem, skipped, warning
from pipeline.checks.running import scratch
from pipeline.config.algorithm import Estimator
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.model_files import text_settings
from pipeline.config.routing_rules import experts_per_token_in, num_experts_in
from pipeline.config.schema import Config
from pipeline.config.update import Precision, TrainingEngine, UpdateConfig
from pipeline.forecast.shapes import num_adapted, num_parameters
from pipeline.run.ages import ages_of, files_below, in_words
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.packing import MANY
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records, find_frontier
from pipeline.run.retention import kept_last, list_folders
from pipeline.run.states import versions_with_state
from pipeline.run.tasks import Stage
from pipeline.text import size

WRITING = "room to write"
"""Gate of the checks of files, which are tried out only where any can be made."""
_WRITTEN_BYTES = 8 << 20
_LITTLE_BYTES = 1 << 30
_LITTLE_FILES = 10_000
_NOTHING_BYTES = 64 << 20
_NOTHING_FILES = 100
_TIGHT_SHARE = 0.8
_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2}
_FP32 = 4
_MOMENTS = 2
_TOKEN_BYTES = 24
"""Bytes on disk for a token: id, mask, two log-probabilities, and its text twice."""
_TOP_BYTES = 8
"""Bytes of a token that a teacher finds likely: its id and log-probability."""
_SPARING_STATES = 5
"""Interval of states (update.save_every) above which the policies between them take more than they spare."""
_EXPERTS_OF_A_BYTE = 256
_FILES_OF_STATE = 12
"""Files of a policy, critic or trainer state: weights, settings, tokenizer."""
_FILES_OF_ITERATION = 45
"""Files and folders of an iteration beside those of its shards: update, evaluation, row, submissions, their
logs."""
_FILES_OF_PACKED = 20
"""Most files and folders of an iteration that is packed."""


@dataclass(frozen=True)
class Footprint:
    """Size on disk, in bytes and files."""

    num_bytes: int
    files: int

    def times(self, factor: int) -> "Footprint":
        return Footprint(self.num_bytes * factor, self.files * factor)

    def plus(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_bytes + other.num_bytes, self.files + other.files)


@dataclass(frozen=True)
class VersionCounts:
    """Numbers of policies and of trainers' states."""

    policies: int
    states: int

    def less(self, other: "VersionCounts") -> "VersionCounts":
        return VersionCounts(max(0, self.policies - other.policies), max(0, self.states - other.states))


# --- the estimate, and its judgement ---


@dataclass(frozen=True)
class DiskEstimate:
    """Disk space that a run will still use, net of what it will remove."""

    policy: Footprint
    """Weights that one iteration commits."""
    state: Footprint
    """A trainer's state: optimizer, and critic."""
    shards: Footprint
    """Everything else of one iteration; where it is not measured, with the longest responses."""
    iterations_left: int
    more: VersionCounts
    """Largest number of both at once, less those that are there now."""
    is_measured: bool
    """Whether it is from an iteration that is done, not from the size of the models."""
    iterations_packed: int = 0
    """Number of ``iterations_left`` that will be packed; see ``update.keep_shards_last``."""
    way_out: str = "keep fewer states (update.keep_last=N), or choose another filesystem"

    @property
    def states(self) -> Footprint:
        return self.policy.times(self.more.policies).plus(self.state.times(self.more.states))

    @property
    def needed(self) -> Footprint:
        spared = Footprint(0, min(0, _FILES_OF_PACKED - self.shards.files)).times(self.iterations_packed)
        return self.states.plus(self.shards.times(self.iterations_left)).plus(spared)


def estimate(config: Config, start: int = 0, run: Run | None = None) -> DiskEstimate:
    """Estimate what a run will still write. Raises ConfigError where a model's files cannot be read.

    Args:
        start: number of iterations that a fork has from its parent.
        run: the run, where it is on disk: its last iteration is measured.
    """
    update = config.update
    done = max(find_frontier(run.plan, run.paths).updated, start) if run else start
    left = config.iterations - done
    most = most_kept(config.iterations - start, kept_last(config), update.keep_every, update.save_every)
    more = most.less(kept_now(run)) if run else most
    measured = measure(run, done) if run and done > start else None
    packed = packed_of(left, update.keep_shards_last)
    sizes = measured or imagine(config)
    return DiskEstimate(
        *sizes, left, more if left else VersionCounts(0, 0), measured is not None, packed, _way_out(update)
    )


def judge_need(given: DiskEstimate, free: int, inodes: int | None) -> Finding:
    """Judge the need against what is free. Bytes of shards that were not measured are no problem, as
    responses may be shorter than the longest; their number of files is known. Pure."""
    if not given.iterations_left:
        return skipped("disk", "no iteration is left")
    need, states = given.needed, given.states.num_bytes
    facts = (
        f"{size(states)} of policies ({given.more.policies} x {size(given.policy.num_bytes)}) and trainer "
        f"states ({given.more.states} x {size(given.state.num_bytes)})"
    )
    numbers = {"need_bytes": float(need.num_bytes), "need_files": float(need.files)}
    if states > free:
        return problem("disk", f"{facts}, and only {size(free)} are free there", given.way_out, **numbers)
    about = "about" if given.is_measured else "at most"
    facts += f", {about} {size(need.num_bytes - states)} of shards, {need.files} files; {size(free)} are free"
    share = max(need.num_bytes / max(free, 1), 0 if inodes is None else need.files / max(inodes, 1))
    if given.is_measured and share > 1:
        return problem("disk", facts, given.way_out, **numbers)
    if inodes is not None and need.files > inodes:
        advice = f"pack shards (update.keep_shards_last), or {given.way_out}"
        return problem("disk", f"{facts}, and only {inodes} inodes", advice, **numbers)
    if share > _TIGHT_SHARE:
        full = "be full" if share > 1 else "be nearly full"
        longest = "" if given.is_measured else "with the longest responses "
        return warning("disk", facts, f"{longest}the disk would {full}; {given.way_out}", **numbers)
    return ok("disk", facts, **numbers)


def check_disk(config: Config, start: int = 0) -> Iterator[str]:
    """Compare what a new run writes with what is free in its place. Yields lines for people. Raises
    ConfigError where it does not fit; see :func:`estimate`."""
    found = judge_need(estimate(config, start), *room(existing_folder(Path(config.run_dir))))
    if found.verdict is Verdict.PROBLEM:
        why = f"needs {found.measured}; {found.advice}"
        raise ConfigError(str(ConfigIssue("run_dir", config.run_dir, why)))
    if found.verdict is Verdict.WARNING:
        yield f"warning: run_dir: {found.advice}"
    yield f"disk: {found.measured}"


def _way_out(update: UpdateConfig) -> str:
    fewer = []
    if update.keep_last is None or update.keep_last > 2:
        fewer.append("update.keep_last=2")
    if update.save_every > _SPARING_STATES:
        fewer.append("update.save_every=2")
    if update.keep_every is not None:
        fewer.append("update.keep_every=null")
    keep = f"keep fewer ({' '.join(fewer)}), or " if fewer else "train adapters only (update.lora), or "
    return f"{keep}give run_dir another place"


# --- models and iterations ---


def most_kept(
    iterations: int, keep_last: int | None, keep_every: int | None, save_every: int
) -> VersionCounts:
    """Return the largest numbers of policies and trainers' states that are on disk at once: of the newest,
    with all policies after the older of two states, and of older iterations that ``keep_every`` divides. The
    newest is written before the oldest goes. Pure."""
    if keep_last is None:
        return VersionCounts(iterations, math.ceil(iterations / save_every))
    last = max(keep_last, 2 * save_every)
    older = max(0, iterations - last - 1) // keep_every if keep_every else 0
    policies = min(iterations, last + 1 + older)
    states = min(last // save_every + 1, iterations // save_every) + older
    # Those of keep_every and of the last iteration are saved out of turn.
    if keep_every and keep_every % save_every:
        states += last // keep_every + 1
    states += iterations % save_every > 0 or (keep_every or 0) % save_every > 0
    return VersionCounts(policies, min(policies, states))


def kept_now(run: Run) -> VersionCounts:
    """Count the policies and states of a run's own iterations that are on disk."""
    own = [folders for version, folders in list_folders(run.paths).items() if version > run.plan.start]
    parents = [{folder.split("/")[0] for folder in folders} for folders in own]
    return VersionCounts(
        sum("policy" in each for each in parents),
        sum("trainer" in each or "state" in each for each in parents),
    )


def imagine(config: Config) -> tuple[Footprint, Footprint, Footprint]:
    """Estimate an iteration's policy, state and shards, from the models' weights and the longest responses.

    With update.lora the policy that is committed is the adapter, in fp32.
    """
    update = config.update
    policy = num_parameters(Path(config.model.policy))
    has_critic = config.algorithm.estimator is Estimator.GAE
    critic = num_parameters(Path(config.model.critic or config.model.policy)) if has_critic else 0
    width, copies = _BYTES[update.precision], _MOMENTS + (update.precision is not Precision.FP32)
    weights, state = policy * width, critic * width + (policy + critic) * _FP32 * copies
    if update.lora is not None:
        adapter = num_adapted(Path(config.model.policy), update.lora)
        weights = adapter * _FP32
        state = critic * (width + _FP32 * copies) + adapter * _FP32 * (1 + _MOMENTS)
    if update.engine != TrainingEngine.DEEPSPEED:
        # What else a trainer of the user's keeps is not known, and it writes whole models.
        weights, state = policy * width, critic * width
    if config.algorithm.kl.averages:  # one beside every Nth policy
        weights += policy * _FP32 // config.algorithm.kl.sync_interval
    waiting = config.responses_per_update if config.is_refilled and config.rollout.carry else 0
    tokens = (config.model.context_length or 0) * (config.responses_per_iteration + waiting)
    files = files_of(config.rollout.num_shards * (2 + len(config.reward.pools)))
    shards = Footprint(tokens * token_bytes(config), files)
    return Footprint(weights, _FILES_OF_STATE), Footprint(state, 2 * _FILES_OF_STATE), shards


def token_bytes(config: Config) -> int:
    """Return the bytes on disk of a token, at most, in all shards of an iteration."""
    found, given = _TOKEN_BYTES, config.algorithm
    # In the scores of a teacher's pool, and in the rewards.
    found += (given.distillation.top_k or 0) * _TOP_BYTES * (1 + bool(config.reward.pools))
    if given.router_replay:
        settings = text_settings(Path(config.model.policy))
        each = 1 if num_experts_in(settings) <= _EXPERTS_OF_A_BYTE else 2
        found += each * (settings.get("num_hidden_layers") or 0) * experts_per_token_in(settings)
    return found


def files_of(tasks: int) -> int:
    """Return the files and folders of an iteration that is not packed, but for policy and trainer's state.
    Pure.

    Args:
        tasks: number of its tasks that each do a shard: their data, records and, where they are few, logs.
    """
    return tasks * (2 if tasks >= MANY else 3) + _FILES_OF_ITERATION


def packed_of(left: int, keep_shards_last: int | None) -> int:
    """Count how many of the iterations that are left will be packed. Pure."""
    # The newest is written before the oldest of those that stay is packed.
    return 0 if keep_shards_last is None else max(0, left - keep_shards_last - 1)


def measure(run: Run, iteration: int) -> tuple[Footprint, Footprint, Footprint] | None:
    """Measure policy, state and shards of an iteration that is done, by its commit records. A trainer that
    commits its state with the policy has none of its own; one that has saved none yet is estimated.

    Raises:
        ConfigError: it is to be estimated, and a model's files cannot be read.
    """
    records = Records(run.paths)
    tasks = run.plan.tasks(iteration)
    newest_state = state_of(next(versions_with_state(run.paths), iteration))
    records.refresh([*tasks, newest_state])
    found = [record for task in tasks if (record := records.readable(task))]
    update = next((record for record in found if record.task == policy_maker(iteration)), None)
    if update is None:
        return None
    others = sum(footprint(record).num_bytes for record in found if record.task.stage is not Stage.UPDATE)
    shards = Footprint(others, files_of(sum(task.stage.is_sharded for task in tasks)))
    if (saved := records.readable(newest_state)) is not None:
        return footprint(update), footprint(saved), shards
    state = Footprint(0, 0) if update.holds_state else imagine(run.config)[1]
    return footprint(update), state, shards


def footprint(record: Record) -> Footprint:
    return Footprint(sum(entry.bytes for entry in record.outputs), len(record.outputs))


# --- room ---


def existing_folder(path: Path) -> Path:
    """Return the path or its nearest parent that exists, on whose filesystem it will be."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def room(folder: Path) -> tuple[int, int | None]:
    """Return bytes and inodes that are free for this user; None where the filesystem counts no inodes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def space_checks(folder: Path, run: Run | None, exists: bool, is_reader: bool = False) -> list[Check]:
    """Return the checks of the run directory's folder, and of those that libraries write to.

    Args:
        is_reader: whether the run is another user's, and this one may only read it.
    """
    place = str(folder)

    def need() -> Finding:
        assert run is not None
        found = estimate(run.config, run.plan.start, run if exists else None)
        return judge_need(found, *room(folder))

    return [
        _space_check("run directory", folder),
        _only_read(folder)
        if is_reader
        else Check(CheckGroup.SPACE, "writing", lambda: check_writing(folder), 30, place, gate=WRITING),
        *([Check(CheckGroup.SPACE, "disk", need, place=place)] if run else []),
        *([Check(CheckGroup.SPACE, "ages", lambda: check_ages(run), 60, place)] if run and exists else []),
        _space_check("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp")),
        _space_check("HOME", Path.home()),
    ]


def _only_read(folder: Path) -> Check:
    """Return the check for who may read a run, and not write to it: nothing is tried out there."""
    facts = f"you may read {folder}, and not write: what needs files there is for its owner to try"
    return Check(CheckGroup.SPACE, "writing", lambda: skipped("writing", facts))


def _space_check(title: str, folder: Path) -> Check:
    place = str(folder)
    return Check(CheckGroup.SPACE, title, lambda: judge_space(title, place, *room(folder)), place=place)


def judge_space(title: str, folder: str, free: int, inodes: int | None) -> Finding:
    """Judge whether anything can be written at all. Pure."""
    files = "inodes not counted" if inodes is None else f"{inodes} inodes free"
    facts = f"{folder}: {size(free)} free, {files}"
    numbers = {"free_bytes": float(free)} | ({} if inodes is None else {"free_inodes": float(inodes)})
    advice, left = "make room there, or choose another folder", math.inf if inodes is None else inodes
    if free < _NOTHING_BYTES or left < _NOTHING_FILES:
        return problem(title, facts, advice, **numbers)
    if free < _LITTLE_BYTES or left < _LITTLE_FILES:
        return warning(title, facts, advice, **numbers)
    return ok(title, facts, **numbers)


def check_writing(folder: Path) -> Finding:
    """Write a file: a quota shows only here, what is free is of the whole filesystem."""
    try:
        with scratch(folder) as place:
            started = time.perf_counter()
            with (place / "file").open("wb") as file:
                file.write(os.urandom(_WRITTEN_BYTES))
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        advice = "make room, ask for more quota, or choose a folder that you may write to"
        return problem("writing", f"{size(_WRITTEN_BYTES)} in {folder}: {error.strerror}", advice)
    rate = _WRITTEN_BYTES / seconds
    return ok("writing", f"{size(_WRITTEN_BYTES)} in {seconds:.2f} s ({size(rate)}/s)", bytes_per_second=rate)


def check_ages(run: Run) -> Finding:
    """Look at every file of a run for those that the site is about to remove."""
    days = run.config.storage.purge_days
    found = ages_of(files_below(run.paths.root), days or math.inf, time.time())
    facts = f"the oldest file of the run was not used for {found.days:.0f} days"
    if days is None:
        return ok("ages", f"{facts}; storage.purge_days is not set: nothing is taken to be removed")
    if not found.count:
        return ok("ages", f"{facts}; files are removed after {days}")
    return warning(
        "ages", in_words(found, run, days), "copy the run, or let it go on: see docs/howto/disk_space.md"
    )
