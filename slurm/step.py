"""Entry point of every process of a job step: ``python -m slurm.step RENDEZVOUS MODULE ARGUMENTS``.

One of several ranks gets its rank in torch's variables.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from slurm.element import rank_variables


def main(argv: list[str]) -> None:
    """Run the module in this process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes before the worker waits must not end it
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(rank_variables(os.environ, Path(argv[0])))
    sys.argv = argv[1:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
