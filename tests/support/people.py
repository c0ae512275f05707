"""Four Unix users and two clusters: commands typed by each, in forks that really are theirs.

A fork drops to a user's number and groups, so that the system decides what may be read and written; names,
Slurm's commands and the clock are made up. Needs root.
"""

import codecs
import importlib
import io
import os
import pwd
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checks.finding import Finding, problem
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.watch.run import Readers, changes
from slurm.commands import SlurmError
from tests.support.warm import import_commands

HOUSE, LAB = 62000, 62001
"""Groups: who may enter the folder that holds the runs, and who may write to them."""
GOLD, SILVER = "gold", "silver"
PARTITIONS = {GOLD: ("cpu", "gpu", "small", "big"), SILVER: ("long",)}
_LATER = ("submitit", "importlib.readers", "multiprocessing.popen_fork", "multiprocessing.connection")
_SECONDS = 20


@dataclass(frozen=True)
class Person:
    """A Unix user, at a machine of a cluster."""

    name: str
    uid: int
    groups: tuple[int, ...]
    cluster: str = GOLD

    @property
    def title(self) -> str:
        return self.name if self.cluster == GOLD else f"{self.name} on {self.cluster}"


OWNER = Person("owner", 61001, (HOUSE, LAB))
MATE = Person("mate", 61002, (HOUSE, LAB))
READER = Person("reader", 61003, (HOUSE,))
STRANGER = Person("stranger", 61004, ())
NAMES = {one.uid: one.name for one in (OWNER, MATE, READER, STRANGER)}


@dataclass(frozen=True)
class Typed:
    """How a command ended, and what it asked of Slurm that changes anything."""

    code: int
    out: str
    err: str
    acts: tuple[str, ...]
    """Calls of sbatch and scancel."""


@dataclass
class Clusters:
    """Two clusters behind the words of Slurm's commands, as one person sees them."""

    person: Person
    jobs: Mapping[str, str]
    """Names of the owner's jobs that run on GOLD, by job id."""
    log: io.TextIOBase
    is_private: bool = False
    """PrivateData=jobs."""
    refuses: str = ""
    """sbatch's words."""

    def run(self, arguments: Sequence[str], timeout: float = 0, input: str | None = None) -> str:
        program, *words = arguments
        answer: str = getattr(self, f"_{program}")(words)
        return answer

    def _scontrol(self, words: Sequence[str]) -> str:
        if words[-1] == "partition":
            limits = "State=UP TotalNodes=4 MaxTime=UNLIMITED"
            return "".join(f"PartitionName={name} {limits}\n" for name in PARTITIONS[self.person.cluster])
        if words[-1] != "config":
            return ""
        private = "jobs" if self.is_private else "none"
        return (
            f"ClusterName = {self.person.cluster}\nSLURM_VERSION = 24.05.8\nMaxArraySize = 1001\n"
            f"MaxJobCount = 10000\nMinJobAge = 300 sec\nPrivateData = {private}\n"
        )

    def _squeue(self, words: Sequence[str]) -> str:
        user = next((word for word in words if word.startswith("--user=")), "")
        is_shown = self.person.uid == OWNER.uid or not self.is_private
        if user != f"--user={OWNER.uid}" or self.person.cluster != GOLD or not is_shown:
            return ""
        fields = re.findall(r"([\w-]+):\|", next(word for word in words if word.startswith("--Format=")))
        return "".join(self._row(fields, job, name) for job, name in self.jobs.items())

    @staticmethod
    def _row(fields: Sequence[str], job: str, name: str) -> str:
        known = {"ArrayJobID": job, "ArrayTaskID": "0", "State": "RUNNING", "RestartCnt": "0"}
        known |= {"Name": name, "NodeList": "node1", "Partition": "gpu", "exit_code": "0"}
        return "".join(f"{known.get(one, '')}|" for one in fields) + "\n"

    def _sbatch(self, words: Sequence[str]) -> str:
        if "--test-only" in words:
            return ""
        if "--version" in words:
            return "slurm 24.05.8\n"
        self._note("sbatch")
        if self.refuses:
            raise SlurmError(["sbatch"], 1, f"sbatch: error: Batch job submission failed: {self.refuses}")
        return f"Submitted batch job {900 + os.getpid()}\n"

    def _scancel(self, words: Sequence[str]) -> str:
        jobs = [word for word in words if not word.startswith("-")]
        self._note(f"scancel {' '.join(jobs)}")
        if self.person.uid != OWNER.uid:
            raise SlurmError(["scancel"], 1, f"Kill job error on job id {jobs[0]}: Access/permission denied")
        self.jobs = {}
        return ""

    def _sacct(self, words: Sequence[str]) -> str:
        raise SlurmError(["sacct"], 1, "Slurm accounting storage is disabled")

    def _sinfo(self, words: Sequence[str]) -> str:
        if words[-1] != "%R|%D|%c|%m|%G":
            return ""
        return "".join(f"{name}|4|64|512000|gpu:8\n" for name in PARTITIONS[self.person.cluster])

    def _sacctmgr(self, words: Sequence[str]) -> str:
        raise SlurmError(["sacctmgr"], 1, "no accounting")

    def _note(self, text: str) -> None:
        self.log.write(f"{text}\n")
        self.log.flush()


def import_all() -> None:
    """Import the command line: a fork of somebody else may not be able to read the package."""
    import_commands()
    for name in _LATER:
        importlib.import_module(name)
    codecs.lookup("unicode-escape")  # which templates are read with


@dataclass(frozen=True)
class Desk:
    """Where people type: what Slurm has, and the time."""

    folder: Path
    """Of outputs; nobody but root needs to see it."""
    now: float
    jobs: Mapping[str, str] = field(default_factory=dict)
    is_private: bool = False
    refuses: str = ""
    is_refused: bool = False
    """Whether jobs with the run's settings are not the person's to submit, as a look at the cluster says."""

    def type(self, person: Person, *words: object) -> Typed:
        """Carry out a command as a person, in a fork."""
        files = [(self.folder / name).open("w+") for name in ("out", "err", "acts")]
        if (child := os.fork()) == 0:
            code = 70
            try:
                code = self._be(person, [str(word) for word in words], files)
            except BaseException:  # a fork must never come back into the test runner
                traceback.print_exc(file=files[1])
            finally:
                for file in (sys.stdout, sys.stderr, *files):
                    file.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out, err, acts = (_content(file) for file in files)
        return Typed(os.waitstatus_to_exitcode(status), out, err, tuple(acts.splitlines()))

    def _be(self, person: Person, words: list[str], files: list[io.TextIOBase]) -> int:
        signal.alarm(_SECONDS)
        for source, target in zip(files, (1, 2), strict=False):
            os.dup2(source.fileno(), target)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        clusters = Clusters(person, self.jobs, files[2], self.is_private, self.refuses)
        self._pretend(person, clusters)
        os.setgroups(person.groups)
        os.setgid(person.groups[-1] if person.groups else person.uid)
        os.setuid(person.uid)
        os.umask(0o002)
        sys.argv = ["slurm-ppo", *words]
        try:
            importlib.import_module("pipeline.cli.app").main()
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(bool(error.code))
        return 0

    def _pretend(self, person: Person, clusters: Clusters) -> None:
        commands = importlib.import_module("slurm.commands")
        commands._run_once = clusters.run
        real = pwd.getpwuid

        def getpwuid(uid: int) -> object:
            entry = real(0)
            fields = list(entry)
            fields[0], fields[2] = NAMES.get(uid, "root"), uid
            return pwd.struct_passwd(fields)

        pwd.getpwuid = getpwuid
        time.time = lambda: self.now
        shutil.which = lambda name, *_: f"/usr/bin/{name}"
        importlib.import_module("pipeline.cli.errors")._acts.clear()  # of commands that this process typed
        for module in ("cluster", "suites"):
            importlib.import_module(f"pipeline.checks.{module}").check_cluster = self._look_at_cluster
        importlib.import_module("pipeline.watch.run").look_on = _look_once
        # Of this machine and its disk, and of a run whose models nobody has made.
        importlib.import_module("pipeline.checks.suites").machine_checks = lambda config: []
        importlib.import_module("pipeline.checks.suites").file_checks = lambda folder, is_shared: []
        importlib.import_module("pipeline.checks.health").missing_paths = lambda config: ()
        queue = importlib.import_module("pipeline.cli.queue")
        make_pass = queue.make_pass
        queue.follow = lambda run, watcher: _once(make_pass, run, watcher)
        os.environ.clear()
        os.environ.update({"HOME": "/", "COLUMNS": "80", "NO_COLOR": "1", "PATH": "/usr/bin:/bin"})
        os.chdir("/")

    def _look_at_cluster(self, config: object) -> list[Finding]:
        if self.is_refused:
            why = "scheduler.rollout.account=theirs: not one of yours; legal: none"
            return [problem("jobs of rollout", why, "")]
        return []


def _once(make_pass: Callable[..., object], run: object, watcher: object) -> Pass:
    """What watching does until Ctrl-C."""
    make_pass(run, watcher)
    return Pass(Outcome.INTERRUPTED)


def _look_once(reading: Readers, *ignored: object) -> bool:
    """What looking on does until Ctrl-C: one look, with Slurm's answer."""
    reading._take(reading._ask(reading.run))
    reading.look()
    assert reading.seen.look
    print("\n".join(changes(None, reading.seen.look)))
    return reading.seen.is_settled


def _content(file: io.TextIOBase) -> str:
    with file:
        file.seek(0)
        return file.read()


def give(root: Path, person: Person, group: int = LAB) -> None:
    """Make a folder and all in it a person's, for the group to write and others to read."""
    for path in (root, *root.rglob("*")):
        os.chown(path, person.uid, group)
        path.chmod(0o2775 if path.is_dir() else 0o664)
