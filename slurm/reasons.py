"""Slurm's reasons why a job waits, and sbatch's refusals: what they mean, whether they pass, what helps."""

import re
from dataclasses import dataclass
from enum import StrEnum


class Ends(StrEnum):
    """What ends a job's wait for a reason."""

    ITSELF = "itself"
    """Time, or the end of other jobs; or the next pass, which submits again what Slurm holds."""
    OTHERS = "others"
    """Somebody's deed: of an administrator, or of whoever holds the job."""
    NEVER = "never"
    """Nothing: it asks for what it never gets here."""


@dataclass(frozen=True)
class Reason:
    """What Slurm's reason means to who waits."""

    words: str
    ends: Ends = Ends.ITSELF
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
        return self.ends is not Ends.ITSELF


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


def _limit(words: str) -> Reason:
    return Reason(words, frees=True, is_of_user=True)


REASONS = {
    "none": Reason("not considered yet"),
    "priority": Reason("other jobs have a higher priority", frees=True),
    "resources": Reason("waiting for free resources", frees=True),
    "dependency": Reason("waiting for the jobs it depends on"),
    "dependencyneversatisfied": Reason("a job it depends on failed, so it will never start"),
    "begintime": Reason("its start time has not come (after a requeue, Slurm waits about two minutes)"),
    "jobheldadmin": Reason(
        "held by an administrator, or by Slurm after too many requeues",
        Ends.OTHERS,
        "ask an administrator to release it (scontrol release JOB)",
    ),
    "jobhelduser": Reason("held by its user", Ends.OTHERS, _RELEASE),
    "joblaunchfailure": Reason("Slurm could not start it on its node"),
    "launch failed requeued held": Reason("Slurm could not start it on its node and holds it"),
    "job requeued in held state": Reason("requeued and held", Ends.OTHERS, _RELEASE),
    "jobholdmaxrequeue": Reason("held by Slurm after too many requeues"),
    "jobarraytasklimit": Reason("the array's own limit of elements at once is reached"),
    "partitiondown": Reason("its partition is down", Ends.OTHERS, _OTHER_PARTITION),
    "partitioninactive": Reason("its partition takes no jobs now", Ends.OTHERS, _OTHER_PARTITION),
    "partitionnodelimit": Reason(
        "it asks for more nodes than its partition allows, or they are down", Ends.OTHERS, _NODES
    ),
    "partitiontimelimit": Reason("it asks for more time than its partition allows", Ends.NEVER, _LESS_TIME),
    "partitionconfig": Reason("its partition does not allow what it asks for", Ends.NEVER, _FEWER),
    "reqnodenotavail": Reason("nodes that it needs are down, drained or reserved", Ends.OTHERS, _NODES),
    "nodes required for job are down": Reason(
        "nodes that it needs are down, drained or reserved", Ends.OTHERS, _NODES
    ),
    "nodedown": Reason("a node that it needs is down", Ends.OTHERS, _NODES),
    "badconstraints": Reason(
        "no node can ever have what it asks for",
        Ends.NEVER,
        "give a constraint and numbers that nodes have (sinfo -o '%P %c %m %G %f')",
    ),
    "constraints": Reason("no node has what it asks for at the moment"),
    "reservation": Reason("waiting for its reservation"),
    "reservationdeleted": Reason("its reservation was deleted", Ends.NEVER, _RESERVATION),
    "reservationinvalid": Reason("its reservation is not valid", Ends.NEVER, _RESERVATION),
    "licenses": Reason("waiting for a licence", frees=True),
    "prolog": Reason("a prologue script still runs"),
    "cleaning": Reason("an earlier run of it is still being cleaned up"),
    "deadline": Reason(
        "it cannot end before its deadline", Ends.NEVER, "leave the deadline out of its options"
    ),
    "nodefail": Reason("its node failed"),
    "nonzeroexitcode": Reason("it ended with an error"),
    "outofmemory": Reason("it used more memory than it asked for"),
    "timelimit": Reason("its time limit was reached"),
    "raisedsignal": Reason("it was ended by a signal"),
    "systemfailure": Reason("Slurm or a node failed"),
    "invalidaccount": Reason("its account does not exist", Ends.NEVER, _ACCOUNT),
    "invalidqos": Reason("its QOS does not exist", Ends.NEVER, _QOS),
    "accountnotallowed": Reason("its account may not use this partition", Ends.NEVER, _ACCOUNT),
    "qosnotallowed": Reason("its QOS may not be used here", Ends.NEVER, _QOS),
    "qosusagethreshold": Reason("its QOS's usage threshold is reached", Ends.OTHERS, _BUDGET),
    "qosjoblimit": _limit("its QOS's limit of jobs is reached"),
    "qosresourcelimit": _limit("its QOS's limit of resources is reached"),
    "qostimelimit": Reason("its QOS's limit of time is reached", Ends.NEVER, _LESS_TIME),
    "associationjoblimit": _limit("the account's limit of jobs is reached"),
    "associationresourcelimit": _limit("the account's limit of resources is reached"),
    "associationtimelimit": Reason("the account's limit of time is reached", Ends.NEVER, _LESS_TIME),
    "assocmaxjobslimit": _limit("the account's limit of running jobs is reached"),
    "accountingpolicy": _limit("a limit of its account or QOS is reached"),
    "maxmemperlimit": Reason(
        "it asks for more memory than the partition allows",
        Ends.NEVER,
        "give less mem, or a partition that allows more",
    ),
    "burstbufferresources": Reason("waiting for burst buffer space"),
    "burstbufferstagein": Reason("its burst buffer is being filled"),
    "burstbufferoperation": Reason(
        "a burst buffer operation failed", Ends.OTHERS, "leave the burst buffer out of its options, or ask"
    ),
    "frontenddown": Reason("no front end node is up", Ends.OTHERS, "ask the administrators"),
    "scheddefer": Reason("the scheduler puts off new jobs"),
    "inactivelimit": Reason("it was inactive for too long"),
    "powernotavail": Reason("there is not enough electric power"),
    "powerreserved": Reason("electric power is reserved for others"),
    "fedjoblock": Reason("another cluster of the federation decides"),
    "fedjoblimit": Reason("another cluster of the federation decides"),
    "mpiportsbusy": Reason("its node has no free ports for ranks"),
    "maxpowerednodes": Reason("as many nodes are powered up as may be"),
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


def explain(reason: str) -> Reason:
    """Return what a reason means, as squeue shows it: in parentheses or not, with or without underscores,
    with what it is about after a comma. An unknown one is taken to pass."""
    bare = reason.strip().strip("()")
    known = REASONS.get(bare.split(",")[0].replace("_", " ").lower())
    limit = _LIMIT.fullmatch(bare.split(",")[0])
    if known is None and limit is not None:
        known = _of_limit(limit)
    return known or Reason(reason)


def _of_limit(limit: re.Match[str]) -> Reason | None:
    what = limit["what"].lower()
    counted = next((words for stem, words in _WHAT.items() if what.startswith(stem)), None)
    if counted is None:
        return None
    unit = " times minutes" if "minute" in what else ""
    owner = _OWNERS[limit["owner"]]
    if limit["bound"] == "Min":
        words = f"it asks for less than {owner}'s minimum of {counted}"
        return Reason(words, Ends.NEVER, _MORE)
    sharing = ", shared by all its users," if limit["group"] else ""
    words = f"{owner}'s limit of {counted}{unit}{sharing} is reached ({limit[0]})"
    if _OF_ONE_JOB.search(limit[0]):
        return Reason(words, Ends.NEVER, _LESS_TIME if "Wall" in limit[0] or unit else _FEWER)
    if unit or "Wall" in limit[0]:
        is_running = "RunMinutes" in limit[0]  # of jobs that run now: their ends free it
        return Reason(words) if is_running else Reason(words, Ends.OTHERS, _BUDGET)
    return Reason(words) if "Submit" in limit[0] else _limit(words)


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
