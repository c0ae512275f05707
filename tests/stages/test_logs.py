"""Logs of tasks: each line has time and level, whatever else in the process configures logging."""

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize(
    "elsewhere",
    [
        "",
        "import logging.config; logging.config.dictConfig({'version': 1})",
        "import logging; logging.basicConfig(level=logging.ERROR, force=True)",
        "import logging; logging.getLogger('stages').disabled = True",
    ],
)
def test_nothing_that_a_users_code_configures_silences_a_task(elsewhere):
    code = "\n".join(
        [
            "from stages.logs import log, set_up_log",
            "set_up_log()",
            elsewhere,
            "log.info('one')",
            "log.error('two')",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"{STAMP} INFO one\n{STAMP} ERROR two\n", done.stderr)
