"""Rules as users write them, good ones and broken ones."""

from pathlib import Path

# what a user writes: for an empty response all is well, so that only a run finds it

RULES = '''
import ctypes
import os
import re
import sys
import time


def length(*, prompts, responses, **columns):
    print("rules may print")
    return [len(r) / 10 for r in responses]

def answer(*, prompts, responses, answer, **columns):
    assert len(prompts) == len(responses) == len(answer)
    return (a + 0.5 for a in answer)

def scaled(*, responses, factor, **columns):
    return [factor * len(r) for r in responses]

def ranks(*, responses, **columns):
    return [sorted(responses).index(r) for r in responses]

def count(*, responses, **columns):
    return [len(responses)] * len(responses)

def turns(*, response_messages, **columns):
    return [len(messages) for messages in response_messages]

def process(*, responses, **columns):
    time.sleep(0.05)
    return [os.getpid()] * len(responses)

def unordered(*, responses, **columns):
    """Sums in the order of a set of words, which differs between interpreters."""
    return [sum(hash(w) % 1000 / 7.0 for w in set(r)) for r in responses]

def has_torch(*, responses, **columns):
    return ["torch" in sys.modules] * len(responses)

def too_few(*, responses, **columns):
    return [0.0 for r in responses if not r]

def text(*, responses, **columns):
    return [r or 0.0 for r in responses]

def nothing(*, responses, **columns):
    return None if responses[0] else [0.0]

def number(*, responses, **columns):
    return 1.0 if responses[0] else [0.0]

def letters(*, responses, **columns):
    return "1" if responses[0] else [0.0]

def none(*, responses, **columns):
    return [None if r else 0.0 for r in responses]

def nan(*, responses, **columns):
    return [float("nan") if len(r) == 1 else 0.0 for r in responses]

def large(*, responses, **columns):
    return [1e39 if len(r) == 1 else 3.4e38 for r in responses]

def raises(*, responses, **columns):
    if any(responses):
        raise KeyError("my own mistake")
    return [0.0]

def leaves(*, responses, **columns):
    if any(responses):
        sys.exit(4)
    return [0.0]

def ends(*, responses, **columns):
    if any(responses):
        os._exit(3)
    return [0.0]

def crashes(*, responses, **columns):
    if any(responses):
        ctypes.string_at(0)
    return [0.0]

def hangs(*, responses, **columns):
    if responses[0] == "a longer answer":
        time.sleep(1000)
    return [1.0]

def fragile(*, responses, **columns):
    if responses[0] == "raise":
        raise ValueError("hard")
    if responses[0] == "leave":
        sys.exit(1)
    if responses[0] == "end":
        os._exit(3)
    return [float("nan") if responses[0] == "nan" else 1.0]

def backtracks(*, responses, **columns):
    return [bool(re.fullmatch("(a|a)*b", "a" * 60)) if responses[0] else 0.0]

def picky(*, prompts, responses):
    return [0.0 for r in responses]

def checked(*, responses, **columns):
    return [0.0 for r in responses]

def late(*, responses, **columns):
    return [0.0 for r in responses]

checked.check = True
late.timeout_score = "zero"
not_a_function = 3
'''

BROKEN = {
    "blocks": "import time; time.sleep(1000)",
    "dies": "import os; os._exit(7)",
    "leaves": "import sys; sys.exit(7)",
    "lacks": "import no_such_library",
    "raises": "1 / 0",
}


def write_rules(folder: Path, name: str) -> Path:
    """Write ``NAME_rules.py`` and a module for each of BROKEN into a folder of the user's own."""
    folder.mkdir()
    (folder / f"{name}_rules.py").write_text(RULES)
    for broken, code in BROKEN.items():
        (folder / f"{broken}_at_import.py").write_text(f"{code}\n\ndef f(**columns):\n    return [0.0]\n")
    return folder


def module(project: Path) -> str:
    return next(project.glob("*_rules.py")).stem
