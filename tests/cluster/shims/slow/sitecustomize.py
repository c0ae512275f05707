"""Makes generation slow down after some tokens, without a CPU. Loaded through PYTHONPATH by test_faults.

Each token then takes TOKEN_SECONDS longer. Only in the first array of a stage: what is submitted again is as
fast as ever.
"""

import os
import time

from stages import warning

FAST_TOKENS = 30
_warned = warning.warned
_count = 0


def slowly() -> bool:
    """Generation asks before each token whether it was warned."""
    global _count
    _count += 1
    if _count > FAST_TOKENS:
        time.sleep(float(os.environ["TOKEN_SECONDS"]))
    return _warned()


if os.environ.get("SLURM_JOB_NAME", "").split(".")[-2:-1] == ["1"]:
    warning.warned = slowly
