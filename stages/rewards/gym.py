"""Data sets of the package reasoning-gym as environments, with its own scorers.

Registered as ``reasoning_gym``; needs the extra ``reasoning-gym``. No text that a policy writes is an error.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

try:
    from reasoning_gym.factory import DATASETS, create_dataset
except ModuleNotFoundError as error:
    missing = (
        "reasoning_gym needs reasoning-gym: pip install 'slurm-ppo[reasoning-gym]' where its tasks are made"
    )
    raise ModuleNotFoundError(missing, name=error.name) from error

_TUPLE, _ITEMS = "__tuple__", "__items__"
"""Keys of dictionaries that stand for what JSON has not: a tuple, and a dictionary with other keys than
text."""


class ReasoningGym:
    """A data set of reasoning-gym.

    Args:
        dataset: its name, e.g. ``basic_arithmetic``.
        chat: whether prompts are chat messages; else they are plain text.
        system: text of a system message before the question.
        instruction: text behind the question, after an empty line.
        pattern: regular expression whose first group is the answer; its last match in the response counts,
            and without a match the score is that of no answer. Default: the response is the answer.
        settings: further settings of the data set.

    Raises:
        ValueError: there is no such data set, it does not take these settings, or the pattern has no group.
    """

    def __init__(
        self,
        dataset: str,
        *,
        chat: bool = True,
        system: str | None = None,
        instruction: str | None = None,
        pattern: str | None = None,
        **settings: Any,
    ) -> None:
        if dataset == "composite":
            raise ValueError(
                "give each data set of composite a component of its own: data.environment.components.NAME "
                "with source=reasoning_gym, arguments.dataset=... and weight=..."
            )
        if not isinstance(dataset, str) or dataset not in DATASETS:
            near = "".join(
                f" (did you mean {one!r}?)" for one in get_close_matches(str(dataset), DATASETS, n=1)
            )
            raise ValueError(f"no data set {dataset!r}{near}; there are: {', '.join(sorted(DATASETS))}")
        if system is not None and not chat:
            raise ValueError("system is a chat message, and chat is false; leave one of them out")
        self._dataset, self._settings = dataset, settings
        self._chat, self._system, self._instruction = chat, system, instruction
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        if self._pattern and not self._pattern.groups:
            raise ValueError(f"pattern={pattern!r:.80} has no group; put parentheses around the answer")
        self._scorer = self._made(size=1, seed=0)

    def tasks(self, size: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the data set's entries, each a prompt with all that its scorer looks at."""
        made = self._made(size=size, seed=seed)
        for index in range(size):
            entry = made[index]
            answer = entry["answer"]
            yield {
                "prompt": self._prompt(entry["question"]),
                "answer": answer if isinstance(answer, str) else None,
                "metadata": encoded(entry),
            }

    def score(self, response: str, metadata: Any) -> float:
        """Return the score of a response's answer by the data set's scorer; 0 for an answer at which that
        raises an exception, as some do at what they cannot read."""
        try:
            return float(self._scorer.score_answer(self._answer(response), decoded(metadata)))
        except Exception:  # of any kind: it is the data set's reading of what a policy has written
            return 0.0

    def _made(self, size: int, seed: int) -> Any:
        try:
            return create_dataset(self._dataset, size=size, seed=seed, **self._settings)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"data set {self._dataset!r} refuses its settings: {error}") from error

    def _prompt(self, question: str) -> str | list[dict[str, str]]:
        text = question if self._instruction is None else f"{question}\n\n{self._instruction}"
        if not self._chat:
            return text
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": text}]

    def _answer(self, response: str) -> str | None:
        if self._pattern is None:
            return response.strip()
        found = [match[1] for match in self._pattern.finditer(response)]
        return (found[-1] or "").strip() if found else None


def encoded(value: Any) -> Any:
    """Return an entry in values that JSON has. Tuples, and keys that are no text, are written so that
    :func:`decoded` gives them back: some scorers compare them."""
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(one) for one in value]}
    if isinstance(value, list):
        return [encoded(one) for one in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encoded(one) for key, one in value.items()}
        return {_ITEMS: [[encoded(key), encoded(one)] for key, one in value.items()]}
    return value


def decoded(value: Any) -> Any:
    """Return what :func:`encoded` was given."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decoded(one) for one in value[_TUPLE])
    if value.keys() == {_ITEMS}:
        return {decoded(key): decoded(one) for key, one in value[_ITEMS]}
    return {key: decoded(one) for key, one in value.items()}
