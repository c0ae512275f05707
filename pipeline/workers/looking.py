"""One look at Slurm's queue for all who want one: the answer of one squeue is kept in a file that all runs
and workers of a user share, on whatever node they are.

Who wants an answer says how old it may be. If the one that is kept is younger, that is it; else one asks,
whom a claim (a file made by hard link) makes known, and the others wait for its answer. The more has been
asked within the last minute, the older an answer may be, and the longer who needs one of now rests before
asking: so a user's questions are bounded, however many ask.

The file is a cache. One that is spoilt, another user's or from the future (clocks of nodes differ) is as
none, and where no file can be written each asks for itself.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.conversion import converted
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import cluster_of, run_id_of
from slurm.commands import SlurmError, SlurmTimeout
from slurm.query import QUEUE_FORMAT, Element, ask_queue, parse_known, parse_queue
from slurm.sharedfiles import is_there, make_folder, names_in, read_newest, sealed, unsealed
from slurm.states import Phase, phase_of

PASS_AGE = 3.0
"""Seconds that an answer may be old for a pass that a worker has asked for: workers say by beats and claims,
which are read later, what has changed since; and passes that follow each other as fast as they may are about
so far apart."""
FROM_NOW = math.inf
"""Instead of an age: any answer to a question of now or later. For driver jobs, which the end of a job has
started."""
PERSON_AGE = 5.0
"""Seconds for a single command of a person."""
WORKER_AGE = 10.0
"""Seconds for a worker that waits: it wants to know of its own end, hours away, and of others who wait for a
place."""
_MINUTE = 60.0
_WIDENINGS = ((9, 4.0), (6, 2.0))
"""Numbers of questions within the last minute, and by what the age that an answer may have is multiplied from
there on: with ages of 3 and 5 s that makes nine a minute."""
_RESTS = ((8, 12.0), (5, 5.0))
"""Numbers of questions within the last minute, and the least seconds from there on between two of them: about
twelve a minute, if all who ask need an answer of now."""
_REFUSALS = 3.0
"""Times the age that an answer may have, for which no process asks again where there was none: squeue
that hangs does so for longer than an answer may be old."""
_SEVERAL = 2.4
"""Times as many questions a minute as for one run, if the user has several: about thirty for all of them."""
_GRACE = 2.0
"""Seconds beyond its patience after which the holder of the claim is taken to be gone."""
_FIRST_POLL, _LONGEST_POLL, _POLL_GROWTH = 0.02, 0.5, 1.5


@dataclass(frozen=True)
class Look:
    """Slurm's queue at one moment: all jobs of this user, of whatever name."""

    asked: float
    """Unix time when squeue was called, by the caller's clock."""
    text: str
    """squeue's output."""
    recent: tuple[float, ...] = ()
    """Unix times of the questions of the minute up to this one."""
    runs: int = 1
    """Number of the user's runs that have jobs, 1 if none has."""

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        """Elements of all jobs, but for those in a state that is not known."""
        return tuple(parse_known(self.text))

    def elements_of(self, is_ours: Callable[[str], bool]) -> list[Element]:
        """Return the elements of jobs by their names. Raises :class:`slurm.states.UnknownState`."""
        return parse_queue(self.text, is_ours)


@dataclass(frozen=True)
class QueueQuestion:
    """Claim of a process that asks, backs off before that, or has asked in vain."""

    token: str
    asked: float
    """Unix time; while backing off, the end of that."""
    until: float
    """Unix time after which there will be no answer."""
    recent: tuple[float, ...] = ()
    """Unix times of the questions before, those without an answer too."""
    failed: str | None = None
    """Reason why there was no answer; None while it may come."""
    is_timeout: bool = False
    conf: str = ""
    """SLURM_CONF of that process: where another has none, or another's, squeue may well answer."""

    def is_open(self, now: float, rest: float = 0.0) -> bool:
        """Whether an answer may still come.

        Args:
            rest: seconds that who asks may rest before; else one that rests is none.
        """
        return self.failed is None and self.asked <= now + rest and now <= self.until

    def error(self) -> SlurmError:
        return (SlurmTimeout if self.is_timeout else SlurmError)(["squeue"], None, self.failed or "")


def allowed_age(max_age: float, recent: Sequence[float], now: float, runs: int = 1) -> float:
    """Return how old an answer may be, in seconds. Pure.

    Args:
        max_age: what is asked for.
        recent: unix times of questions.
        runs: number of the user's runs.
    """
    return max_age * _step(_WIDENINGS, recent, now, 1.0, runs)


def resting(recent: Sequence[float], now: float, runs: int = 1) -> float:
    """Return the seconds until the next question is due. Pure.

    Args:
        recent: unix times of questions, the newest last.
        runs: number of the user's runs.
    """
    past = within_a_minute(recent, now)
    return max(0.0, past[-1] + _step(_RESTS, past, now, 0.0, runs) - now) if past else 0.0


def _step(
    steps: Sequence[tuple[int, float]], recent: Sequence[float], now: float, first: float, runs: int
) -> float:
    """Return what steps give for the number of questions within the last minute."""
    count = sum(0 <= now - asked < _MINUTE for asked in recent) / min(_SEVERAL, max(1, runs))
    return next((value for least, value in steps if count >= least), first)


def runs_in(text: str) -> int:
    """Count the runs that have jobs which wait or run, by squeue's output; at least 1. Pure."""
    live = (e for e in parse_known(text) if phase_of(e.state) is not Phase.ENDED)
    return max(1, len({run_id_of(element.name) for element in live} - {""}))


def is_usable(look: Look, max_age: float, since: float, now: float) -> bool:
    """Whether a kept answer is young enough. Pure. One that will be asked in the future is not."""
    return look.asked > since and 0 <= now - look.asked < allowed_age(max_age, look.recent, now, look.runs)


def look(paths: RunPaths, max_age: float, patience: float, since: float = 0.0, is_view: bool = False) -> Look:
    """Look at the queue: by the answer that is kept, or by one squeue.

    Args:
        paths: of the run that wants to know.
        max_age: seconds that the answer may be old; 0: it is asked for now; FROM_NOW: asked by whomever from
            now on, which may rest for some seconds where much has been asked.
        patience: seconds until there is an answer: half of them for another's, the rest for its own;
            without those of a rest.
        since: unix time; an answer from before is too old in any case.
        is_view: whether nothing may be written into the run's folder.

    Raises:
        SlurmTimeout: there was no answer in that time; or no process got one just now.
        SlurmError: squeue failed, or its answer is not understood.
        SlurmMissing: there is no squeue here, and no other process asks.
    """
    if max_age == FROM_NOW:
        since = max(since, time.time())
    for shelf in _shelves(paths):
        with contextlib.suppress(OSError):  # a full disk, say: then another place, or none
            if not is_view or shelf.folder != paths.slurm:
                return _look_on(shelf, max_age, patience, since)
            if (kept := shelf.kept()) is not None and is_usable(kept, max_age, since, time.time()):
                return kept
    return Look(time.time(), ask_queue(patience))


@dataclass(frozen=True)
class Shelf:
    """Place where an answer is kept, and the claim of the process that asks."""

    folder: Path
    name: str

    def kept(self) -> Look | None:
        """Return the answer that is kept; None where there is none, or none that is ours and whole."""
        found = self._read("json")
        if found is None or (found.pop("format", ""), found.pop("user", None)) != (QUEUE_FORMAT, os.getuid()):
            return None
        with contextlib.suppress(ValueError, TypeError):
            return converted(Look, found)
        return None

    def keep(self, answer: Look) -> None:
        """Keep an answer, unless a newer one is there."""
        there = self.kept()
        if there is not None and answer.asked < there.asked <= time.time():
            return
        about = {"format": QUEUE_FORMAT, "user": os.getuid()}
        replace_durably(self._path("json"), sealed({**asdict(answer), **about}))

    def question(self) -> QueueQuestion | None:
        """Return the claim of the process that asks."""
        with contextlib.suppress(ValueError, TypeError):
            return converted(QueueQuestion, self._read("claim"))
        return None

    def claim(self, question: QueueQuestion, instead: QueueQuestion | None) -> bool:
        """Claim the question. Returns whether this process got it."""
        path = self._path("claim")
        if is_there(path):
            there = self.question()
            if there is None or (instead is not None and there.token == instead.token):  # spoilt, or over
                path.unlink(missing_ok=True)
        return link_once(path, sealed(asdict(question)))

    def settle(self, question: QueueQuestion, failed: SlurmError | None = None) -> None:
        """Take back an own claim, or say why it came to nothing."""
        there = self.question()
        if there is None or there.token != question.token:
            return
        if failed is None:
            self._path("claim").unlink(missing_ok=True)
            return
        said = replace(question, failed=failed.stderr, is_timeout=isinstance(failed, SlurmTimeout))
        replace_durably(self._path("claim"), sealed(asdict(said)))

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.name}.{ending}"

    def _read(self, ending: str) -> dict[str, Any] | None:
        """Read a file of this user's; None where there is none that is whole."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            content = read_newest(self._path(ending))
            if self._path(ending).stat().st_uid == os.getuid():
                return unsealed(content)
        return None


_PLACE = re.compile(r"place-\d+_\d+-(\d+)")
_PLACES_KEPT = 60
"""Minutes for which it is known which worker has made place for a job."""


def claim_place(paths: RunPaths, element: str, now: float) -> bool:
    """Make known to a user's other runs that this one makes place for a job that waits. False where another
    does: two who leave for one job would start up again for nothing. It counts for this minute and the next.

    Args:
        paths: of the run that makes place.
        element: the job, like ``4711_3``.
        now: unix time.
    """
    minute, name = int(now // _MINUTE), str(paths.root)
    for shelf in _shelves(paths):
        with contextlib.suppress(OSError, ValueError):  # then each decides for itself
            _forget_places(shelf.folder, minute)
            before, path = (shelf.folder / f"place-{element}-{when}" for when in (minute - 1, minute))
            if is_there(before) and read_newest(before).decode() != name:
                return False
            return link_once(path, name) or read_newest(path).decode() == name
    return True


def _forget_places(folder: Path, minute: int) -> None:
    for found in filter(None, map(_PLACE.fullmatch, names_in(folder))):
        if not -1 <= minute - int(found[1]) < _PLACES_KEPT:  # another node's clock may be ahead
            (folder / found[0]).unlink(missing_ok=True)


def within_a_minute(moments: Sequence[float], now: float) -> tuple[float, ...]:
    """Return the times of the last minute, the newest last."""
    return tuple(sorted(moment for moment in set(moments) if 0 <= now - moment < _MINUTE))


def _look_on(shelf: Shelf, max_age: float, patience: float, since: float) -> Look:
    """Look by the answer on a shelf, or put a new one there. Raises OSError where that cannot be."""
    began, poll, may_rest = time.monotonic(), _FIRST_POLL, max_age == FROM_NOW
    patience_with_others = patience / 2 + (_RESTS[0][1] if may_rest else 0.0)
    while True:
        kept, question = shelf.kept(), shelf.question()
        now = time.time()  # after what was read: that is of the past
        in_vain = (*question.recent, question.asked) if question and question.failed is not None else ()
        recent = within_a_minute((*in_vain, *(kept.recent if kept else ())), now)
        if kept is not None and is_usable(kept, max_age, since, now):
            return kept
        if question is not None and _is_refusal(question, since, now, _REFUSALS * max_age):
            raise question.error()
        waited = time.monotonic() - began
        is_tired = waited >= patience_with_others
        is_awaited = question is not None and question.is_open(now, _RESTS[0][1] if may_rest else 0.0)
        if is_tired or max_age <= 0 or not is_awaited:
            rest = resting(recent, now, kept.runs if kept else 1) if may_rest else 0.0
            left = max(patience - waited, patience / 2)
            own = QueueQuestion(
                os.urandom(8).hex(), now + rest, now + rest + left + _GRACE, recent, conf=_conf()
            )
            if shelf.claim(own, question) or is_tired:
                return _rested(shelf, own, since, rest) or _ask(shelf, own, left)
        time.sleep(poll)
        poll = min(_LONGEST_POLL, _POLL_GROWTH * poll)


def _rested(shelf: Shelf, own: QueueQuestion, since: float, rest: float) -> Look | None:
    """Rest before a question. Returns the answer that another process has got meanwhile."""
    if not rest:
        return None
    time.sleep(rest)
    kept = shelf.kept()
    if kept is None or not is_usable(kept, FROM_NOW, since, time.time()):
        return None
    shelf.settle(own)
    return kept


def _is_refusal(question: QueueQuestion, since: float, now: float, age: float) -> bool:
    """Whether a process got no answer just now, so that there is no need to ask."""
    is_failed = question.failed is not None and question.conf == _conf()
    return is_failed and question.asked >= since and 0 <= now - question.asked < age


def _conf() -> str:
    return os.environ.get("SLURM_CONF", "")


def _ask(shelf: Shelf, question: QueueQuestion, patience: float) -> Look:
    """Ask for all who wait. An answer that cannot be kept is an answer."""
    failed: SlurmError | None = None
    asked = time.time()
    try:
        before = (*question.recent, *(kept.recent if (kept := shelf.kept()) else ()))
        text = ask_queue(patience)
        answer = Look(asked, text, (*within_a_minute(before, asked), asked), runs_in(text))
        with contextlib.suppress(OSError):
            shelf.keep(answer)
        return answer
    except SlurmError as error:
        failed = error
        raise
    finally:
        with contextlib.suppress(OSError):
            shelf.settle(question, failed)


def _shelves(paths: RunPaths) -> Iterator[Shelf]:
    """Yield the places where an answer may be kept, the one that all runs of the user share first."""
    if (cluster := cluster_of(paths)) and (home := cache_home(os.environ)):
        folder = home / "slurm-ppo" / re.sub(r"[^\w.-]", "_", cluster)
        if _is_writable(folder, home):
            yield Shelf(folder, "queue-v1")
    if _is_own(paths.slurm):
        yield Shelf(paths.slurm, "queue")


def cache_home(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for what may be lost, by the XDG Base Directory Specification; None where it is not
    known. Pure."""
    given, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if given.startswith("/"):
        return Path(given)
    return Path(home) / ".cache" if home.startswith("/") else None


def _is_writable(folder: Path, home: Path) -> bool:
    """Whether a folder is ours; it is made where nothing is there, but not in another user's home."""
    if _is_own(folder):
        return True
    with contextlib.suppress(OSError):  # a home that jobs may not even look at, say
        above = next((path for path in (home, *home.parents) if path.is_dir()), home)
        if _is_own(above):
            make_folder(folder)
            return _is_own(folder)
    return False


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_dir() and folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    return False
