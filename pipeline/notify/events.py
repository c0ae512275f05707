"""Notifications to people, by command or webhook, when a run fails, completes, stalls or meets trouble.

An event is sent once and noted in ``events.jsonl`` with what came of it; a driver that is killed between the
two sends it a second time. Whatever the command or the server does, training goes on.
"""

import contextlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config.issue import ConfigError
from pipeline.config.notify import NotifyConfig, Occasion
from pipeline.notify.deliver import Delivery, post, run_words
from pipeline.notify.secrets import secrets_of, without_secrets
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.failures import Failure
from pipeline.run.lease import Lease, LeaseHeld, acquire
from pipeline.run.plan import policy_maker
from pipeline.run.records import find_frontier
from pipeline.text import duration

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
    message = f"{why}, so it pauses until somebody resumes it, or cancels it"
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

    Never raises for what the command, the server or the disk does: a full disk is worth a notification.
    """
    given = run.config.notify
    if event.event not in given.on or not given.tells_anybody or _was_told(run, event.key):
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
    if not run.config.notify.tells_anybody:
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


def _record(run: Run, event: Event, deliveries: Sequence[Delivery], note: Note) -> None:
    for delivery in deliveries:
        if delivery.trouble:
            note(f"notify.{delivery.to} was not told that the run is {event.event}: {delivery.trouble}")
    outcomes = {str(delivery.to): delivery.trouble or "sent" for delivery in deliveries}
    try:
        journal.event(run.paths.events, "notified", of=event.event, key=event.key, **outcomes)
    except OSError as error:
        note(f"{run.paths.events} could not take note of the notification: {error}")


def _folder(run: Run) -> Path:
    """Return where the command runs: where the run was started, if that is still there."""
    folder = Path(run.identity.folder or run.paths.root)
    return folder if folder.is_dir() else run.paths.root


def deliver(given: NotifyConfig, event: Event, folder: Path) -> list[Delivery]:
    """Send an event to every recipient. Takes at most ``given.time_limit`` seconds for each."""
    found = []
    if given.command:
        environment = {**os.environ, **event.variables()}
        body = json.dumps(event.to_json()).encode()
        trouble = run_words(given.command, body, environment, folder, given.time_limit)
        hidden = secrets_of(os.environ) | {os.environ.get(given.webhook_env or "", "")} - {""}
        found.append(Delivery("command", without_secrets(trouble, hidden)))
    if given.webhook or given.webhook_env or given.webhook_file:
        found.append(_to_webhook(given, event))
    return found


def _to_webhook(given: NotifyConfig, event: Event) -> Delivery:
    try:
        address = webhook_address(given, os.environ)
    except (OSError, ValueError) as error:
        return Delivery("webhook", str(error))
    trouble = post(address, json.dumps(event.to_json()).encode(), given.time_limit)
    return Delivery("webhook", without_secrets(trouble, secrets_of(os.environ, address)))


def send_trial(run: Run) -> tuple[list[str], bool]:
    """Send a test event. Returns lines on it, and whether it arrived everywhere. Raises ConfigError."""
    given = run.config.notify
    if not given.tells_anybody:
        raise ConfigError(
            "notify: nobody is notified; give notify.command=..., or notify.webhook_env=NAME of an "
            "environment variable that holds an address"
        )
    deliveries = deliver(given, trial(run), _folder(run))
    lines = [f"notify.{d.to}: {d.trouble or 'a test event was sent'}" for d in deliveries]
    return lines, not any(delivery.trouble for delivery in deliveries)


def webhook_address(given: NotifyConfig, environment: Mapping[str, str]) -> str:
    """Return the webhook's address, from wherever it is kept.

    Raises:
        OSError: its file cannot be read.
        ValueError: there is none, or it is not an address. The message never shows it.
    """
    if given.webhook:
        return given.webhook
    if given.webhook_env:
        place, found = f"webhook_env={given.webhook_env}", environment.get(given.webhook_env, "").strip()
    else:
        assert given.webhook_file is not None
        place, found = f"webhook_file={given.webhook_file}", Path(given.webhook_file).read_text().strip()
    if not found:
        raise ValueError(f"notify.{place} is not set" if given.webhook_env else f"notify.{place} is empty")
    if not found.startswith(("https://", "http://")) or len(found.split()) != 1:
        raise ValueError(f"notify.{place} holds something that is not an address like https://...")
    return found
