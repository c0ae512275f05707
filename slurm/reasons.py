"""Slurm's reasons why a job waits, and sbatch's refusals: what they mean, whether they pass, what helps."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from slurm.query import Element


class WaitEnds(StrEnum):
    """What ends a job's wait for a reason."""

    ITSELF = "itself"
    """Time, or the end of other jobs; or the next pass, which submits again what Slurm holds."""
    OTHERS = "others"
    """An administrator's action, or the job owner's."""
    NEVER = "never"
    """Nothing: it asks for what it never gets here."""


@dataclass(frozen=True)
class WaitReason:
    """What Slurm's reason means to who waits."""

    words: str
    ends: WaitEnds = WaitEnds.ITSELF
    helps: str = ""
    """What a person can do; empty where that is to wait."""
    frees: bool = False
    """Whether the end of another job of the same user may let it start: what waits for room, its turn, or a
    limit of what the user has at once."""
    is_of_user: bool = False
    """Whether it is a limit of the user: others' jobs are not in the way."""

    @property
    def is_stuck(self) -> bool:
        """Whether waiting is not enough."""
        return self.ends is not WaitEnds.ITSELF


_RELEASE = "to let it go on: scontrol release JOB; to end the run: slurm-ppo cancel"
_OTHER_PARTITION = "ask when it opens (scontrol show partition says its state), or give other partitions"
_NODES = "sinfo -R says which and why; it goes on when they are back, or give other partitions"
_LESS_TIME = "give a shorter time, or a partition or QOS that allows more"
_FEWER = "ask for less in one job (nodes, GPUs, CPUs, memory), or give a QOS or account that allows more"
_MORE = "ask for more, or give a QOS that takes smaller jobs"
_ACCOUNT = "sacctmgr show assoc user=$USER lists yours: give another account, or have it opened again"
_QOS = "sacctmgr show assoc user=$USER format=account,qos lists yours: give another QOS, or have it allowed"
_BUDGET = "the account's or QOS's budget is used up: ask for more, or give another; some are filled up again"
_RESERVATION = "give another reservation, or none"


def _limit(words: str) -> WaitReason:
    return WaitReason(words, frees=True, is_of_user=True)


REASONS = {
    "none": WaitReason("not considered yet"),
    "priority": WaitReason("other jobs have a higher priority", frees=True),
    "resources": WaitReason("waiting for free resources", frees=True),
    "dependency": WaitReason("waiting for the jobs it depends on"),
    "dependencyneversatisfied": WaitReason("a job it depends on failed, so it will never start"),
    "begintime": WaitReason("its start time has not come (after a requeue, Slurm waits about two minutes)"),
    "jobheldadmin": WaitReason(
        "held by an administrator, or by Slurm after too many requeues",
        WaitEnds.OTHERS,
        "ask an administrator to release it (scontrol release JOB)",
    ),
    "jobhelduser": WaitReason("held by its user", WaitEnds.OTHERS, _RELEASE),
    "joblaunchfailure": WaitReason("Slurm could not start it on its node"),
    "launch failed requeued held": WaitReason("Slurm could not start it on its node and holds it"),
    "job requeued in held state": WaitReason("requeued and held", WaitEnds.OTHERS, _RELEASE),
    "jobholdmaxrequeue": WaitReason("held by Slurm after too many requeues"),
    "jobarraytasklimit": WaitReason("the array's own limit of elements at once is reached"),
    "partitiondown": WaitReason("its partition is down", WaitEnds.OTHERS, _OTHER_PARTITION),
    "partitioninactive": WaitReason("its partition takes no jobs now", WaitEnds.OTHERS, _OTHER_PARTITION),
    "partitionnodelimit": WaitReason(
        "it asks for more nodes than its partition allows, or they are down", WaitEnds.OTHERS, _NODES
    ),
    "partitiontimelimit": WaitReason(
        "it asks for more time than its partition allows", WaitEnds.NEVER, _LESS_TIME
    ),
    "partitionconfig": WaitReason("its partition does not allow what it asks for", WaitEnds.NEVER, _FEWER),
    "reqnodenotavail": WaitReason(
        "nodes that it needs are down, drained or reserved", WaitEnds.OTHERS, _NODES
    ),
    "nodes required for job are down": WaitReason(
        "nodes that it needs are down, drained or reserved", WaitEnds.OTHERS, _NODES
    ),
    "nodedown": WaitReason("a node that it needs is down", WaitEnds.OTHERS, _NODES),
    "badconstraints": WaitReason(
        "no node can ever have what it asks for",
        WaitEnds.NEVER,
        "give a constraint and numbers that nodes have (sinfo -o '%P %c %m %G %f')",
    ),
    "constraints": WaitReason("no node has what it asks for at the moment"),
    "reservation": WaitReason("waiting for its reservation"),
    "reservationdeleted": WaitReason("its reservation was deleted", WaitEnds.NEVER, _RESERVATION),
    "reservationinvalid": WaitReason("its reservation is not valid", WaitEnds.NEVER, _RESERVATION),
    "licenses": WaitReason("waiting for a licence", frees=True),
    "prolog": WaitReason("a prologue script still runs"),
    "cleaning": WaitReason("an earlier run of it is still being cleaned up"),
    "deadline": WaitReason(
        "it cannot end before its deadline", WaitEnds.NEVER, "leave the deadline out of its options"
    ),
    "nodefail": WaitReason("its node failed"),
    "nonzeroexitcode": WaitReason("it ended with an error"),
    "outofmemory": WaitReason("it used more memory than it asked for"),
    "timelimit": WaitReason("its time limit was reached"),
    "raisedsignal": WaitReason("it was ended by a signal"),
    "systemfailure": WaitReason("Slurm or a node failed"),
    "invalidaccount": WaitReason("its account does not exist", WaitEnds.NEVER, _ACCOUNT),
    "invalidqos": WaitReason("its QOS does not exist", WaitEnds.NEVER, _QOS),
    "accountnotallowed": WaitReason("its account may not use this partition", WaitEnds.NEVER, _ACCOUNT),
    "qosnotallowed": WaitReason("its QOS may not be used here", WaitEnds.NEVER, _QOS),
    "qosusagethreshold": WaitReason("its QOS's usage threshold is reached", WaitEnds.OTHERS, _BUDGET),
    "qosjoblimit": _limit("its QOS's limit of jobs is reached"),
    "qosresourcelimit": _limit("its QOS's limit of resources is reached"),
    "qostimelimit": WaitReason("its QOS's limit of time is reached", WaitEnds.NEVER, _LESS_TIME),
    "associationjoblimit": _limit("the account's limit of jobs is reached"),
    "associationresourcelimit": _limit("the account's limit of resources is reached"),
    "associationtimelimit": WaitReason("the account's limit of time is reached", WaitEnds.NEVER, _LESS_TIME),
    "assocmaxjobslimit": _limit("the account's limit of running jobs is reached"),
    "accountingpolicy": _limit("a limit of its account or QOS is reached"),
    "maxmemperlimit": WaitReason(
        "it asks for more memory than the partition allows",
        WaitEnds.NEVER,
        "give less mem, or a partition that allows more",
    ),
    "burstbufferresources": WaitReason("waiting for burst buffer space"),
    "burstbufferstagein": WaitReason("its burst buffer is being filled"),
    "burstbufferoperation": WaitReason(
        "a burst buffer operation failed",
        WaitEnds.OTHERS,
        "leave the burst buffer out of its options, or ask",
    ),
    "frontenddown": WaitReason("no front end node is up", WaitEnds.OTHERS, "ask the administrators"),
    "scheddefer": WaitReason("the scheduler puts off new jobs"),
    "inactivelimit": WaitReason("it was inactive for too long"),
    "powernotavail": WaitReason("there is not enough electric power"),
    "powerreserved": WaitReason("electric power is reserved for others"),
    "fedjoblock": WaitReason("another cluster of the federation decides"),
    "fedjoblimit": WaitReason("another cluster of the federation decides"),
    "mpiportsbusy": WaitReason("its node has no free ports for ranks"),
    "maxpowerednodes": WaitReason("as many nodes are powered up as may be"),
}
"""Every single reason, by its name in lower case without parentheses. Those that name a limit are families,
see :func:`explain`."""

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
_OF_ONE_JOB = re.compile(r"Max\w+Per(Job|Node)")


def explain(reason: str) -> WaitReason:
    """Return what a reason means, as squeue shows it: in parentheses or not, with or without underscores,
    with what it is about after a comma. An unknown one is taken to pass."""
    bare = reason.strip().strip("()")
    known = REASONS.get(bare.split(",")[0].replace("_", " ").lower())
    limit = _LIMIT.fullmatch(bare.split(",")[0])
    if known is None and limit is not None:
        known = _of_limit(limit)
    return known or WaitReason(reason)


def _of_limit(limit: re.Match[str]) -> WaitReason | None:
    what = limit["what"].lower()
    counted = next((words for stem, words in _WHAT.items() if what.startswith(stem)), None)
    if counted is None:
        return None
    unit = " times minutes" if "minute" in what else ""
    owner = _OWNERS[limit["owner"]]
    if limit["bound"] == "Min":
        words = f"it asks for less than {owner}'s minimum of {counted}"
        return WaitReason(words, WaitEnds.NEVER, _MORE)
    sharing = ", shared by all its users," if limit["group"] else ""
    words = f"{owner}'s limit of {counted}{unit}{sharing} is reached ({limit[0]})"
    if _OF_ONE_JOB.search(limit[0]):
        return WaitReason(words, WaitEnds.NEVER, _LESS_TIME if "Wall" in limit[0] or unit else _FEWER)
    if unit or "Wall" in limit[0]:
        is_running = "RunMinutes" in limit[0]  # of jobs that run now: their ends free it
        return WaitReason(words) if is_running else WaitReason(words, WaitEnds.OTHERS, _BUDGET)
    return WaitReason(words) if "Submit" in limit[0] else _limit(words)


def reason_in_words(reason: str) -> str:
    """Explain Slurm's reason why a job waits, in words; an unknown one is returned as it is."""
    return explain(reason).words


def lacks_room(reason: str) -> bool:
    """Whether a job waits, by Slurm's reason, for what the end of another job of its user may free:
    resources, its turn, or a limit of what the user runs at once."""
    return explain(reason).frees


def is_at_limit(reason: str) -> bool:
    """Whether a job waits for a limit of what its user runs at once: others' jobs are not in its way."""
    return explain(reason).is_of_user


_REFUSALS = (
    (r"partition not available|partition.*(inactive|drain)", _OTHER_PARTITION),
    (r"invalid partition", "give a partition that is there (sinfo -s)"),
    (r"invalid account|account.*not permitted|not allowed to submit", _ACCOUNT),
    (r"invalid qos", _QOS),
    (r"time limit is invalid|exceeds partition time limit|DurationPerJobLimit", _LESS_TIME),
    (r"node configuration is not available|more processors requested|memory specification", _FEWER),
    (r"invalid feature", "give a constraint that nodes have (sinfo -o '%P %f')"),
    (r"reservation is invalid|invalid reservation|access denied to requested reservation", _RESERVATION),
    (r"\b(QOS|Assoc)Max\w+Per(Job|Node)", _FEWER),
    (r"\b(QOS|Assoc)Grp\w+", "a limit of the account or QOS: ask for less, or give another"),
    (r"\b(QOS|Assoc)Min\w+", _MORE),
    (r"invalid license", "give licences that are there (scontrol show licenses)"),
)


def help_with_refusal(words: str) -> str:
    """Return what helps against sbatch's refusal, by its message; empty where that is not known."""
    return next((helps for pattern, helps in _REFUSALS if re.search(pattern, words, re.IGNORECASE)), "")


# --- held jobs ---

_BY_USER = frozenset({"jobhelduser", "jobrequeuedinheldstate", "jobholdmaxrequeue"})
_BY_ADMIN = frozenset({"jobheldadmin"})
_MOST_NAMED = 4


def way_to_release(waiting: Iterable[Element]) -> str | None:
    """Return what lets held elements start, in words; None where none of these is held. Pure."""
    held = {element.array_id: _bare(element.reason) for element in waiting}
    own = sorted((job for job, reason in held.items() if reason in _BY_USER), key=int)
    others = sorted((job for job, reason in held.items() if reason in _BY_ADMIN), key=int)
    message = [f"to let it start: scontrol release {_some(own)}"] if own else []
    message += [f"to let it start, an administrator runs: scontrol release {_some(others)}"] if others else []
    return "; ".join(message) or None


def _bare(reason: str) -> str:
    """Return a reason as the same word in every version of Slurm, and option of squeue."""
    return reason.strip("()").replace("_", "").replace(" ", "").lower()


def _some(jobs: list[str]) -> str:
    more = len(jobs) - _MOST_NAMED
    return " ".join(jobs[:_MOST_NAMED]) + (f" (and {more} more)" if more > 0 else "")
