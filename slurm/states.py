"""Slurm's job states and exit codes, and what they mean in words."""

import re
import signal as signals
from enum import StrEnum

from slurm.errors import ServiceError


class SlurmState(StrEnum):
    """Every base state and flag that Slurm 22.05 to 26.05 shows."""

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    PREEMPTED = "PREEMPTED"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    POWER_UP_NODE = "POWER_UP_NODE"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    UPDATE_DB = "UPDATE_DB"


class Phase(StrEnum):
    """Phase of a job's life that a state belongs to."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


class UnknownState(ServiceError, ValueError):
    """A state that this version of the package does not know."""


_PENDING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"}
)
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"}
)
_FLAGS = frozenset(
    {"COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING"}
    | {"SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "UPDATE_DB"}
)
"""States that Slurm shows beside a base state."""


def parse_state(text: str) -> SlurmState:
    """Parse the state that a command shows.

    Takes "CANCELLED by 1000", a truncated "OUT_OF_ME+", any case, and lists ("RUNNING,COMPLETING" and JSON's
    form), of which the base state is returned. Raises :class:`UnknownState`.
    """
    words = re.findall(r"[A-Za-z_]+\+?", re.sub(r"\bby\s+\S+", "", text, flags=re.IGNORECASE))
    if not words:
        raise UnknownState(f"Slurm shows no state where one belongs: {text!r}")
    shown = [_parse_word(word.upper(), text) for word in words]
    return next((state for state in shown if state not in _FLAGS), shown[0])


def _parse_word(word: str, text: str) -> SlurmState:
    if word in SlurmState.__members__:
        return SlurmState[word]
    stem = word.removesuffix("+")
    matching = [state for state in SlurmState if word.endswith("+") and state.startswith(stem)]
    if len(matching) != 1:
        raise UnknownState(f"Slurm shows a state that this version does not know: {text!r}")
    return matching[0]


def phase_of(state: SlurmState) -> Phase:
    """Return whether a job in this state waits, runs (or is started, paused or cleaned up), or has ended."""
    if state in _PENDING:
        return Phase.PENDING
    return Phase.ENDED if state in _ENDED else Phase.RUNNING


_ENDINGS = {
    SlurmState.BOOT_FAIL: "its node did not start (BOOT_FAIL)",
    SlurmState.CANCELLED: "cancelled (CANCELLED)",
    SlurmState.DEADLINE: "stopped at its deadline (DEADLINE)",
    SlurmState.LAUNCH_FAILED: "Slurm could not start it on its node (LAUNCH_FAILED)",
    SlurmState.NODE_FAIL: "its node failed (NODE_FAIL)",
    SlurmState.OUT_OF_MEMORY: "used more memory than it asked for (OUT_OF_MEMORY)",
    SlurmState.PREEMPTED: "stopped for a job of higher priority (PREEMPTED)",
    SlurmState.TIMEOUT: "stopped at its time limit (TIMEOUT)",
}


def exit_in_words(state: SlurmState, exit_code: int, signal: int) -> str:
    """Say how a job ended, for a person: Slurm's verdict where it has one, else its exit code or signal."""
    if state in _ENDINGS:
        return _ENDINGS[state]
    # A shell reports a child's signal as 128 + its number, and Slurm reports the shell.
    number = signal or (exit_code - 128 if 128 < exit_code < 160 else 0)
    if number:
        hint = ", often out of memory" if number == signals.SIGKILL else ""
        name = next((f" ({known.name})" for known in signals.Signals if known == number), "")
        return f"killed by signal {number}{name}{hint}"
    return "completed" if state == SlurmState.COMPLETED else f"exit code {exit_code}"
