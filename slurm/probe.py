"""Probes: tiny jobs that check on a compute node what no login node can know."""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm import probe_task
from slurm.commands import SlurmError
from slurm.query import Element, NoAccounting, read_ended, read_queue
from slurm.sharedfiles import is_there, read_shared, size_of
from slurm.states import Phase, exit_in_words, phase_of, reason_in_words
from slurm.submission import Array, Option, Refused, cancel, literal, render, submit

_TIME_LIMIT = "0:05:00"
_POLL_SECONDS = 2.0
_GREET_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 5.0
_NOTE_SECONDS = 15.0
_GRACE_SECONDS = 10.0
"""Seconds that an answer may take to appear here after its job ended: caches of network filesystems."""
_SHORT_GRACE_SECONDS = 3.0
_LOG_LINES = 3


@dataclass(frozen=True)
class Probe:
    """One probe job to send."""

    name: str
    """Name of its files, short and unique."""
    options: Mapping[str, Option]
    command: Sequence[str]
    """Words before the script's path: the interpreter, in its container."""
    modules: Sequence[str] = ()
    """Modules to import; with a ? before the name only to look for."""
    paths: Sequence[str] = ()
    """Paths that must exist."""
    programs: Sequence[str] = ()
    """Commands that must succeed."""
    setup: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    measures_delay: bool = False
    """Whether to exchange files with the job, and measure how long each side takes to see the other's."""


@dataclass(frozen=True)
class Exchange:
    """Delays, in seconds, of files that a job and this machine wrote for each other."""

    round_trip: float | None
    """Time from the job's file to the job seeing the answer, on its clock, without the time between the job's
    file being seen here and the answer being written. None: the answer was not seen there in time."""
    seen_here: float
    """Time from the job's file, by its clock, to its being seen here, by ours."""
    node_skew: float
    """Seconds by which the file server's clock is ahead of the node's."""


@dataclass(frozen=True)
class ProbeResult:
    """Findings of a probe on its node."""

    node: str
    python: str
    missing_modules: Mapping[str, str]
    missing_paths: Sequence[str]
    unreachable: Mapping[str, str]
    gpus: int | None
    """Number of visible GPUs; None where the node does not say."""
    delay: Mapping[str, float | None] | None = None
    """Times that the node measured, where it was asked to."""
    exchange: Exchange | None = None


@dataclass(frozen=True)
class ProbeTimeout:
    """Absence of an answer."""

    why: str
    is_late: bool
    """Whether its job did not start or end in time, so that nothing is known. Otherwise it was refused, or
    ended without an answer."""


Answer = ProbeResult | ProbeTimeout


def run_probes(
    probes: Sequence[Probe], parent: Path, folder: Path, seconds: float, note: Callable[[str], None]
) -> dict[str, Answer]:
    """Send the jobs, wait for their answers, and leave nothing behind.

    Args:
        parent: folder where a run directory is to be made; the probes exchange files in a folder there.
        folder: working directory of the jobs.
        seconds: to wait for all of them.
        note: called every few seconds with what is being waited for.

    Raises:
        OSError: nothing can be made in ``parent``.
        SlurmError: Slurm does not answer.
    """
    with _meeting_place(parent) as place:
        shutil.copy(probe_task.__file__, place / "probe.py")
        sent = _Sent(place, folder)
        try:
            for probe in probes:
                sent.send(probe)
            sent.wait(time.monotonic() + seconds, note)
        finally:
            sent.cancel()
        return sent.answers


@contextlib.contextmanager
def _meeting_place(parent: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix=".slurm-ppo-probe-", dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # NFS keeps files that a job has open


@dataclass
class _Sent:
    """Probes on their way."""

    place: Path
    folder: Path
    answers: dict[str, Answer] = field(default_factory=dict)
    _jobs: dict[str, str] = field(default_factory=dict)
    """Job id by probe."""
    _ended: dict[str, float] = field(default_factory=dict)
    """Monotonic time by probe at which its job was first seen to have ended."""
    _expected: set[str] = field(default_factory=set)
    """Probes that will write a greeting."""
    _greeted: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Unix times by probe at which its greeting was seen and was answered."""

    def send(self, probe: Probe) -> None:
        request: dict[str, object] = {"modules": probe.modules, "paths": probe.paths}
        request["programs"] = probe.programs
        if probe.measures_delay:
            request["exchange"] = str(self.place / probe.name)
            self._expected.add(probe.name)
        (self.place / f"{probe.name}.request").write_text(json.dumps(request))
        array = Array(
            name=self._job_name(probe.name),
            indices=[0],
            command=[
                *probe.command,
                str(self.place / "probe.py"),
                str(self.place / f"{probe.name}.request"),
                str(self.place / f"{probe.name}.answer"),
            ],
            output=literal(self._log(probe.name)),
            folder=self.folder,
            options={**probe.options, "time": _TIME_LIMIT},
            setup=probe.setup,
            environment=probe.environment,
        )
        script = self.place / f"{probe.name}.sh"
        script.write_text(render(array))
        try:
            self._jobs[probe.name] = submit(script, array.name)
        except Refused as error:
            self.answers[probe.name] = ProbeTimeout(str(error).replace(f"{script}", "it"), is_late=False)

    def wait(self, until: float, note: Callable[[str], None]) -> None:
        noted = time.monotonic() - _NOTE_SECONDS + _FIRST_NOTE_SECONDS
        while missing := self._look():
            now = time.monotonic()
            seen = self._queue()
            self._note_ended(seen, now)
            if now > until:
                for name in missing:
                    self.answers.setdefault(
                        name, ProbeTimeout(_waiting(seen.get(self._jobs[name])), is_late=True)
                    )
                return
            if now - noted > _NOTE_SECONDS:
                noted = now
                note(f"waiting for {len(missing)} probe jobs, {until - now:.0f} s more at most:")
                for name in missing:
                    note(f"  {name}, job {self._jobs[name]}: {_waiting(seen.get(self._jobs[name]))}")
            self._greet_until(time.monotonic() + _POLL_SECONDS)

    def _greet_until(self, until: float) -> None:
        """Answer greetings at once, so that the filesystem is measured and not the polling interval."""
        while (left := until - time.monotonic()) > 0:
            silent = self._expected - self._greeted.keys()
            names = {path.name for path in self.place.iterdir()} if silent else set()
            for name in silent:
                if f"{name}.hello" in names:
                    seen = time.time()
                    reply = self.place / f"{name}.reply"
                    reply.with_suffix(".reply.tmp").write_text("")
                    reply.with_suffix(".reply.tmp").replace(reply)
                    self._greeted[name] = (seen, time.time())
            time.sleep(_GREET_SECONDS if silent else left)

    def _look(self) -> list[str]:
        """Read the answers that have come. Returns the names of the probes without one."""
        for name in self._jobs.keys() - self.answers.keys():
            with contextlib.suppress(FileNotFoundError):
                content: dict[str, Any] = json.loads(read_shared(self.place / f"{name}.answer"))
                self.answers[name] = self._with_exchange(name, ProbeResult(**content))
        return [name for name in self._jobs if name not in self.answers]

    def _with_exchange(self, name: str, sighting: ProbeResult) -> ProbeResult:
        measured = sighting.delay
        if measured is None or name not in self._greeted:
            return sighting
        (seen, answered), written = self._greeted[name], measured["written"]
        assert written is not None
        total = measured["round_trip"]
        trip = None if total is None else max(0.0, total - (answered - seen))
        return replace(sighting, exchange=Exchange(trip, seen - written, measured["skew"] or 0.0))

    def _queue(self) -> dict[str, Element]:
        return {e.array_id: e for e in read_queue(lambda name: name.startswith(f"{self.place.name}."))}

    def _note_ended(self, seen: Mapping[str, Element], now: float) -> None:
        """Record as unanswered the probes whose jobs ended without an answer a while ago."""
        for name, job in self._jobs.items():
            element = seen.get(job)
            if name in self.answers or (element and phase_of(element.state) is not Phase.ENDED):
                continue
            has_spoken = is_there(self._log(name)) and size_of(self._log(name)) > 0
            grace = _SHORT_GRACE_SECONDS if has_spoken else _GRACE_SECONDS
            if now - self._ended.setdefault(name, now) > grace:
                self.answers[name] = ProbeTimeout(self._how_it_ended(name, job, element), is_late=False)

    def _how_it_ended(self, name: str, job: str, element: Element | None) -> str:
        with contextlib.suppress(NoAccounting, SlurmError):
            element = element or read_ended([job]).get((job, 0))
        words = (
            exit_in_words(element.state, element.exit_code or 0, element.signal or 0) if element else "gone"
        )
        at = f" on {element.node}" if element and element.node else ""
        log = self._log(name)
        said = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        told = f"it said: {' / '.join(said)}"
        if not said:
            told = f"nothing it wrote is seen in {self.place.parent}: do compute nodes share that filesystem?"
        return f"job {job}{at} left no answer ({words}); {told}"

    def _log(self, name: str) -> Path:
        return self.place / f"{name}.log"

    def _job_name(self, name: str) -> str:
        return f"{self.place.name}.{name}"

    def cancel(self) -> None:
        """Cancel the jobs of probes that have not answered."""
        silent = [
            job for name, job in self._jobs.items() if not isinstance(self.answers.get(name), ProbeResult)
        ]
        if silent:
            with contextlib.suppress(SlurmError):  # they end by themselves within minutes
                cancel(silent, only_pending=False)


def _waiting(element: Element | None) -> str:
    if element is None or phase_of(element.state) is Phase.ENDED:
        return "ended"
    return "running" if phase_of(element.state) is Phase.RUNNING else reason_in_words(element.reason)
