"""Slurm's queue as one pass reads it: by a look from before its lease where that is enough, else by its own.

Nothing is remembered between passes but what is on disk (:mod:`pipeline.run.submissions`) and in the queue.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pipeline.config.job_kinds import DRIVERS
from pipeline.executors.slurm.by_hand import Paused, look_for_act
from pipeline.executors.slurm.job_table import Snapshot, take_snapshot
from pipeline.executors.slurm.queue import is_live, is_pending, worker_of
from pipeline.run.control import Control
from pipeline.run.directory import Run
from pipeline.run.submissions import Ledger, Submission, is_job_of
from pipeline.workers.looking import Look, look
from slurm.commands import SlurmTimeout
from slurm.query import Element

SECOND_PATIENCE = 5.0
"""Seconds that squeue may take while the lease is held."""


@dataclass
class QueueReader:
    """The looks at the queue of one pass."""

    run: Run
    first_look: Look | None = None
    """Look at the queue from before the lease was taken; None: the pass looks itself."""
    is_alone: bool = False
    """Whether nobody has held the lease since that was asked for."""
    second_look: Look | None = None
    """Look by which it was confirmed that elements are gone."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.paths)

    def snapshot(self) -> Snapshot:
        """Return the snapshot that the pass decides by."""
        seen, self.first_look = self.first_look, None
        snapshot = self._from_before(seen, self.ledger.load({0})) if seen else None
        if snapshot is None:
            now = look(self.run.paths, 0.0, SECOND_PATIENCE)
            snapshot = take_snapshot(self.run, now, is_fresh=True)
        return snapshot

    def again(self) -> Snapshot:
        """Return a snapshot of a look of now, once in a pass."""
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        return take_snapshot(self.run, self.second_look, is_fresh=True).expecting(self.ledger.load({0}))

    def heed_people(self, elements: Sequence[Element], control: Control) -> None:
        """Do nothing further if somebody has cancelled the run's jobs.

        Args:
            elements: the run's, as a look shows them.
            control: people's requests at the time of the snapshot.

        Raises:
            Paused: somebody has.
        """
        if act := look_for_act(self.ledger, elements, control):
            raise Paused(act)

    def _from_before(self, seen: Look, submitted: Sequence[Submission]) -> Snapshot | None:
        """Return what a look shows that was taken before the lease was; None where it is to be taken again:
        after a pass which finds no driver job that waits, and none that was submitted since, there may be no
        other, so nothing is taken for granted."""
        snapshot = take_snapshot(self.run, seen, is_fresh=self.is_alone)
        since = (s for s in submitted if s.job_kind in DRIVERS and s.state.job and s.created > seen.asked)
        if self.is_alone or any(map(snapshot.count_pending, DRIVERS)) or any(since):
            return snapshot.expecting(submitted)
        return None

    def confirm_gone(self, elements: Iterable[tuple[str | None, int]], seen: Snapshot) -> None:
        """Look at the queue once more, before elements are judged as ended that this pass's look does not
        show: that was taken before the lease was, and may be older than they are.

        Args:
            elements: by array ids, None where that is not known, and indices.
            seen: what the pass decides by.

        Raises:
            SlurmTimeout: there is no answer, or one of them lives: nothing is judged in this pass.
            Paused: somebody has cancelled the run's jobs.
        """
        unseen = {(job, index) for job, index in elements if job and not seen.shows((job, index))}
        if seen.is_fresh or not unseen:
            return
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        if any((e.array_id, e.index) in unseen and is_live(e) for e in self.second_look.elements):
            raise SlurmTimeout(["squeue"], None, "it did not show a job that is there")
        own = self.second_look.elements_of(lambda name: is_job_of(self.run.identity.id, name))
        self.heed_people(own, seen.control)

    def still_running(self, elements: Collection[str], seen: Snapshot) -> list[str]:
        """Return those of some elements that run on with the workers which a pass saw there, by a look of
        now: one that is back in the queue by then is not to be cancelled."""
        if not elements or seen.is_fresh:
            return list(elements)
        known = {str(worker_of(e)) for of_name in seen.queue.values() for e in of_name}
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        running = [worker_of(e) for e in self.second_look.elements if is_live(e) and not is_pending(e)]
        return [w.element for w in running if w.element in elements and str(w) in known]
