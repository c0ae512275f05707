"""A calculator as a tool, and the reward for right answers.

The policy asks by writing ``<calc>17+25</calc>`` and ending its turn; the tool answers ``42``, and the policy
goes on. A turn that asks for nothing is the answer, and ends the conversation.

    rollout.multi_turn.scheduler=examples.calculator.calculator:step
    reward.components.right.function=examples.calculator.calculator:right

It needs nothing but the standard library.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

MAX_LETTERS, MAX_DIGITS, MAX_DEPTH = 200, 30, 20
"""Longest expression, longest number of a result, deepest parentheses: the policy may write anything."""

Messages = list[dict[str, str]]


# what slurm-ppo calls


def step(conversation: Any) -> Messages | None:
    """The answer to the first expression of the turn; None, which ends the conversation, if it has none.

    ``conversation`` is a stages.conversations.Conversation.
    """
    asked = re.search(r"<calc>(.*?)</calc>", conversation.last_turn, re.DOTALL)
    return None if asked is None else [{"role": "tool", "content": answer_to(asked[1])}]


def right(*, response_messages: Sequence[Messages], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last turn says the right number, 0 where it says another, -0.5 where it says none."""
    return [
        score(messages, Fraction(value)) for messages, value in zip(response_messages, answer, strict=True)
    ]


def score(messages: Messages, value: Fraction) -> float:
    said = re.fullmatch(
        r"\s*(-?\d{1,30}(?:/\d{1,30}|\.\d{1,30})?)\s*", messages[-1]["content"] if messages else ""
    )
    if said is None or messages[-1]["role"] != "assistant":
        return -0.5
    try:
        return float(Fraction(said[1]) == value)
    except ZeroDivisionError:
        return -0.5


# arithmetic: expression = term {("+" | "-") term}, term = factor {("*" | "/") factor},
# factor = "-" factor | "(" expression ")" | number


class NotArithmetic(ValueError):
    """What was asked cannot be calculated."""


def answer_to(text: str) -> str:
    """What the tool says: a number, or what is wrong."""
    try:
        return str(calculate(text))
    except NotArithmetic as error:
        return f"error: {error}"


def calculate(text: str) -> Fraction:
    """The value of an expression of numbers, + - * / and parentheses. Raises NotArithmetic."""
    if len(text) > MAX_LETTERS:
        raise NotArithmetic("too long")
    words = re.findall(r"\d+(?:\.\d+)?|\S", text)[::-1]
    value = expression(words, MAX_DEPTH)
    if words:
        raise NotArithmetic(f"unexpected {words[-1]}")
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise NotArithmetic("too large")
    return value


def expression(words: list[str], depth: int) -> Fraction:
    """Takes its words off the end of the list, as all of these do."""
    return chain(words, depth, term, {"+": Fraction.__add__, "-": Fraction.__sub__})


def term(words: list[str], depth: int) -> Fraction:
    return chain(words, depth, factor, {"*": Fraction.__mul__, "/": divide})


def chain(
    words: list[str],
    depth: int,
    part: Callable[[list[str], int], Fraction],
    operators: dict[str, Callable[[Fraction, Fraction], Fraction]],
) -> Fraction:
    """Parts with operators between them, from the left to the right."""
    value = part(words, depth)
    while words and words[-1] in operators:
        value = operators[words.pop()](value, part(words, depth))
    return value


def factor(words: list[str], depth: int) -> Fraction:
    word = words.pop() if words else "the end"
    if depth == 0:
        raise NotArithmetic("too deep")
    if word == "-":
        return -factor(words, depth - 1)
    if word == "(":
        value = expression(words, depth - 1)
        if not words or words.pop() != ")":
            raise NotArithmetic("a parenthesis is not closed")
        return value
    if not word[0].isascii() or not word[0].isdecimal():
        raise NotArithmetic(f"unexpected {word}")
    return Fraction(word)


def divide(one: Fraction, other: Fraction) -> Fraction:
    if other == 0:
        raise NotArithmetic("division by zero")
    return one / other
