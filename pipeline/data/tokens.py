"""Texts to token ids and back: what a tokenizer adds to a text by itself, what may be cut off, and which ids
end a response.

The only place that decides this: prompts of rollouts, inputs of reward models and reference samples are made
here, so that one text has the same ids wherever it is read. Needs neither torch nor transformers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.config.model_files import model_end_ids
from pipeline.data.chat import refusals

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBES = ("a", "0", "the", ".")
"""Texts that show what a tokenizer adds: the first of which it makes an id is taken."""
_ANSWER = "ANSWER"
_CHAT = ({"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": _ANSWER})


class TextTokenizer(Protocol):
    """The part of transformers' tokenizers that makes ids of texts."""

    def __call__(self, text: list[str], /, *, add_special_tokens: bool, verbose: bool) -> Any: ...


@dataclass(frozen=True)
class Affixes:
    """The ids that a tokenizer puts around a text: ``[CLS]`` or a begin token before it, ``[SEP]`` or an end
    token behind it."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    """Begin tokens that a text or a chat template may have written where the tokenizer adds none."""

    def around(self, ids: Sequence[int], ends: bool) -> list[int]:
        """Return a text's ids with those that are put around it, none of them twice.

        Args:
            ends: whether the text is whole: what is to be continued has no end.
        """
        has_end = bool(self.after) and tuple(ids[-len(self.after) :]) == self.after
        return [
            *(() if self.begins_text(ids) else self.before),
            *ids,
            *(self.after if ends and not has_end else ()),
        ]

    def begins_text(self, ids: Sequence[int]) -> bool:
        """Whether ids have what is put before a text, if anything is."""
        return bool(self.before) and tuple(ids[: len(self.before)]) == self.before

    def num_leading(self, ids: Sequence[int]) -> int:
        """Return how many ids of a sequence are its beginning's, which is kept when it is cut."""
        if self.begins_text(ids):
            return len(self.before)
        return int(bool(ids) and ids[0] in self.begins)

    def cut(self, ids: Sequence[int], limit: int) -> list[int]:
        """Return the last of a sequence's ids, behind those that begin it: at most ``limit`` in all."""
        head = self.num_leading(ids)
        if len(ids) <= limit or head >= limit:
            return list(ids[-limit:])
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]


def affixes_of(tokenizer: TextTokenizer) -> Affixes:
    """Find out what a tokenizer puts around texts, by one that it makes ids of."""
    begins = (getattr(tokenizer, name, None) for name in ("bos_token_id", "cls_token_id"))
    known = tuple(dict.fromkeys(id_ for id_ in begins if id_ is not None))
    for probe in _PROBES:
        (bare,), (whole,) = (_encoded(tokenizer, [probe], special) for special in (False, True))
        places = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        if bare and places:
            start = places[0]
            return Affixes(tuple(whole[:start]), tuple(whole[start + len(bare) :]), known)
    return Affixes(begins=known)


def text_ids(
    tokenizer: TextTokenizer, texts: Sequence[str], *, special: bool, ends: bool, affixes: Affixes
) -> list[list[int]]:
    """Return the ids of each text.

    Args:
        special: whether the tokenizer's own begin belongs to them. Not where a chat template has written all.
        ends: whether its own end does too, as in what is read only: a prompt is continued.
    """
    found = _encoded(tokenizer, texts, special=False)
    return [affixes.around(ids, ends) for ids in found] if special else found


def text_starts(tokenizer: Any, text: str, *, special: bool, affixes: Affixes) -> tuple[list[int], list[int]]:
    """Return the ids of a whole text as :func:`text_ids` does, and the character at which each starts; those
    that are put before it start at -1, those behind it at its length. Needs a fast tokenizer."""
    found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ids, starts = list(found["input_ids"]), [start for start, _ in found["offset_mapping"]]
    if not special:
        return ids, starts
    whole = affixes.around(ids, ends=True)
    before = 0 if affixes.begins_text(ids) else len(affixes.before)
    starts = [-1] * before + starts
    return whole, starts + [len(text)] * (len(whole) - len(starts))


def _encoded(tokenizer: TextTokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
    if not texts:  # which some tokenizers refuse
        return []
    # verbose=False: what is too long is reported by us, row by row
    found = tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
    return [list(ids) for ids in found]


def written_text(
    tokenizer: Any, ids: Sequence[int], mask: Sequence[bool], ends: frozenset[int], special: bool = False
) -> str:
    """Return the text of a response, without special tokens and without the ids that ended it or a turn of
    it, whether or not the tokenizer calls them special.

    Args:
        mask: true where the policy wrote the id; what a tool has said ends no turn.
        ends: ids that end a response.
        special: whether special tokens are part of the text: all but the one that ended the response.
    """
    if special:
        has_end = bool(ids) and mask[-1] and ids[-1] in ends
        return str(tokenizer.decode(list(ids[:-1] if has_end else ids), skip_special_tokens=False))
    kept = [id_ for id_, is_own in zip(ids, mask, strict=True) if not (is_own and id_ in ends)]
    return str(tokenizer.decode(kept, skip_special_tokens=True))


def what_makes_ids(backend: "Tokenizer") -> dict[str, Any]:
    """Return what decides a text's ids: vocabulary, merges, normaliser, special tokens. Padding and
    truncation are those of whatever call came last before it was saved; the decoder makes text of ids."""
    found: dict[str, Any] = json.loads(backend.to_str())
    for name in ("padding", "truncation", "decoder", "version"):
        found.pop(name, None)
    # Whether it is called special changes the text of ids, not the ids of a text.
    for token in found.get("added_tokens") or ():
        token.pop("special", None)
    return found


# --- ends ---


@dataclass(frozen=True)
class Ends:
    """The ids that end a response, by who names them."""

    model: frozenset[int]
    """``eos_token_id`` of config.json and generation_config.json."""
    tokenizer: int | None
    """The tokenizer's end token."""
    template: int | None
    """The added token that follows an answer in the chat template."""
    given: frozenset[int] = frozenset()
    """``rollout.stop_token_ids``."""
    added: frozenset[int] = frozenset()
    """Those of them that were added to the tokenizer, as ``<|im_end|>`` is."""

    @property
    def ids(self) -> frozenset[int]:
        return self.unwritten | self.given

    @property
    def unwritten(self) -> frozenset[int]:
        """Ids that are no part of a response's text. A given one that is an ordinary piece of text is: a
        newline, say."""
        others = (self.tokenizer, self.template)
        return self.model | self.added | {id_ for id_ in others if id_ is not None}

    def of_answer(self, is_chat: bool) -> int | None:
        """Return the id that ends an answer as fine-tuning has shown it; None if none is known."""
        if is_chat and self.template is not None:
            return self.template
        return self.tokenizer if self.tokenizer is not None else min(self.model, default=None)


def ends_of(directory: Path, tokenizer: Any, given: Sequence[int] = ()) -> Ends:
    """Return the ids that end a response of the policy in ``directory``.

    Args:
        given: ``rollout.stop_token_ids``.
    """
    added = frozenset(_added_tokens(tokenizer).values())
    return Ends(
        model_end_ids(directory),
        getattr(tokenizer, "eos_token_id", None),
        template_end(tokenizer),
        frozenset(given),
        added.intersection(given),
    )


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    found: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return found


def template_end(tokenizer: Any) -> int | None:
    """Return the id of the token that the chat template writes right after an answer; None where there is no
    template, it refuses a plain question and answer, or no added token follows."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = tokenizer.apply_chat_template(list(_CHAT), tokenize=False, add_generation_prompt=False)
    except refusals():
        return None  # templates of other roles; prompts that it refuses are reported one by one
    behind = str(text).rpartition(_ANSWER)[2].lstrip()
    added = _added_tokens(tokenizer)
    fitting = [token for token in added if token.strip() and behind.startswith(token.strip())]
    found = added[max(fitting, key=len)] if fitting else None
    begins = [getattr(tokenizer, name, None) for name in ("bos_token_id", "unk_token_id")]
    is_end = found == getattr(tokenizer, "eos_token_id", None) or found not in begins
    return found if is_end else None


def end_warnings(ends: Ends, tokenizer: Any, policy: str) -> Iterator[str]:
    """Warn where nothing ends a response, and where model, tokenizer and template name different ids."""
    if not ends.ids:
        yield (
            f"warning: model.policy={policy}: neither the model nor its tokenizer names an end token, so "
            "that every response goes on to rollout.max_new_tokens; give rollout.stop_token_ids"
        )
        return
    if unknown := ends.ids - set(_vocabulary(tokenizer).values() or ends.ids):
        numbers = ", ".join(map(str, sorted(unknown)))
        yield (
            f"warning: model.policy={policy}: responses cannot end at {numbers}, which is no token's id "
            "in its tokenizer; fix eos_token_id of its config.json and generation_config.json, or "
            "rollout.stop_token_ids"
        )
    named = {
        "its tokenizer's end token": ends.tokenizer,
        "the end of a turn in its chat template": ends.template,
    }
    for what, id_ in named.items():
        if id_ is not None and ends.model and id_ not in ends.model:
            yield (
                f"warning: model.policy={policy}: {what} ({_shown(tokenizer, [id_])}) is none of the model's "
                f"end-of-sequence ids ({_shown(tokenizer, ends.model)}); responses end at any of "
                f"{_shown(tokenizer, ends.ids)}; if that is wrong, fix eos_token_id in its "
                "generation_config.json, or its tokenizer"
            )


def _shown(tokenizer: Any, ids: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(f"{id_} {str(tokenizer.decode([id_]))!r}" for id_ in sorted(ids))


# --- ids that no token has ---


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Return the ids of all tokens; nothing of a tokenizer of the user's that does not say."""
    found: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return found


def hidden_ids(tokenizer: Any, size: int) -> list[int]:
    """Return the ids below ``size``, rows of a model's head, for which the tokenizer has no token: padding,
    which no response may have. Empty where the tokenizer does not say which it has."""
    known = set(_vocabulary(tokenizer).values())
    return [id_ for id_ in range(size) if id_ not in known] if known else []
