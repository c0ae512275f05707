"""The KL's reference as a moving average of policies (algorithm.kl.sync_weight).

At each sync the reference becomes ``weight * policy + (1 - weight) * reference``, weight by weight, as TRL's
SyncRefModelCallback does (ref_model_mixup_alpha). The update that makes the policy commits it, in fp32: in
half precision a small share of a policy would be rounded away.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config.model_files import Tensor as Header
from pipeline.config.model_files import read_tensors
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.run.commits import FileEntry
from stages import ranks
from stages.context import Context, UserError
from stages.models.loading import load_causal_lm
from stages.training import hash_folders, removed_on_failure


def save_average(context: Context, iteration: int) -> tuple[FileEntry, ...]:
    """Write the new reference under this attempt's own name, durably, where one is due. Every rank takes
    part; the first one has the files.

    Raises:
        UserError: the reference has other weights than the policy.
        OSError: there is no room for it. Other ranks raise RuntimeError.
    """
    before = context.plan.averaged_with(iteration) if context.config.algorithm.kl.averages else None
    if before is None:
        return ()
    reference, found = context.reference_files(before).base, tuple[FileEntry, ...]()
    with ranks.agreed(OSError, UserError):
        if ranks.is_first():
            found = _written(context, reference)
    return found


def _written(context: Context, reference: Path) -> tuple[FileEntry, ...]:
    policy, folder = (make(context.attempt) for make in (context.files.policy, context.files.reference))
    with removed_on_failure(folder), named_alike(context.config, policy, reference) as stored:
        write_average(policy, stored, context.config.algorithm.kl.sync_weight, folder)
        return hash_folders(context, [folder])


@contextmanager
def named_alike(config: Config, policy: Path, reference: Path) -> Iterator[Mapping[str, Header]]:
    """Yield the reference's weights by the names that they have in the policy's files: the user's model may
    have others, which transformers knows to translate; none is rounded."""
    found = read_tensors(reference)
    if found.keys() >= read_tensors(policy).keys():
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="slurm-ppo-reference-") as folder:
        model = load_causal_lm(reference, Precision.FP32, config.model.trust_remote_code, "cpu")
        model.save_pretrained(folder)
        yield read_tensors(Path(folder))


def write_average(policy: Path, reference: Mapping[str, Header], weight: float, folder: Path) -> None:
    """Write a model directory of ``weight * policy + (1 - weight) * reference``, by files of the policy's.

    Args:
        policy: directory of the policy.
        reference: where each weight of the reference is, by the policy's names.

    Raises:
        UserError: the reference lacks a weight, or has it in another shape.
    """
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(policy.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            averaged = {
                name: averaged_weight(name, file.get_tensor(name), reference, weight) for name in names
            }
        save_file(averaged, folder / path.name, metadata={"format": "pt"})


def averaged_weight(name: str, mine: Tensor, reference: Mapping[str, Header], weight: float) -> Tensor:
    """Return the average of a tensor with the reference's, in fp32; one that is no weight as it is."""
    if not mine.is_floating_point():
        return mine
    header = reference.get(name)
    if header is None or tuple(header.shape) != tuple(mine.shape):
        raise UserError(
            f"algorithm.kl.sync_weight={weight}: the reference has no weight {name} of shape {[*mine.shape]} "
            "to average with; give a model.reference of the policy's architecture, or set it to 1"
        )
    with safe_open(header.path, "pt") as file:
        return mine.float() * weight + file.get_tensor(name).float() * (1 - weight)
