"""Presses Ctrl-C, for the whole process group, when a module is about to be imported. Loaded by PYTHONPATH.

INTERRUPT_AT names the module; with ``#N`` behind it, the N-th process of the group that comes to it. The file
INTERRUPT_MARKER counts them. INTERRUPT_BY is another signal's name.
"""

import os
import signal
import sys
from pathlib import Path

_module, _, _which = os.environ.get("INTERRUPT_AT", "").partition("#")


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == _module:
            sys.meta_path.remove(self)
            with Path(os.environ["INTERRUPT_MARKER"]).open("ab") as file:
                file.write(b"x")
                count = file.tell()
            if count == int(_which or 1):
                os.killpg(0, signal.Signals[os.environ.get("INTERRUPT_BY", "SIGINT")])


if _module:
    sys.meta_path.insert(0, _Finder())
