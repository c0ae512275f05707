"""Notifications to people, by a command, when a run fails, completes, stalls or meets trouble.

An event is sent once and noted in ``events.jsonl`` with what came of it; a driver that is killed between the
two sends it a second time. Whatever the command does, training goes on.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, Any

from pipeline.config.issue import ConfigError
from pipeline.config.notify import NotifyConfig, Occasion
from pipeline.process import signal_session, wait_or_kill
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.failures import Failure
from pipeline.run.lease import Lease, LeaseHeld, acquire
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier
from pipeline.text import duration, exit_in_words

TEST = "test"
"""Name of the event that a person asks for, to see that it arrives."""

Note = Callable[[str], None]

_LONGEST_MESSAGE = 1000
_TAIL_BYTES = 1 << 22
"""Bytes at the end of events.jsonl searched for an event that was sent: about ten thousand lines."""


@dataclass(frozen=True)
class Event:
    """Content of a notification."""

    event: str
    """An :class:`Occasion`, or ``test``."""
    run: str
    """The run directory."""
    name: str
    iteration: int
    """Iteration that failed or is at hand; of a complete run the last."""
    iterations: int
    state: str
    """State of the run: failed, complete or running."""
    message: str
    next: str
    """The command to type next."""
    key: str
    """Identity of the event: one of the same key is not sent again."""

    @property
    def text(self) -> str:
        """The event for people, in two lines."""
        how_far = f"{self.name}: {self.event}, iteration {self.iteration} of {self.iterations}"
        return f"{how_far}: {self.message}\nnext: {self.next}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, ``text``, which chat servers show, and when and where it was sent."""
        return {"text": self.text, **asdict(self), "time": time.time(), "host": socket.gethostname()}

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the command."""
        named = {name: value for name, value in asdict(self).items() if name not in ("key", "iterations")}
        return {f"SLURM_PPO_{name.upper()}": str(value).replace("\0", "") for name, value in named.items()}


# --- what happened -----------------------------------------------------------------------------------


def failure(run: Run, given_up: Sequence[Failure], begun: float) -> Event:
    """Make the event that tasks were given up. Sent once per invocation, told apart by its time ``begun``."""
    first = given_up[0]
    more = f", and {len(given_up) - 1} more tasks" if len(given_up) > 1 else ""
    message = f"{first.task}, attempt {first.attempt}: {first.message}{more}"
    return _event(run, Occasion.FAILED, message, f"failed in call {begun}", first.task.iteration)


def breakdown(run: Run, error: BaseException, begun: float) -> Event:
    """Make the event that the driver could not go on. Sent once per call."""
    message = f"the driver ended: {type(error).__name__}: {' '.join(str(error).split())}"
    return _event(run, Occasion.FAILED, message, f"failed in call {begun}")


def rows_unwritten(run: Run, why: str, begun: float) -> Event:
    """Make the event that rows cannot be written; training goes on. Sent once per call."""
    message = f"rows cannot be written: {why}; training goes on"
    return _event(run, Occasion.TROUBLE, message, f"trouble with rows, call {begun}")


def pass_failed(run: Run, why: str, begun: float) -> Event:
    """Make the event that a driver could not look at the run, or not do what was due. Sent once per call."""
    message = f"a driver's pass failed: {why}; the next one tries again"
    return _event(run, Occasion.TROUBLE, message, f"trouble with pass, call {begun}")


def pause(run: Run, why: str, begun: float) -> Event:
    """Make the event that the run rests, as its jobs were cancelled by hand. Sent once per call."""
    message = f"{why}, so it pauses until it is resumed or cancelled"
    return _event(run, Occasion.TROUBLE, message, f"paused in call {begun}")


def completion(run: Run) -> Event:
    """Make the event that the run is complete. Sent once, also if resumed, unless its end is remade."""
    try:
        record = read_record(run.paths, policy_maker(run.plan.iterations))
    except CorruptData:
        record = None
    rows = journal.read_tail(run.paths.metrics)
    reward = f", reward {rows[-1]['reward/mean']:+.3f}" if rows and "reward/mean" in rows[-1] else ""
    missing = sum(bool(one.missing) for one in read_measured(run.paths))
    without = f", {missing} benchmarks are missing" if missing else ""
    message = f"all {run.plan.iterations} iterations are committed{reward}{without}"
    key = f"complete by attempt {record.attempt if record else '?'}"
    return _event(run, Occasion.COMPLETE, message, key, run.plan.iterations)


def standstill(run: Run, since: float, now: float, why: str = "") -> Event:
    """Make the event that nothing was committed since a time. Sent once per standstill."""
    message = f"nothing was committed for {duration(now - since)}" + (f"; {why}" if why else "")
    return _event(run, Occasion.STALLED, message, f"stalled since {since:.0f}")


def trial(run: Run) -> Event:
    """Make the test event of ``slurm-ppo notify``. The run need not exist yet."""
    return _event(run, TEST, "this is a test; nothing happened to the run", "test")


_STATES: dict[str, str] = {Occasion.FAILED: "failed", Occasion.COMPLETE: "complete"}
_NEXT: dict[str, str] = {Occasion.FAILED: "resume", Occasion.COMPLETE: "report"}


def _event(run: Run, event: str, message: str, key: str, iteration: int | None = None) -> Event:
    """Make an event of an iteration. Default: the first that is not done, or the last."""
    if iteration is None:
        updated = find_frontier(run.plan, run.paths).updated
        iteration = min(max(updated, run.plan.start) + 1, run.plan.iterations)
    root = str(run.paths.root)
    return Event(
        event=str(event),
        run=root,
        name=run.identity.name,
        iteration=iteration,
        iterations=run.plan.iterations,
        state=_STATES.get(event, "running"),
        message=message[:_LONGEST_MESSAGE],
        next=f"slurm-ppo {_NEXT.get(event, 'status')} {shlex.quote(root)}",
        key=key,
    )


# --- telling -----------------------------------------------------------------------------------------


def tell(run: Run, event: Event, note: Note) -> None:
    """Send an event that is wanted and was not sent before, and note what came of it.

    Never raises for what the command or the disk does: a full disk is worth a notification.
    """
    given = run.config.notify
    if event.event not in given.on or not given.command or _was_told(run, event.key):
        return
    try:
        lease = _alone(run)
    except LeaseHeld:
        return  # the driver that holds it tells
    try:
        if not _was_told(run, event.key):  # by the driver that held the lease before
            _record(run, event, deliver(given, event, _folder(run)), note)
    finally:
        with contextlib.suppress(OSError):  # it expires by itself
            if lease:
                lease.release()


def tell_if_stalled(run: Run, newest: float, begun: float, note: Note, why: str = "") -> None:
    """Notify of a stalled run: nothing was committed for ``notify.stall_after`` seconds.

    Args:
        newest: unix time of the newest commit, 0 for none.
        begun: unix time of the person's call.
    """
    if not run.config.notify.command:
        return
    since, now = max(newest, begun, run.identity.created), time.time()
    if now - since >= run.config.notify.stall_after:
        tell(run, standstill(run, since, now, why), note)


def _alone(run: Run) -> Lease | None:
    """Take the lease of notifying; None for want of a disk: better twice than never. Raises LeaseHeld."""
    try:
        return acquire(run.paths.locks / "notify")
    except OSError:
        return None


def _was_told(run: Run, key: str) -> bool:
    try:
        end = journal.read_end(run.paths.events, _TAIL_BYTES)
        return f'"key": {json.dumps(key)}'.encode() in end
    except OSError:
        return False


def _record(run: Run, event: Event, trouble: str, note: Note) -> None:
    if trouble:
        note(f"notify.command got no notification that the run is {event.event}: {trouble}")
    outcome = trouble or "sent"
    try:
        journal.event(run.paths.events, "notified", of=event.event, key=event.key, command=outcome)
    except OSError as error:
        note(f"{run.paths.events} could not take note of the notification: {error}")


def _folder(run: Run) -> Path:
    """Return where the command runs: where the run was started, if that is still there."""
    folder = Path(run.identity.folder or run.paths.root)
    return folder if folder.is_dir() else run.paths.root


def deliver(given: NotifyConfig, event: Event, folder: Path) -> str:
    """Send an event, in at most ``given.time_limit`` seconds. Returns what went wrong, in a line."""
    assert given.command is not None
    environment = {**os.environ, **event.variables()}
    body = json.dumps(event.to_json()).encode()
    trouble = run_words(given.command, body, environment, folder, given.time_limit)
    return without_secrets(trouble, os.environ)


def send_trial(run: Run) -> str:
    """Send a test event. Returns why it did not arrive, in a line. Raises ConfigError."""
    given = run.config.notify
    if not given.command:
        raise ConfigError("notify: no notification is sent; give notify.command=...")
    return deliver(given, trial(run), _folder(run))


# Delivery within a time limit. Any failure becomes a line of text without secrets in it.

_LAST_BYTES = 4096
"""Bytes kept of a command's standard error, to find its last line in."""
_LONGEST_LINE = 200
_AFTER_SECONDS = 1.0
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|HOOK|AUTH|COOKIE", re.IGNORECASE)
_SHORTEST = 6
"""Fewest characters of a secret: shorter ones would be found in everything."""


def run_words(
    words: Sequence[str], body: bytes, environ: Mapping[str, str], folder: Path, limit: float
) -> str:
    """Run a command without a shell, ``body`` on its standard input. Returns what went wrong, in a line."""
    try:
        process = Popen(
            words, cwd=folder, env=environ, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"{words[0]} cannot be started: {error}"
    assert process.stdin is not None
    assert process.stderr is not None
    last = bytearray()
    listener = threading.Thread(target=_listen, args=(process.stderr, last), daemon=True)
    listener.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it need not read
            process.stdin.write(body)  # far less than a pipe holds
            process.stdin.close()
    except BaseException:
        signal_session(process.pid)
        raise
    code = wait_or_kill(process, limit)
    if code is None:
        return f"{words[0]} was stopped, it took more than {limit:g} s"
    listener.join(_AFTER_SECONDS)  # a child that it left behind may hold the pipe open
    return "" if code == 0 else _in_words(words[0], code, bytes(last))


def _listen(stream: IO[bytes], last: bytearray) -> None:
    """Keep the end of a stream, however long it is."""
    with stream:
        while chunk := os.read(stream.fileno(), 1 << 16):
            last += chunk
            del last[:-_LAST_BYTES]


def _in_words(program: str, code: int, said: bytes) -> str:
    how = f"{'was ' if code < 0 else ''}{exit_in_words(code)}"
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f"{program} {how}" + (f": {lines[-1].strip()[:_LONGEST_LINE]}" if lines else "")


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Hide the values of variables that are named like secrets, longer ones first."""
    values = {value.strip() for name, value in environment.items() if is_secret_name(name)}
    for secret in sorted(values, key=len, reverse=True):
        text = text.replace(secret, "[hidden]") if len(secret) >= _SHORTEST else text
    return text
