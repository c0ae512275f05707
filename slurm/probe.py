"""Probes: tiny jobs that check on a compute node what no login node can know."""

import contextlib
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm import probe_task
from slurm.commands import SlurmError
from slurm.ended import NoAccounting, read_ended
from slurm.query import Element, read_queue
from slurm.reasons import reason_in_words
from slurm.setup_lines import checked, failed_line
from slurm.sharedfiles import is_there, read_newest, read_shared, size_of
from slurm.states import Phase, exit_in_words, phase_of
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
    """Words of the interpreter, in its container, which reads its program from standard input."""
    modules: Sequence[str] = ()
    """Modules to import; with a ? before the name only to look for."""
    paths: Sequence[str] = ()
    """Paths that must be there and readable."""
    programs: Sequence[str] = ()
    """Commands that must succeed."""
    setup: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    enters_image: bool = False
    """Whether the command goes into a container: then paths are looked for outside of it too."""
    trial: str = ""
    """Text of a program that tries the node's GPUs: its second line of output says what is wrong."""
    measures_delay: bool = False
    """Whether to exchange files with the job, and measure how long each side takes to see the other's."""
    run: Sequence[str] = ()
    """Module and arguments to run with the interpreter before the answer is written."""
    time: str = _TIME_LIMIT
    """Time limit of the job."""


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
    version: str = ""
    """Version of slurm-ppo that is installed for its interpreter; empty where none is."""
    driver_error: str = ""
    """Reason why the library of NVIDIA's driver cannot be loaded, on a node that has the driver."""
    trial_error: str = ""
    """Reason why the node's GPUs do not compute, where they were tried."""
    capabilities: Sequence[str] = ()
    """Compute capability of each NVIDIA GPU that it sees, such as ``8.6``."""
    place_error: str = ""
    """Reason why it cannot write beside the run directory."""
    missing_outside: Sequence[str] | None = None
    """Paths that its node lacks outside of the container; None where that was not checked."""
    delay: Mapping[str, float | None] | None = None
    """Times that the node measured, where it was asked to."""
    exchange: Exchange | None = None
    exit_code: int | None = None
    """Exit code of the module that was to be run."""


@dataclass(frozen=True)
class ProbeTimeout:
    """Absence of an answer."""

    why: str
    is_late: bool
    """Whether its job did not start or end in time, so that nothing is known. Otherwise it was refused, or
    ended without an answer."""
    has_spoken: bool = False
    """Whether it ran, and wrote to its log."""
    failed_setup: str = ""
    """Phrase on the line of its setup that failed, if one ended it."""


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
    sent: list[_Sent] = []
    # NFS keeps files that a job has open.
    with tempfile.TemporaryDirectory(
        prefix=".slurm-ppo-probe-", dir=parent, ignore_cleanup_errors=True
    ) as made:
        place = Path(made)
        shutil.copy(probe_task.__file__, place / "probe.py")
        try:
            for probe in probes:
                sent.append(_send(probe, place, folder))
            _wait(sent, place, time.monotonic() + seconds, note)
        finally:
            silent = [one.job for one in sent if one.job and not isinstance(one.answer, ProbeResult)]
            if silent:
                with contextlib.suppress(SlurmError):  # they end by themselves within minutes
                    cancel(silent, only_pending=False)
    return {one.name: one.answer for one in sent if one.answer}


@dataclass
class _Sent:
    """A probe on its way."""

    probe: Probe
    place: Path
    job: str = ""
    answer: Answer | None = None
    ended: float | None = None
    """Monotonic time at which its job was first seen to have ended."""
    greeted: tuple[float, float] | None = None
    """Unix times at which its greeting was seen and was answered."""

    @property
    def name(self) -> str:
        return self.probe.name

    def file(self, ending: str) -> Path:
        return self.place / f"{self.name}.{ending}"

    def has_answer(self) -> bool:
        """Whether there is an answer, which is read once it has come."""
        if self.answer is None:
            with contextlib.suppress(FileNotFoundError):
                content: dict[str, Any] = json.loads(self._answer_text())
                outside = self._missing_outside()
                self.answer = self._with_exchange(ProbeResult(**content, missing_outside=outside))
        return self.answer is not None

    def _answer_text(self) -> bytes:
        """Return its answer, from its file or its log. Raises FileNotFoundError where there is none yet."""
        with contextlib.suppress(FileNotFoundError):
            return read_shared(self.file("answer"))
        mark = probe_task.ANSWER.encode()
        whole = read_newest(self.file("log")).splitlines(keepends=True)
        for line in (line for line in whole if line.startswith(mark) and line.endswith(b"\n")):
            return line.removeprefix(mark)
        raise FileNotFoundError(self.file("answer"))

    def _missing_outside(self) -> list[str] | None:
        with contextlib.suppress(FileNotFoundError):
            numbers = read_shared(self.file("outside")).split()
            return [self.probe.paths[int(number)] for number in numbers]
        return None

    def _with_exchange(self, result: ProbeResult) -> ProbeResult:
        measured = result.delay
        if measured is None or self.greeted is None:
            return result
        (seen, answered), written = self.greeted, measured["written"]
        assert written is not None
        total = measured["round_trip"]
        trip = None if total is None else max(0.0, total - (answered - seen))
        return replace(result, exchange=Exchange(trip, seen - written, measured["skew"] or 0.0))

    def greet(self) -> None:
        """Answer the greeting that is there."""
        seen, reply = time.time(), self.file("reply")
        reply.with_suffix(".reply.tmp").write_text("")
        reply.with_suffix(".reply.tmp").replace(reply)
        self.greeted = (seen, time.time())

    def note_ended(self, element: Element | None, now: float) -> None:
        """Record as unanswered a probe whose job ended without an answer a while ago."""
        if element and phase_of(element.state) is not Phase.ENDED:
            return
        self.ended = now if self.ended is None else self.ended
        has_spoken = is_there(self.file("log")) and size_of(self.file("log")) > 0
        if now - self.ended > (_SHORT_GRACE_SECONDS if has_spoken else _GRACE_SECONDS):
            failed = failed_line(read_newest(self.file("log"))) if has_spoken else ""
            self.answer = ProbeTimeout(self._how_it_ended(element), False, has_spoken, failed)

    def _how_it_ended(self, element: Element | None) -> str:
        with contextlib.suppress(NoAccounting, SlurmError):
            element = element or read_ended([self.job]).get((self.job, 0))
        words = (
            exit_in_words(element.state, element.exit_code or 0, element.signal or 0) if element else "gone"
        )
        at = f" on {element.node}" if element and element.node else ""
        log = self.file("log")
        said = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        facts = f"it said: {' / '.join(said)}"
        if not said:
            facts = (
                f"nothing it wrote is seen in {self.place.parent}: do compute nodes share that filesystem?"
            )
        return f"job {self.job}{at} left no answer ({words}); {facts}"


def _send(probe: Probe, place: Path, folder: Path) -> _Sent:
    """Submit a probe's job, or take down why Slurm refused it."""
    sent = _Sent(probe, place)
    request: dict[str, object] = {"modules": probe.modules, "paths": probe.paths, "programs": probe.programs}
    request |= {"trial": probe.trial, "run": probe.run}
    exchange = {"exchange": str(place / probe.name)} if probe.measures_delay else {}
    array = Array(
        name=f"{place.name}.{probe.name}",
        indices=[0],
        command=[*probe.command, "-", json.dumps(request | exchange), str(sent.file("answer"))],
        output=literal(sent.file("log")),
        folder=folder,
        options={"nodes": 1, **probe.options, "time": probe.time},
        setup=[
            *checked(probe.setup),
            *_looking_outside(sent),
            f"exec <{shlex.quote(str(place / 'probe.py'))}",
        ],
        environment=probe.environment,
    )
    script = sent.file("sh")
    script.write_text(render(array))
    try:
        sent.job = submit(script, array.name)
    except Refused as error:
        sent.answer = ProbeTimeout(str(error).replace(f"{script}", "it"), is_late=False)
    return sent


def _looking_outside(sent: _Sent) -> list[str]:
    """Return shell lines that write the numbers of missing paths to a file, before a container is entered."""
    if not sent.probe.enters_image:
        return []
    looks = [f"[ -r {shlex.quote(path)} ] || echo {i}" for i, path in enumerate(sent.probe.paths)]
    file = shlex.quote(str(sent.file("outside")))
    return ["{ :", *looks, f"}} >{file} 2>/dev/null || :"]


def _wait(sent: Sequence[_Sent], place: Path, until: float, note: Callable[[str], None]) -> None:
    """Wait until every probe has an answer, if only that it is late."""
    noted = time.monotonic() - _NOTE_SECONDS + _FIRST_NOTE_SECONDS
    while missing := [one for one in sent if not one.has_answer()]:
        now = time.monotonic()
        seen = {e.array_id: e for e in read_queue(lambda name: name.startswith(f"{place.name}."))}
        for one in missing:
            one.note_ended(seen.get(one.job), now)
        if now > until:
            for one in missing:
                one.answer = one.answer or ProbeTimeout(_waiting(seen.get(one.job)), is_late=True)
            return
        if now - noted > _NOTE_SECONDS:
            noted = now
            note(f"waiting for {len(missing)} probe jobs, {until - now:.0f} s more at most:")
            for one in missing:
                note(f"  {one.name}, job {one.job}: {_waiting(seen.get(one.job))}")
        _greet_until(
            time.monotonic() + _POLL_SECONDS, [one for one in sent if one.probe.measures_delay], place
        )


def _greet_until(until: float, expected: Sequence[_Sent], place: Path) -> None:
    """Answer greetings at once, so that the filesystem is measured and not the polling interval."""
    while (left := until - time.monotonic()) > 0:
        silent = [one for one in expected if one.greeted is None]
        names = {path.name for path in place.iterdir()} if silent else set()
        for one in silent:
            if one.file("hello").name in names:
                one.greet()
        time.sleep(_GREET_SECONDS if silent else left)


def _waiting(element: Element | None) -> str:
    if element is None or phase_of(element.state) is Phase.ENDED:
        return "ended"
    return "running" if phase_of(element.state) is Phase.RUNNING else reason_in_words(element.reason)
