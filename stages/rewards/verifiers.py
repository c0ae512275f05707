"""Environments of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers): data sets, rubrics,
and conversations with tools, simulated users and games.

Registered as ``verifiers``. It runs in a process of an interpreter that has the package
(:mod:`pipeline.plugins.hosted`), so it imports nothing else but the standard library. A conversation so far
is played back to the environment's own ``rollout`` by a client that stands for the policy: nothing is kept
between calls, and what the environment says has to follow from the conversation.
"""

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
_HOW = (
    "python -m venv ENV && ENV/bin/pip install 'verifiers>=0.1.14,<0.4' YOUR_ENVIRONMENT, "
    "and data.environment.components.NAME.python=ENV/bin/python"
)
try:
    import verifiers as vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall
except ModuleNotFoundError as error:
    missing = f"verifiers needs the package verifiers in an environment of its own: {_HOW}"
    if error.name != "verifiers":
        missing = f"this release of verifiers has no {error.name}: {_HOW}"
    raise ModuleNotFoundError(missing, name=error.name) from error

Messages = list[dict[str, Any]]

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A call of a tool as chat templates of the kind of Hermes and Qwen have the policy write it."""
_OF_MESSAGES = ("role", "content", "tool_call_id", "name")
"""Keys of a message that conversations keep."""


class VerifiersEnvironment:
    """An environment of verifiers.

    Args:
        environment: its name, that of an installed package with a function ``load_environment``.
        settings: arguments of that function.

    Raises:
        ValueError, RuntimeError: there is no such environment, or it does not take these arguments.
    """

    def __init__(self, environment: str, **settings: Any) -> None:
        self._made = vf.load_environment(environment, **settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.compares = bool(self._made.rubric.has_group_rewards)
        """Whether a function of the rubric looks at all responses to a prompt at once."""
        if not isinstance(self._made, vf.SingleTurnEnv):
            self.step = self._step

    def tasks(self, size: int, seed: int, heldout: bool = False) -> Iterator[dict[str, Any]]:
        """Yield rows of the data set in an order that the seed gives; held-out ones of the evaluation set, if
        there is one."""
        rows = self._made.get_eval_dataset() if heldout else self._made.get_dataset()
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        for index in order[:size]:
            row = rows[index]
            answer = row.get("answer")
            yield {
                "prompt": _plain_prompt(row["prompt"]),
                "answer": answer if isinstance(answer, str) else None,
                "tools": self._tools(row),
                "metadata": row,
            }

    def _tools(self, row: dict[str, Any]) -> Any:
        """Return a row's tools as chat templates take them; None where there are none."""
        info = row.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        given = info.get("tool_defs") or self._made.tool_defs or []
        tools = [dict(tool if isinstance(tool, dict) else tool.model_dump()) for tool in given]
        kept = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: tool[key] for key in kept}} for tool in tools] or None

    def score(self, response: str, metadata: Any, messages: Messages | None = None) -> float:
        """Return the rubric's reward of a conversation, or of a response where there is one turn."""
        return self.score_group([response], metadata, [messages])[0]

    def score_group(
        self, responses: Sequence[str], metadata: Any, messages: Sequence[Messages | None]
    ) -> list[float]:
        """Return the rubric's rewards of all responses to a prompt."""
        said = [
            [{"role": "assistant", "content": response}] if given is None else given
            for response, given in zip(responses, messages, strict=True)
        ]
        return self._run(self._scores(metadata, said))

    async def _scores(self, row: Any, said: Sequence[Messages]) -> list[float]:
        played = [await self._played(row, messages) for messages in said]
        states, rubric = [state for state, _ in played], self._made.rubric
        if self.compares:
            await rubric.score_group(states)
        else:
            for state in states:
                await rubric.score_rollout(state)
        for state in states:
            await rubric.cleanup(state)
        return [float(state["reward"]) for state in states]

    def _step(self, messages: Messages, metadata: Any) -> Messages | None:
        """Return what the environment says to the last turn; None when the conversation is over."""
        _, following = self._run(self._played(metadata, messages))
        return following

    async def _played(self, row: Any, messages: Messages) -> tuple[Any, Messages | None]:
        """Return the environment's state after a conversation, and what it says next; None: nothing."""
        policy = _Recorded(messages, self._made.tool_defs)
        state = await self._made.rollout(json.loads(json.dumps(row)), policy, "policy", {})
        return state, policy.following

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop that all of them share, as verifiers does."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class _Recorded(Client):  # type: ignore[misc]
    """A client that plays back the turns of a conversation, and takes down what the environment says next.

    Args:
        said: messages after the prompt.
    """

    def __init__(self, said: Messages, tools: Any) -> None:
        super().__init__(None)
        self._said, self._parses_calls = said, bool(tools)
        self._num_heard, self._num_prompt, self._turn = 0, 0, 0
        self.following: Messages | None = None

    async def get_response(self, prompt: Any, *given: Any, tools: Any = None, **more: Any) -> Any:
        """Return the next turn. Raises OverlongPromptError, with which a rollout ends, after the last.
        Raises ValueError where the environment says something else than in the conversation."""
        if not self._turn:
            self._num_prompt = len(prompt)
        new = [_plain(message) for message in prompt[self._num_prompt + self._num_heard :]]
        end = next(
            (i for i, one in enumerate(self._said) if i >= self._num_heard and one["role"] == "assistant"),
            None,
        )
        if end is None and self._num_heard == len(self._said):
            self.following = new or None
            raise vf.OverlongPromptError("the conversation goes on here")
        recorded = [_plain(message) for message in self._said[self._num_heard : end]]
        if new != recorded:
            raise ValueError(
                f"after turn {self._turn} it says {new!r:.300}, and has said {recorded!r:.300} before: "
                "what an environment says must follow from the conversation"
            )
        if end is None:  # a turn was to come, and the conversation ended
            raise vf.OverlongPromptError("the conversation ends here")
        self._turn, self._num_heard = self._turn + 1, end + 1
        return self._response(str(self._said[end]["content"] or ""))

    def _response(self, text: str) -> Any:
        calls = _calls_in(text, self._turn) if self._parses_calls else None
        message = ResponseMessage(
            content=_CALL.sub("", text).strip() if calls else text,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id=f"turn {self._turn}", created=0, model="policy", message=message)

    def setup_client(self, config: Any) -> None:
        """Connect to nothing."""

    async def close(self) -> None:
        """Close nothing."""

    async def to_native_tool(self, tool: Any) -> Any:
        """Return a tool as it is."""
        return tool

    async def to_native_prompt(self, messages: Any) -> Any:
        """Return a prompt as it is."""
        return messages, {}

    async def get_native_response(self, prompt: Any, *given: Any, **more: Any) -> Any:
        """Return the next turn."""
        return await self.get_response(prompt)

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise nothing."""

    async def from_native_response(self, response: Any) -> Any:
        """Return a turn as it is."""
        return response


def _calls_in(text: str, turn: int) -> list[Any] | None:
    """Return the calls of tools in a turn's text; None where there are none."""
    found = []
    for index, written in enumerate(_CALL.findall(text)):
        try:
            call = json.loads(written)
        except ValueError:
            call = {}
        name = call.get("name")
        arguments = call.get("arguments", {})
        given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append(ToolCall(id=f"call_{turn}_{index}", name=str(name), arguments=given))
    return found or None


def _plain_prompt(prompt: Any) -> str | Messages:
    return prompt if isinstance(prompt, str) else [_plain(message) for message in prompt]


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as a dictionary of texts. Raises ValueError for one with images or sound."""
    given = message if isinstance(message, dict) else message.model_dump()
    content = given.get("content") or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if other := [part for part in parts if part.get("type") != "text"]:
            raise ValueError(f"a message has a part of type {other[0].get('type')!r}; only text can be read")
        content = "".join(part["text"] for part in parts)
    kept = {key: given[key] for key in _OF_MESSAGES if given.get(key) is not None}
    return kept | {"content": content}
