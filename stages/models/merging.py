"""Merged models: directories of whole models, made on demand from a base and an adapter.

For engines that take no adapters, in the node's temporary folder, and for ``slurm-ppo export``, whose process
this is: ``python -m stages.models.merging``. Files of weights are made one by one, so that a model need not
fit into the memory of a login node.
"""

import argparse
import errno
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config.model_files import INDEX, BadModel, read_tensors
from pipeline.config.model_files import Tensor as Header
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.run.durable import fsync_path, umask
from pipeline.text import size
from stages.context import UserError
from stages.files.node_folders import make_node_folder, remove_abandoned, remove_node_folder
from stages.models.adapters import Adapter, merge_into, read_adapter

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_SETTINGS = (".json", ".py", ".txt", ".model", ".jinja")
"""Endings of the files of a model directory that describe model and tokenizer."""
_PREFIX = "slurm-ppo-policy-"
_OF_WEIGHTS = ".index.json"
_GENERATION = "generation_config.json"


def merged_folder(config: Config, base: Path, adapter: Path) -> Path:
    """Make a merged model in a new folder of the node, for an engine to load. The caller removes it
    (:func:`remove_node_folder`); those of processes that were killed are removed first.

    Raises:
        OSError: there is no room for it.
        UserError: base or adapter cannot be merged.
    """
    place = Path(tempfile.gettempdir())
    remove_abandoned(_PREFIX)
    needed = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if (free := shutil.disk_usage(place).free) < needed:
        why = (
            f"no room to merge the policy into a whole model ({size(needed)}, {size(free)} are free); "
            "let TMPDIR name a larger folder of the node (scheduler.environment.TMPDIR)"
        )
        raise OSError(errno.ENOSPC, why, str(place))
    folder = make_node_folder(_PREFIX)
    try:
        write_merged(base, adapter, config.update.precision, config.model.trust_remote_code, folder)
    except BaseException:
        remove_node_folder(folder)
        raise
    return folder


def write_merged(
    base: Path,
    adapter: Path,
    precision: Precision,
    trust_remote_code: bool,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the model in ``base``, with the adapter merged into it, into an existing folder.

    Weights get the format ``precision``, but those that the base holds in another format than its own.

    Args:
        say: callback that gets a line after every file of weights.

    Raises:
        UserError: base or adapter cannot be merged.
    """
    found = read_adapter(adapter)
    try:
        headers = read_tensors(base)
    except BadModel as error:
        raise UserError(f"{base} {error}") from error
    names = None if found.of_experts else stored_names(found.factors, headers)
    if names is None:  # the class of the model knows what its checkpoints call them
        _write_loaded(base, found, precision, trust_remote_code, folder)
        return
    _write_files(headers, found, names, _dtypes(base, precision), folder, say)
    _copy_settings(base, precision, folder)
    _write_index(base, headers, folder)


def stored_names(adapted: Collection[str], stored: Collection[str]) -> dict[str, str] | None:
    """Return each adapted weight's name in the model, by its name in the files, which may lack the model's
    prefix, or have one more. None where that is not clear. Pure."""
    exact = {name: name for name in adapted if name in stored}
    for name in adapted:
        if name not in exact:
            found = [s for s in stored if f".{name}".endswith(f".{s}") or f".{s}".endswith(f".{name}")]
            if len(found) != 1 or found[0] in exact:
                return None
            exact[found[0]] = name
    return exact if len(set(exact.values())) == len(adapted) else None


def _dtypes(base: Path, precision: Precision) -> Callable[[Tensor], torch.dtype]:
    """Return what says which format a tensor of the base gets."""
    described = json.loads((base / "config.json").read_text())
    own = getattr(torch, str(described.get("dtype") or described.get("torch_dtype")), None)
    wanted = _DTYPES[precision]
    return lambda tensor: (
        wanted if tensor.is_floating_point() and own in (None, tensor.dtype) else tensor.dtype
    )


def _write_files(
    headers: Mapping[str, Header],
    adapter: Adapter,
    names: Mapping[str, str],
    dtype_of: Callable[[Tensor], torch.dtype],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Rewrite each file of weights of the base."""
    total, done = sum(header.size for header in headers.values()), 0
    ordered = sorted(headers, key=lambda name: (headers[name].path, headers[name].start))
    for path, group in groupby(ordered, key=lambda name: headers[name].path):
        tensors: dict[str, Tensor] = {}
        with safe_open(path, "pt") as file:
            for stored in group:
                tensors[stored] = _merged(file.get_tensor(stored), adapter, names.get(stored), dtype_of)
                done += headers[stored].size
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        say(f"{path.name}: {size(done)} of {size(total)}")


def _merged(
    tensor: Tensor, adapter: Adapter, name: str | None, dtype_of: Callable[[Tensor], torch.dtype]
) -> Tensor:
    """Return a tensor as the trainer had it, and then as its adapter makes it, if it is adapted."""
    dtype = dtype_of(tensor)
    had = tensor.to(dtype)
    return had if name is None else adapter.merged(name, had).to(dtype).contiguous()


def _copy_settings(base: Path, precision: Precision, folder: Path) -> None:
    """Copy what describes the model, and its tokenizer, except for what is in the folder."""
    for path in base.iterdir():
        is_one = path.is_file() and path.suffix in _SETTINGS and not path.name.endswith(_OF_WEIGHTS)
        if is_one and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    described = json.loads((base / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in described and "dtype" not in described else "dtype"
    described[key] = str(_DTYPES[precision]).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _write_index(base: Path, headers: Mapping[str, Header], folder: Path) -> None:
    """Write which file has which tensor, if there are several."""
    files = {name: header.path.name for name, header in sorted(headers.items())}
    if len(set(files.values())) > 1 or (base / INDEX).is_file():
        total = sum((folder / name).stat().st_size for name in set(files.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def _write_loaded(base: Path, adapter: Adapter, precision: Precision, trust: bool, folder: Path) -> None:
    """Merge in memory, and let the model's class write it."""
    from transformers import GenerationConfig

    from stages.models.loading import load_causal_lm

    model = load_causal_lm(base, precision, trust, device_map="cpu")
    merge_into(model, adapter)
    # transformers refuses to save settings that it loaded with a warning; the base's own are copied.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, safe_serialization=True)
    if (base / _GENERATION).is_file():
        shutil.copyfile(base / _GENERATION, folder / _GENERATION)


def settle(files: Iterable[Path]) -> None:
    """Make files durable, and readable as the umask says; safetensors writes them for their owner only."""
    for path in files:
        path.chmod(0o666 & ~umask())
        fsync_path(path)


def main(argv: Sequence[str]) -> int:
    """Write a merged model; a line on standard output for every file of weights. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.models.merging", description="Merge an adapter.")
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", type=Precision, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args(argv)
    try:
        write_merged(
            given.base,
            given.adapter,
            precision=given.precision,
            trust_remote_code=given.trust_remote_code,
            folder=given.folder,
            say=lambda line: print(line, flush=True),
        )
        settle(path for path in given.folder.iterdir() if path.is_file())
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
