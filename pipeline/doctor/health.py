"""Checks of the run: who is at work on it, what crashes left behind, whether its commits stand."""

import contextlib
import functools
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.config.job_kinds import DRIVERS
from pipeline.config.resolve import missing_paths
from pipeline.doctor.attempts import look_at_attempts
from pipeline.doctor.findings import Check, Finding, Group, ok, problem, skipped, warning
from pipeline.doctor.workers import look_at_workers
from pipeline.executors.slurm.queue import Queue, ask_for_queue
from pipeline.orchestrate.row_writer import differing
from pipeline.run import journal
from pipeline.run.benchmarks import in_words as measured_in_words
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, check_sizes, require_record
from pipeline.run.control import read_control, spoilt_control
from pipeline.run.directory import Run
from pipeline.run.identity import version
from pipeline.run.lease import holder_of
from pipeline.run.lineage import find_damage
from pipeline.run.place import original_of
from pipeline.run.plan import policy_maker, state_of, unique
from pipeline.run.records import Frontier, Records, find_frontier, newest_row
from pipeline.run.retention import in_words
from pipeline.run.standpoint import to_resume
from pipeline.run.states import has_state, keeps_state, state_before
from pipeline.run.submissions import job_kind_of
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.journal_end import how_it_stopped, troubles_in_words
from pipeline.status.snapshot import is_complete, read_status
from pipeline.status.state import Status
from pipeline.status.whose import in_words as whose_in_words
from pipeline.status.whose import next_step
from pipeline.text import printable, size
from pipeline.tracking.state import offline_lease, read_offline, segment_folders
from pipeline.workers.looking import PERSON_AGE
from slurm.commands import SlurmError, SlurmMissing
from slurm.query import Element
from slurm.sealing import from_json
from slurm.sharedfiles import is_there, names_in, read_newest
from slurm.states import Phase, UnknownState, phase_of

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
        "version": look_at_version,
        "identity": look_at_identity,
        "inputs": look_at_inputs,
        "driver": look_at_driver,
        "troubles": look_at_troubles,
        "journals": look_at_journals,
        "commits at hand": look_at_commits,
        "last policy": look_at_last_policy,
        "trainer's state": look_at_state,
        "attempts": look_at_attempts,
        "benchmarks": look_at_benchmarks,
        "left-overs": look_at_leftovers,
        "W&B segments": look_at_segments,
    }
    limits = {"last policy": _HASH_SECONDS}
    checks = [
        Check(Group.RUN, title, functools.partial(look, run), limits.get(title, _READ_SECONDS), place)
        for title, look in looks.items()
    ]
    if run.config.slurm:
        checks.append(Check(Group.RUN, "requests", lambda: look_at_requests(run), _READ_SECONDS, place))
        checks.append(Check(Group.RUN, "jobs", lambda: look_at_jobs(run), _READ_SECONDS, "Slurm"))
        checks.append(Check(Group.RUN, "workers", lambda: look_at_workers(run), _READ_SECONDS, "Slurm"))
    return checks


def look_at_version(run: Run) -> Finding:
    began, here = run.identity.version, version()
    if began == here:
        return ok("version", f"{here}, as when the run began")
    advice = "go on with the version that it began with, or compare the rows before and after"
    return warning("version", f"{here} here, the run began with {began}", advice)


def look_at_identity(run: Run) -> Finding:
    """Look at what identifies the run, which is kept twice, and at whether it is a copy."""
    names, paths = names_in(run.paths.root), run.paths
    if original := original_of(run):
        told = f"a copy of {original}, whose jobs and run on W&B are the original's"
        return ok("identity", f"{told}; it gets an id of its own once it goes on")
    gone = [path.name for path in (paths.run_json, paths.config_yaml) if path.name not in names]
    if gone:
        told = f"{' and '.join(gone)}: gone, and read from the copy"
        return warning(
            "identity", told, "nothing to do: the next driver writes it again; what removes files?"
        )
    return ok("identity", f"{run.identity.name}, id {run.identity.id}")


def look_at_inputs(run: Run) -> Finding:
    missing = list(missing_paths(run.config))
    if not missing:
        return ok("inputs", "models, prompts and whatever else the settings name are there")
    told = "; ".join(f"{p.key}={p.value} {p.why}" for p in missing[:_MOST_NAMED])
    return problem("inputs", told, "put them back where they were: settings of a run are frozen")


def look_at_troubles(run: Run) -> list[Finding]:
    """Look for failures of drivers that are not overcome yet, and for rows that are missing at the end."""
    found = list(troubles_in_words(journal.read_events(run.paths.events)))
    frontier = find_frontier(run.plan, run.paths)
    newest = newest_row(journal.read_tail(run.paths.metrics), run.plan.start)
    lacks_rows = frontier.is_committed(run.plan) and newest < run.plan.iterations
    if not found and lacks_rows and not holder_of(run.paths.locks):
        found = [f"everything is committed, but {run.plan.iterations - newest} rows are not written"]
    advice = f"mend that; the next driver tries again, or: {to_resume(run)}"
    fine = ok("troubles", "every driver did what it had to do")
    return [problem("troubles", words, advice) for words in found] or [fine]


def look_at_benchmarks(run: Run) -> Finding:
    """Look for policies that evaluate.command has given no numbers of."""
    total = len(run.plan.benchmarks())
    if not total:
        return skipped("benchmarks", "evaluate.command is not set")
    measured = read_measured(run.paths)
    told = printable(measured_in_words(measured, len(measured), total))
    missing = [one.policy_version for one in measured if one.missing]
    if not missing:
        return ok("benchmarks", told)
    log = f"slurm-ppo logs {shlex.quote(str(run.paths.root))} {Stage.BENCHMARK}@{missing[-1]}"
    back = to_resume(run, f"--from {Stage.BENCHMARK}@{missing[0]}")
    return warning("benchmarks", told, f"its log: {log}; to measure again from one on: {back}")


def look_at_driver(run: Run) -> Finding:
    holder, control = holder_of(run.paths.locks), read_control(run.paths)
    if original := original_of(run):
        return ok("driver", f"none: it is a copy of {original}, whose lease was copied too")
    asked = "; cancelled by a person" if control.cancelled else "; failed" if control.has_failed else ""
    asked = f"; {control.paused.in_words}, so the run pauses" if control.paused else asked
    if holder and "cannot be read" in holder:
        return warning("driver", holder, "nothing to do: the next driver waits for that")
    if holder:
        return ok("driver", holder.partition(" (")[0] + asked)
    # Driver jobs of a run on Slurm come and go without a word in the journal.
    last = None if run.config.slurm else how_it_stopped(journal.read_events(run.paths.events))
    return ok("driver", "none is at work" + (f"; the last one: {last}" if last else "") + asked)


def look_at_requests(run: Run) -> Finding:
    """Look at the two files that say what people asked of the run. Raises SpoiltControl."""
    read_control(run.paths)
    if why := spoilt_control(run.paths):
        return warning("requests", why, "nothing to do: the next driver job writes it again")
    return ok("requests", "both files of people's requests say the same")


def look_at_journals(run: Run) -> Iterator[Finding]:
    for path, rewrites in ((run.paths.events, False), (run.paths.metrics, True)):
        if is_there(path):
            yield judge_journal(path.name, read_newest(path), rewrites)
    if wrong := differing(run.paths, run.plan.start + 1):
        told = f"row {in_words(wrong)} is not what was published in rows/, or that is spoilt"
        yield problem("rows", told, f"it is written again by: {to_resume(run)}")


def judge_journal(name: str, content: bytes, is_rewritten: bool) -> Finding:
    """Judge a journal by lines that a crash has cut. Pure."""
    lines = content.split(b"\n")
    open_end = bool(lines.pop())
    cut = sum(not _is_row(line) for line in lines if line) + open_end
    told = f"{len(lines)} lines, {size(len(content))}"
    if not cut:
        return ok(name, told, lines=len(lines), cut=0)
    how = "the next driver restores them" if is_rewritten else "readers pass over them"
    return warning(name, f"{told}, {cut} cut by a crash", f"nothing to do: {how}", lines=len(lines), cut=cut)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(from_json(line), dict)
    except ValueError:
        return False


def look_at_commits(run: Run) -> Finding:
    """Check records of the iterations at hand, and sizes of what they name; contents are hashed when read."""
    frontier = find_frontier(run.plan, run.paths)
    records = Records(run.paths)
    records.refresh(tasks_around(run, frontier))
    if records.corrupt:
        first = "; ".join(list(records.corrupt.values())[:_MOST_NAMED])
        advice = f"they are moved aside and computed again by: {to_resume(run)}"
        return problem("commits at hand", f"{len(records.corrupt)} do not stand: {first}", advice)
    looked, done = len(records.known), max(frontier.updated, run.plan.start)
    told = f"{done} of {run.plan.iterations} iterations are done; {looked} records looked at, all stand"
    return ok("commits at hand", told, records=looked)


def look_at_last_policy(run: Run) -> Finding:
    """Hash the last policy of a trained run: no later task reads it, so none would find it damaged."""
    updated = find_frontier(run.plan, run.paths).updated
    if updated < run.plan.iterations:
        return skipped("last policy", "the run is not at its end; tasks verify what they read")
    if found := find_damage(run.plan, run.paths, updated):
        return problem("last policy", found.why, f"it is moved aside and made again by: {to_resume(run)}")
    return ok("last policy", "it has the hashes that it was committed with")


def look_at_state(run: Run) -> Finding:
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
            advice = f"it is moved aside, and learnt again by the next update, after: {to_resume(run)}"
            return warning(title, str(error), advice)
        return ok(title, f"that of iteration {newest} stands")
    told = NOT_DUE if update.skips_state else fate(run)
    return judge_lost_state(newest, state_before(plan, paths, newest), newest == plan.iterations, told)


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
    told = f"that of iteration {newest} {fate}"
    if is_last:
        return ok("trainer's state", f"{told}; no update follows that needs it")
    if before is None:
        advice = "restore one from a backup, or fork or go back to an iteration that has one"
        return problem("trainer's state", f"{told}, and none that it could be made again from", advice)
    again = {
        LOST: "the next update learns it again",
        NOT_DUE: "the trainer has it in memory, or the next update learns it again",
    }.get(fate, "if lost, the next update learns it again")
    return ok("trainer's state", f"{told}; {again} from iteration {before}")


def tasks_around(run: Run, frontier: Frontier) -> tuple[Task, ...]:
    """Return the tasks at hand, what they read, and those of the last iteration that is done."""
    plan = run.plan
    window = frontier.window(plan)
    last = plan.tasks(max(frontier.updated, plan.start)) if frontier.updated > plan.start else ()
    return unique(PREPARE, *last, *window, *(source for task in window for source in plan.inputs(task)))


def look_at_leftovers(run: Run) -> Finding:
    frontier = find_frontier(run.plan, run.paths)
    folders = {run.paths.task(task).folder for task in tasks_around(run, frontier)}
    folders |= {run.paths.root, run.paths.locks, run.paths.slurm, run.paths.policies}
    folders |= {run.paths.task(state_of(max(frontier.updated, 0))).folder}
    folders |= {run.paths.submissions(i) for i in (0, frontier.updated, frontier.updated + 1)}
    found = list(orphans(folders, time.time()))
    if not found:
        return ok("left-overs", "no private file of a writer that was killed")
    names = ", ".join(run.paths.relative(path) for path in found[:_MOST_NAMED])
    told = f"{len(found)} private files of writers that were killed: {names}"
    total = size(sum(path.lstat().st_size for path in found))
    advice = "nobody reads them; they may be removed"
    return warning("left-overs", f"{told} ({total})", advice, files=len(found))


def orphans(folders: Iterable[Path], now: float) -> Iterator[Path]:
    """Find private files whose writers are gone."""
    for folder in sorted(folders):
        for path in sorted(folder / name for name in names_in(folder) if _PRIVATE.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):  # its writer lives, and has just removed it
                if now - path.lstat().st_mtime > _ORPHAN_SECONDS:
                    yield path


def look_at_segments(run: Run) -> Finding:
    listed, folders = read_offline(run.paths).segments, segment_folders(run.paths)
    loose = [folder.name for folder in folders if folder.name not in listed]
    if loose and not holder_of(offline_lease(run.paths)):
        advice = f"slurm-ppo sync {shlex.quote(str(run.paths.root))} writes their rows again"
        return warning("W&B segments", f"{len(loose)} of {len(folders)} were cut by a crash", advice)
    if folders:
        return ok("W&B segments", f"{len(folders)}, all whole")
    return skipped("W&B segments", "none were written")


def look_at_jobs(run: Run) -> Finding:
    try:
        queue = ask_for_queue(run, PERSON_AGE, patience=20.0)
    except SlurmMissing as error:
        return skipped("jobs", str(error))
    except (SlurmError, UnknownState) as error:
        return problem("jobs", f"Slurm does not answer: {error}", "ask again later; nothing is lost")
    elements, control = queue.elements, read_control(run.paths)
    # A driver job waits for the last update's end, which goes on to write the trainer's state.
    trains = any(
        phase_of(one.state) is not Phase.ENDED and job_kind_of(one.name) == Stage.UPDATE for one in elements
    )
    is_over = control.cancelled or control.has_failed or (is_complete(run) and not trains)
    if queue.elsewhere is not None:
        return judge_jobs_of_others(queue, read_status(run), is_over)
    return judge_jobs(elements, is_over, shlex.quote(str(run.paths.root)))


def judge_jobs_of_others(queue: Queue, status: Status, is_over: bool) -> Finding:
    """Say what is known of the jobs of a run's owner. Whether they can advance the run is the owner's to see.
    Pure."""
    assert status.slurm
    if status.slurm.whose is None or is_over:
        return ok("jobs", f"{queue.elsewhere.owner if queue.elsewhere else ''} has submitted the run")
    told = whose_in_words(status.slurm.whose, status.state, status.time)
    step = next_step(status.slurm.whose, status.state, status.run)
    if status.state == "stopped":
        return warning("jobs", told, step or "")
    return ok("jobs", told)


def judge_jobs(elements: Sequence[Element], is_over: bool, root: str) -> Finding:
    """Judge whether the jobs in the queue can advance the run. Pure."""
    live = [element for element in elements if phase_of(element.state) is not Phase.ENDED]
    running = sum(phase_of(element.state) is Phase.RUNNING for element in live)
    drivers = sum(job_kind_of(element.name) in DRIVERS for element in live)
    told = f"{running} running, {len(live) - running} waiting, {drivers} of them driver jobs"
    if is_over and running < len(live):
        return warning("jobs", f"{told}, and the run is over", f"slurm-ppo cancel {root}")
    if not is_over and not drivers:
        return problem("jobs", f"{told}: nothing will advance the run", f"slurm-ppo submit {root}")
    return ok("jobs", told, running=running, waiting=len(live) - running)
