"""Checks of a rehearsal that meet what nodes do to processes."""

import errno
import os
import signal
import sys
import time

from stages.context import UserError
from stages.rehearsal.answers import CheckFailed, CheckInput, NotShown, Shown


def works(given: CheckInput) -> Shown:
    return Shown("it computes", {"answer": 42})


def advises(given: CheckInput) -> Shown:
    return Shown("it computes, slowly", advice="take the faster one")


def hangs(given: CheckInput) -> Shown:
    print("waiting for the driver", flush=True)
    time.sleep(600)
    raise AssertionError


def dies(given: CheckInput) -> Shown:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leaves(given: CheckInput) -> Shown:
    print("the licence has ended", flush=True)
    sys.exit(3)


def differs(given: CheckInput) -> Shown:
    raise CheckFailed("the loss is 7", "exclude this node")


def is_elsewhere(given: CheckInput) -> Shown:
    raise NotShown("needs a GPU")


def refuses(given: CheckInput) -> Shown:
    raise UserError("CUDA_VISIBLE_DEVICES=7: none of these GPUs can be used on this node; look at nvidia-smi")


def fills_the_disk(given: CheckInput) -> Shown:
    raise OSError(errno.ENOSPC, "No space left on device", "policy-file")


def has_an_old_driver(given: CheckInput) -> Shown:
    raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040).")


def second_rank_dies(given: CheckInput) -> Shown:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("connection closed by peer")


def one_rank_never_comes(given: CheckInput) -> Shown:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    from stages.rehearsal import devices, meeting

    meeting.MEETING_SECONDS = 8.0
    return devices.own_device(given)


def names(given: CheckInput) -> Shown:
    return Shown(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
