"""A light trainer of several ranks, which meet and agree as those of a real one do: over gloo, each on a
device of its own.

Each rank writes into the file of ``MEETING`` where it is and what all have added up. With ``MEETING_KILLS``
or ``MEETING_FAULT``, RANK:FILE in the environment, that rank is killed among the others, or its GPU fails,
unless the file is there, which it makes.
"""

import json
import os
import signal
import socket
from pathlib import Path

from stages.engines.base import takes_ranks, without_torch
from tests.support.fault_texts import cuda
from tests.support.faulty import AcceleratorError
from tests.support.light_training import LightTrainer

WORD = "update.engine=tests.support.meeting:make_trainer"
FILE, KILLS, FAULT = "MEETING", "MEETING_KILLS", "MEETING_FAULT"


@without_torch
@takes_ranks
def make_trainer(config):
    return MeetingTrainer()


class MeetingTrainer(LightTrainer):
    """Rank 0 computes; the others take part in the sum alone."""

    def update(self, context, iteration):
        from stages import ranks

        note(meet(), iteration)
        return super().update(context, iteration) if ranks.is_first() else None


def meet() -> dict[str, object]:
    """Raises UserError where two ranks have one device."""
    import torch

    from stages import ranks
    from stages.models.devices import DevicePlace

    ranks.start_distributed()
    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    device = names[ranks.gpu_index(ranks.RankPlace.of(os.environ), len(names))]
    node = os.environ["SLURMD_NODENAME"]
    ranks.check_own_devices(DevicePlace(node, f"GPU-{device}"))
    if is_due(KILLS, ranks.rank()):
        os.kill(os.getpid(), signal.SIGKILL)
    is_broken = is_due(FAULT, ranks.rank())
    ranks.agree(AcceleratorError(cuda("uncorrectable ECC error encountered")) if is_broken else None)
    total = ranks.sum_over_ranks(torch.tensor([1, 2 ** ranks.rank()]))
    place = {"node": node, "host": socket.gethostname(), "device": device, "rank": ranks.rank()}
    return {**place, "sum": total.tolist(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}


def is_due(variable: str, rank: int) -> bool:
    """Whether something is to happen to this rank now."""
    victim, _, file = os.environ.get(variable, "").partition(":")
    if victim != str(rank) or Path(file).exists():
        return False
    Path(file).touch()
    return True


def note(said: dict[str, object], iteration: int) -> None:
    line = json.dumps({**said, "iteration": iteration}) + "\n"
    with Path(os.environ[FILE]).open("a") as file:
        file.write(line)


def read(file: Path) -> list[dict]:
    """What ranks have written, by rank."""
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["rank"])
