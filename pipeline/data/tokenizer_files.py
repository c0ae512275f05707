"""A model directory's tokenizer, made from its files without importing transformers, which takes seconds.

tokenizer.json is what transformers' tokenizers are made of; special tokens and the chat template are taken
from where transformers looks. Needs the packages tokenizers and, for chat messages, jinja2.
"""

import datetime
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.model_files import read_json
from pipeline.data.tokens import what_makes_ids
from pipeline.run.environment import TASK_ENVIRONMENT

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from tokenizers import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILE = "tokenizer.json"
_AT_ONCE = 500
"""Texts that are encoded at once: until its ids are taken, each token takes some hundred bytes."""


class CannotLook(Exception):
    """The tokenizer cannot be made on this machine; the message says why. Tasks may have it."""


class FileTokenizer:
    """The methods of transformers' tokenizers that make prompts of text and messages."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        chat_template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._compiled: dict[str, Template] = {}
        self.chat_template = chat_template

    def __call__(
        self, text: Sequence[str], *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, list[list[int]]]:
        """Return ``input_ids`` of each text. ``verbose`` only matches transformers' signature."""
        ids: list[list[int]] = []
        for start in range(0, len(text), _AT_ONCE):
            part = list(text[start : start + _AT_ONCE])
            encoded = self._tokenizer.encode_batch_fast(part, add_special_tokens=add_special_tokens)
            ids += [one.ids for one in encoded]
        return {"input_ids": ids}

    def is_same(self, other: "FileTokenizer") -> bool:
        """Whether both give the same ids for the same text and messages."""
        same_template = self.chat_template == other.chat_template
        return same_template and what_makes_ids(self._tokenizer) == what_makes_ids(other._tokenizer)

    @property
    def special(self) -> frozenset[str]:
        """Tokens that are left out of a text of these ids."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of tokens that were added to the tokenizer's model, special ones among them."""
        return {token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def cls_token_id(self) -> int | None:
        return self._id_of("cls_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of("unk_token")

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **given: Any,
    ) -> str:
        """Render the messages as text. Raises jinja2.TemplateError and whatever else a template causes."""
        assert not tokenize, "only text is made here"
        source = self._template_for(tools)
        if source not in self._compiled:
            self._compiled[source] = _environment().from_string(source)
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
            **given,
        }
        return self._compiled[source].render(values)

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Choose among several templates as transformers does: ``tool_use`` for tools, else ``default``."""
        assert self.chat_template is not None
        if isinstance(self.chat_template, str):
            return self.chat_template
        has_own = tools is not None and "tool_use" in self.chat_template
        if not has_own and "default" not in self.chat_template:
            raise ValueError(f"the tokenizer has the chat templates {sorted(self.chat_template)}, no default")
        return self.chat_template["tool_use" if has_own else "default"]


def read_tokenizer(directory: Path) -> FileTokenizer:
    """Read the tokenizer of a model directory. Raises CannotLook."""
    tokenizer, settings = _tokenizer(directory), _json(directory / "tokenizer_config.json")
    if "auto_map" in settings:
        raise CannotLook(f"the tokenizer of {directory} is Python code of its own")
    try:
        given = {**_json(directory / "special_tokens_map.json"), **settings}
        special = {name: _text(given[name]) for name in _NAMED if given.get(name)}
        added = settings.get("added_tokens_decoder") or {}
        known = [*(_text(added[key]) for key in sorted(added, key=int)), *special.values()]
        new = [token for token in known if tokenizer.token_to_id(token) is None]
        tokenizer.add_special_tokens(list(dict.fromkeys(new)))
        return FileTokenizer(tokenizer, _chat_template(directory, settings), special)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotLook(f"the tokenizer's settings in {directory} cannot be read here: {error!r}") from error


def check_can_render() -> None:
    """Raise CannotLook where chat messages cannot be rendered as text."""
    if not importlib.util.find_spec("jinja2"):
        raise CannotLook("the package jinja2 is not installed here")


def _tokenizer(directory: Path) -> "Tokenizer":
    if not importlib.util.find_spec("tokenizers"):
        raise CannotLook("the package tokenizers is not installed here")
    if not (directory / _FILE).is_file():
        raise CannotLook(f"{directory} has no {_FILE}")
    # One thread: this process may still start others, and may be on a shared login node.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", TASK_ENVIRONMENT["TOKENIZERS_PARALLELISM"])
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(directory / _FILE))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CannotLook(f"{directory / _FILE} cannot be read here: {error}") from error
    found.no_truncation()
    found.no_padding()
    return found


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is no such file. Raises CannotLook."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise CannotLook(f"{path} is not a JSON object")
    return found


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the template, or several by name, from where transformers looks."""
    file, more = directory / "chat_template.jinja", directory / "additional_chat_templates"
    given = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(given, list):
        given = {template["name"]: template["template"] for template in given}
    named = {path.stem: path.read_text("utf-8") for path in sorted(more.glob("*.jinja")) if path.is_file()}
    if named:
        given = {**(given if isinstance(given, dict) else {"default": given} if given else {}), **named}
    return given


def _environment() -> "Environment":
    """Set up Jinja as transformers does: templates cannot reach Python's internals or change their input."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks what the model wrote and changes nothing."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **others: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **others)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return found
