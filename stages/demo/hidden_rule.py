"""The judge that stands in for people's taste in the quickstart: warm, finished reviews without repeats win.

`make.py` asks it which of two responses is preferred (with noise), and the reward model learns from the
answers only. The training pipeline never imports this file, so a finished run can be judged with it. It needs
nothing but the standard library.
"""

import math
import re

POSITIVE = (
    "wonderful", "superb", "lovely", "clever", "moving", "brilliant", "charming",
    "funny", "tender", "gripping", "elegant", "warm", "bright", "honest",
)  # fmt: skip
NEGATIVE = (
    "dull", "awful", "clumsy", "boring", "weak", "noisy", "shallow",
    "messy", "bland", "tedious", "silly", "cold", "flat", "lazy",
)  # fmt: skip
# Words that a good review repeats naturally; only a direct stutter ("the the") counts against them.
FUNCTION_WORDS = frozenset({
    "a", "an", "about", "all", "and", "at", "but", "call", "felt", "found", "i", "in", "is", "it", "its",
    "me", "my", "not", "of", "on", "our", "seemed", "so", "that", "the", "to", "was", "we", "were",
    "with", "would",
})  # fmt: skip

SENTIMENT_WEIGHT, REPEAT_WEIGHT, UNFINISHED_PENALTY = 2.5, 1.5, 1.0
LOWEST, HIGHEST = -(SENTIMENT_WEIGHT + REPEAT_WEIGHT + UNFINISHED_PENALTY), SENTIMENT_WEIGHT


def words_of(text: str) -> list[str]:
    """Lower-case words in reading order."""
    return re.findall(r"[a-z']+", text.lower())


def sentiment(response: str) -> int:
    """Distinct positive minus distinct negative words: saying "superb" twice is no better than once."""
    seen = set(words_of(response))
    return len(seen.intersection(POSITIVE)) - len(seen.intersection(NEGATIVE))


def num_repeats(prompt: str, response: str) -> int:
    """Words of the response that were already said (content words), or that stutter (any word)."""
    said, repeats = set(words_of(prompt)), 0
    previous = (words_of(prompt) or [""])[-1]
    for word in words_of(response):
        repeats += word == previous or (word in said and word not in FUNCTION_WORDS)
        said.add(word)
        previous = word
    return repeats


def is_finished(response: str) -> bool:
    """True when the response has a word in it and stops at the end of a sentence."""
    return bool(words_of(response)) and response.rstrip().endswith((".", "!", "?"))


def hidden_rule(prompt: str, response: str) -> float:
    """Score in [LOWEST, HIGHEST]; both terms saturate, so no single trick is worth repeating without end."""
    score = SENTIMENT_WEIGHT * math.tanh(sentiment(response) / 4)
    score -= REPEAT_WEIGHT * math.tanh(num_repeats(prompt, response) / 3)
    return score - (0.0 if is_finished(response) else UNFINISHED_PENALTY)
