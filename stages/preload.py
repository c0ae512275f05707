"""Imported once by the local scheduler's fork server, so that no task pays for it.

Importing must start no thread and touch no GPU: every task is a fork of what this leaves behind.
"""

import gc
import os

from pipeline.environment import NO_NETWORK

os.environ.update(NO_NETWORK)
os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
if not os.path.exists("/dev/nvidia0"):  # noqa: PTH110 - asks the machine, not torch, which would wake the driver
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: F401
import transformers  # noqa: F401

import stages.engines.transformers
import stages.evaluate
import stages.prepare
import stages.reward
import stages.rollout
import stages.runner
import stages.update  # noqa: F401

gc.freeze()  # what is shared stays shared: the collector would write to every object's header
