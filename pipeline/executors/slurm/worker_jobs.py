"""The attempts at a run's tasks where stages have workers: arrays without dependencies, which stay or start
early, and find their next task from records alone. A pass is bookkeeping: it counts what failed, and submits
workers where none will do what is ready (:mod:`pipeline.orchestrate.staffing`).
"""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pipeline.config.scheduler import resources_of
from pipeline.executors.slurm.crew import (
    Beats,
    Roster,
    are_in_doubt,
    are_several_warned,
    beats_of,
    broken_attempts,
    gone_claims,
    held_by,
    is_of,
    lacking_room,
    live_arrays,
    needs_of,
    read_roster,
    silent_workers,
    split_unclaimed,
    wanted_by,
)
from pipeline.executors.slurm.dependencies import ArrayElement
from pipeline.executors.slurm.exit_reasons import Gone
from pipeline.executors.slurm.expectations import early_kinds, read_estimates
from pipeline.executors.slurm.job_table import JobTable, read_table, take_snapshot
from pipeline.executors.slurm.jobs import SECOND_PATIENCE, SlurmJobs
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.nodes_at_hand import AtHand, nodes_of
from pipeline.executors.slurm.queue import is_live, is_pending, newest_starts, worker_of
from pipeline.executors.slurm.silence import (
    LOOK_AGAIN_SECONDS,
    as_cancelled,
    look_again,
    note_silences,
    read_silences,
)
from pipeline.orchestrate.crew import Crew, failed_claims, held_tasks
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.orchestrate.situation import Situation, at_hand, left_alone
from pipeline.orchestrate.staffing import Staffing, is_making_way, staff
from pipeline.run import journal
from pipeline.run.bookkeeping import ask_for_pass_later
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.endings import Ending, Evidence, element_ending
from pipeline.run.records import newest_row
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim, claims_of, newest_numbers, said, tried_again
from pipeline.workers.handover import Told, read_told, tell
from pipeline.workers.living import forget_old, mark_gone
from pipeline.workers.looking import claim_place, look
from pipeline.workers.measuring import measures_policies
from slurm.commands import SlurmError
from slurm.nodes import Node
from slurm.ringing import elements_of, parse_worker
from slurm.submission import array_expression, start_now

_ROW_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl, which hold more than its last row."""
_SOON_SECONDS = 1.0
"""Least seconds until a pass that follows another: so long Slurm takes to start what was submitted."""
_MOST_UNWRITTEN = 100
"""Finished iterations without a row that are looked at: more there are only where rows cannot be written."""


@dataclass
class WorkerJobs(SlurmJobs):
    """The workers of a run, in one pass."""

    beats: Beats = field(default_factory=dict)
    roster: Roster = field(default_factory=lambda: Roster(Crew()))
    claims: Sequence[Claim] = ()
    """Claims of the tasks at hand."""
    held: Mapping[Task, str] = field(default_factory=dict)
    """Tasks that somebody does or begins with, and who (:func:`held_tasks`)."""
    ready: Sequence[Task] = ()
    """Tasks that this pass found to be due."""

    @property
    def lookahead(self) -> int:
        return 0

    def query(self) -> None:
        super().query()
        self.ready = ()

    def collect_ended(
        self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None = None
    ) -> list[Ended]:
        """Match submissions, claims and beats with Slurm's queue, and explain what ended without a commit."""
        considered = {*at_hand(self.run.plan, tasks), *([newest] if newest else ())}
        iterations = {task.iteration for task in considered} | {0}
        self._mend(iterations)
        looked_at = considered.union(tried_again(self.run.paths, self._unwritten(newest)))
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
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        ledger = self.submitter.ledger
        seen = take_snapshot(self.run, self.second_look, is_fresh=True).expecting(ledger.load({0}))
        self.table = JobTable(ledger, seen)
        self.heed_people(self.elements)

    def _unwritten(self, newest: Task | None) -> list[Task]:
        """Return the tasks of the last finished iterations that have no row yet, and those before the first
        iteration. What was tried at them and failed is listed before their rows are written, with which the
        claims go."""
        plan, last = self.run.plan, newest.iteration if newest else 0
        try:
            first = newest_row(journal.read_tail(self.run.paths.metrics, _ROW_BYTES), plan.start) + 1
        except OSError:  # rows that cannot be read never stop what trains
            return []
        finished = range(max(first, last - _MOST_UNWRITTEN), last + 1)
        return [task for iteration in (plan.start, *finished) for task in plan.tasks(iteration)]

    def _elements_at_hand(self) -> set[str]:
        """Return the names of elements that are in the queue, ended unexplained or have claimed a task."""
        queued = {worker_of(e).element for elements in self.table.seen.queue.values() for e in elements}
        ended = {f"{submission.state.job}_{index}" for submission, index in self.table.unsettled()}
        claimed = {name.element for claim in self.claims if (name := parse_worker(claim.worker))}
        return queued | ended | claimed

    def _judge_claims(self, committed: set[Task]) -> list[Ended]:
        """Explain claims that came to nothing, each once."""
        broken = self._broken(committed, self.table.endings)
        failed = failed_claims(self.claims, self.roster.crew, committed, self.table.endings, broken)
        failed = [claim for claim in failed if parse_worker(claim.worker)]
        self.confirm_gone((w.array, w.index) for claim in failed if (w := parse_worker(claim.worker)))
        found = self._explain(gone_claims(failed, self.beats))
        self.table.note_endings(
            replace(ended.ending, is_redone=claim.task in committed)
            for claim, ended in zip(failed, found, strict=True)
        )
        for worker in {claim.worker for claim in failed} - {w.name for w in self.roster.crew.workers}:
            mark_gone(self.run.paths, worker)
        return found

    def _broken(self, committed: set[Task], judged: Collection[str]) -> set[str]:
        """Return the attempts that failed at tasks which others have done since the last pass."""
        claimed = Counter(claim.task for claim in self.claims)
        winners = {}
        for task in (task for task, count in claimed.items() if count > 1 and task in committed):
            with contextlib.suppress(CorruptData):
                if record := read_record(self.run.paths, task):
                    winners[task] = record.attempt
        unjudged = (claim for claim in self.claims if claim.attempt not in judged)
        return broken_attempts(
            unjudged, self.beats, winners, lambda claim: said(self.run.paths, claim) is not None
        )

    def _judge_elements(self, committed_of: CommittedOf) -> list[Ended]:
        """Explain elements that ended before they claimed anything: failures of the task they were for."""
        over = self.table.find_gone(committed_of)
        self.confirm_gone((submission.state.job, index) for submission, index in over)
        failed, left = split_unclaimed(over, self.claims, self.beats)
        found = self._explain([self._gone(submission, index) for submission, index in failed])
        self.table.note_endings([*(ended.ending for ended in found), *self._left(left)])
        return found

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

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """Take note of what is due: who does it is decided with all that workers may do later."""
        self.ready = tuple(launch.task for launch in launches)

    def update_dependencies(self, seen: Observation) -> None:
        """Submit workers, bring early ones forward, end silent ones, and have driver jobs watch them all."""
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
        queue = [element for of_name in self.table.seen.queue.values() for element in of_name]
        staying = [element for element in queue if str(worker_of(element)) not in left]
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
        queue = [element for of_name in seen.queue.values() for element in of_name]
        own = [element for element in (*queue, *seen.others) if is_live(element)]
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
        has seen the same; else have one come. By a clock that is as far behind all seem to: who beats before
        the second look lives."""
        elements = [e for of_name in self.table.seen.queue.values() for e in of_name if is_live(e)]
        silent = silent_workers(elements, self.beats, self.table.seen.time)
        if not silent:
            return
        paths = self.run.paths
        ended, silences = look_again(silent, read_silences(paths), socket.gethostname(), time.time())
        with contextlib.suppress(OSError):  # then a later pass begins anew
            note_silences(paths, silences)
        if still := self._still_running(ended):
            with contextlib.suppress(OSError):  # then it looks like anybody's cancellation
                note_silences(paths, as_cancelled(silences, still))
            self.note(f"workers {', '.join(still)} have not been heard of for minutes, and are cancelled")
            self.errands.cancel(still, only_pending=False)
        if len(ended) < len(silent):
            ask_for_pass_later(paths, LOOK_AGAIN_SECONDS)

    def _still_running(self, elements: Sequence[str]) -> list[str]:
        """Return those of some elements that run on with the workers which this pass sees there, by a look of
        now: one that is back in the queue by then is not to be cancelled."""
        seen = self.table.seen
        if not elements or seen.is_fresh:
            return list(elements)
        known = {str(worker_of(e)) for of_name in seen.queue.values() for e in of_name}
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        running = [worker_of(e) for e in self.second_look.elements if is_live(e) and not is_pending(e)]
        return [w.element for w in running if w.element in elements and str(w) in known]

    def withdraw(self) -> int:
        """Cancel every job that waits, and end workers that do nothing; what is computed may be committed."""
        idle = [w.name for w in self.roster.crew.workers if w.doing not in (Doing.BUSY, Doing.LEAVING)]
        self._dismiss(idle)
        return super().withdraw()

    def _dismiss(self, workers: Sequence[str]) -> None:
        """Have workers leave, which they do with what they have committed."""
        self.errands.end_gently(elements_of(name for w in workers if (name := parse_worker(w))))
