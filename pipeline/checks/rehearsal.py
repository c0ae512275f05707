"""How each check of the rehearsal is made on a machine: by processes with a limit.

The checks themselves are in :mod:`stages.rehearsal`. Their processes are started as a run's workers are:
forked from a server that has imported the libraries, with GPUs of their own.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.checks.finding import Finding, Verdict, problem, skipped
from pipeline.checks.rehearsal_list import CHECKS, DRIVER, RANKS, RehearsalCheck, Role
from pipeline.executors.devices import Devices
from pipeline.executors.limits import HERE, Limits, Started, need_of, node_of
from pipeline.executors.processes import Processes
from pipeline.executors.slurm.resources import SRUN
from pipeline.gpus import visible_names
from pipeline.process import ended_within, signal_session
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.tasks import Stage, Task
from pipeline.text import exit_in_words

_PROGRAM = "stages.rehearsal.program"
PRELOAD = ("stages.preload", "stages.preload.models", "stages.ranks")
_KIND = {(1, 1): Stage.EVALUATE, (1, 2): Stage.ROLLOUT, (RANKS, 1): Stage.UPDATE}
"""Job kind that a worker of so many ranks, each with so many GPUs, has in the limits."""
_WAIT_SECONDS = 0.5
_SAID = 200
_MOST_ORPHANED = 60.0
"""Seconds after the death of a rank by which the others must have ended."""


@dataclass(frozen=True)
class RehearsalRequest:
    """What is to be rehearsed in one place."""

    names: tuple[str, ...]
    """Names of the checks, in their order."""
    gpus: int = 0
    """Number of GPUs that a task or job asks for."""
    devices: tuple[str, ...] = ()
    """Names of the GPUs that there are."""
    nodes: int = 1
    """Nodes of this job."""
    ranks: int = RANKS
    """Ranks of checks that have several."""
    launcher: tuple[str, ...] = ()
    """Command that runs :mod:`slurm.step` in each rank of this job, as its tasks start theirs; empty where
    ranks are processes of this machine."""
    is_short: bool = False
    needs_vllm: bool = False
    num_mib: int = 256


@dataclass(frozen=True)
class CheckEnd:
    """How the processes of a check ended."""

    seconds: float
    code: int = 0
    is_late: bool = False
    note: str = ""
    refused: str = ""
    """Why nothing was started."""


class RehearsalRunner:
    """Makes checks on this machine; for the length of a block, after which none of its processes is left."""

    def __init__(self, request: RehearsalRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        devices = Devices(request.devices, bool(request.devices))
        needs = {str(kind): need_of(gpus=size * each) for (size, each), kind in _KIND.items()}
        self._processes = Processes(
            f"{_PROGRAM}:serve",
            PRELOAD,
            Limits(
                workers={},
                time_limit=float("inf"),
                nodes=(node_of(HERE, len(request.devices), 0),) if request.devices else (),
                gpus={HERE: request.devices},
                needs=needs if request.devices else {},
                show=lambda grant: devices.variables([name for share in grant for name in share.gpus]),
                ranks={kind: size for (size, _), kind in _KIND.items()},
            ),
        )

    def __enter__(self) -> "RehearsalRunner":
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.cancel()

    def findings(self) -> Iterator[Finding]:
        """Yield the finding of each check as it is made. What needs a driver is left out where that fails."""
        is_broken = False
        for check in [check for check in CHECKS if check.name in self._request.names]:
            if is_broken and check.role is not Role.COMPUTES:
                yield skipped(check.name, f"not shown here: needs {DRIVER}, see above")
                continue
            found = self._made(check)
            is_broken |= check.name == DRIVER and found.verdict is Verdict.PROBLEM
            yield found

    def _made(self, check: RehearsalCheck) -> Finding:
        made, seconds = list[Finding](), 0.0
        for size in check.sizes:
            stem = self._folder / f"{check.name}-of-{size}"
            ended = self._ended(check, size, stem)
            seconds += ended.seconds
            found = judge(check, ended, self._answers(stem, size), last_line(stem.with_suffix(".log")))
            made.append(self._killed(check, found))
            if made[-1].verdict is not Verdict.OK:
                break
        found = whole(made)
        numbers = {**found.numbers, "seconds": round(seconds, 2)}
        return Finding(found.title, found.verdict, found.measured, found.advice, numbers)

    def _killed(self, check: RehearsalCheck, found: Finding) -> Finding:
        """Judge how soon ranks ended after the death of one; the finding of any other check as it is."""
        death = self._folder / "killed-at"
        if not check.kills or not death.exists():
            return found
        return judge_killed(check, time.time() - float(death.read_text()))

    def _ended(self, check: RehearsalCheck, size: int, stem: Path) -> CheckEnd:
        """Start the processes of a check, and wait for their end, until its limit at most."""
        given = {name: getattr(self._request, name) for name in ("gpus", "is_short", "needs_vllm", "num_mib")}
        words = (check.function, str(stem), json.dumps({"folder": str(self._folder), **given}))
        log = stem.with_suffix(".log")
        if self._is_step(size):
            return run_command(self._step(words, stem), log, check.limit)
        if check.is_plain:
            return run_command([sys.executable, "-P", "-m", _PROGRAM, *words], log, check.limit)
        return self._forked(check, size, words, log)

    def _is_step(self, size: int) -> bool:
        """Whether ranks are those of a job step: they can be forked on one node, if its image has no srun."""
        has_step = size > 1 and bool(self._request.launcher)
        return has_step and (self._request.nodes > 1 or shutil.which(SRUN) is not None)

    def _step(self, words: Sequence[str], stem: Path) -> list[str]:
        """Return the command of a job step with all ranks of this job. It may be within another step, where
        srun enters an image (--overlap)."""
        srun, *launcher = self._request.launcher
        return [srun, "--overlap", *launcher, str(stem.with_suffix(".rendezvous")), _PROGRAM, *words]

    def _forked(self, check: RehearsalCheck, size: int, words: Sequence[str], log: Path) -> CheckEnd:
        began, worker = time.monotonic(), Started(log.stem, Task(1, _KIND[size, check.devices]), log)
        try:
            if not self._processes.start(worker, words, TASK_ENVIRONMENT):
                return CheckEnd(
                    0.0, refused=f"needs {size * check.devices} GPUs, there are {len(self._request.devices)}"
                )
        except (OSError, EOFError) as error:
            return CheckEnd(time.monotonic() - began, 1, note=f"the server of processes ended: {error}")
        until, is_late = time.monotonic() + check.limit, False
        while not (ended := self._processes.collect_ended()):
            if not is_late and time.monotonic() > until:
                is_late = True
                self._processes.kill(worker.name, "late")
            self._processes.wait(_WAIT_SECONDS)
        end = ended[worker.name]
        return CheckEnd(time.monotonic() - began, end.exit_code, is_late, end.note)

    def _answers(self, stem: Path, size: int) -> list[dict[str, Any] | None]:
        """Return the answer of each rank; None of one that has written none."""
        number = self._request.ranks if self._is_step(size) else size
        paths = [Path(f"{stem}.{rank}.json") for rank in range(number)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def run_command(command: Sequence[str], log: Path, limit: float) -> CheckEnd:
    """Run a command in a session of its own, whose processes are gone afterwards."""
    began = time.monotonic()
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **TASK_ENVIRONMENT},
            )
        except OSError as error:
            return CheckEnd(0.0, refused=f"{command[0]} cannot be started: {error.strerror}")
    try:
        is_late = not ended_within(process, limit)
    finally:
        signal_session(process.pid)
        ended_within(process, 1.0)
    return CheckEnd(time.monotonic() - began, process.returncode or 0, is_late)


def last_line(log: Path) -> str:
    """Return the last line of a log, shortened; empty without one."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:_SAID] if lines else ""
    return ""


def judge(
    check: RehearsalCheck, ended: CheckEnd, answers: Sequence[Mapping[str, Any] | None], said: str
) -> Finding:
    """Judge the end and the answers of a check's ranks. Pure.

    Args:
        said: the last line of its log.
    """
    said = f"; its log ends with: {said}" if said else ""
    alone = f"look for the cause with slurm-ppo rehearse --only {check.name}"
    if ended.refused:
        return skipped(check.name, f"not shown here: {ended.refused}")
    problems = [answer for answer in answers if answer and answer["verdict"] == Verdict.PROBLEM]
    # What the other ranks say of one that died is only that their peer is gone. One that hangs they name.
    if None in answers and not ended.is_late and not any(answer["missed"] for answer in problems):
        how = ended.note or exit_in_words(ended.code)
        return problem(check.name, f"its process gave no answer ({how}){said}", alone)
    if problems:  # a rank that fails before it meets the others says why, and they only that it did not come
        answer = min(problems, key=lambda answer: bool(answer["missed"]))
        return problem(check.name, answer["measured"], answer["advice"], **answer["numbers"])
    if ended.is_late:
        return problem(check.name, f"it hung: no end in {check.limit:g} s, so it was ended{said}", alone)
    first = answers[0]
    assert first is not None
    return Finding(
        check.name, Verdict(first["verdict"]), first["measured"], first["advice"], first["numbers"]
    )


def whole(made: Sequence[Finding]) -> Finding:
    """Return the finding of a check that was made with several numbers of ranks: the last, which says what
    those before it have shown where it shows nothing. Pure."""
    *before, last = made
    if last.verdict is not Verdict.SKIPPED or not before:
        return last
    shown = "; ".join(one.measured for one in before)
    return skipped(last.title, f"{last.measured}; shown without: {shown}")


def judge_killed(check: RehearsalCheck, seconds: float) -> Finding:
    """Judge after how many seconds all ranks had ended. Pure."""
    measured = f"all ranks had ended {seconds:.1f} s after one was killed"
    if seconds <= _MOST_ORPHANED:
        return Finding(check.name, Verdict.OK, measured, numbers={"seconds_to_end": seconds})
    return problem(
        check.name,
        measured,
        "until then a run's GPUs are idle: set NCCL's and Slurm's time limits lower",
        seconds_to_end=seconds,
    )


def main(request: str, folder: str) -> None:
    """Rehearse in a job, on the GPUs that it was given. Writes ``findings.json`` of the folder after
    each check."""
    content = json.loads(request)
    given = visible_names(os.environ) or () if content["gpus"] else ()
    content |= {"names": tuple(content["names"]), "launcher": tuple(content["launcher"]), "devices": given}
    found: list[dict[str, Any]] = []
    path = Path(folder) / "findings.json"
    with RehearsalRunner(RehearsalRequest(**content), Path(folder)) as runner:
        for finding in runner.findings():
            found.append(asdict(finding))
            path.with_suffix(".tmp").write_text(json.dumps(found))
            path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
