"""The frozen reference's log-probabilities in the reward stage."""

import pyarrow as pa
import torch

from pipeline.run.schemas import is_sampled
from stages.context import Context
from stages.engines import engine
from stages.models import device, load_causal_lm
from stages.ppo.batching import Row, micro_batches
from stages.ppo.forward import response_log_probs


@torch.inference_mode()
def reference_log_probs(context: Context, rows: pa.Table) -> list[list[float] | None]:
    """Compute the log-probability of each response token under the frozen reference, sampling temperature
    included.

    None for greedy responses, which are never trained on.
    """
    config = context.config
    directory = context.source(config.model.reference or config.model.policy)
    reward, trust = config.reward, config.model.trust_remote_code
    model = engine(
        "reference",
        (directory, config.reward_precision, reward.device_map),
        lambda: load_causal_lm(directory, config.reward_precision, trust, reward.device_map),
    )
    prompts, responses = rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist()
    sequences = [Row(p, r) for p, r in zip(prompts, responses, strict=True)]
    sampled = [i for i, is_one in enumerate(is_sampled(rows).to_pylist()) if is_one]
    found: dict[int, list[float]] = {i: [] for i in sampled}
    # A prompt that the engine refused has no response, and may be one that this model cannot take either.
    written = [i for i in sampled if responses[i]]
    with context.computing():
        for batch in micro_batches(sequences, written, reward.tokens_per_batch):
            log_probs = response_log_probs(model, batch.to(device()), config.rollout.temperature)
            for index, values in zip(batch.rows.tolist(), log_probs.tolist(), strict=True):
                found[index] = values[: len(responses[index])]
    return [found.get(i) for i in range(len(sequences))]
