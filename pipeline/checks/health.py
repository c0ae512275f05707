"""Checks of the run: what advances it, what crashes left behind, whether its commits stand."""

import contextlib
import functools
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.checks.finding import Check, CheckGroup, Finding, ok, problem, skipped, warning
from pipeline.checks.workers import check_jobs, check_workers
from pipeline.config.resolve import missing_paths
from pipeline.orchestrate.row_writer import differing
from pipeline.run import journal
from pipeline.run.benchmarks import in_words as measured_in_words
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, check_sizes, require_record
from pipeline.run.control import read_control, spoilt_control
from pipeline.run.directory import Run
from pipeline.run.endings import BY_EVIDENCE, Ending, read_endings, spoilt_endings
from pipeline.run.identity import version
from pipeline.run.lease import holder_of
from pipeline.run.losses import find_damage
from pipeline.run.place import original_of
from pipeline.run.plan import policy_maker, state_of, unique
from pipeline.run.records import Frontier, Records, find_frontier, newest_row
from pipeline.run.retention import in_words
from pipeline.run.standpoint import to_resume
from pipeline.run.states import has_state, keeps_state, state_before
from pipeline.run.tasks import PREPARE, Stage, Task, parse_task
from pipeline.status.journal_end import how_it_stopped, troubles_in_words
from pipeline.status.snapshot import read_status
from pipeline.text import printable, size
from slurm.sharedfiles import from_json, is_there, names_in, read_newest

_PRIVATE = re.compile(r"\..+\.(\d+)(\.[0-9a-f]{8})?")
"""Names under which files are written before they are published; see pipeline.run.durable."""
_ORPHAN_SECONDS = 3600.0
"""Seconds after which a private file has lost its writer, which needs moments only."""
_MOST_NAMED = 3
LOST = "was lost"
NOT_DUE = "was not due (update.save_every)"
_READ_SECONDS = 60.0
_HASH_SECONDS = 900.0
"""Seconds to hash a policy of 140 GB from a slow file server."""


def health_checks(run: Run) -> list[Check]:
    """Return the checks of a run on disk."""
    place = str(run.paths.root)
    looks: dict[str, Callable[[Run], Finding | Iterable[Finding]]] = {
        "version": check_version,
        "identity": check_identity,
        "inputs": check_inputs,
        "driver": check_driver,
        "troubles": check_troubles,
        "journals": check_journals,
        "commits at hand": check_commits,
        "last policy": check_last_policy,
        "trainer's state": check_state,
        "attempts": check_attempts,
        "benchmarks": check_benchmarks,
        "left-overs": check_leftovers,
    }
    limits = {"last policy": _HASH_SECONDS}
    checks = [
        Check(CheckGroup.RUN, title, functools.partial(look, run), limits.get(title, _READ_SECONDS), place)
        for title, look in looks.items()
    ]
    if run.config.slurm:
        checks.append(Check(CheckGroup.RUN, "requests", lambda: check_requests(run), _READ_SECONDS, place))
        checks.append(Check(CheckGroup.RUN, "jobs", lambda: check_jobs(run), _READ_SECONDS, "Slurm"))
        checks.append(Check(CheckGroup.RUN, "workers", lambda: check_workers(run), _READ_SECONDS, "Slurm"))
    return checks


def check_version(run: Run) -> Finding:
    began, here = run.identity.version, version()
    if began == here:
        return ok("version", f"{here}, as when the run began")
    advice = "go on with the version that it began with, or compare the rows before and after"
    return warning("version", f"{here} here, the run began with {began}", advice)


def check_identity(run: Run) -> Finding:
    """Look at what identifies the run, which is kept twice, and at whether it is a copy."""
    names, paths = names_in(run.paths.root), run.paths
    if original := original_of(run):
        facts = f"a copy of {original}, whose jobs and run on W&B are the original's"
        return ok("identity", f"{facts}; it gets an id of its own once it goes on")
    gone = [path.name for path in (paths.run_json, paths.config_yaml) if path.name not in names]
    if gone:
        facts = f"{' and '.join(gone)}: gone, and read from the copy"
        return warning(
            "identity", facts, "nothing to do: the next driver writes it again; what removes files?"
        )
    return ok("identity", f"{run.identity.name}, id {run.identity.id}")


def check_inputs(run: Run) -> Finding:
    missing = list(missing_paths(run.config))
    if not missing:
        return ok("inputs", "models, prompts and other files of the settings are there")
    facts = "; ".join(f"{p.key}={p.value} {p.why}" for p in missing[:_MOST_NAMED])
    return problem("inputs", facts, "put them back where they were: settings of a run are frozen")


def check_troubles(run: Run) -> list[Finding]:
    """Look for failures of drivers that are not overcome yet, and for rows that are missing at the end."""
    found = list(troubles_in_words(journal.read_events(run.paths.events)))
    frontier = find_frontier(run.plan, run.paths)
    newest = newest_row(journal.read_tail(run.paths.metrics), run.plan.start)
    lacks_rows = frontier.is_committed(run.plan) and newest < run.plan.iterations
    if not found and lacks_rows and not holder_of(run.paths.locks):
        found = [f"everything is committed, but {run.plan.iterations - newest} rows are not written"]
    advice = f"fix that; the next driver tries again, or: {to_resume(run)}"
    fine = ok("troubles", "every driver did what it had to do")
    return [problem("troubles", words, advice) for words in found] or [fine]


def check_benchmarks(run: Run) -> Finding:
    """Look for policies that evaluate.command has given no numbers of."""
    total = len(run.plan.benchmarks())
    if not total:
        return skipped("benchmarks", "evaluate.command is not set")
    measured = read_measured(run.paths)
    facts = printable(measured_in_words(measured, len(measured), total))
    missing = [one.policy_version for one in measured if one.missing]
    if not missing:
        return ok("benchmarks", facts)
    log = f"slurm-ppo logs {shlex.quote(str(run.paths.root))} {Stage.BENCHMARK}@{missing[-1]}"
    back = to_resume(run, f"--from {Stage.BENCHMARK}@{missing[0]}")
    return warning("benchmarks", facts, f"its log: {log}; to measure again from one on: {back}")


def check_driver(run: Run) -> Finding:
    holder, control = holder_of(run.paths.locks), read_control(run.paths)
    if original := original_of(run):
        return ok("driver", f"none: it is a copy of {original}, whose lease was copied too")
    asked = "; cancelled by a person" if control.cancelled else "; failed" if control.has_failed else ""
    asked = f"; {control.paused.in_words}, so the run pauses" if control.paused else asked
    if holder and "cannot be read" in holder:
        return warning("driver", holder, "nothing to do: the next driver waits for that")
    if holder:
        return ok("driver", holder.partition(" (")[0] + asked)
    # Driver jobs of a run on Slurm come and go without an event in the journal.
    last = None if run.config.slurm else how_it_stopped(journal.read_events(run.paths.events))
    return ok("driver", "none is running" + (f"; the last one: {last}" if last else "") + asked)


def check_requests(run: Run) -> Finding:
    """Look at the two files that say what people asked of the run. Raises SpoiltControl."""
    read_control(run.paths)
    if why := spoilt_control(run.paths):
        return warning("requests", why, "nothing to do: the next driver job writes it again")
    return ok("requests", "both files of people's requests say the same")


def check_journals(run: Run) -> Iterator[Finding]:
    for path, rewrites in ((run.paths.events, False), (run.paths.metrics, True)):
        if is_there(path):
            yield judge_journal(path.name, read_newest(path), rewrites)
    if wrong := differing(run.paths, run.plan.start + 1):
        facts = f"row {in_words(wrong)} is not what was published in rows/, or that is corrupt"
        yield problem("rows", facts, f"it is written again by: {to_resume(run)}")


def judge_journal(name: str, content: bytes, is_rewritten: bool) -> Finding:
    """Judge a journal by lines that a crash has cut. Pure."""
    lines = content.split(b"\n")
    open_end = bool(lines.pop())
    cut = sum(not _is_row(line) for line in lines if line) + open_end
    facts = f"{len(lines)} lines, {size(len(content))}"
    if not cut:
        return ok(name, facts, lines=len(lines), cut=0)
    how = "the next driver restores them" if is_rewritten else "readers pass over them"
    return warning(name, f"{facts}, {cut} cut by a crash", f"nothing to do: {how}", lines=len(lines), cut=cut)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(from_json(line), dict)
    except ValueError:
        return False


def check_commits(run: Run) -> Finding:
    """Check records of the iterations at hand, and sizes of what they name; contents are hashed when read."""
    frontier = find_frontier(run.plan, run.paths)
    records = Records(run.paths)
    records.refresh(tasks_around(run, frontier))
    if records.corrupt:
        first = "; ".join(list(records.corrupt.values())[:_MOST_NAMED])
        advice = f"they are moved aside and computed again by: {to_resume(run)}"
        return problem("commits at hand", f"{len(records.corrupt)} do not stand: {first}", advice)
    looked, done = len(records.known), max(frontier.updated, run.plan.start)
    facts = f"{done} of {run.plan.iterations} iterations are done; {looked} records looked at, all stand"
    return ok("commits at hand", facts, records=looked)


def check_last_policy(run: Run) -> Finding:
    """Hash the last policy of a trained run: no later task reads it, so none would find it damaged."""
    updated = find_frontier(run.plan, run.paths).updated
    if updated < run.plan.iterations:
        return skipped("last policy", "the run is not at its end; tasks verify what they read")
    if found := find_damage(run.plan, run.paths, updated):
        return problem("last policy", found.why, f"it is moved aside and made again by: {to_resume(run)}")
    return ok("last policy", "it has the hashes that it was committed with")


def check_state(run: Run) -> Finding:
    """Check sizes of the trainer's newest state, with which the next update would begin. One that was lost is
    made again, and at a run's end nothing needs it."""
    title, plan, paths = "trainer's state", run.plan, run.paths
    newest = find_frontier(plan, paths).updated
    update = Records(paths).readable(policy_maker(newest)) if newest > plan.start else None
    if update is None or not keeps_state(update):
        return skipped(title, "no update that keeps one is committed yet")
    if has_state(paths, newest):
        try:
            check_sizes(paths, update if update.holds_state else require_record(paths, state_of(newest)))
        except CorruptData as error:
            advice = f"it is moved aside, and learned again by the next update, after: {to_resume(run)}"
            return warning(title, str(error), advice)
        return ok(title, f"that of iteration {newest} stands")
    facts = NOT_DUE if update.skips_state else fate(run)
    return judge_lost_state(newest, state_before(plan, paths, newest), newest == plan.iterations, facts)


def fate(run: Run) -> str:
    """Say what became of the newest promised state, which is not there."""
    missing = read_status(run).missing_state
    if missing is None:
        return "is not there: it is being written, or was lost"
    by = f" ({missing.writer})" if missing.writer else ""
    return LOST if missing.is_lost else f"is being written{by}"


def judge_lost_state(newest: int, before: int | None, is_last: bool, fate: str) -> Finding:
    """Judge a promised state that is not there. Pure.

    Args:
        before: version whose state is there, from which learning can get to ``newest``.
        is_last: whether no update follows.
        fate: what became of it, in words.
    """
    facts = f"that of iteration {newest} {fate}"
    if is_last:
        return ok("trainer's state", f"{facts}; no update follows that needs it")
    if before is None:
        advice = "restore one from a backup, or fork or go back to an iteration that has one"
        return problem("trainer's state", f"{facts}, and none that it could be made again from", advice)
    again = {
        LOST: "the next update learns it again",
        NOT_DUE: "the trainer has it in memory, or the next update learns it again",
    }.get(fate, "if lost, the next update learns it again")
    return ok("trainer's state", f"{facts}; {again} from iteration {before}")


def tasks_around(run: Run, frontier: Frontier) -> tuple[Task, ...]:
    """Return the tasks at hand, what they read, and those of the last iteration that is done."""
    plan = run.plan
    window = frontier.window(plan)
    last = plan.tasks(max(frontier.updated, plan.start)) if frontier.updated > plan.start else ()
    return unique(PREPARE, *last, *window, *(source for task in window for source in plan.inputs(task)))


def check_leftovers(run: Run) -> Finding:
    frontier = find_frontier(run.plan, run.paths)
    folders = {run.paths.task(task).folder for task in tasks_around(run, frontier)}
    folders |= {run.paths.root, run.paths.locks, run.paths.slurm, run.paths.policies}
    folders |= {run.paths.task(state_of(max(frontier.updated, 0))).folder}
    last = frontier.updated + 1 + run.plan.staleness
    folders |= {run.paths.submissions(i) for i in (0, *range(frontier.updated, last + 1))}
    found = list(orphans(folders, time.time()))
    if not found:
        return ok("left-overs", "no private file of a writer that was killed")
    names = ", ".join(run.paths.relative(path) for path in found[:_MOST_NAMED])
    facts = f"{len(found)} private files of writers that were killed: {names}"
    total = size(sum(path.lstat().st_size for path in found))
    advice = "they are not read; they may be removed"
    return warning("left-overs", f"{facts} ({total})", advice, files=len(found))


def orphans(folders: Iterable[Path], now: float) -> Iterator[Path]:
    """Find private files whose writers are gone."""
    for folder in sorted(folders):
        for path in sorted(folder / name for name in names_in(folder) if _PRIVATE.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):  # its writer lives, and has just removed it
                if now - path.lstat().st_mtime > _ORPHAN_SECONDS:
                    yield path


def check_attempts(run: Run) -> Finding:
    """Look at attempts that failed at the tasks at hand."""
    iterations = {task.iteration for task in find_frontier(run.plan, run.paths).window(run.plan)}
    if spoilt := spoilt_endings(run.paths, iterations):
        advice = "nothing to do: the next driver writes it again, or looks again at why attempts ended"
        return warning("attempts", spoilt, advice)
    endings = read_endings(run.paths, iterations).values()
    return judge_attempts([ending for ending in endings if ending.is_failure])


def judge_attempts(failed: Sequence[Ending]) -> Finding:
    """Say how attempts at the tasks at hand failed. Pure."""
    if not failed:
        return ok("attempts", "no attempt of current tasks is known to have failed")
    counts = ", ".join(
        f"{count} {kind}" for kind, count in Counter(str(e.kind) for e in failed).most_common()
    )
    last = max(failed, key=lambda ending: ending.time)
    by = f", {BY_EVIDENCE[last.evidence]}" if last.evidence else ""
    task = f"{parse_task(last.task)}, attempt {last.number} ({last.kind}{by})"
    said = printable(" ".join(last.message.split()))
    return ok("attempts", f"failed attempts of current tasks: {counts}; the last: {task}: {said}")
