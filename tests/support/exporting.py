"""``slurm-ppo export`` in a process of its own, which must not import torch."""

import subprocess
import sys
from pathlib import Path

_CODE = """
import sys
from pipeline.cli.app import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def export_without_torch(what: str, target: Path) -> subprocess.CompletedProcess[str]:
    """Export, and return what was said."""
    words = [sys.executable, "-c", _CODE, "export", what, str(target)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False", "export has imported torch"
    return done
