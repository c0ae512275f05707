"""A folder of modules with environments that cannot be used, each for one reason."""

from pathlib import Path

ENVIRONMENTS = '''
import os
import time

number = 3


class Sums:
    def __init__(self, largest=9):
        self.largest = largest

    def tasks(self, size, seed):
        for index in range(size):
            yield {"prompt": f"say {seed} {index}", "answer": "a", "metadata": index}

    def score(self, response, metadata):
        return float(len(response) == metadata)


def returns(what):
    return {"none": None, "bytes": b"\\xff", "text": "sums", "generator": (i for i in range(3)),
            "class": Sums, "number": float("nan")}[what]


def hanging():
    time.sleep(600)


def leaving():
    os._exit(3)


class Raising(Sums):
    def __init__(self):
        raise RuntimeError("first line\\nsecond \\x1b[31mline" + "!" * 3000)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def mute():
    raise Mute


class Tasks(Sums):
    """Tasks that are none, or cannot be used."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def tasks(self, size, seed):
        one = {"prompt": "say", "metadata": 1}
        return {
            "none": lambda: None,
            "number": lambda: 3,
            "text": lambda: "a prompt",
            "nothing": lambda: [],
            "of none": lambda: [None] * size,
            "bytes": lambda: [one | {"prompt": b"\\xff\\xfe"}] * size,
            "numbers": lambda: [one | {"prompt": 3}] * size,
            "surrogate": lambda: [one | {"prompt": "\\udcff"}] * size,
            "no number": lambda: [one | {"metadata": float("nan")}] * size,
            "same": lambda: [one] * size,
            "empty": lambda: [one | {"prompt": ""}] * size,
            "seedless": lambda: [one | {"prompt": f"say {i}"} for i in range(size)],
            "hanging": lambda: (time.sleep(600) for _ in range(size)),
            "reserved": lambda: [one | {"prompt_id": 3}] * size,
            "messages": lambda: [one | {"prompt": [{"role": 3, "content": "say"}]}] * size,
        }[self.what]()


class Scores(Sums):
    """Scores that are none."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def score(self, response, metadata):
        return {
            "none": lambda: None,
            "no number": lambda: float("nan"),
            "text": lambda: "1.0",
            "bytes": lambda: b"1",
            "huge": lambda: 1e300,
            "list": lambda: [1.0, 2.0],
            "generator": lambda: (i for i in range(3)),
            "raising": lambda: metadata["nothing"],
            "hanging": lambda: time.sleep(600),
            "leaving": lambda: os._exit(3),
        }[self.what]()


class Conversing(Sums):
    def step(self, messages, metadata):
        return None


class Comparing(Sums):
    compares = True
'''
MODULES = {
    "mistaken": ENVIRONMENTS.encode(),
    "raising": b"raise RuntimeError('first line\\nsecond line')\n",
    "leaving": b"import sys\n\nsys.exit(5)\n",
    "ending": b"import os\n\nos._exit(5)\n",
    "hanging": b"import time\n\ntime.sleep(600)\n",
    "unfinished": b"class Sums:\n    def tasks(self,\n",
    "latin": "SUMS = 'Zähler'\n".encode("latin-1"),
    "needing": b"import nowhere_at_all\n",
}
"""Text of each module, by its name."""


def write_modules(folder: Path) -> Path:
    """Write them into a user's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_bytes(text)
    return folder
