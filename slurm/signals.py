"""Signals to the batch scripts of running elements, and cancellations, which do not wait for an answer.

Of an array that has elements in the queue Slurm (22.05 to 26.05) answers each signal to a running one with
"Job can not be altered now, try again later", although it has sent it. scancel tries again then: ten times,
after 5, 6, ... 14 s, and each time the signal is sent once more. It does the same for an element that was put
back into the queue. So it is ended once it has said so, and at the latest before its second try. It has ten
threads, each of which keeps to one element meanwhile: so no call names more.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm import commands
from slurm.commands import Begun, SlurmError, SlurmMissing, SlurmTimeout

MOST_SIGNALLED = 10
"""Elements that one call of scancel sends a signal to."""
SIGNAL_SECONDS = 4.0
"""Seconds until a call is ended, less than scancel waits before its second try."""
CANCEL_SECONDS = 5.0
_SENT = re.compile(rb"in transitional state")
_OVER = re.compile(r"Invalid job id|already (completed|completing|finished)", re.IGNORECASE)
_NOT_RUNNING = re.compile(rf"{_OVER.pattern}|pending|not running|no longer|Invalid job", re.IGNORECASE)


def signal_elements(name: str, elements: Sequence[str]) -> str:
    """Send a signal to the batch scripts of running elements like ``12_3``, and wait until it is sent.

    Those that do not run get none, which is no error. Returns what went wrong; empty if nothing did.
    """
    said: list[str] = []
    errands = Errands(said.append)
    errands.signal(name, elements, f"no {name} was sent")
    errands.finish()
    return "; ".join(dict.fromkeys(said))


def in_calls(elements: Sequence[str]) -> list[Sequence[str]]:
    """Divide elements among calls of scancel. Pure."""
    starts = range(0, len(elements), MOST_SIGNALLED)
    return [elements[start : start + MOST_SIGNALLED] for start in starts]


def _begin_signal(name: str, elements: Sequence[str]) -> Begun:
    # Without --batch it would go to the steps of a job alone; -v says when it has been sent.
    command = ["scancel", "-v", "--batch", f"--signal={name}", *elements]
    return commands.begin_command(command, SIGNAL_SECONDS, _SENT)


def _finish_signal(begun: Begun) -> None:
    try:
        begun.finish()
    except SlurmTimeout:
        raise
    except SlurmError as error:
        if not _NOT_RUNNING.search(error.stderr):
            raise


def cancel_command(jobs: Sequence[str], only_pending: bool) -> list[str]:
    return ["scancel", *(["--state=PENDING"] if only_pending else []), *jobs]


def is_over(error: SlurmError) -> bool:
    """Whether scancel says no more than that jobs have ended meanwhile."""
    return _OVER.search(error.stderr) is not None


def single_out(elements: Sequence[str]) -> None:
    """Have Slurm keep pending elements apart from the others of their arrays, by one call for each array.

    Elements that wait together are one record, and ``scancel --state=PENDING 12_3`` (22.05) cancels all that
    are in the record of that one. A change of some of them, here of their comment, makes another record.
    Those that have started or ended meanwhile are no error. Raises :class:`SlurmError`.
    """
    arrays: dict[str, list[str]] = {}
    for element in elements:
        array, _, index = element.partition("_")
        arrays.setdefault(array, []).append(index)
    for array, indices in arrays.items():
        try:
            command = ["scontrol", "update", f"jobid={array}_[{','.join(indices)}]", "comment=withdrawn"]
            commands.run_command(command)
        except SlurmError as error:
            if not is_over(error):
                raise


def _finish_cancel(begun: Begun) -> None:
    try:
        begun.finish()
    except SlurmError as error:
        if not is_over(error):
            raise


@dataclass
class Errands:
    """Signals and cancellations of a pass, which run beside it. What fails is left to the next pass, which
    sees that it has not happened."""

    note: Callable[[str], None]
    _begun: list[tuple[str, Callable[[Begun], None], Begun]] = field(default_factory=list)

    def ring(self, elements: Sequence[str]) -> None:
        """Have workers look at once: SIGUSR1 to running elements like ``12_3``."""
        self.signal("USR1", elements, "workers were not notified")

    def end_gently(self, elements: Sequence[str]) -> None:
        """Ask running elements to end by themselves, as Slurm warns them (SIGUSR2). One that has begun
        something since it was seen idle ends after that; SIGTERM might end it at once."""
        self.signal("USR2", elements, "workers were not asked to leave")

    def cancel(self, jobs: Sequence[str], only_pending: bool) -> None:
        """Cancel jobs; none that are named are no error, nor those that have ended meanwhile."""
        if jobs:
            command, undone = cancel_command(jobs, only_pending), f"{', '.join(jobs)} not cancelled"
            begun = self._begin(lambda: commands.begin_command(command, CANCEL_SECONDS), undone)
            self._begun += [(undone, _finish_cancel, one) for one in begun]

    def withdraw(self, elements: Sequence[str]) -> None:
        """Cancel elements like ``12_3`` that wait in the queue; those that have started meanwhile go on."""
        try:
            single_out(elements)
        except (SlurmError, SlurmMissing) as error:
            self.note(f"{', '.join(elements)} not cancelled: {error}")
            return
        self.cancel(elements, only_pending=True)

    def signal(self, name: str, elements: Sequence[str], undone: str) -> None:
        """Send a signal to the batch scripts of running elements; ``undone`` says what that was for."""
        for some in in_calls(elements):
            begun = self._begin(lambda some=some: _begin_signal(name, some), undone)  # type: ignore[misc]
            self._begun += [(undone, _finish_signal, one) for one in begun]

    def _begin(self, begin: Callable[[], Begun], undone: str) -> list[Begun]:
        try:
            return [begin()]
        except (SlurmError, SlurmMissing) as error:
            self.note(f"{undone}: {error}")
            return []

    def finish(self) -> list[SlurmError]:
        """Wait until all is done, for some seconds at most, and not with a lease. Returns what failed."""
        failed, begun, self._begun = [], self._begun, []
        for undone, finish, one in begun:
            try:
                finish(one)
            except SlurmError as error:
                self.note(f"{undone}: {error}")
                failed.append(error)
        return failed
