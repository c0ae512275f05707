"""An environment of the package verifiers, as users write them: sums in one turn, with tools, a game."""

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", num_rows: int = 40):
    rows = [
        {"question": f"{a}+{a + 1}=", "answer": str(2 * a + 1), "info": {"a": a}} for a in range(num_rows)
    ]
    data = {"dataset": Dataset.from_list(rows[:-8]), "eval_dataset": Dataset.from_list(rows[-8:])}
    funcs, weights = [is_right, length], [1.0, 0.5]
    if kind == "group":
        funcs, weights = [*funcs, longest], [*weights, 1.0]
    given = {**data, "system_prompt": "Add.", "rubric": vf.Rubric(funcs=funcs, weights=weights)}
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **given)
    return Game(max_turns=4, **given) if kind == "game" else vf.SingleTurnEnv(**given)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def text_of(message) -> str:
    return message["content"] if isinstance(message, dict) else message.content


def is_right(completion, answer, **kwargs):
    return float(any(text_of(one).strip() == answer for one in completion))


def length(completion, info):
    return len(text_of(completion[0])) / 100 + info["a"]


def longest(completions):
    lengths = [len(text_of(one[0])) for one in completions]
    return [float(number == max(lengths)) for number in lengths]


class Game(vf.MultiTurnEnv):
    """Counts wrong answers in the state of the rollout."""

    async def setup_state(self, state, **kwargs):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if text_of(messages[-1]).strip() == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return []
        return [vf.UserMessage(content=f"no {state['tries']}")]
