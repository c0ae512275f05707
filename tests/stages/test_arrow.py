"""Workers do not import pandas, and whoever wants it has it."""

import subprocess
import sys

from tests.support import ROOT

SPARED = """
import sys
from stages.process.arrow import spare_pandas

spare_pandas()
assert not [one for one in sys.meta_path if type(one).__module__ == "stages.process.arrow"]
import pyarrow as pa

table = pa.table({"a": [1, None]})
assert table["a"].filter(pa.array([True, False])).to_pylist() == [1]
assert "pandas" not in sys.modules
frame = table.to_pandas()
assert sys.modules["pandas"].DataFrame is type(frame)
assert pa.array(frame["a"]).to_pylist() == [1, None]
"""


def test_arrow_makes_arrays_without_pandas_and_frames_with_it(environment):
    done = subprocess.run(
        [sys.executable, "-c", SPARED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
