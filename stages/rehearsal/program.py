"""A process of the rehearsal: it makes one check, or is one of its ranks, and writes its answer to a file.

``python -m stages.rehearsal.program CHECK ANSWER INPUT``: the check as ``module:function``, the file without
its ending, and the fields of :class:`stages.rehearsal.answers.CheckInput` as JSON. Ranks add their number to
the file's name.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.decide.device_faults import diagnose
from stages.context import UserError
from stages.rehearsal.answers import CheckFailed, CheckInput, MissedRanks, NotShown, Shown

_SAID = 300
"""Characters of a library's error message that are quoted."""
_LOOK_AT_LOG = (
    "fix what the message names; a page of the documentation, docs/howto/gpus.md, has the frequent ones"
)


def serve(words: Sequence[str]) -> None:
    """Make a check; its answer names the outcome as ``verdict``. Where another rank did not come, the exit
    code is 1, upon which that one is ended too."""
    check, stem, given = words
    content = json.loads(given)
    answer = answer_of(check, CheckInput(**content | {"folder": Path(content["folder"])}))
    path = Path(f"{stem}.{os.environ.get('RANK', '0')}.json")
    private = path.with_suffix(".tmp")
    private.write_text(json.dumps(answer))
    private.replace(path)
    if answer["missed"]:
        sys.exit(1)


def answer_of(check: str, given: CheckInput) -> dict[str, Any]:
    """Return verdict, what was measured, advice and numbers of a check, whatever it meets, and whether it
    missed another rank."""
    try:
        module, _, name = check.partition(":")
        shown: Shown = getattr(importlib.import_module(module), name)(given)
        return _answer("ok", shown.measured, shown.advice, shown.numbers)
    except NotShown as error:
        return _answer("skipped", f"not shown here: {error}")
    except CheckFailed as error:
        answer = _answer("problem", str(error), error.advice)
        return answer | {"missed": isinstance(error, MissedRanks)}
    except UserError as error:
        measured, _, advice = str(error).rpartition("; ")
        return _answer("problem", measured or advice, advice if measured else _LOOK_AT_LOG)
    except Exception as error:  # whatever a library raises is what the check has found
        traceback.print_exc()
        said = " ".join(str(error).split())[:_SAID] or "no message"
        fault = diagnose(f"{type(error).__name__}: {error}")
        advice = fault.row.change if fault else _LOOK_AT_LOG
        return _answer("problem", f"{type(error).__name__}: {said}", advice)


def _answer(
    verdict: str, measured: str, advice: str = "", numbers: Mapping[str, float] | None = None
) -> dict[str, Any]:
    numbers = dict(numbers or {})
    return {"verdict": verdict, "measured": measured, "advice": advice, "numbers": numbers, "missed": False}


if __name__ == "__main__":
    serve(sys.argv[1:])
