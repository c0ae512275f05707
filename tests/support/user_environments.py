"""Environments as users write them, good ones and broken ones."""

from pathlib import Path

ENVIRONMENTS = '''
import os
import random
import time

print("environments may print", flush=True)


class Sums:
    """Words of a set in the order of their hashes, which differ where strings hash differently."""

    def __init__(self, largest=99, words=("red", "green", "blue", "white", "black", "brown")):
        self.largest, self.words = largest, words

    def tasks(self, size, seed):
        for index in range(size):
            yield self.task(index, f"{next(iter(set(self.words)))} {random.randint(0, self.largest)}")

    def task(self, index, prompt):
        return {"prompt": prompt, "answer": prompt, "metadata": {"prompt": prompt, "index": index}}

    def score(self, response, metadata):
        return len(response) / 10 + metadata["index"] / 1000 + 10 * (response == metadata["prompt"])


class Different(Sums):
    def tasks(self, size, seed):
        for index in range(size):
            yield self.task(index, f"{self.largest} {seed} {index}")


class Mute:
    def __repr__(self):
        raise RuntimeError("no text")


def deep(levels):
    return [deep(levels - 1)] if levels else 1


def broken(what, at=3):
    class Broken(Sums):
        def task(self, index, prompt):
            row = super().task(index, f"{prompt} {index}")
            return BREAK[what](row) if index == at else row

    return Broken()


BREAK = {
    "raises": lambda row: row["nothing"],
    "leaves": lambda row: os._exit(4),
    "leaves quietly": lambda row: os._exit(0),
    "hangs": lambda row: time.sleep(600),
    "text": lambda row: "a prompt",
    "unknown": lambda row: row | {"question": 1},
    "no prompt": lambda row: {"metadata": 1},
    "list": lambda row: row | {"answer": ["4"]},
    "tuple": lambda row: row | {"metadata": {"a": (1, 2)}},
    "surrogate": lambda row: row | {"prompt": "\\ud800"},
    "nan": lambda row: row | {"metadata": float("nan")},
    "infinite": lambda row: row | {"metadata": [float("inf")]},
    "keys": lambda row: row | {"metadata": {1: 2}},
    "digits": lambda row: row | {"metadata": 10**5000},
    "deep": lambda row: row | {"metadata": deep(500)},
    "mute": lambda row: row | {"metadata": Mute()},
    "object": lambda row: row | {"metadata": {"a": {1, 2}}},
}


class Few(Sums):
    def tasks(self, size, seed):
        return list(super().tasks(5, seed))


def no_score():
    return random.Random(0)


def no_environment(largest):
    return Sums(largest)


class Scores(Sums):
    """Scores that are none."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def score(self, response, metadata):
        if response and metadata["index"] == 1:
            return {"raises": lambda: metadata["nothing"], "text": lambda: "good", "nan": lambda: 1e999,
                    "hangs": lambda: time.sleep(600)}[self.what]()
        return 0.5
'''


def write_environments(folder: Path) -> str:
    """Write them into a user's folder. Returns the module's name, of which each test has its own."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"tasks_{folder.parent.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(ENVIRONMENTS)
    return name
