"""Prompts as the text that models read, by chat templates: the policy's, and those of reward models."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from pipeline.config.reward import RemoteConfig, RewardModelConfig
from pipeline.config.schema import Config
from pipeline.data.chat import NEEDED, Renderer, Rendering, left_out, refusals
from pipeline.data.messages import Message, Tools, as_dicts
from pipeline.data.prompts import Prompt, Rejected
from pipeline.data.rows import RejectReason
from pipeline.data.tables import PromptError

_ANSWER = {"role": "assistant", "content": "ANSWER"}
"""Answer with which the templates of scoring components are tried."""


class PromptTokenizer(Renderer, Protocol):
    """The part of transformers' tokenizers that makes tokens of prompts."""

    def __call__(self, text: list[str], /, *, add_special_tokens: bool, verbose: bool) -> Any: ...

    def decode(self, ids: list[int], /) -> Any: ...


@dataclass(frozen=True)
class ScoringTemplate:
    """The way in which a component that scores responses reads chats, which is not the policy's."""

    key: str
    """Configuration key and value that name the tokenizer's directory, for messages."""
    tokenizer: Renderer
    rendering: Rendering

    def refusal(self, prompt: Prompt) -> str | None:
        """Return why it does not take a prompt with an answer; None if it does."""
        try:
            self._render(as_dicts(chat_of(prompt)), prompt.tools)
        except refusals() as error:
            said = " ".join(str(error).split()) or type(error).__name__
            return f"the chat template of {self.key} refuses it: {said}"
        return None

    def left_out(self, prompt: Prompt) -> list[str]:
        """Return the parts of a prompt, which it does not refuse, that it does not read."""
        return left_out(self._render, chat_of(prompt), prompt.tools)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> str:
        if not self.tokenizer.chat_template:
            return "\n".join(message["content"] or "" for message in messages)
        return self.rendering.text(self.tokenizer, [*messages, _ANSWER], tools)


class _ScoringTokenizer(NamedTuple):
    """A tokenizer by which a component reads chats."""

    key: str
    """Configuration key that names its directory."""
    directory: str
    may_share: bool
    """Whether the component is given the policy's token ids where its tokenizer is the same."""


_Tokenizer = TypeVar("_Tokenizer", bound=Renderer)


def scoring_templates(
    config: Config,
    rendering: Rendering,
    read: Callable[[str, str], _Tokenizer | None],
    is_policys: Callable[[_Tokenizer], bool],
) -> list[ScoringTemplate]:
    """Return how reward models and services read chats that are not given the policy's own token ids.

    Args:
        rendering: what the policy's chat template is given besides messages and tools.
        read: loads the tokenizer of a directory, given the configuration key that names it first; None where
            it cannot be looked at.
        is_policys: whether a tokenizer gives the ids that the policy's gives.
    """
    own, found = rendering.without_arguments(), []
    for key, directory, may_share in _scoring_tokenizers(config):
        tokenizer = read(key, directory)
        if tokenizer is not None and not (may_share and is_policys(tokenizer)):
            found.append(ScoringTemplate(f"{key}={directory}", tokenizer, own))
    return found


def _scoring_tokenizers(config: Config) -> Iterator[_ScoringTokenizer]:
    """Yield the tokenizers of all reward models, and of services that have one."""
    for name, component in config.reward.components.items():
        key = f"reward.components.{name}"
        if isinstance(component, RewardModelConfig):
            yield _ScoringTokenizer(f"{key}.path", component.path, True)
        elif isinstance(component, RemoteConfig) and component.tokenizer:
            yield _ScoringTokenizer(f"{key}.tokenizer", component.tokenizer, False)


def chat_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt; none of plain text."""
    return () if isinstance(prompt.prompt, str) else prompt.prompt


class TemplateRefused(PromptError):
    """The chat template cannot make text of these messages."""


def prompt_text(prompt: Prompt, tokenizer: PromptTokenizer, rendering: Rendering) -> str:
    """Return the text that the policy continues: plain text as it is, messages through the chat template.

    Raises:
        TemplateRefused: the template refuses these messages.
        PromptError: there is no template, or it is not written in Jinja's language.
    """
    if isinstance(prompt.prompt, str):
        return prompt.prompt
    if not tokenizer.chat_template:
        raise PromptError(
            "data.prompts holds chat messages, but the policy's tokenizer has no chat template; "
            "add chat_template to the tokenizer, or give prompts as plain text"
        )
    from jinja2 import TemplateSyntaxError

    try:
        return rendering.text(tokenizer, as_dicts(prompt.prompt), prompt.tools, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise PromptError(f"the policy's chat template, line {error.lineno}: {error.message}") from error
    except refusals() as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise TemplateRefused(f"the policy's chat template refuses it: {said}") from error


@dataclass(frozen=True)
class Rendered:
    """Prompts as text."""

    texts: list[str]
    """Text of each row; empty of one that is refused."""
    refused: Mapping[int, Rejected]
    """By index, the rows whose messages a chat template refuses."""
    left_out: Counter[str]
    """Counts of prompts, by what in them a chat template does not write, in words."""


def prompt_texts(
    rows: Sequence[Prompt],
    rendering: Rendering,
    tokenizer: PromptTokenizer,
    templates: Sequence[ScoringTemplate] = (),
) -> Rendered:
    """Render every row, and try the templates of scoring components on it."""
    texts: list[str] = []
    refused: dict[int, Rejected] = {}
    counts: Counter[str] = Counter()

    def render(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> str:
        return rendering.text(tokenizer, messages, tools, add_generation_prompt=True)

    for index, row in enumerate(rows):
        try:
            texts.append(prompt_text(row, tokenizer, rendering))
            if not isinstance(row.prompt, str):
                missing = left_out(render, row.prompt, row.tools)
                _check_is_written(missing)
                for why in filter(None, (template.refusal(row) for template in templates)):
                    raise TemplateRefused(why)
                counts.update(f"the policy's chat template does not write {part}" for part in missing)
                counts.update(
                    f"{template.key} does not read {part}"
                    for template in templates
                    for part in template.left_out(row)
                )
        except TemplateRefused as error:
            texts[index:] = [""]
            refused[index] = row.rejected(RejectReason.BAD_MESSAGE, str(error))
    return Rendered(texts, refused, counts)


def _check_is_written(missing: Sequence[str]) -> None:
    """Raise TemplateRefused where the policy would read another prompt than the file has."""
    if needed := [part for part in missing if part in NEEDED]:
        raise TemplateRefused(
            f"the policy's chat template leaves out {' and '.join(needed)}, so that it would not read them"
        )
