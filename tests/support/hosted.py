"""Environments for an interpreter of their own, which has a package that this one lacks, and no other."""

import subprocess
import sys
from pathlib import Path

ONLY_THERE = """
def sum_of(a, b):
    return a + b
"""
ENVIRONMENTS = '''
import importlib.util
import os
import random
import signal
import sys
import time

import only_there


class Sums:
    """Tasks in one turn. ``what`` happens at the third task, and at the score of any response to it."""

    def __init__(self, what=None):
        self.what = what

    def tasks(self, size, seed, heldout=False):
        words = {"red", "green", "blue", "white", "black", "brown"}
        for index in range(size):
            if index == 2 and self.what:
                HAPPENS[self.what]()
            a = random.randint(0, 99)
            prompt = f"{next(iter(words))} {a} + {index} {'held out ' * heldout}="
            yield {"prompt": prompt, "answer": str(only_there.sum_of(a, index)), "metadata": [a, index]}

    def score(self, response, metadata):
        if metadata[1] == 2 and self.what:
            return HAPPENS[self.what]()
        return float(response == str(only_there.sum_of(*metadata))) + len(response) / 100


class Guess(Sums):
    """Says higher or lower until the sum is guessed, or three turns are over."""

    def step(self, messages, metadata):
        if self.what and metadata[1] == 2:
            return HAPPENS[self.what]()
        said = [one["content"] for one in messages if one["role"] == "assistant"]
        if len(said) == 3 or said[-1] == str(sum(metadata)):
            return None
        return [{"role": "user", "content": f" no {len(said)} {len(said[-1])} "}]

    def score(self, response, metadata, messages):
        return len(messages) + len(messages[-1]["content"]) / 100


class Best(Sums):
    compares = True

    def score_group(self, responses, metadata):
        longest = max(map(len, responses))
        return [float(len(response) == longest) for response in responses]


class Packages(Sums):
    """What it sees of the environment of slurm-ppo."""

    def tasks(self, size, seed):
        found = [name for name in ("pyarrow", "pydantic", "pipeline") if importlib.util.find_spec(name)]
        for index in range(size):
            yield {"prompt": f"{found} {sys.prefix} {index}"}


def forks():
    if os.fork() == 0:
        time.sleep(0.2)
    return 1.0


def leaves_one_behind():
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)


def spoils():
    print("{no JSON", flush=True)
    os.write(1, b"nor this\\n")
    sys.stdin.read()
    os.chdir("/")
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sys.path.clear()
    return 1.0


HAPPENS = {
    "raises": lambda: {}["nothing"],
    "exits": lambda: sys.exit(3),
    "leaves": lambda: os._exit(4),
    "leaves one behind": leaves_one_behind,
    "hangs": lambda: time.sleep(600),
    "forks": forks,
    "spoils": spoils,
    "nan": lambda: float("nan"),
    "huge": lambda: 10**5000,
    "object": lambda: [object()],
    "text": lambda: "good",
    "number": lambda: 7,
}
'''


def make_interpreter(folder: Path) -> str:
    """Make a virtual environment with a package of one module. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text(ONLY_THERE)
    return str(folder / "bin" / "python")


def write_environments(folder: Path) -> str:
    """Write the environments into a user's folder. Returns the module's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosted_tasks.py").write_text(ENVIRONMENTS)
    return "hosted_tasks"
