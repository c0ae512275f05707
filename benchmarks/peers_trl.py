"""TRL's side of benchmarks/peers.py, run by the Python of TRL's environment: GRPO, a JSON line for each step.

A line has CPU seconds and wall seconds of the step by stage, the mean reward, and the share of flat groups.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers_ours import RECORDED, score


class Clock:
    """CPU seconds of this process and wall seconds, by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._begin = (0.0, 0.0)

    @staticmethod
    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def add(self, stage: str, begin: tuple[float, float]) -> None:
        for place, (start, end) in enumerate(zip(begin, self.now(), strict=True)):
            self.spent[stage][place] += end - start

    def timed(self, stage: str, function: Any) -> Any:
        """Return the function, which adds to a stage what its calls take."""

        def call(*given: Any, **named: Any) -> Any:
            begin = self.now()
            try:
                return function(*given, **named)
            finally:
                self.add(stage, begin)

        return call

    def begin_step(self) -> None:
        self.spent.clear()
        self._begin = self.now()

    def end_step(self) -> dict[str, dict[str, float]]:
        """Return the step's seconds: what no stage took is the update's."""
        self.add("iteration", self._begin)
        found = {stage: dict(zip(("cpu", "wall"), spent, strict=True)) for stage, spent in self.spent.items()}
        others = [of for stage, of in found.items() if stage != "iteration"]
        found["update"] = {
            kind: found["iteration"][kind] - sum(of[kind] for of in others) for kind in ("cpu", "wall")
        }
        return found


class Steps(TrainerCallback):
    """Prints a line for each optimizer step; a step begins where the last one ended."""

    def __init__(self, clock: Clock, rewards: list[list[float]], group: int) -> None:
        self._clock, self._rewards, self._group = clock, rewards, group

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        self._clock.begin_step()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        seconds = self._clock.end_step()
        rewards = [one for call in self._rewards for one in call]
        groups = [set(rewards[i : i + self._group]) for i in range(0, len(rewards), self._group)]
        flat = sum(len(values) == 1 for values in groups) / len(groups)
        line = {"seconds": seconds, "reward": sum(rewards) / len(rewards), "flat": flat}
        print(json.dumps(line), flush=True)
        self._rewards.clear()
        self._clock.begin_step()


def recorded_rollouts(folder: Path, tokenizer: Any) -> Any:
    """Return a rollout function that gives the recorded responses to each prompt, in their order."""
    recorded = json.loads((folder / RECORDED).read_text())
    by_prompt = {json.dumps(one["prompt"]): one for one in recorded}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen: dict[str, int] = defaultdict(int)
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for prompt in prompts:
            key = json.dumps([{"role": m["role"], "content": m["content"]} for m in prompt])
            one = by_prompt[key]
            found["prompt_ids"].append(one["prompt_tokens"])
            found["completion_ids"].append(one["responses"][seen[key]]["tokens"])
            seen[key] += 1
        return found

    return rollout


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    clock, rewards = Clock(), []
    lines = [json.loads(line) for line in Path(given["prompts"]).read_text().splitlines()]

    def reward(completions: list[Any], entry: list[str], **columns: Any) -> list[float]:
        scores = score(responses=[one[0]["content"] for one in completions], entry=entry)
        rewards.append(scores)
        return scores

    responses, rows = given["prompts_per_iteration"] * given["group"], given["rows"]
    config = GRPOConfig(
        output_dir=given["folder"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=responses // rows,
        num_generations=given["group"],
        max_completion_length=given["longest"],
        max_steps=given["iterations"],
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant",
        beta=given["kl"],
        use_bias_correction_kl=False,
        loss_type="grpo",
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=given["checkpointing"],
        bf16=given["precision"] == "bf16",
        use_cpu=True,
        dataloader_num_workers=0,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    dataset = Dataset.from_list([{"prompt": one["prompt"], "entry": one["entry"]} for one in lines])
    rollout = recorded_rollouts(Path(given["prompts"]).parent, None) if given["recorded"] else None
    trainer = GRPOTrainer(
        given["model"],
        reward_funcs=clock.timed("reward", reward),
        args=config,
        train_dataset=dataset,
        callbacks=[Steps(clock, rewards, given["group"])],
        rollout_func=rollout,
    )
    time_stages(trainer, clock)
    trainer.train()


def time_stages(trainer: Any, clock: Clock) -> None:
    """Have generation and the reference's forward passes timed."""
    trainer._generate = clock.timed("rollout", trainer._generate)
    log_probs = trainer._get_per_token_logps_and_entropies

    def timed(model: Any, *given: Any, **named: Any) -> Any:
        function = log_probs if torch.is_grad_enabled() else clock.timed("reference", log_probs)
        return function(model, *given, **named)

    trainer._get_per_token_logps_and_entropies = timed


if __name__ == "__main__":
    main()
