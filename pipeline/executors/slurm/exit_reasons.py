"""Evidence of why array elements ended, from the queue and accounting, for :mod:`pipeline.decide.judging`."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.decide.device_faults import LOG_LINES
from pipeline.decide.judging import Gone, Signs, judge
from pipeline.orchestrate.jobs import Ended, ended_of
from pipeline.run.accounting import note_accounting, read_accounting
from pipeline.run.control import Control, read_control
from pipeline.run.failures import read_said
from pipeline.run.journal import tail
from pipeline.run.packed import BadArchive, read_file
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task
from slurm.commands import SlurmError
from slurm.ended import NoAccounting, NoAnswer, read_ended
from slurm.query import Element
from slurm.setup_lines import SETUP_EXIT, failed_line
from slurm.states import SlurmState

_END_OF_LOG = 1 << 16
"""Bytes at the end of a log in which it is looked for which line of setup failed."""
_MOMENT = 3.0
"""Seconds that a pass waits for accounting."""
ElementKey = tuple[str, int]
"""Array id and index of an element."""


def explain(
    paths: RunPaths,
    gone: Sequence[Gone],
    seen: Mapping[ElementKey, Element],
    control: Control,
    accounts: "Accounts",
    taken_back: Collection[Task] = (),
    silenced: Collection[str] = (),
) -> list[Ended]:
    """Say why attempts ended without a commit, in their order.

    Args:
        seen: what the queue shows of their elements; those that it does not show are looked up in accounting.
        control: says of which invocations all jobs were cancelled, or those that waited.
        taken_back: tasks of which commits were taken back in this invocation.
        silenced: elements like ``4711_3`` that were cancelled since nothing was heard of them.

    Raises:
        Unanswered: accounting is slow, and is to be asked between passes.
    """
    elements, found = evidence_of(gone, seen, accounts, paths), []
    for attempt in gone:
        element = elements.get((attempt.job or "", attempt.index))
        signs = Signs(
            gone=attempt,
            element=element,
            said=None if attempt.log else read_said(paths, attempt.task, attempt.number),
            is_taken_back=attempt.task in taken_back,
            is_emptied=0 < attempt.invocation <= control.emptied,
            is_withdrawn=0 < attempt.invocation <= control.withdrawn,
            is_silenced=f"{attempt.job}_{attempt.index}" in silenced,
            failed_setup=_failed_setup(paths, attempt, element),
            log_end=_log_end(paths, attempt, element),
            slurm_log=str(paths.slurm_log),
        )
        found.append(ended_of(paths, signs, judge(signs)))
    return found


def _failed_setup(paths: RunPaths, gone: Gone, element: Element | None) -> str:
    """Return a phrase on the line of setup that failed, if one ended the job, by its log."""
    if element is None or element.exit_code != SETUP_EXIT:
        return ""
    with contextlib.suppress(OSError, BadArchive):
        content = read_file(paths, gone.task.iteration, _log_of(paths, gone))
        return failed_line(content[-_END_OF_LOG:])
    return ""


def _log_end(paths: RunPaths, gone: Gone, element: Element | None) -> str:
    """Return the last lines of the log of a job that failed; they count where it aborted."""
    if element is None or element.state is not SlurmState.FAILED or element.exit_code == SETUP_EXIT:
        return ""
    return "\n".join(tail(_log_of(paths, gone), LOG_LINES))


def _log_of(paths: RunPaths, gone: Gone) -> Path:
    return paths.root / gone.log if gone.log else paths.task(gone.task).log(gone.number)


class Unanswered(Exception):
    """Missing answer of accounting: a pass, which holds the lease, does not wait for it."""


@dataclass
class Accounts:
    """What accounting says of ended elements: a pass asks for a moment, its caller with patience
    before the next."""

    known: dict[ElementKey, Element] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    """Ids of arrays that it was asked for with patience, whether or not it answered."""
    unanswered: set[str] = field(default_factory=set)
    is_absent: bool = False
    """Whether the cluster has said that it has none."""

    def of(self, jobs: Collection[str]) -> Mapping[ElementKey, Element]:
        """Return what is known of elements of some arrays. Raises :class:`Unanswered`."""
        wanted = set(jobs) - self.asked
        try:
            return {**self.known, **(read_ended(wanted, _MOMENT) if wanted else {})}
        except NoAnswer as error:
            self.unanswered |= wanted
            raise Unanswered(str(error)) from None
        except (NoAccounting, SlurmError) as error:
            self.is_absent = isinstance(error, NoAccounting) and error.is_absent
            return self.known  # why they ended stays unknown; that they ended the queue has said

    def ask(self) -> None:
        """Ask with patience for what was not answered in a pass. Not for the holder of a lease."""
        jobs, self.unanswered = self.unanswered, set()
        self.asked |= jobs
        with contextlib.suppress(NoAccounting, SlurmError):
            self.known |= read_ended(jobs)


def evidence_of(
    gone: Sequence[Gone], seen: Mapping[ElementKey, Element], accounts: Accounts, paths: RunPaths
) -> dict[ElementKey, Element]:
    """Look up ended elements: in ``seen``, the queue's, and the others in accounting, by one call. A cluster
    without is asked once in each invocation."""
    jobs = {attempt.job for attempt in gone if attempt.job and (attempt.job, attempt.index) not in seen}
    if not jobs or (known := read_accounting(paths, read_control(paths).invocation)).is_absent:
        return dict(seen)
    found = {**accounts.of(jobs), **seen}
    if accounts.is_absent:
        note_accounting(paths, replace(known, is_absent=True))
    return found
