"""Log-probabilities of responses under models that are not trained: the KL's reference, and teachers."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from pipeline.config.reward import TeacherConfig
from pipeline.config.schema import Config
from pipeline.run.schemas import is_sampled
from stages.context import Context
from stages.engines import Wanted, engine
from stages.engines.in_place import Unused
from stages.files import columns
from stages.files.policy import PolicyFiles
from stages.models.adapters import merge_into, read_adapter
from stages.models.devices import device
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm
from stages.ppo.batching import Row, micro_batches
from stages.ppo.forward import policy_outputs
from stages.ppo.sharing import can_share


class Reference:
    """A language model that gives responses log-probabilities, which a process may keep from task to task."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._unused = Unused.of(model)

    def reset(self) -> bool:
        """Make the model as it was when it was loaded."""
        self._unused.restore()
        return True


def load_reference(context: Context) -> Reference:
    """Return the reference of the task's iteration: loaded now, or kept by the process."""
    config = context.config
    files = context.reference_files(context.reference_of(context.task.iteration))
    wanted = Wanted("reference", context.attempt, config, files.weights)
    found: Reference = engine(wanted, lambda: Reference(_loaded(config, files)))
    return found


def load_teacher(context: Context, name: str, teacher: TeacherConfig) -> Reference:
    """Return a teacher: loaded now, or kept by the process."""
    files = PolicyFiles(context.source(teacher.path), weights=(context.fingerprint_of(teacher.path), ""))
    wanted = Wanted(f"teacher {name}", context.attempt, context.config, files.weights)
    found: Reference = engine(wanted, lambda: Reference(_loaded(context.config, files)))
    return found


def _loaded(config: Config, files: PolicyFiles) -> PreTrainedModel:
    reward, trust = config.reward, config.model.trust_remote_code
    model = load_causal_lm(files.base, config.reward_precision, trust, reward.device_map)
    if files.adapter is not None:
        merge_into(model, read_adapter(files.adapter))
    return hide_unknown_ids(model, config)


def reference_log_probs(context: Context, rows: pa.Table) -> pa.ListArray:
    """Compute the log-probability of each response token under the reference: :func:`log_probs_of` all that
    was sampled."""
    found, *_ = log_probs_of(context, rows, load_reference(context), np.array(is_sampled(rows), dtype=bool))
    return found


@torch.inference_mode()
def log_probs_of(
    context: Context, rows: pa.Table, kept: Reference, wanted: npt.NDArray[np.bool_], top_k: int | None = None
) -> list[pa.ListArray]:
    """Compute the log-probability of each response token under a model, sampling temperature included; a
    column of float32. With ``top_k`` also, of each token's place, that many ids that are most probable there,
    and their log-probabilities: columns of int32 and float32, with so many values a token.

    Args:
        wanted: [rows] true for the responses to compute; the others have null.
    """
    config = context.config
    prompts, responses = (columns.lists(rows[name]) for name in ("prompt_tokens", "response_tokens"))
    sequences = [Row(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    offsets = np.cumsum([0, *np.where(wanted, columns.lengths(rows["response_tokens"]), 0)])
    found, top = np.empty(offsets[-1], np.float32), top_k or 0
    top_ids, top_found = np.empty((len(found), top), np.int32), np.empty((len(found), top), np.float32)
    # A prompt that the engine refused has no response, and may be one that this model cannot take either.
    written = np.flatnonzero(np.diff(offsets)).tolist()
    with context.computing():
        shared = config.rollout.samples_per_prompt > 1 and can_share(kept.model)
        for batch in micro_batches(sequences, written, config.reward.tokens_per_batch, shared=shared):
            batch.count_pass()
            outputs = policy_outputs(
                kept.model, batch.to(device()), config.rollout.temperature, entropy=False, top=top
            )
            pairs = [(found, outputs.log_probs), (top_ids, outputs.top), (top_found, outputs.others)]
            for flat, matrix in pairs[: 3 if top else 1]:
                assert matrix is not None, "it was asked for"
                for index, line in zip(batch.rows.tolist(), matrix.cpu().numpy(), strict=True):
                    flat[offsets[index] : offsets[index + 1]] = line[: len(responses[index])]
    made = [columns.column_of(found, offsets, ~wanted)]
    if top:
        made += [columns.column_of(flat.flatten(), offsets * top, ~wanted) for flat in (top_ids, top_found)]
    return made
