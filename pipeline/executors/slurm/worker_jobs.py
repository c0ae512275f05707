"""The attempts at a run's tasks as Slurm's array jobs: workers, which find their tasks from records alone.

A pass is bookkeeping: it counts what failed, and submits workers where none will do what is ready
(:mod:`pipeline.orchestrate.staffing`). No array waits for another by a dependency, but for driver jobs
(:class:`Watchdogs`).
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pipeline.config.job_kinds import DRIVERS
from pipeline.config.scheduler import resources_of
from pipeline.executors.slurm.crew import (
    Beats,
    Roster,
    are_in_doubt,
    are_several_warned,
    beats_of,
    find_broken,
    gone_claims,
    held_by,
    is_of,
    kinds_of_one_task,
    lacking_room,
    live_arrays,
    needs_of,
    read_roster,
    silent_workers,
    split_unclaimed,
    wanted_by,
)
from pipeline.executors.slurm.exit_reasons import Accounts, Gone, explain
from pipeline.executors.slurm.expectations import early_kinds, read_estimates
from pipeline.executors.slurm.job_table import ArrayElement, JobTable, read_table
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.nodes_at_hand import AtHand, nodes_of
from pipeline.executors.slurm.queue import arrays_of, is_live, is_pending, newest_starts, worker_of
from pipeline.executors.slurm.queue_reader import QueueReader
from pipeline.executors.slurm.silence import read_silences, silent_twice
from pipeline.executors.slurm.submitter import Submitter
from pipeline.executors.slurm.watchdogs import Watchdogs
from pipeline.orchestrate.crew import Crew, failed_claims, held_tasks
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.orchestrate.situation import Situation, at_hand, left_alone
from pipeline.orchestrate.staffing import Staffing, is_making_way, staff
from pipeline.run.bookkeeping import ask_for_pass_later
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.endings import Ending, Evidence, element_ending, mend_endings, retraction
from pipeline.run.failures import Failure
from pipeline.run.records import unwritten_tasks
from pipeline.run.submissions import Submission, is_driver_job
from pipeline.run.tasks import Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim, claims_of, newest_numbers, tried_again
from pipeline.workers.handover import Told, read_told, tell
from pipeline.workers.living import forget_old, mark_gone
from pipeline.workers.looking import claim_place
from pipeline.workers.measuring import measures_policies
from slurm.commands import SlurmError
from slurm.limits import ClusterLimits
from slurm.nodes import Node
from slurm.query import Element
from slurm.ringing import elements_of, parse_worker
from slurm.signals import Errands
from slurm.submission import Refused, array_expression, start_now

_SOON_SECONDS = 1.0
"""Least seconds until a pass that follows another: so long Slurm takes to start what was submitted."""


@dataclass
class WorkerJobs:
    """The workers of a run, in one pass."""

    submitter: Submitter
    limits: ClusterLimits
    note: Callable[[str], None]
    errands: Errands
    """What runs beside the pass."""
    reader: QueueReader
    accounts: Accounts = field(default_factory=Accounts)
    """What accounting has said before the pass."""
    watchdogs: Watchdogs = field(init=False)
    table: JobTable = field(init=False)
    """Jobs of this pass, from one snapshot of the queue."""
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    needs_watchdogs: bool = False
    """Whether a pass begins with watchdogs: whatever goes wrong in it, there will be another."""
    refusal: Refused | None = None
    """The job that Slurm refused in this pass; the rest of the pass was done all the same."""
    beats: Beats = field(default_factory=dict)
    roster: Roster = field(default_factory=lambda: Roster(Crew()))
    claims: Sequence[Claim] = ()
    """Claims of the tasks at hand."""
    held: Mapping[Task, str] = field(default_factory=dict)
    """Tasks that somebody does or begins with, and who (:func:`held_tasks`)."""
    ready: Sequence[Task] = ()
    """Tasks that this pass found to be due."""

    def __post_init__(self) -> None:
        self.watchdogs = Watchdogs(self.submitter, self.note)
        self.table = JobTable(self.submitter.ledger)

    @property
    def run(self) -> Run:
        return self.submitter.run

    @property
    def elements(self) -> list[Element]:
        """Elements of the run's jobs, as this pass sees the queue."""
        return [element for of_name in self.table.seen.queue.values() for element in of_name]

    @property
    def live(self) -> Collection[Task]:
        return self.table.live.keys()

    @property
    def is_watched(self) -> bool:
        """Whether a driver job waits that will make the next pass."""
        return bool(self.watchdogs.submitted) or any(map(self.table.seen.count_pending, DRIVERS))

    def query(self) -> None:
        """Take the snapshot that the pass decides by.

        Raises:
            Paused: somebody has cancelled the run's jobs.
        """
        snapshot = self.reader.snapshot()
        self.table = JobTable(self.submitter.ledger, snapshot)
        self.reader.heed_people(self.elements, snapshot.control)
        if self.needs_watchdogs:
            self.needs_watchdogs = False  # a queue that does not show them yet must not get them twice
            self.watchdogs.ensure(snapshot)

    def collect_ended(
        self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None = None
    ) -> list[Ended]:
        """Match submissions, claims and beats with Slurm's queue, and explain what ended without a commit."""
        considered = {*at_hand(self.run.plan, tasks), *([newest] if newest else ())}
        iterations = {task.iteration for task in considered} | {0}
        for spoilt in mend_endings(self.run.paths, iterations):
            self.note(f"{spoilt}; it was written again from what the other says")
        unwritten = unwritten_tasks(self.run.plan, self.run.paths, newest)
        looked_at = considered.union(tried_again(self.run.paths, unwritten))
        self._read(iterations, looked_at, newest)
        committed = set(committed_of(sorted(looked_at)))
        shown = {worker.name for worker in self.roster.crew.workers}
        is_doubtful = are_in_doubt(self.claims, shown, self.beats, committed)
        if not self.table.seen.is_fresh and (is_doubtful or are_several_warned(shown, self.beats)):
            self._look_again()
            self._read(iterations, looked_at, newest)
            committed = set(committed_of(sorted(looked_at)))
        found = [*self._judge_claims(committed), *self._judge_elements(committed_of)]
        self.held = held_tasks(self.claims, self.roster.crew, committed)
        self.table.live = {task: self.roster.lives[name] for task, name in self.held.items()}
        self.failures = self.table.failures()
        return found

    def _read(self, iterations: set[int], looked_at: Collection[Task], newest: Task | None) -> None:
        """Read what matches the queue that this pass sees. In this order: a worker moves on after it has
        committed, and beats after it has claimed."""
        seen = self.table.seen
        self.table = read_table(self.submitter.ledger, seen, iterations, newest, seen.queue.keys())
        self.claims = list(chain.from_iterable(claims_of(self.run.paths, looked_at).values()))
        self.table.learn_endings({claim.task.iteration for claim in self.claims} - iterations)
        self.beats = beats_of(self.run.paths, self._elements_at_hand())
        self.roster = read_roster(self.table, self.beats, self.claims)

    def _look_again(self) -> None:
        self.table = JobTable(self.submitter.ledger, self.reader.again())
        self.reader.heed_people(self.elements, self.table.seen.control)

    def _elements_at_hand(self) -> set[str]:
        """Return the names of elements that are in the queue, ended unexplained or have claimed a task."""
        queued = {worker_of(e).element for elements in self.table.seen.queue.values() for e in elements}
        ended = {f"{submission.state.job}_{index}" for submission, index in self.table.unsettled()}
        claimed = {name.element for claim in self.claims if (name := parse_worker(claim.worker))}
        return queued | ended | claimed

    def _judge_claims(self, committed: set[Task]) -> list[Ended]:
        """Explain claims that came to nothing, each once."""
        broken = find_broken(self.run.paths, self.claims, self.beats, committed, self.table.endings)
        failed = failed_claims(self.claims, self.roster.crew, committed, self.table.endings, broken)
        failed = [claim for claim in failed if parse_worker(claim.worker)]
        gone = [(w.array, w.index) for claim in failed if (w := parse_worker(claim.worker))]
        self.reader.confirm_gone(gone, self.table.seen)
        found = self._explain(gone_claims(failed, self.beats))
        self.table.note_endings(
            replace(ended.ending, is_redone=claim.task in committed)
            for claim, ended in zip(failed, found, strict=True)
        )
        for worker in {claim.worker for claim in failed} - {w.name for w in self.roster.crew.workers}:
            mark_gone(self.run.paths, worker)
        return found

    def _judge_elements(self, committed_of: CommittedOf) -> list[Ended]:
        """Explain elements that ended before they claimed anything: failures of the task they were for."""
        over = self.table.find_gone(committed_of)
        gone = [(submission.state.job, index) for submission, index in over]
        self.reader.confirm_gone(gone, self.table.seen)
        failed, left = split_unclaimed(over, self.claims, self.beats)
        found = self._explain([self._gone(submission, index) for submission, index in failed])
        self.table.note_endings([*(ended.ending for ended in found), *self._left(left)])
        return found

    def _explain(self, gone: Sequence[Gone]) -> list[Ended]:
        """Say why attempts ended without a commit, in their order."""
        if not gone:
            return []
        seen = self.table.seen
        shown = {(e.array_id, e.index): e for e in self.elements}
        known = (seen.control, self.accounts, time.time(), self.table.taken_back(), self._silenced())
        return explain(self.run.paths, gone, shown, *known)

    def _left(self, elements: Sequence[tuple[Submission, int]]) -> Iterator[Ending]:
        """Yield the ends of elements whose workers left, or are judged by what they took."""
        starts = newest_starts([*self.beats, *(claim.worker for claim in self.claims)])
        for submission, index in elements:
            ending = element_ending(self.run.paths, submission, index)
            worker = f"{ending.job}r{starts.get((submission.state.job or '', index), 0)}"
            beat = self.beats.get(worker)
            why = f"it left: {beat.reason}" if beat and beat.reason else "what it took is judged by itself"
            yield replace(ending, attempt=worker, evidence=Evidence.BEAT, message=why, time=time.time())

    def _silenced(self) -> Collection[str]:
        """Return the elements, like ``4711_3``, that were cancelled since nothing was heard of them."""
        noted = read_silences(self.run.paths).items()
        last = {(name.element, beat.beat) for w, beat in self.beats.items() if (name := parse_worker(w))}
        return {element for element, one in noted if one.is_cancelled and (element, one.beat) in last}

    def _gone(self, submission: Submission, index: int) -> Gone:
        """Return a worker that ended before it took any task."""
        log = submission.own_log(self.run.paths, submission.task(index))
        element = f"{submission.state.job}_{index}"
        is_contained = bool(resources_of(self.submitter.config, submission.job_kind).container)
        is_mute = is_contained and not any(is_of(worker, element) for worker in self.beats)
        return replace(Gone.of(submission, index), log=log, is_mute=is_mute)

    def note_retracted(self, failure: Failure, attempt: str) -> None:
        invocation = self.table.seen.control.invocation
        self.table.note_endings(retraction(failure, attempt, invocation, time.time()))
        self.failures.setdefault(failure.task, []).append(failure)

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """Submit workers, bring early ones forward, end silent ones, and have driver jobs watch them all."""
        self.ready = tuple(launch.task for launch in launches)
        at_hand = self._nodes()
        launcher = Launcher(self.submitter, self.limits, self.table, self.failures, self.note)
        decided = staff(self._situation(seen, at_hand.nodes, launcher.most_elements()))
        self._hurry(decided)
        self._withdraw(decided.withdrawn)
        self.refusal = launcher.submit_workers(
            decided.orders, self.table.seen.time, newest_numbers(self.claims)
        )
        rung = self._hand_over(decided, at_hand.is_contended)
        here = self._elements_at_hand()
        forget_old(self.run.paths, lambda worker: worker.rpartition("r")[0] in here)
        self.watchdogs.watch_workers(self.table, sorted(self._arrays_to_watch(rung), key=int))
        self._end_silent()
        self._follow_up(decided, sum(len(order.tasks) for order in decided.orders) > launcher.num_submitted)

    def _arrays_to_watch(self, rung: Collection[str]) -> set[str]:
        """Return the arrays whose end somebody has to see. Not that of workers which leave, as this pass has
        seen or told them: nothing is to be done after it.

        Args:
            rung: names of workers that have nothing to do and were told to make place now.
        """
        left = {w.name for w in self.roster.crew.workers if w.doing is Doing.LEAVING}.union(rung)
        staying = [element for element in self.elements if str(worker_of(element)) not in left]
        submitted = {live.carrier.array for live in self.table.live.values() if live.carrier.array}
        return {*live_arrays(staying, self.table.submissions), *submitted}

    def _follow_up(self, decided: Staffing, is_full: bool) -> None:
        """Have another pass come where somebody waits without a task, and something was submitted or has
        started since this one's look: who makes place for what then waits is not known yet. Soon, where the
        queue was full and takes more in a moment."""
        doing = [worker.doing for worker in self.roster.crew.workers]
        if is_full and is_making_way(decided, doing, self.table.seen.time):
            ask_for_pass_later(self.run.paths, _SOON_SECONDS)
        seen, now = self.table.seen, time.time()
        moments = (*(s.created for s in self.table.submissions), *(b.started for b in self.beats.values()))
        is_behind = any(seen.asked < moment <= now for moment in moments)  # of a clock that is ahead: no
        if is_behind and Doing.WAITING in doing:
            ask_for_pass_later(self.run.paths, max(_SOON_SECONDS, seen.renewed - now))

    def _withdraw(self, names: Sequence[str]) -> None:
        """Cancel elements that wait. That they end without having done their task is no failure."""
        gone: dict[str, list[int]] = {}
        shown = [
            name for name in names if self.roster.lives[name].element is not None
        ]  # else it has no number
        for live in (self.roster.lives[name] for name in shown):
            gone.setdefault(live.submission.name, []).append(live.carrier.index)
        for submission in [s for s in self.table.submissions if s.name in gone]:
            withdrawn = (*submission.state.withdrawn, *gone[submission.name])
            self.table.note(submission, withdrawn=withdrawn)
        self.errands.withdraw(shown)

    def _hand_over(self, decided: Staffing, is_contended: bool) -> set[str]:
        """Publish who makes place, and ring those of them who have nothing to do. For a job that other runs
        see too only one makes place. Returns the names of those who were rung."""
        paths, now = self.run.paths, self.table.seen.time
        handovers = [h for h in decided.handovers if not h.job or claim_place(paths, h.job, now)]
        with contextlib.suppress(OSError):  # who cannot read it stays
            tell(paths, Told(tuple(handovers), is_contended, decided.measures))
        idle = {w.name for w in self.roster.crew.workers if w.doing is Doing.WAITING}
        leaving = idle.intersection(one.worker for one in handovers if one.at <= self.table.seen.time)
        self.errands.ring(elements_of(name for one in sorted(leaving) if (name := parse_worker(one))))
        return leaving

    def _nodes(self) -> AtHand:
        """Return what is known of the nodes that jobs of the run may run on."""
        config, seen = self.submitter.config, self.table.seen
        needs = needs_of(config, wanted_by(config, self.run.plan)).values()
        own = [element for element in (*self.elements, *seen.others) if is_live(element)]
        return nodes_of(self.run.paths, needs, seen.time, own)

    def _situation(self, seen: Observation, nodes: Sequence[Node], slots: int) -> Situation:
        tasks, now = at_hand(self.run.plan, seen.tasks), self.table.seen.time
        return Situation(
            plan=self.run.plan,
            tasks=tasks,
            crew=self.roster.crew,
            held=self.held,
            committed=seen.committed.keys() - seen.corrupt.keys(),
            ready=self.ready,
            wanted=(wanted := wanted_by(self.submitter.config, self.run.plan)),
            needs=needs_of(self.submitter.config, wanted),
            nodes=nodes,
            early=early_kinds(self.submitter.config, wanted),
            of_one_task=kinds_of_one_task(self.submitter.config, wanted),
            now=now,
            estimates=read_estimates(self.run, self.submitter.config, tasks, seen.committed, now),
            begun_with={task for s in self.table.submissions if self._is_new(s) for _, task in s.tasks()},
            left=left_alone(self.failures, self.run.config.attempts_of),
            others=held_by(self.table.seen.others),
            foreign=lacking_room(self.table.seen.others),
            promised=read_told(self.run.paths).handovers,
            slots=slots,
            measures=measures_policies(self.run.config),
            tried={claim.task for claim in self.claims},
        )

    def _is_new(self, submission: Submission) -> bool:
        return submission.invocation == self.table.seen.control.invocation

    def _hurry(self, decided: Staffing) -> None:
        hurried: dict[str, list[ArrayElement]] = {}
        for live in (self.roster.lives[name] for name in decided.hurried):
            if live.element is not None:  # else Slurm has not shown it yet; the next pass knows its number
                hurried.setdefault(live.submission.name, []).append(live.carrier)
        for submission in [s for s in self.table.submissions if s.name in hurried]:  # as they are by now
            indices = sorted(carrier.index for carrier in hurried[submission.name])
            elements = f"{hurried[submission.name][0].array}_[{array_expression(indices, None)}]"
            try:
                start_now(elements)
            except SlurmError as error:  # some have started or ended since they were seen; the next pass sees
                self.note(f"{elements} could not be told to start now: {error}")
                continue
            self.table.note(submission, hurried=(*submission.state.hurried, *indices))

    def _end_silent(self) -> None:
        """Cancel workers that Slurm shows as running and that have not beaten for minutes, once another pass
        has seen the same; else have one come."""
        elements, seen = [e for e in self.elements if is_live(e)], self.table.seen
        silent = silent_workers(elements, self.beats, seen.time)
        if not silent:
            return
        ended = silent_twice(self.run.paths, silent, lambda given: self.reader.still_running(given, seen))
        if ended:
            self.note(f"workers {', '.join(ended)} have not been heard of for minutes, and are cancelled")
            self.errands.cancel(ended, only_pending=False)

    def end_all(self) -> None:
        """Cancel every job of the run but for driver jobs that run: they end by themselves."""
        live = [e for e in self.elements if is_live(e)]
        ids = {e.array_id for e in live if is_pending(e) or not is_driver_job(e.name)}
        self.errands.cancel([*self.watchdogs.submitted, *sorted(ids, key=int)], only_pending=False)

    def withdraw(self) -> int:
        """Cancel every job of the run that waits, as it is at its end, and end workers that do nothing; what
        is computed may be committed. Returns how many arrays. It is noted first: another driver would take
        it for a person's act."""
        idle = [w.name for w in self.roster.crew.workers if w.doing not in (Doing.BUSY, Doing.LEAVING)]
        self._dismiss(idle)
        control = read_control(self.run.paths)
        if control.withdrawn != control.invocation:
            write_control(self.run.paths, replace(control, withdrawn=control.invocation))
        arrays = arrays_of(self.table.seen.queue.values(), only_pending=True)
        self.errands.cancel([*self.watchdogs.submitted, *arrays], only_pending=True)
        return len(arrays)

    def _dismiss(self, workers: Sequence[str]) -> None:
        """Have workers leave, which they do with what they have committed."""
        self.errands.end_gently(elements_of(name for w in workers if (name := parse_worker(w))))
