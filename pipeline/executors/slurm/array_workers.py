"""Slurm's array jobs as workers, which find their tasks from records alone.

A pass submits workers where none will do what is ready (:mod:`pipeline.decide.staffing`).
No array waits for another by a dependency, but for driver jobs (:class:`Watchdogs`).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVERS
from pipeline.config.scheduler import resources_of
from pipeline.decide.crew import Crew
from pipeline.decide.ended import Beats, are_in_doubt, are_several_warned, is_of, split_unclaimed
from pipeline.decide.judging import Gone
from pipeline.decide.measuring import measures_policies
from pipeline.decide.reconcile import Observation
from pipeline.decide.situation import Situation
from pipeline.decide.staffing import Staffing, is_freeing_slots
from pipeline.executors.slurm.arrays import Submitter
from pipeline.executors.slurm.crew import (
    beats_of,
    early_kinds,
    gone_of,
    held_by,
    kinds_of_one_task,
    lacking_room,
    live_arrays,
    needs_of,
    outdated,
    outdated_drivers,
    read_crew,
    read_estimates,
    silent_workers,
    wanted_by,
)
from pipeline.executors.slurm.exit_reasons import Accounts, explain
from pipeline.executors.slurm.job_table import JobTable, QueueReader, Snapshot, read_table
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.nodes_at_hand import AtHand, nodes_of
from pipeline.executors.slurm.queue import arrays_of, is_live, is_pending, newest_starts
from pipeline.executors.slurm.silence import read_silences, silent_twice
from pipeline.executors.slurm.watchdogs import Watchdogs
from pipeline.orchestrate.jobs import CommittedOf, Ended, Failures, Sight
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.endings import Ending, Evidence, element_ending, note_endings
from pipeline.run.pass_requests import request_pass_later
from pipeline.run.submissions import Submission, is_driver_job
from pipeline.run.tasks import Task
from pipeline.workers.beats import Doing, forget_old
from pipeline.workers.claims import Claim
from pipeline.workers.handover import Instructions, read_instructions
from pipeline.workers.looking import claim_place
from slurm.commands import SlurmError
from slurm.limits import ClusterLimits
from slurm.query import Element
from slurm.ringing import elements_of, parse_worker
from slurm.signals import Errands
from slurm.submission import Refused, array_expression, start_now

_SOON_SECONDS = 1.0
"""Least seconds until a pass that follows another: so long Slurm takes to start what was submitted."""


@dataclass
class ArrayWorkers:
    """Provider of the workers of a run, in one pass."""

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
    needs_watchdogs: bool = False
    """Whether a pass begins with watchdogs: whatever goes wrong in it, there will be another."""
    refusal: Refused | None = None
    """The job that Slurm refused in this pass; the rest of the pass was done all the same."""
    beats: Beats = field(default_factory=dict)
    crew: Crew = field(default_factory=Crew)
    nodes: AtHand = field(default_factory=AtHand)
    _outdated: Collection[str] = ()
    """Elements that wait, and were submitted with other settings than the run has."""
    _launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.watchdogs = Watchdogs(self.submitter, self.note)
        self.table = JobTable(self.submitter.ledger)

    @property
    def run(self) -> Run:
        return self.submitter.run

    @property
    def invocation(self) -> int:
        return self.table.seen.control.invocation

    @property
    def elements(self) -> list[Element]:
        """Elements of the run's jobs, as this pass sees the queue."""
        return [element for of_name in self.table.seen.queue.values() for element in of_name]

    @property
    def is_watched(self) -> bool:
        """Whether a driver job waits that will make the next pass."""
        return bool(self.watchdogs.submitted) or any(map(self.table.seen.count_pending, DRIVERS))

    # --- what lives ---

    def look(self) -> None:
        """Take the snapshot that the pass decides by.

        Raises:
            Paused: the run's jobs were cancelled.
        """
        self._take(self.reader.snapshot())
        if self.needs_watchdogs:
            self.needs_watchdogs = False  # a queue that does not show them yet must not get them twice
            self.watchdogs.ensure(self.table.seen)

    def _take(self, snapshot: Snapshot) -> None:
        self.table = JobTable(self.submitter.ledger, snapshot)
        self.reader.heed_people(self.elements, snapshot.control)

    def see(self, tasks: Collection[Task], claims: Sequence[Claim], newest: Task | None) -> Sight:
        """Match submissions, claims and beats with the queue that this pass sees."""
        iterations = {task.iteration for task in tasks} | {0}
        self.table = read_table(self.submitter.ledger, self.table.seen, iterations, newest)
        self.table.learn_endings({claim.task.iteration for claim in claims} - iterations)
        self.beats = beats_of(self.run.paths, self._elements_at_hand(claims))
        crew = read_crew(self.table, self.beats, claims)
        self._outdated = outdated(self.run, crew.pending, self.table.submissions)
        self.crew = crew.without(self._outdated)
        return Sight(self.table.seen.time, self.crew, self.beats, self.table.endings)

    def _elements_at_hand(self, claims: Iterable[Claim] = ()) -> set[str]:
        """Return the names of elements that are in the queue, ended unexplained or have claimed a task."""
        queued = {element.job_id for element in self.elements}
        ended = {f"{submission.state.job}_{index}" for submission, index in self.table.unsettled()}
        claimed = {name.element for claim in claims if (name := parse_worker(claim.worker))}
        return queued | ended | claimed

    def look_again(self, claims: Sequence[Claim], committed: Collection[Task]) -> bool:
        shown = {worker.name for worker in self.crew.workers}
        is_doubtful = are_in_doubt(claims, shown, self.beats, committed)
        if self.table.seen.is_fresh or not (is_doubtful or are_several_warned(shown, self.beats)):
            return False
        self._take(self.reader.again())
        return True

    # --- evidence of ends ---

    def may_judge(self, claim: Claim) -> bool:
        return parse_worker(claim.worker) is not None

    def explain(self, failed: Sequence[Claim]) -> list[Ended]:
        return self._explain([gone_of(claim, self.beats.get(claim.worker)) for claim in failed])

    def explain_unclaimed(self, claims: Sequence[Claim], committed_of: CommittedOf) -> list[Ended]:
        """Explain elements that ended before they claimed anything, and note those that just left."""
        failed, left = split_unclaimed(self.table.find_gone(committed_of), claims, self.beats)
        self._confirm_gone((submission.state.job, index) for submission, index in left)
        found = self._explain([self._gone(submission, index) for submission, index in failed])
        note_endings(self.run.paths, self._left(left, claims))
        return found

    def _confirm_gone(self, elements: Iterable[tuple[str | None, int]]) -> None:
        self.reader.confirm_gone(elements, self.table.seen)

    def _explain(self, gone: Sequence[Gone]) -> list[Ended]:
        """Say why attempts ended without a commit, in their order."""
        if not gone:
            return []
        self._confirm_gone((attempt.job, attempt.index) for attempt in gone)
        return explain(
            self.run.paths,
            gone,
            seen={(e.array_id, e.index): e for e in self.elements},
            control=self.table.seen.control,
            accounts=self.accounts,
            taken_back=self.table.taken_back(),
            silenced=self._silenced(),
        )

    def _left(self, elements: Sequence[tuple[Submission, int]], claims: Iterable[Claim]) -> Iterator[Ending]:
        """Yield the ends of elements whose workers left, or are judged by what they took."""
        starts = newest_starts([*self.beats, *(claim.worker for claim in claims)])
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

    # --- who is started, and who makes place ---

    def situation(self, common: Situation, seen: Observation) -> Situation:
        """Complete what a pass sees by what is known of the queue, of nodes and of other jobs."""
        config, queue = self.submitter.config, self.table.seen
        wanted = wanted_by(config, self.run.plan)
        needs = needs_of(config, wanted)
        own = [element for element in (*self.elements, *queue.others) if is_live(element)]
        self.nodes = nodes_of(self.run.paths, needs.values(), queue.time, own)
        submitted = (s for s in self.table.submissions if s.invocation == self.invocation)
        return replace(
            common,
            wanted=wanted,
            needs=needs,
            nodes=self.nodes.nodes,
            early=early_kinds(config, wanted),
            of_one_task=kinds_of_one_task(config, wanted),
            estimates=read_estimates(self.run, config, common.tasks, seen.committed, common.now),
            submitted_for={task for submission in submitted for _, task in submission.tasks()},
            others=held_by(queue.others),
            foreign=lacking_room(queue.others),
            promised=read_instructions(self.run.paths).handovers,
            slots=self._launch({}).most_elements(),
            most_running=self.limits.max_running,
            measures=measures_policies(self.run.config),
        )

    def _launch(self, failures: Failures) -> Launcher:
        return Launcher(self.submitter, self.limits, self.table, failures, self.note)

    def start(self, decided: Staffing, failures: Failures, known: Mapping[Task, int]) -> Instructions:
        """Submit workers, bring early ones forward, and cancel what waits for nothing. For a job that other
        runs see too only one worker makes place."""
        now, self._launcher = self.table.seen.time, self._launch(failures)
        self._hurry(decided)
        self._withdraw([*self._outdated, *decided.cancel_pending])
        self.refusal = self._launcher.submit_workers(decided.requests, now, known)
        handovers = (h for h in decided.end_idle if not h.job or claim_place(self.run.paths, h.job, now))
        return Instructions(tuple(handovers), self.nodes.is_contended, decided.measures)

    def conclude(self, decided: Staffing, leaving: Collection[str]) -> None:
        """Ring idle workers that make place now, have driver jobs watch the others, and end silent ones."""
        self.errands.ring(_elements_of(sorted(leaving)))
        here = self._elements_at_hand()
        forget_old(self.run.paths, lambda worker: worker.rpartition("r")[0] in here)
        self.watchdogs.watch_workers(self.table, sorted(self._arrays_to_watch(leaving), key=int))
        old = outdated_drivers(self.run, self.table)
        self.errands.cancel(list(self.watchdogs.renew(self.table, old)), only_pending=True)
        self._end_silent()
        asked = sum(len(request.tasks) for request in decided.requests)
        self._follow_up(decided, is_full=asked > self._launcher.num_submitted)

    def _arrays_to_watch(self, notified: Collection[str]) -> set[str]:
        """Return the arrays whose end a pass has to see. Not that of workers which leave, as this pass has
        seen or told them: nothing is to be done after it.

        Args:
            notified: names of workers that have nothing to do and are to make place now.
        """
        left = {w.name for w in self.crew.workers if w.doing is Doing.LEAVING}.union(notified)
        staying = [element for element in self.elements if element.run_id not in left]
        submitted = {submission.state.job or "" for submission in self._launcher.entered}
        return {*live_arrays(staying, self.table.submissions), *submitted}

    def _follow_up(self, decided: Staffing, is_full: bool) -> None:
        """Have another pass come where a worker waits without a task, and something was submitted or has
        started since this one's look: who makes place for what then waits is not known yet. Soon, where the
        queue was full and takes more in a moment."""
        doing = [worker.doing for worker in self.crew.workers]
        if is_full and is_freeing_slots(decided, doing, self.table.seen.time):
            request_pass_later(self.run.paths, _SOON_SECONDS)
        seen, now = self.table.seen, time.time()
        moments = (*(s.created for s in self.table.submissions), *(b.started for b in self.beats.values()))
        is_behind = any(seen.asked < moment <= now for moment in moments)  # of a clock that is ahead: no
        if is_behind and Doing.WAITING in doing:
            request_pass_later(self.run.paths, max(_SOON_SECONDS, seen.renewed - now))

    def _withdraw(self, names: Sequence[str]) -> None:
        """Cancel elements that wait. That they end without having done their task is no failure."""
        shown = self._shown(names)
        for submission, indices in shown:
            self.table.note(submission, withdrawn=(*submission.state.withdrawn, *indices))
        self.errands.withdraw([f"{s.state.job}_{index}" for s, indices in shown for index in indices])

    def _hurry(self, decided: Staffing) -> None:
        for submission, indices in self._shown(decided.start_now):
            elements = f"{submission.state.job}_[{array_expression(indices, None)}]"
            try:
                start_now(elements)
            except SlurmError as error:  # some have started or ended since they were seen; the next pass sees
                self.note(f"{elements} could not be asked to start now: {error}")
                continue
            self.table.note(submission, hurried=(*submission.state.hurried, *indices))

    def _shown(self, names: Iterable[str]) -> list[tuple[Submission, list[int]]]:
        """Return, by submission, the indices of elements that wait. One that Slurm has not shown yet has no
        number: the next pass knows it."""
        wanted, found = set(names), []
        for submission in self.table.submissions:
            job = submission.state.job
            indices = [index for index, _ in submission.tasks() if f"{job}_{index}" in wanted]
            if indices:
                found.append((submission, indices))
        return found

    def _end_silent(self) -> None:
        """Cancel workers that Slurm shows as running and that have not beaten for minutes, once another pass
        has seen the same; else have one come."""
        elements, seen = [e for e in self.elements if is_live(e)], self.table.seen
        silent = silent_workers(elements, self.beats, seen.time)
        if not silent:
            return
        ended = silent_twice(self.run.paths, silent, lambda given: self.reader.still_running(given, seen))
        if ended:
            self.note(f"workers {', '.join(ended)} have sent no heartbeat for minutes, and are cancelled")
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
        idle = [w.name for w in self.crew.workers if w.doing not in (Doing.BUSY, Doing.LEAVING)]
        self.errands.end_gently(_elements_of(idle))  # they leave, with what they have committed
        control = read_control(self.run.paths)
        if control.withdrawn != control.invocation:
            write_control(self.run.paths, replace(control, withdrawn=control.invocation))
        arrays = arrays_of(self.table.seen.queue.values(), only_pending=True)
        self.errands.cancel([*self.watchdogs.submitted, *arrays], only_pending=True)
        return len(arrays)


def _elements_of(workers: Iterable[str]) -> tuple[str, ...]:
    return elements_of(name for worker in workers if (name := parse_worker(worker)))
