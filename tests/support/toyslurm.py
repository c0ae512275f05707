"""A Slurm of a few rules, behind the words of its commands: no daemons, no time, everything at one's will.

It has array jobs, dependencies on the end of others, requeues, ``scontrol update``, an accounting that
may be missing, and a memory from which ended jobs vanish. What elements do when they run is the caller's.
"""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm.commands import SlurmError
from slurm.query import expand
from slurm.states import Phase, SlurmState, phase_of

CONFIG = "SLURM_VERSION = 22.05.8\nMaxArraySize = {size}\nMaxJobCount = {jobs}\nMinJobAge = 300 sec\n"


@dataclass(eq=False)
class Element:
    """One element of an array."""

    job: "Job"
    index: int
    waits_for: list["Job"]
    """Arrays of which one has to end before it starts."""
    state: SlurmState = SlurmState.PENDING
    exit_code: int = 0
    restarts: int = 0
    attempt: int = 0
    """Counts its starts."""
    submitted: float = field(default_factory=time.time)
    started: float = 0.0
    ended: float = 0.0
    """Unix times; 0: not yet."""
    is_apart: bool = False
    """Whether it has a record of its own while it waits, as somebody has changed it or it was requeued."""

    @property
    def has_ended(self) -> bool:
        return phase_of(self.state) is Phase.ENDED

    @property
    def is_pending(self) -> bool:
        return self.state is SlurmState.PENDING

    @property
    def is_free(self) -> bool:
        """Whether it waits for nothing but room."""
        return self.is_pending and (not self.waits_for or any(job.has_ended for job in self.waits_for))

    @property
    def reason(self) -> str:
        return "None" if not self.is_pending or self.is_free else "Dependency"

    @property
    def dependency(self) -> str:
        """What it still waits for, as squeue shows it."""
        left = [f"afterany:{job.id}_*(unfulfilled)" for job in self.waits_for if not job.has_ended]
        return "?".join(left) or "(null)"

    def __str__(self) -> str:
        return f"{self.job.id}_{self.index} {self.job.name} {self.state} {self.reason}"


@dataclass(eq=False)
class Job:
    """An array."""

    id: str
    name: str
    begin: str
    file: Path
    """What its elements read, and ``work``: its content."""
    work: dict
    elements: list[Element] = field(default_factory=list)
    script: Path = Path()

    @property
    def has_ended(self) -> bool:
        return all(element.has_ended for element in self.elements)


@dataclass
class Begun:
    """A command that was carried out, and why not."""

    error: SlurmError | None = None

    def finish(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class ToySlurm:
    """``run`` takes the place of slurm.commands._run_once, ``begin`` of slurm.commands.begin_command."""

    has_accounting: bool = True
    refuses_unknown: bool = False
    """As Slurm 23.02 and later: to depend on a forgotten job is an error; before, it is nothing."""
    max_array_size: int = 1001
    shows_times: bool = False
    """Whether squeue shows when jobs were submitted, started and ended."""
    most_queued: int | None = None
    """Jobs that it takes; each element counts."""
    nodes: str = ""
    """Answer of ``sinfo -N``; empty: it knows none."""
    before: Callable[[str], None] = lambda program: None
    after: Callable[[str], None] = lambda program: None
    """Called before and after it carries a command out; may raise, and let things happen."""
    on_signal: Callable[["Element", str], None] = lambda element, name: None
    """Called for each running element whose batch script gets a signal."""
    jobs: dict[str, Job] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)

    def run(self, arguments: Sequence[str], timeout: float = 0, input: str | None = None) -> str:
        self.before(arguments[0])
        answer = self.run_quietly(arguments)
        self.after(arguments[0])
        return answer

    def take_the_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the real Slurm."""
        monkeypatch.setattr("slurm.commands._run_once", self.run)
        monkeypatch.setattr("slurm.commands.begin_command", self.begin)

    def begin(self, arguments: Sequence[str], *_: object) -> "Begun":
        """Carry a command out at once that runs beside whoever starts it."""
        try:
            self.run(arguments)
        except SlurmError as error:
            return Begun(error)
        return Begun()

    def run_quietly(self, arguments: Sequence[str]) -> str:
        """Carry out a command of somebody else's."""
        program, *words = arguments
        answer: str = getattr(self, f"_{program}")(words)
        return answer

    # --- its rules ---

    def elements(self, *states: SlurmState) -> list[Element]:
        return [e for job in self.jobs.values() for e in job.elements if not states or e.state in states]

    def forget_ended(self) -> None:
        """MinJobAge has passed."""
        self.forgotten |= {job.id for job in self.jobs.values() if job.has_ended}

    def _named_in(self, dependency: str) -> list[Job]:
        """Arrays that ``afterany:12?afterany:13`` names, without those that are forgotten."""
        ids = [part.removeprefix("afterany:") for part in dependency.split("?") if part]
        assert set(ids) <= self.jobs.keys(), dependency
        if self.refuses_unknown and set(ids) & self.forgotten:
            raise refusal("Job dependency problem")
        return [self.jobs[job] for job in ids if job not in self.forgotten]

    # --- its commands ---

    def _sbatch(self, words: Sequence[str]) -> str:
        text = Path(words[-1]).read_text()
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
        given = {name: shlex.split(value)[0] for name, value in options.items()}
        indices = expand(given["array"])
        queued = sum(not element.has_ended for element in self.elements())
        if self.most_queued is not None and queued + len(indices) > self.most_queued:
            raise refusal("Job violates accounting/QOS policy (job submit limit)")
        assert max(indices) < self.max_array_size
        waits_for = self._named_in(given.get("dependency", ""))
        (command,) = re.findall(r"^exec .*", text, re.MULTILINE)
        file = Path(shlex.split(command)[-1])
        id, work = str(100 + len(self.jobs)), json.loads(file.read_text())
        job = Job(id, given["job-name"], given.get("begin", ""), file, work, script=Path(words[-1]))
        job.elements += [Element(job, index, waits_for) for index in indices]
        assert job.name not in {other.name for other in self.jobs.values()}
        self.jobs[job.id] = job
        return f"Submitted batch job {job.id}\n"

    def _squeue(self, words: Sequence[str]) -> str:
        fields = re.findall(r"([\w-]+):\|", option(words, "--Format") or "")
        known = _SHOWN | (_TIMES if self.shows_times else {})
        show = [known.get(name, lambda element: "") for name in fields]
        names, jobs = ((option(words, name) or "").split(",") for name in ("--name", "--jobs"))
        states = {SlurmState.PENDING} if option(words, "--states") == "PENDING" else set(SlurmState)
        rows = (
            "".join(f"{of(element)}|" for of in show) + "\n"
            for element in self.elements(*states)
            if element.job.id not in self.forgotten
            and (names == [""] or element.job.name in names)
            and (jobs == [""] or element.job.id in jobs)
        )
        return "".join(rows)

    def _sacct(self, words: Sequence[str]) -> str:
        fields = (option(words, "--format") or "").split(",")
        if not self.has_accounting or not set(fields) <= _ACCOUNTED.keys():
            raise SlurmError(["sacct"], 1, "Slurm accounting storage is disabled")
        ids, names = ((option(words, name) or "").split(",") for name in ("--jobs", "--name"))
        rows = (
            "|".join(_ACCOUNTED[name](element) for name in fields) + "\n"
            for element in self.elements()
            if element.job.id in ids or element.job.name in names
        )
        return "".join(rows)

    def _scontrol(self, words: Sequence[str]) -> str:
        if "show" in words:
            if words[-2:-1] == ["job"]:
                return f"JobId={words[-1]} Command={self.jobs[words[-1]].script} WorkDir=/x\n"
            is_config = words[-1] == "config"
            return CONFIG.format(size=self.max_array_size, jobs=10_000) if is_config else ""
        assert words[0] == "update", words
        for element in self._named([words[1].removeprefix("jobid=")]):
            element.is_apart = True
        if words[2].startswith("comment="):
            return ""
        if words[2] == "starttime=now":
            for element in self._named([words[1].removeprefix("jobid=")]):
                element.job.begin = ""
            return ""
        waits_for, missed = self._named_in(words[2].removeprefix("dependency=")), []
        for element in self._named([words[1].removeprefix("jobid=")]):
            if element.is_pending:
                element.waits_for = waits_for
            else:
                missed.append(element)
        if missed:
            raise SlurmError(["scontrol", "update"], 1, "Job is no longer pending execution")
        return ""

    def _scancel(self, words: Sequence[str]) -> str:
        only_pending = "--state=PENDING" in words
        name = option(words, "--signal")
        for element in self._named([word for word in words if not word.startswith("-")]):
            if name is not None:
                if element.state is SlurmState.RUNNING:
                    self.on_signal(element, name)
            elif element.is_pending or not only_pending:
                for one in self._recorded_with(element) if only_pending else [element]:
                    self.end(one, SlurmState.CANCELLED)
        return ""

    @staticmethod
    def _recorded_with(element: Element) -> list[Element]:
        """Return the elements that scancel takes for one where only those that wait are to be cancelled."""
        together = (e for e in element.job.elements if e.is_pending and not e.is_apart)
        return [element] if element.is_apart else list(together)

    def _sinfo(self, words: Sequence[str]) -> str:
        return self.nodes if "-N" in words else ""

    def _sacctmgr(self, words: Sequence[str]) -> str:
        raise SlurmError(["sacctmgr"], 1, "no accounting")

    def _named(self, ids: Iterable[str]) -> Iterator[Element]:
        for text in ids:
            job, _, index = text.partition("_")
            wanted = expand(index) if index else None
            for element in self.jobs[job].elements:
                if wanted is None or element.index in wanted:
                    yield element

    # --- what happens to elements ---

    def start(self, element: Element) -> None:
        assert element.is_free
        assert element.job.file.exists(), element
        element.state, element.started = SlurmState.RUNNING, time.time()
        element.attempt += 1

    def end(self, element: Element, state: SlurmState, exit_code: int = 0) -> None:
        if not element.has_ended:
            element.state, element.exit_code, element.ended = state, exit_code, time.time()

    def requeue(self, element: Element) -> None:
        element.state, element.restarts, element.is_apart = SlurmState.PENDING, element.restarts + 1, True
        element.submitted, element.started = time.time(), 0.0


def option(words: Sequence[str], name: str) -> str | None:
    return next((word.split("=", 1)[1] for word in words if word.startswith(f"{name}=")), None)


def refusal(words: str) -> SlurmError:
    return SlurmError(["sbatch"], 1, f"sbatch: error: Batch job submission failed: {words}")


_SHOWN: dict[str, Callable[[Element], str]] = {
    "ArrayJobID": lambda element: element.job.id,
    "ArrayTaskID": lambda element: str(element.index),
    "State": lambda element: element.state,
    "exit_code": lambda element: str(element.exit_code << 8),
    "RestartCnt": lambda element: str(element.restarts),
    "Reason": lambda element: element.reason,
    "Dependency": lambda element: element.dependency,
    "NodeList": lambda element: "" if element.is_pending else "node",
    "Name": lambda element: element.job.name,
}
_TIMES: dict[str, Callable[[Element], str]] = {
    "SubmitTime": lambda element: str(int(element.submitted)),
    "StartTime": lambda element: str(int(element.started)),
    "EndTime": lambda element: str(int(element.ended)),
}
_ACCOUNTED: dict[str, Callable[[Element], str]] = {
    "JobID": lambda element: f"{element.job.id}_{element.index}",
    "State": lambda element: element.state,
    "ExitCode": lambda element: f"{element.exit_code}:0",
    "NodeList": lambda element: "node",
    "JobName": lambda element: element.job.name,
    **dict.fromkeys(("Submit", "Start", "End", "TimelimitRaw", "Partition", "Reason"), lambda element: ""),
}
