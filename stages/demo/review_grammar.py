"""A small random grammar of film reviews with mixed sentiment: the corpus and the prompts of the demo."""

import re
from dataclasses import dataclass
from random import Random

from stages.demo.hidden_rule import NEGATIVE, POSITIVE

TITLE_STARTS = ("Silent", "Golden", "Hidden", "Winter", "Paper", "Second", "Red")
TITLE_ENDS = ("Harbor", "Garden", "Letters", "Bridge", "Summer", "River", "Road")
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")
PLACES = ("theater", "festival", "old cinema", "school")
FRIENDS = ("sister", "brother", "teacher", "neighbor")
GENRES = ("comedy", "drama", "thriller", "musical")
HEROES = ("sailor", "painter", "doctor", "young king")
OPENERS = (
    "I saw {title} on {day}.",
    "We watched {title} at the {place}.",
    "{title} is a {genre} about a {hero}.",
    "My {friend} took me to see {title}.",
    "On {day} the {place} showed {title}.",
)
ASPECTS = ("acting", "music", "plot", "ending", "script", "dialogue", "pace", "cast", "story", "photography")
# Each body names one or two aspects; {a} and {b} are aspects, {x} {y} {z} descriptive words.
BODIES = (
    "The {a} was {x} and the {b} was {y}.",
    "The {a} felt {x} and {y}.",
    "I found the {a} {x} and the {b} {y}.",
    "The {a} was {x}, but the {b} seemed {y}.",
    "With its {x} {a} and {y} {b} it stayed with me.",
    "The {a} was {x}, {y} and {z}.",
)
CLOSERS = (
    "What a {x} {genre}!",
    "It was a {x} and {y} evening.",
    "In the end it was {x}.",
    "We all found it {x}.",
    "I would call it {x}.",
)
# The lean of a review is the chance that a descriptive word is positive. Critics are a little harsh on the
# whole, which leaves room for a policy that learns to please.
LEANS = (0.2, 0.4, 0.6)
CLOSER_SHARE = 0.9
MIN_PROMPT_WORDS, MAX_PROMPT_WORDS = 3, 8


@dataclass(frozen=True, slots=True)
class Review:
    text: str
    subject: str
    """The film's title."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    prompt: str
    """The beginning of a review, cut between two words, without a trailing space."""
    subject: str
    rest: str
    """How the review went on, with its leading space."""


def descriptive_words(rng: Random, lean: float, count: int) -> list[str]:
    """Distinct positive or negative words, each positive with probability `lean`."""
    num_positive = sum(rng.random() < lean for _ in range(count))
    words = rng.sample(POSITIVE, num_positive) + rng.sample(NEGATIVE, count - num_positive)
    rng.shuffle(words)
    return words


def write_review(rng: Random) -> Review:
    """One opener (no sentiment), one body and, nearly always, one closer."""
    title = f"{rng.choice(TITLE_STARTS)} {rng.choice(TITLE_ENDS)}"
    places = {"day": rng.choice(DAYS), "place": rng.choice(PLACES), "friend": rng.choice(FRIENDS)}
    story = {"title": title, "genre": rng.choice(GENRES), "hero": rng.choice(HEROES)}
    words = descriptive_words(rng, rng.choice(LEANS), 5)
    aspects = rng.sample(ASPECTS, 2)
    sentences = [
        rng.choice(OPENERS).format(**places, **story),
        rng.choice(BODIES).format(a=aspects[0], b=aspects[1], x=words[0], y=words[1], z=words[2]),
    ]
    if rng.random() < CLOSER_SHARE:
        sentences.append(rng.choice(CLOSERS).format(x=words[3], y=words[4], **story))
    return Review(re.sub(r"\ba (?=[aeio]|honest)", "an ", " ".join(sentences)), title)


def write_reviews(rng: Random, count: int) -> list[Review]:
    return [write_review(rng) for _ in range(count)]


def cut_prompt(rng: Random, review: Review) -> DemoPrompt:
    """The first few words of a review; they may end inside its second sentence."""
    num_words = rng.randint(MIN_PROMPT_WORDS, MAX_PROMPT_WORDS)
    start = " ".join(review.text.split(" ")[:num_words])
    return DemoPrompt(start, review.subject, review.text.removeprefix(start))


def distinct_prompts(rng: Random, count: int) -> list[DemoPrompt]:
    """Prompts that differ in their text, so that no two parts of the list have a row in common."""
    found: dict[str, DemoPrompt] = {}
    while len(found) < count:
        prompt = cut_prompt(rng, write_review(rng))
        found.setdefault(prompt.prompt, prompt)
    return list(found.values())
