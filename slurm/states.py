"""Slurm's job states, pending reasons and exit codes, and what they mean in words."""

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


_REASONS = {
    "none": "not considered yet",
    "priority": "other jobs have a higher priority",
    "resources": "waiting for free resources",
    "dependency": "waiting for the jobs it depends on",
    "dependencyneversatisfied": "a job it depends on failed, so it will never start",
    "begintime": "its start time has not come (after a requeue, Slurm waits about two minutes)",
    "jobheldadmin": "held by an administrator, or by Slurm after too many requeues",
    "jobhelduser": "held by its user",
    "joblaunchfailure": "Slurm could not start it on its node",
    "launch failed requeued held": "Slurm could not start it on its node and holds it",
    "job requeued in held state": "requeued and held",
    "jobholdmaxrequeue": "held by Slurm after too many requeues",
    "jobarraytasklimit": "the array's own limit of elements at once is reached",
    "partitiondown": "its partition is down",
    "partitioninactive": "its partition takes no jobs now",
    "partitionnodelimit": "it asks for more nodes than its partition allows, or they are down",
    "partitiontimelimit": "it asks for more time than its partition allows",
    "partitionconfig": "its partition does not allow what it asks for",
    "reqnodenotavail": "nodes that it needs are down, drained or reserved",
    "nodes required for job are down": "nodes that it needs are down, drained or reserved",
    "nodedown": "a node that it needs is down",
    "badconstraints": "no node can ever have what it asks for",
    "reservation": "waiting for its reservation",
    "reservationdeleted": "its reservation was deleted",
    "licenses": "waiting for a licence",
    "prolog": "a prologue script still runs",
    "cleaning": "an earlier run of it is still being cleaned up",
    "deadline": "it cannot end before its deadline",
    "nodefail": "its node failed",
    "nonzeroexitcode": "it ended with an error",
    "outofmemory": "it used more memory than it asked for",
    "timelimit": "its time limit was reached",
    "raisedsignal": "it was ended by a signal",
    "systemfailure": "Slurm or a node failed",
    "invalidaccount": "its account does not exist",
    "invalidqos": "its QOS does not exist",
    "accountnotallowed": "its account may not use this partition",
    "qosnotallowed": "its QOS may not be used here",
    "qosusagethreshold": "its QOS's usage threshold is reached",
    "qosjoblimit": "its QOS's limit of jobs is reached",
    "qosresourcelimit": "its QOS's limit of resources is reached",
    "qostimelimit": "its QOS's limit of time is reached",
    "associationjoblimit": "the account's limit of jobs is reached",
    "associationresourcelimit": "the account's limit of resources is reached",
    "associationtimelimit": "the account's limit of time is reached",
    "assocmaxjobslimit": "the account's limit of running jobs is reached",
    "maxmemperlimit": "it asks for more memory than the partition allows",
    "burstbufferresources": "waiting for burst buffer space",
    "burstbufferstagein": "its burst buffer is being filled",
    "frontenddown": "no front end node is up",
    "burstbufferoperation": "a burst buffer operation failed",
    "scheddefer": "the scheduler puts off new jobs",
    "inactivelimit": "it was inactive for too long",
    "accountingpolicy": "a limit of its account or QOS is reached",
    "reservationinvalid": "its reservation is not valid",
    "constraints": "no node has what it asks for at the moment",
    "powernotavail": "there is not enough electric power",
    "powerreserved": "electric power is reserved for others",
    "fedjoblock": "another cluster of the federation decides",
}
# e.g. QOSMaxGRESPerUser, AssocGrpCPUMinutesLimit, QOSGrpNodeLimit; a QOS's MaxJobsPerAccount lacks its prefix
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc|(?=Max\w+PerAccount))(?P<group>Grp)?(?P<bound>Max|Min)?(?P<what>\w+)"
)
_OWNERS = {"QOS": "the QOS", "Assoc": "the account", "": "the QOS"}
_WHAT = {
    "cpu": "CPUs",
    "gres": "GPUs or other devices",
    "job": "jobs",
    "mem": "memory",
    "node": "nodes",
    "submit": "submitted jobs",
    "wall": "time",
    "billing": "billing units",
    "bb": "burst buffers",
    "energy": "energy",
    "license": "licences",
    "unknown": "resources",
}


_LACKS_ROOM = frozenset(
    {"resources", "priority", "associationjoblimit", "associationresourcelimit", "qosjoblimit"}
    | {"qosresourcelimit", "assocmaxjobslimit", "accountingpolicy", "licenses"}
)
_ROOM_OF_OTHERS = frozenset({"resources", "priority", "licenses"})
_SHARED_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)\w+|Max\w+PerAccount")
_NEVER_FREED = re.compile(r"Wall|Submit|Minutes|Max\w+PerJob")
"""Limits that a job's end frees nothing of."""


def lacks_room(reason: str) -> bool:
    """Whether a job waits, by Slurm's reason, for what the end of another job of its user may free:
    resources, its turn, or a limit of what the user runs at once."""
    bare = reason.strip("()").split(",")[0]
    if _SHARED_LIMIT.fullmatch(bare):
        return not _NEVER_FREED.search(bare)
    return bare.replace("_", "").lower() in _LACKS_ROOM


def is_at_limit(reason: str) -> bool:
    """Whether a job waits for a limit of what its user runs at once: others' jobs are not in its way."""
    bare = reason.strip("()").split(",")[0].lower()
    return lacks_room(reason) and bare not in _ROOM_OF_OTHERS


def reason_in_words(reason: str) -> str:
    """Explain Slurm's reason why a job waits, in words; an unknown one is returned as it is."""
    bare = reason.strip().strip("()")
    # squeue shows "launch failed requeued held" with or without underscores, by its version and option.
    known = _REASONS.get(bare.split(",")[0].replace("_", " ").lower())
    limit = _LIMIT.fullmatch(bare)
    if known is None and limit is not None:
        known = _limit_in_words(limit)
    return known or reason


def _limit_in_words(limit: re.Match[str]) -> str | None:
    what = limit["what"].lower()
    counted = next((words for stem, words in _WHAT.items() if what.startswith(stem)), None)
    if counted is None:
        return None
    unit = " times minutes" if "minute" in what else ""
    owner = _OWNERS[limit["owner"]]
    if limit["bound"] == "Min":
        return f"it asks for less than {owner}'s minimum of {counted}"
    sharing = ", shared by all its users," if limit["group"] else ""
    return f"{owner}'s limit of {counted}{unit}{sharing} is reached ({limit[0]})"


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
